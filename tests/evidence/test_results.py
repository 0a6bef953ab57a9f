from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from microsdpa.evidence import environment, probes, ratios, render, results, signatures, wording
from microsdpa.evidence.inputs import Case
from microsdpa.jit.signature import code_signature
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.select import select

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
MISSION = Case(1, 8, 512, 512, 64)
ERROR = {"max_abs": 1e-4, "rmse": 1e-5, "rel_l1": 1e-4, "cosine": 1.0, "tolerance": {"max_abs": 2e-4}}


def spec_signature() -> str:
    return code_signature(select(Problem(1, 8, 8, 512, 512, 64, "float16", target="sm_90a")).spec, "sm_90a")


def timed(impl: str, median: float, **fields: object) -> results.Row:
    return results.row(
        MISSION,
        **(
            {"impl": impl, "median_us": median, "min_us": median - 0.5, "samples_us": [median], "error": ERROR} | fields
        ),
    )


@pytest.fixture
def result() -> results.Result:
    ours = {"kernel": "ladder/01_scalar", "code_signature": spec_signature(), "requested": "auto", "variant": ""}
    rows = [
        timed("microsdpa", 40.0, **ours),
        timed("torch FLASH", 10.0),
        results.row(MISSION, impl="torch CUDNN", status="unavailable", reason="no kernel"),
    ]
    made = results.make("mission", "microsdpa bench", rows)
    made["environment"] = made["environment"] | {"gpu": "NVIDIA H200", "target": "sm_90a"}
    return made | {"checksum": results.checksum(made)}


def test_a_result_survives_the_disk(result: results.Result, tmp_path: Path) -> None:
    path = results.write(result, tmp_path)
    assert path == tmp_path / "h200" / "mission.json"
    assert results.read(path) == json.loads(json.dumps(result))


def test_this_machines_result_is_valid(tmp_path: Path) -> None:
    made = results.make("verify", "microsdpa verify", [])
    assert results.read(results.write(made, tmp_path))["environment"]["torch"]


def test_parts_of_a_suite_make_one_result(result: results.Result, tmp_path: Path) -> None:
    def of(rows: list[results.Row], command: str, **fields: object) -> results.Result:
        made = {**result, "rows": rows, "command": command, **fields}
        return made | {"checksum": results.checksum(made)}

    def told() -> list[tuple[int, float]]:
        rows = results.read(tmp_path / "h200" / "mission.json")["rows"]
        return [(row["shape"]["b"], row["median_us"]) for row in rows]

    shapes = [result["rows"][0]["shape"] | {"b": b} for b in (1, 2, 3)]
    first = of([timed("microsdpa", 1.0, shape=shape) for shape in shapes[:2]], "one")
    second = of([timed("microsdpa", 2.0, shape=shape) for shape in shapes[1:]], "two")
    for part in (first, second):
        results.write(results.completed(part, tmp_path, wording.case_name), tmp_path)
    assert told() == [(1, 1.0), (2, 2.0), (3, 2.0)]
    assert results.read(tmp_path / "h200" / "mission.json")["command"] == "one && two"
    one = of([timed("microsdpa", 3.0, shape=shapes[0])], "three", commit="1" * 40, created="2026-12-01T00:00:00Z")
    results.write(results.completed(one, tmp_path, wording.case_name), tmp_path)
    assert told() == [(2, 2.0), (3, 2.0), (1, 3.0)]
    again = of([timed("microsdpa", 4.0, shape=shapes[1])], "four", commit="2" * 40)
    whole = results.completed(again, tmp_path, wording.case_name)
    results.write(whole, tmp_path)
    assert told() == [(3, 2.0), (1, 3.0), (2, 4.0)]
    of_commits = [row.get("recorded", {}).get("commit") for row in whole["rows"]]
    assert of_commits == [result["commit"], "1" * 40, None]
    said = wording.provenance(whole)
    assert "commit 2222222222, " in said
    assert "; 1 cell: commit 1111111111, 2026-12-01" in said
    last = of([timed("microsdpa", 5.0, shape=shapes[0])], "five", commit="3" * 40)
    assert results.completed(last, tmp_path, wording.case_name, of_any_commit=False) == last
    elsewhere = of(last["rows"], "six", environment=last["environment"] | {"driver": "another"})
    assert results.completed(elsewhere, tmp_path, wording.case_name) == elsewhere


