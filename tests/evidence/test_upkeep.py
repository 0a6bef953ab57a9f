"""Cells of result files: those that want to be measured again, and those that are added."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from microsdpa.emulate import build
from microsdpa.errors import InvalidArgument
from microsdpa.evidence import results, upkeep
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.probes import PROBES
from microsdpa.jit.signature import code_signature
from microsdpa.kernels.select import select

TARGET = "sm_90a"
CASES = Case(1, 8, 512, 512, 64), Case(2, 8, 512, 512, 64)


def recorded(cases: tuple[Case, ...], us: float, suite: str = "small", **fields: object) -> results.Result:
    rows = []
    for case in cases:
        spec = select(case.problem(TARGET)).spec
        signatures = {"kernel": spec.name, "signature": "0" * 32, "code_signature": code_signature(spec, TARGET)}
        times = {"median_us": us, "min_us": us, "samples_us": [us], "interval_us": [us, us]}
        rows.append(results.row(case, impl="microsdpa", mode="graph", **signatures, **times))
    made = results.make(suite, "microsdpa bench", rows)
    made["environment"] = made["environment"] | {"gpu": "NVIDIA H200", "target": TARGET}
    made |= fields
    return made | {"checksum": results.checksum(made)}


def times(directory: Path) -> list[tuple[int, float]]:
    rows = results.read(directory / "h200/small.json")["rows"]
    return [(row["shape"]["b"], row["median_us"]) for row in rows]


def test_a_cell_is_stale_when_its_kernel_has_changed(tmp_path: Path) -> None:
    made = recorded(CASES, 3.0)
    results.write(made, tmp_path)
    step = upkeep.stale(tmp_path, "h200")
    assert step.table == [["GPU", "suite", "cell"]]
    assert step.summary.startswith("0 of 2 cells")
    made["rows"][1]["code_signature"] = "1" * 32
    results.write(made | {"checksum": results.checksum(made)}, tmp_path)
    step = upkeep.stale(tmp_path)
    assert step.table[1:] == [["h200", "small", "(2, 8, 512, 512, 64), float16"]]
    assert step.summary.startswith("1 of 2 cells")
    with pytest.raises(InvalidArgument, match=r"gpu: expected a folder of .*, got l4; name one of h200"):
        upkeep.stale(tmp_path, "l4")


def test_an_instruction_is_stale_when_its_probe_has_changed(tmp_path: Path) -> None:
    made, problem = recorded(CASES[:2], 3.0, "instructions"), {"dtype": "bits", "op": "instruction", "mode": "verify"}
    emulators = build.source_signature(PROBES[0].spec), "1" * 32
    for row, probe, emulator in zip(made["rows"], PROBES, emulators, strict=False):
        signatures = {"code_signature": code_signature(probe.spec, TARGET), "emulator_signature": emulator}
        row |= problem | signatures | {"kernel": probe.spec.name}
    results.write(made | {"checksum": results.checksum(made)}, tmp_path)
    step = upkeep.stale(tmp_path)
    assert step.table[1:] == [["h200", "instructions", PROBES[1].spec.name]]
    assert step.summary.startswith("1 of 2 cells")


def test_cells_of_another_machine_are_added(tmp_path: Path) -> None:
    results.write(recorded(CASES, 3.0), tmp_path)
    new = replace(CASES[0], batch=3)
    path = results.write(recorded((CASES[1], new), 2.0, commit="1" * 40), tmp_path / "elsewhere")
    step = upkeep.add([path], tmp_path)
    assert step.table[1] == [str(tmp_path / "h200/small.json"), "2", "1"]
    assert times(tmp_path) == [(1, 3.0), (2, 2.0), (3, 2.0)]


def test_random_cells_of_another_commit_do_not_stay(tmp_path: Path) -> None:
    results.write(recorded(CASES[:1], 3.0, "wild"), tmp_path)
    path = results.write(recorded(CASES[1:], 2.0, "wild", commit="1" * 40), tmp_path / "elsewhere")
    upkeep.add([path], tmp_path)
    assert [row["shape"]["b"] for row in results.read(tmp_path / "h200/wild.json")["rows"]] == [2]


def test_rows_of_another_driver_are_not_added(tmp_path: Path) -> None:
    results.write(recorded(CASES, 3.0), tmp_path)
    made = recorded(CASES[:1], 2.0)
    made["environment"] = made["environment"] | {"driver": "1.2"}
    path = results.write(made | {"checksum": results.checksum(made)}, tmp_path / "elsewhere")
    with pytest.raises(InvalidArgument, match=r"files: expected rows of driver .*, got .* with driver 1\.2"):
        upkeep.add([path], tmp_path)
    assert times(tmp_path) == [(1, 3.0), (2, 3.0)]
