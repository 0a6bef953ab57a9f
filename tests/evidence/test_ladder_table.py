"""`microsdpa ladder`: its figures without a GPU, and its tables from a result file."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from microsdpa.evidence import ada, compare, ladder, ladder_table, render, results, signatures, worker
from microsdpa.evidence.devices import named
from microsdpa.evidence.expectation import Expectation
from microsdpa.evidence.inputs import Case, make
from microsdpa.evidence.peers.ours import WIDE_PROBABILITIES, ours
from microsdpa.evidence.roofline_page import ladder_times
from microsdpa.evidence.suites import Suite, load
from microsdpa.jit.signature import code_signature
from microsdpa.runtime import launcher

MISSION = load("ladder").cases[0]
FIGURES = ladder.Figures(128, 40 * 1024, 0, 3, 0.1875, "registers", "HMMA 64", 0, 3008, 1e-4)

ERROR = compare.as_record(compare.Errors(2e-4, 1e-5, 1e-4, 1.0, (0, 0, 0, 0)), compare.Tolerance(1e-3, 1e-3, 1e-3))


def result() -> results.Result:
    rows = []
    for case in (MISSION, Case(1, 2, 64, 64, 64, causal="upper_left")):
        for kernel, us in (("ladder/01_scalar", 50.0), ("ladder/02_wmma", 20.0)):
            row = results.row(
                case, kernel=kernel, median_us=us, min_us=us, samples_us=[us], tflops=1.0, requested=kernel, version="1"
            )
            row |= {"error": ERROR, "code_signature": "of another day", "signature": "s"}
            rows.append(row | ({"figures": asdict(FIGURES)} if case == MISSION else {}))
        rows.append(results.row(case, impl="torch FLASH", median_us=10.0, min_us=10.0, samples_us=[10.0], version="2"))
        rows.append(results.row(case, impl="torch MATH", status="unavailable", reason="no", version="2"))
    made = results.make("ladder", "microsdpa ladder", rows)
    made["environment"] |= {"gpu": "NVIDIA H200", "target": "sm_90a", "driver": "1", "cuda": "13.0"}
    return made | {"checksum": results.checksum(made)}


def test_the_table_has_ratios_to_the_rung_before_and_to_the_best_of_torch() -> None:
    head, first, second = ladder_table.mission(result())
    assert first[:4] == ["ladder/01_scalar", "50.00", "", "0.20x"]
    assert second[:4] == ["ladder/02_wmma", "20.00", "2.50x", "0.50x"]
    assert second[5] == "3%"  # of the H200's 0.54 us for 537 MFLOP
    assert second[6:] == ["128", "40.0", "3 (registers)", "19%", "0", "0 of 3,008", "HMMA 64", "2.0e-04", ""]
    assert len(head) == len(first) == len(second)


def test_rungs_with_8_bits_are_no_step_from_16_bits() -> None:
    kernels = {"ladder/07_tuned": 6.0, "ladder/08_fp8_scalar": 60.0, "ladder/10_fp8_probability": 12.0}
    kernels |= {"ladder/11_8bit_cp_async": 8.0, "ladder/12_8bit_persistent": 10.0}
    figures = asdict(replace(FIGURES, ada_tensor_instructions="QMMA 32", ada_least_us=4.02))
    rows = [
        results.row(MISSION, kernel=k, median_us=us, tflops=1.0, dtype="float16" if k < "ladder/08" else "e4m3")
        | {"figures": figures, "error": ERROR}
        for k, us in kernels.items()
    ]
    lines = {line[0]: line for line in ladder_table.columns(rows, named("h200"), best_us=9.0)}
    assert [line[2] for line in lines.values()] == ["rung before / this", "", "", "5.00x", "1.50x", "0.80x"]
    assert lines["ladder/07_tuned"][3] == "1.50x"
    assert lines["ladder/11_8bit_cp_async"][3] == ""  # 8 bits beside 16 would be no comparison of implementations
    assert lines["ladder/11_8bit_cp_async"][5] == "7%"  # of exp2's 0.54 us
    assert lines["ladder/11_8bit_cp_async"][12:] == ["HMMA 64 (sm_89: QMMA 32)", "2.0e-04", "4.0"]


def test_the_other_shapes_have_a_line_each() -> None:
    lines = ladder_table.shapes(result())
    assert lines[0] == ["(B, H, S_q, S_k, D)", "ladder/01_scalar", "ladder/02_wmma", "torch FLASH", "torch MATH"]
    assert lines[2] == ["(1, 2, 64, 64, 64), causal", "50.00", "20.00", "10.00", "unavailable"]


def test_markers_give_all_rungs_one_rung_or_the_shapes(tmp_path: Path) -> None:
    marker = "<!-- microsdpa:table gpu=h200 suite=ladder{} -->\n<!-- microsdpa:end -->\n"
    assert "Not recorded yet" in render.rendered(marker.format(""), tmp_path, "page")
    results.write(result(), tmp_path)
    whole, one, shapes = (
        render.rendered(marker.format(option), tmp_path, "page") for option in ("", " rung=02", " table=shapes")
    )
    assert whole.count("| ladder/") == 2
    assert "| ladder/02_wmma (stale) | 20.00 |" in one
    assert "(1, 2, 64, 64, 64), causal" in shapes
    assert "`microsdpa ladder`" in whole
    assert ladder_times(tmp_path / "h200" / "ladder.json") == {"ladder/01_scalar": 50.0, "ladder/02_wmma": 20.0}


def test_what_a_run_does_not_have_is_said_plainly(tmp_path: Path) -> None:
    marker = "<!-- microsdpa:table gpu=h200 suite=ladder{} -->\n<!-- microsdpa:end -->\n"
    made = result()
    results.write(made, tmp_path)
    assert "*Rung 05 is not in the recorded run.*" in render.rendered(marker.format(" rung=05"), tmp_path, "page")
    other = made | {"rows": [row | {"kernel": row["kernel"] and "ampere/mma"} for row in made["rows"]]}
    text = ladder_table.markdown(other, {}, set())
    assert text == ladder_table.NOT_RECORDED
    plot = "<!-- microsdpa:plot gpu=cpu name=ladder -->\n<!-- microsdpa:end -->\n"
    assert "no result file of the suite ladder" in render.rendered(plot, tmp_path, "page")


def test_a_table_shows_the_columns_of_the_peers_that_are_named(tmp_path: Path) -> None:
    rows = [
        results.row(MISSION, impl=impl, median_us=us, min_us=us, samples_us=[us], tflops=1.0, version="1")
        for impl, us in (("microsdpa", 3.0), ("torch FLASH", 10.0), ("torch CUDNN", 9.0))
    ]
    head, line = render.timing_lines(result() | {"rows": rows}, "graph", peers=["torch-flash"])
    assert head[1:] == ["microsdpa", "torch FLASH", "best peer / microsdpa"]
    assert line[1:] == ["3.00", "10.00", "3.00x"]  # of the best of all peers


def test_on_a_gpu_every_rung_has_a_process_and_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names, ended = ["ladder/04_mma_sync", "ladder/11_8bit_cp_async"], []

    class Process:
        def __init__(self, job: dict[str, Any]) -> None:
            self.job = job
            assert len(job["eight_bit"]) == (7 if job["impl"] == names[1] else 0)

        def wait_until_ready(self) -> None:
            assert self.job["modes"] == ["graph"]

        def abandon(self) -> None:
            ended.append(self.job["impl"])

    def run(suite: Suite, modes: list[str], impl: str, peers: str, waiting: list[Any]) -> list[results.Row]:
        assert waiting[0].job == worker.jobs(suite, modes, impl, peers)[0][1]
        rows = []
        for case in suite.cases:
            dtype = "e4m3" if impl == names[1] else "float16"
            fields = {"median_us": 9.0, "min_us": 9.0, "samples_us": [9.0], "tflops": 1.0, "version": "1"}
            common = fields | {"error": ERROR, "inputs": "float16"}
            if case == suite.cases[2] and impl == names[1]:
                rows += [results.row(case, dtype=dtype, status="unavailable", reason="the process died")]
            else:
                rows += [results.row(case, **common, kernel=impl, dtype=dtype)]
            rows += [results.row(case, **common, impl="torch FLASH"), results.row(case, **fields, op="empty")]
        return rows

    monkeypatch.setattr(ladder, "rungs", lambda target: names)
    monkeypatch.setattr(ladder, "launcher", SimpleNamespace(device_error=lambda: None))
    monkeypatch.setattr(ladder.torch.cuda, "get_device_capability", lambda: (8, 9))
    monkeypatch.setattr(ladder.worker, "Worker", Process)
    monkeypatch.setattr(ladder.worker, "run", run)
    step = ladder.step(output=tmp_path)
    assert step.status == "failed"
    assert step.summary.startswith("2 rungs, 1 rows wrong or missing")
    assert ended == [*names, "auto"]
    (path,) = tmp_path.glob("*/ladder.json")
    rows = results.read(path)["rows"]
    assert [row["kernel"] for row in rows] == [names[0]] * 7 + [names[1]] * 7 + [None] * 7
    assert [row["kernel"] for row in rows if "figures" in row] == [names[0]] * 2 + [names[1]] * 2  # causal, too
    assert len(step.table) == 3
    text = ladder_table.markdown(results.read(path), {}, set())
    assert "QMMA into conversions and HMMA" in text


@pytest.mark.skipif(launcher.device_error() is None, reason="this machine has a GPU")
def test_without_a_gpu_the_compiled_and_emulated_columns_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ladder, "rungs", lambda target: ["ladder/02_wmma", "ladder/04_mma_sync", "ladder/11_8bit_cp_async"]
    )
    step = ladder.step()
    assert step.status == "passed"
    assert "times need a GPU" in step.summary
    wmma, mma_sync, quantized = step.table[1:]
    assert wmma[1:6] == mma_sync[1:6] == [""] * 5
    assert "not modelled" in wmma[11]
    assert mma_sync[11].startswith("0 of ")
    assert mma_sync[12] == "HMMA 64"
    assert float(mma_sync[13]) < 1e-3
    assert (quantized[12], mma_sync[14], quantized[14]) == ("QMMA 32", "8.0", "4.0")
    assert 1e-3 < float(quantized[13]) < 2e-2


@pytest.mark.parametrize("rung", [rung for rung in ladder.rungs() if rung >= "ladder/08"])
def test_rungs_with_8_bits_have_no_bank_conflicts_and_small_errors(rung: str) -> None:
    report, error = ladder.emulated(rung, "sm_89")
    assert report.bank_conflicts == 0, [site for site in report.bank_sites if site.conflicts]
    assert error <= (5e-4 if rung in WIDE_PROBABILITIES else 1.5e-2)


def test_a_rung_with_8_bits_is_checked_against_the_dequantized_values() -> None:
    case = Case(1, 2, 70, 130, 32, causal="upper_left")
    tensors = make(case)
    (rung,) = ours("ladder/09_fp8_mma")
    plain = rung.stands_for(case, tensors)
    assert plain is not None
    assert all(0.01 < float((a - b).abs().max()) < 0.3 for a, b in zip(plain, tensors, strict=True))
    out = rung.bind(case, tensors, torch.empty_like(tensors[0]))()
    error, wrong = Expectation(case, plain).check(out, rung.rounding)
    assert wrong == ""
    assert float(str(error["max_abs"])) < 5e-3
    assert "differs from the oracle" in Expectation(case, plain).check(1.02 * out, rung.rounding)[1]
    row = results.row(case, dtype=rung.arithmetic, inputs=case.dtype)
    row |= {"operands": "fp8", "requested": rung.name, "code_signature": "of other code"}
    assert signatures.is_stale(row | {"requested": "ladder/09"}, "sm_90a")
    spec, _ = ladder.specification("ladder/09_fp8_mma", case, "sm_90a")
    current = {"requested": "ladder/09_fp8_mma", "code_signature": code_signature(spec, "sm_90a")}
    assert not signatures.is_stale(row | current, "sm_90a")


def test_an_l4_is_expected_by_arithmetic() -> None:
    """64 tiles of 64 rows on 58 SMs: the busiest has 128 of 70.6 rows."""
    spec, problem = ladder.specification("ladder/11_8bit_cp_async", MISSION, "sm_89")
    found = ada.expectation("ladder/11_8bit_cp_async", spec, problem, MISSION)
    assert ada.balance(spec, problem) == pytest.approx(4096 / 58 / 128)
    assert found.least_us == pytest.approx(2.219 * 128 * 58 / 4096, rel=1e-3)
    spec, problem = ladder.specification("ladder/01_scalar", MISSION, "sm_89")
    found = ada.expectation("ladder/01_scalar", spec, problem, MISSION)
    assert found == ada.Expectation("none", pytest.approx(537 / 30.28 * 80 * 58 / 4096, rel=1e-2))