def test_an_edited_file_is_refused(result: results.Result, tmp_path: Path) -> None:
    path = results.write(result, tmp_path)
    path.write_text(path.read_text().replace("40.0", "4.0"))
    with pytest.raises(results.ResultFileError, match="checksum does not match"):
        results.read(path)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("schema",), 2, "expected schema version 1, got 2"),
        (("suite",), "Mission Suite", "suite: 'Mission Suite' does not match"),
        (("environment", "gpu"), 7, "environment/gpu: 7 is not of type"),
        (("rows", 0, "median_us"), -1.0, "rows/0/median_us"),
        (("rows", 0, "median_us"), None, "rows/0/median_us: None is not of type 'number'"),
        (("rows", 0, "samples_us"), [], "rows/0/samples_us"),
        (("rows", 0, "mode"), "fast", "rows/0/mode: 'fast' is not one of"),
        (("rows", 2, "reason"), "", "rows/2/reason"),
        (("rows", 0, "shape", "d"), 0, "rows/0/shape/d"),
    ],
)
def test_the_schema_refuses(result: results.Result, place: tuple[Any, ...], value: object, message: str) -> None:
    broken: Any = copy.deepcopy(result)
    target = broken
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    broken["checksum"] = results.checksum(broken)
    with pytest.raises(results.ResultFileError, match=message):
        results.validate(broken, "test")


@pytest.mark.parametrize("name", ["absent.json", "text.json", "list.json"])
def test_other_files_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "text.json").write_text("not json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(results.ResultFileError, match=name):
        results.read(tmp_path / name)


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json")), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_committed_result_files_are_valid(path: Path) -> None:
    result = results.read(path)
    assert results.path_below(RESULTS, result) == path
    assert result["rows"]
    assert not result["commit"].endswith("-dirty")


def test_there_are_committed_results_of_the_h200() -> None:
    assert {p.stem for p in (RESULTS / "h200").glob("*.json")} >= {"instructions", "mission", "verify"}


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100pcie"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L4", "l4"),
        (None, "cpu"),
    ],
)
def test_gpu_slugs(name: str | None, slug: str) -> None:
    assert environment.gpu_slug(name) == slug


PAGE = "before\n<!-- microsdpa:table gpu=h200 suite=mission mode=graph -->\nold\n<!-- microsdpa:end -->\nafter\n"


@pytest.fixture
def checkout(tmp_path: Path, result: results.Result) -> Path:
    results.write(result, tmp_path / "results")
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(PAGE)
    (tmp_path / "docs/page.md").write_text("no table\n")
    return tmp_path


