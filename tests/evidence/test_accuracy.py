"""The accuracy of 8-bit attention: its gates, at the headline shape in the emulator, and the tables of its results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from microsdpa.evidence import accuracy, render, results
from microsdpa.evidence.compare import Errors
from microsdpa.evidence.inputs import Case, make
from microsdpa.kernels.problem import PRECISIONS


def test_the_gates_hold_for_the_mission_shape_with_outliers() -> None:
    """The hardest kind for one set of inputs; `microsdpa accuracy` takes every kind and more sets."""
    measured = [accuracy.measure(p, Case(1, 8, 512, 512, 64, kind="outliers"), "cpu") for p in PRECISIONS]
    assert accuracy.failures(measured) == []
    for one in measured:
        assert one.on_quantized is not None
        assert 0.05 < one.on_quantized.share < 1
        assert 0.95 < one.errors.rel_l1 / one.on_quantized.exact_sums < 1.01
    rows = [accuracy.as_row(one, "sm_89") for one in measured]
    head, *lines = accuracy.quantized_lines(results.make("accuracy", "microsdpa accuracy", rows))
    assert [line[0] for line in lines] == [f'`precision="{p}"`' for p in PRECISIONS]
    assert lines[0][1].endswith("%")
    assert len(head) == len(lines[0])


def made(rmse: float = 0.001, rel_l1: float = 0.01) -> list[accuracy.Measured]:
    """Measurements of every case, of which int8_fp16's are a third of the others'."""
    return [
        accuracy.Measured(p, case, Errors(0.1, rmse / share, rel_l1 / share, 1.0, ()))
        for case in accuracy.cases(2)
        for p, share in zip(PRECISIONS, (1, 1, 1, 3.1), strict=True)
    ]


def test_gates() -> None:
    assert accuracy.failures(made()) == []
    assert len(accuracy.failures(made(rmse=0.02))) == 9
    assert len(accuracy.failures(made(rmse=float("nan")))) == 12
    worse = [m for m in made() if m.precision != "int8_fp16"]
    worse += [accuracy.Measured("int8_fp16", m.case, m.errors) for m in worse if m.precision == "fp8"]
    assert {text.split(":")[0] for text in accuracy.failures(worse)} == {f"int8_fp16, {k}" for k in accuracy.KINDS}


@pytest.mark.parametrize(
    ("precision", "beside", "words"),
    [
        ("fp8", (0.1, 0.5, 0.0101), ""),
        ("fp8", (0.1, 1.5, 0.0101), "fp8, .*: 1.50 of what rounding P and the output explains"),
        ("fp8", (0.1, 0.5, 0.0097), "fp8, .*: 0.01 is more than exact sums' 0.0097"),
        ("int8_fp16", (0.02, 0.5, 0.0101), "int8_fp16, .*: 0.02 on the dequantized values"),
        ("int8_fp16", (0.006, 0.5, 0.0101), ""),
    ],
)
def test_gates_on_the_dequantized_values(precision: str, beside: tuple[float, float, float], words: str) -> None:
    most, share, exact_sums = beside
    errors = Errors(0.1, 0.0004, 0.01, 1.0, ())
    on_quantized = accuracy.OnQuantized(Errors(most, 0.0, 0.0, 1.0, ()), share, exact_sums)
    case = Case(1, 8, 32, 512, 64, seed=100)
    found = accuracy.failures([accuracy.Measured(precision, case, errors, on_quantized)])  # type: ignore[arg-type]
    assert len(found) == bool(words)
    assert re.fullmatch(words, "".join(found))


def test_growth_with_length_is_a_failure() -> None:
    grown = [
        accuracy.Measured(m.precision, m.case, Errors(0.1, 0.001, 0.02, 1.0, ()))
        if m.case.seqlen_k == accuracy.LENGTHS[-1] and m.precision == "fp8"
        else m
        for m in made()
    ]
    assert accuracy.failures(grown) == ["fp8: relative error grows from 0.01 to 0.02"]
    # A kernel of few keys that keeps probabilities in 16 bits is more exact than later ones can be.
    exact = [
        accuracy.Measured(m.precision, m.case, m.errors, accuracy.OnQuantized(Errors(0, 0, 0, 1.0, ()), 0.5, 0.0195))
        if m.case.seqlen_q == 32 and m.case.seqlen_k == accuracy.LENGTHS[0] and m.precision == "fp8"
        else m
        for m in grown
    ]
    assert accuracy.failures(exact) == []


def test_tables_come_from_the_result_file_and_say_what_is_stale(tmp_path: Path) -> None:
    rows = [accuracy.as_row(m, "sm_89") for m in made()]
    for row in rows:
        if row["dtype"] == "fp8":
            row["code_signature"] = "of other code"
    results.write(results.make("accuracy", "microsdpa accuracy", rows), tmp_path)
    marker = "<!-- microsdpa:table gpu=cpu suite=accuracy{} -->\n<!-- microsdpa:end -->"
    kinds = render.rendered(marker.format(""), tmp_path, "page")
    assert '| `precision="fp8"` (stale) | 0.00100 / 0.0100, 0.00100 |' in kinds
    assert '| `precision="int8_fp16"` | 0.00032 / 0.0032, 0.00032 |' in kinds
    lengths = render.rendered(marker.format(" by=length"), tmp_path, "page")
    assert "512 keys | 2,048 keys" in lengths
    assert '| `precision="int8_fp8"` | 0.0100 | 0.0100 |' in lengths


def test_a_key_bias_is_the_same_for_all_keys() -> None:
    plain, biased = (make(Case(1, 2, 30, 400, 64, kind=kind)) for kind in ("normal", "key_bias"))  # type: ignore[arg-type]
    difference = (biased[1] - plain[1]).float()
    assert difference.std(dim=2).max() < 0.01
    assert 3 < difference.mean(dim=2).std() < 5
    assert (biased[2] == plain[2]).all()


@pytest.mark.parametrize("seeds", [1, 3])
def test_cases_are_of_every_kind_and_length(seeds: int) -> None:
    found = accuracy.cases(seeds)
    assert len(found) == len(accuracy.KINDS) * seeds + len(accuracy.LENGTHS)
    assert len(set(found)) == len(found)