def test_render_writes_tables_between_the_markers(checkout: Path) -> None:
    assert render.differing(checkout, checkout / "results") == [checkout / "README.md"]
    assert render.render(checkout, checkout / "results") == [checkout / "README.md"]
    text = (checkout / "README.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("<!-- microsdpa:end -->\nafter\n")
    assert "old" not in text
    assert "| (1, 8, 512, 512, 64), float16 | 40.00 | 10.00 | 0.25x |" in text
    assert "- torch CUDNN: no kernel" in text
    assert render.differing(checkout, checkout / "results") == []


def test_a_table_can_leave_out_8_bit_modes(tmp_path: Path, result: results.Result) -> None:
    eight_bit = timed("cuDNN FP8", 5.0, dtype="e4m3", inputs="float16")
    wider = result | {"rows": [*result["rows"], eight_bit]}
    path = results.write(wider | {"checksum": results.checksum(wider)}, tmp_path)
    marker = (
        f"<!-- microsdpa:table gpu={path.parent.name} suite={path.stem} mode=graph{{}} -->\n<!-- microsdpa:end -->\n"
    )
    assert "cuDNN FP8" in render.rendered(marker.format(""), tmp_path, "page")
    assert "cuDNN FP8" not in render.rendered(marker.format(" eight_bit=no"), tmp_path, "page")


def test_a_table_can_be_in_tflops_and_compares_like_with_like(result: results.Result) -> None:
    result["rows"][0]["tflops"], result["rows"][1]["tflops"] = 13.4, 53.7
    eight_bit = timed("cuDNN FP8", 5.0, dtype="e4m3", inputs="float16", tflops=107.4)
    lines = render.timing_lines(result | {"rows": [*result["rows"], eight_bit]}, "graph", "tflops")
    assert lines[1][1:] == ["13", "54", "107", "0.25x"]


def test_an_option_shows_what_it_adds_to_the_plain_call_beside_it(result: results.Result) -> None:
    assert render.OVER_PLAIN not in render.timing_lines(result, "graph")[0]
    rows = [timed("microsdpa", 9.0, plain_us=6.75), timed("torch CUDNN", 20.0)]
    head, line = render.timing_lines(result | {"rows": rows}, "graph")
    assert head[3:] == [render.OVER_PLAIN, "best peer / microsdpa"]
    assert line[3:] == ["+1.75", "2.22x"]  # of the best samples, of which ours is 8.5


def test_our_8_bit_calls_are_compared_with_8_bit_peers_that_do_the_same(result: results.Result) -> None:
    def eight(impl: str, us: float, **fields: Any) -> results.Row:
        return timed(impl, us, **({"dtype": "e4m3", "inputs": "float16"} | fields))

    rows = [
        eight("microsdpa", 8.0, variant="fp8", op="quantize+sdpa", precision="fp8"),
        eight("microsdpa", 9.0, variant="int8_fp8", op="quantize+sdpa", precision="int8_fp8", dtype="int8_fp8"),
        eight("microsdpa", 6.0, variant="fp8 quantized", precision="fp8"),
        eight("cuDNN FP8", 9.0),
        eight("SageAttention", 20.0, op="quantize+sdpa", dtype="int8"),
    ]
    head, line = render.timing_lines(result | {"rows": [*result["rows"], *rows]}, "graph")
    assert head[-2:] == ["best peer / microsdpa", "8-bit: best peer / microsdpa"]
    assert {"microsdpa fp8", "microsdpa fp8 quantized", "cuDNN FP8"} < set(head)
    assert line[-2:] == ["0.25x", "2.50x (SageAttention / fp8); 1.50x (cuDNN FP8 / fp8 quantized)"]


def test_a_changed_result_file_is_noticed(checkout: Path, result: results.Result) -> None:
    render.render(checkout, checkout / "results")
    result["rows"][1]["median_us"] = 11.0
    results.write(result | {"checksum": results.checksum(result)}, checkout / "results")
    assert render.differing(checkout, checkout / "results") == [checkout / "README.md"]


def test_a_row_whose_kernel_changed_is_marked_stale(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    render.render(checkout, checkout / "results")
    monkeypatch.setattr(signatures, "code_signature", lambda spec, target: "changed")
    assert render.differing(checkout, checkout / "results") == [checkout / "README.md"]
    render.render(checkout, checkout / "results")
    assert "40.00 (stale)" in (checkout / "README.md").read_text()


def test_instructions_are_stale_when_the_emulator_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = results.read(RESULTS / "h200/instructions.json")
    known = {probe.spec.name for probe in probes.PROBES}  # a row of a probe that is no more is stale in any case
    recorded["rows"] = [row for row in recorded["rows"] if row["kernel"] in known]
    monkeypatch.setattr(probes, "code_signature", lambda spec, target: "code")
    monkeypatch.setattr("microsdpa.emulate.build.source_signature", lambda spec: "emulator")
    for row in recorded["rows"]:
        row["code_signature"], row["emulator_signature"] = "code", "emulator"
    assert render.STALE not in render.instructions_table(recorded)
    monkeypatch.setattr("microsdpa.emulate.build.source_signature", lambda spec: "changed")
    table = render.instructions_table(recorded)
    assert table.count(f"({render.STALE})") == len(recorded["rows"]) > 20


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("<!-- microsdpa:table gpu=h200 suite=absent mode=graph -->\n<!-- microsdpa:end -->\n", "no result file"),
        ("<!-- microsdpa:table gpu=h200 -->\n<!-- microsdpa:end -->\n", "needs gpu= and suite="),
        ("<!-- microsdpa:table gpu=h200 suite=mission -->\n<!-- microsdpa:end -->\n", "needs mode="),
        (
            "<!-- microsdpa:table gpu=h200 suite=mission mode=graph unit=s -->\n<!-- microsdpa:end -->\n",
            "unit: expected",
        ),
        ("<!-- microsdpa:table gpu=h200 suite=mission mode=eager -->\n<!-- microsdpa:end -->\n", "no rows of mode"),
        ("<!-- microsdpa:table gpu=h200 suite=mission mode=graph -->\n", "closed by microsdpa:end"),
    ],
)
def test_a_wrong_marker_is_an_error(checkout: Path, marker: str, message: str) -> None:
    with pytest.raises(render.RenderError, match=message):
        render.rendered(marker, checkout / "results", "page")


@pytest.mark.parametrize(
    ("suite", "command"), [("fp8", "bench --suite fp8"), ("accuracy", "accuracy"), ("ladder", "ladder")]
)
def test_what_is_not_recorded_yet_says_by_what_it_is(checkout: Path, suite: str, command: str) -> None:
    marker = f"<!-- microsdpa:table gpu=h200 suite={suite} mode=graph -->\n<!-- microsdpa:end -->\n"
    text = render.rendered(marker, checkout / "results", "page")
    assert f"*Not recorded yet: `microsdpa {command} --output benchmarks/results`" in text


def test_the_host_mode_quotes_its_best_sample() -> None:
    assert wording.quoted_us(timed("microsdpa", 5.0, mode="host")) == 4.5
    assert wording.quoted_us(timed("microsdpa", 5.0, mode="eager")) == 5.0
    assert wording.us_with_interval(timed("microsdpa", 5.0, mode="host")) == "4.50"
    eager = timed("microsdpa", 5.0, mode="eager", interval_us=[4.9, 5.125])
    assert wording.us_with_interval(eager) == "5.00 [4.90, 5.12]"
    assert wording.us_with_interval(timed("microsdpa", 5.0) | {"median_us": None}) == ""


@pytest.mark.parametrize("said", ["main", "HEAD", "", "1234567890abcdefg", "12345"])
def test_a_commit_is_a_hash_or_not_recorded(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_run", lambda *command: None)  # outside a checkout
    monkeypatch.setenv("MICROSDPA_COMMIT", said)
    assert environment.commit() == "unknown"
    result = results.make("mission", "microsdpa bench", [])
    assert "commit not recorded" in wording.provenance(result | {"commit": said})
    monkeypatch.setenv("MICROSDPA_COMMIT", "1234567890")
    assert "commit 1234567890," in wording.provenance(results.make("mission", "microsdpa bench", []))


def test_the_summary_has_the_mean_and_the_lowest_call(result: results.Result, tmp_path: Path) -> None:
    ours, peer, _ = result["rows"]
    shape = ours["shape"]
    fast = timed("microsdpa", 5.0, shape=shape | {"b": 2})
    made = result | {"rows": [ours, peer, fast, timed("torch FLASH", 80.0, shape=shape | {"b": 2})]}
    results.write(made | {"checksum": results.checksum(made)}, tmp_path)
    lines = ratios.summary(tmp_path / "h200").splitlines()
    assert len(lines) == 3  # a suite that is not recorded has no line
    worst = f"{wording.case_name(ours)}: 0.25x, torch FLASH"
    assert lines[2] == f"| {ratios.SUMMARIZED['mission']} | `mission` | 2 | 2.00x | 1 | {worst} |"
    page = "<!-- microsdpa:summary gpu=h200 -->\n<!-- microsdpa:end -->\n"
    assert render.rendered(page, tmp_path, "page").splitlines()[1:4] == lines


def test_the_summary_compares_8_bits_with_8_bits(result: results.Result, tmp_path: Path) -> None:
    rows = [
        timed("microsdpa", 8.0),
        timed("microsdpa", 4.0, dtype="e4m3", variant="e4m3, one term"),
        timed("cuDNN FP8", 6.0, dtype="e4m3"),
        timed("torch CUDNN", 2.0),
    ]
    made = result | {"suite": "prefill_fp8", "rows": rows}
    results.write(made | {"checksum": results.checksum(made)}, tmp_path)
    assert "| 1 | 1.50x | 0 |" in ratios.summary(tmp_path / "h200")


def test_the_summary_takes_cold_rows_where_a_suite_has_no_graphs(result: results.Result, tmp_path: Path) -> None:
    rows = [
        timed("microsdpa", 4.0, mode="cold"),
        timed("FlashAttention-4", 6.0, mode="cold"),
        timed("microsdpa", 9.0, mode="host"),
        timed("FlashAttention-4", 9.0, mode="host"),
    ]
    made = result | {"suite": "serving", "rows": rows}
    results.write(made | {"checksum": results.checksum(made)}, tmp_path)
    assert "| 1 | 1.50x | 0 |" in ratios.summary(tmp_path / "h200")
