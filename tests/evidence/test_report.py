from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from microsdpa.evidence import accuracy, minilm, render, report, repro, results, resume, roofline, suites
from microsdpa.evidence.compare import Errors
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.plots import all_plots, charts
from microsdpa.evidence.plots import files as plot_files
from microsdpa.evidence.plots.charts import spread
from microsdpa.evidence.plots.figure import COLOURS, FURTHER, OURS, colour_of
from microsdpa.evidence.report import dense_first
from microsdpa.evidence.step import Step
from microsdpa_cli import app as cli
from microsdpa_cli import running

PLOTS = ["latency", "ladder", "throughput", "ampere", "accuracy", "errors", "roofline", "host"]


def row(case: Case, impl: str, us: float, mode: str = "graph", **fields: Any) -> results.Row:
    error = {"max_abs": 1e-3, "rmse": 1e-4, "rel_l1": 3e-4, "cosine": 1.0, "tolerance": {}}
    measured = {
        "impl": impl,
        "mode": mode,
        "inputs": case.dtype,
        "kind": case.kind,
        "median_us": us,
        "min_us": us * 0.99,
        "samples_us": [us * 0.99, us, us * 1.01],
        "interval_us": [us * 0.99, us * 1.01],
        "tflops": roofline.flops(case) / us / 1e6,
        "error": error,
    }
    return results.row(case, **(measured | fields))


def made(suite: str, rows: list[results.Row]) -> results.Result:
    result = results.make(suite, f"microsdpa bench --suite {suite}", rows)
    result["environment"] = result["environment"] | {"gpu": "NVIDIA H200", "target": "sm_90a"}
    return result | {"checksum": results.checksum(result)}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Result files of every suite that a plot is drawn from."""
    for suite in ("mission", "prefill", "ampere", "fp8"):
        rows = []
        for case in suites.load(suite).cases[:8]:
            for mode in ("graph", "host") if suite == "mission" else ("graph",):
                rows += [row(case, "torch FLASH", 20.0, mode), row(case, "microsdpa", 10.0, mode, variant="")]
        if suite == "fp8":
            rows.append(row(suites.load(suite).cases[0], "cuDNN FP8", 9.0, dtype="e4m3"))
        rows.append(row(Case(1, 8, 512, 512, 64), "empty kernel", 0.6, op="empty"))
        results.write(made(suite, rows), tmp_path)
    rungs = {"ladder/01_scalar": 48.0, "ladder/02_wmma": 24.0, "ampere/mma": 5.0}
    rows = [row(Case(1, 8, 512, 512, 64), "microsdpa", us, kernel=kernel) for kernel, us in rungs.items()]
    results.write(made("ladder", rows), tmp_path)
    wrong = Errors(0.1, 0.002, 0.03, 0.999, ())
    rows = [accuracy.as_row(accuracy.Measured("int8_fp8", case, wrong), "sm_90a") for case in accuracy.cases(2)]
    layer = minilm.LayerErrors("int8_fp8", 0, 1, Case(1, 12, 9, 9, 32), Errors(0.1, 0.002, 0.0123, 0.999, ()))
    rows += minilm.as_rows(([layer], [minilm.EmbeddingCosine("int8_fp8", 0, layer.case, 0.9999)]), "sm_90a")
    results.write(made("accuracy", rows), tmp_path)
    return tmp_path / "h200"


def test_every_plot_is_drawn_from_its_result_file(directory: Path) -> None:
    plots = all_plots(plot_files.load(directory))
    assert [plot.name for plot in plots] == PLOTS
    for plot in plots:
        assert not plot.missing
        root = ElementTree.fromstring(plot.file)
        text = " ".join(element.text or "" for element in root.iter())
        assert "NVIDIA H200" in plot.caption
        assert "currentColor" in plot.svg
        assert "#010203" not in plot.svg
        if plot.name in ("latency", "host"):
            assert "microsdpa" in text
            assert "empty kernel" not in text
        if plot.name == "errors":
            assert "0.0300" in text
            assert "0.0123" in text
            assert "MiniLM" in text
        if plot.name == "ladder":
            assert "24.00  (2.00x)" in text.replace("\xa0", " ")


def test_a_plot_without_data_says_so() -> None:
    plots = all_plots({})
    assert [plot.name for plot in plots] == PLOTS
    for plot in plots:
        assert plot.missing.startswith("no data: there is no result file")
        assert plot.svg == ""
        command = re.search(r"; microsdpa ([a-z]+)(.*) takes (?:it|them)$", plot.missing)
        assert command is not None
        offered = CliRunner().invoke(cli.app, [command[1], "--help"], env={"COLUMNS": "200"}).output
        assert set(re.findall(r"--[a-z]+", command[2])) < {*re.findall(r"--[a-z]+", offered)}


def test_a_drawing_is_the_same_each_time_and_its_digest_follows_the_data(directory: Path) -> None:
    loaded = plot_files.load(directory)
    first = charts.latency(loaded)
    assert charts.latency(loaded) == first
    changed = json.loads(json.dumps(loaded))
    changed["mission"]["rows"][1]["interval_us"] = [9.0, 12.0]
    assert charts.latency(changed).digest != first.digest


def test_the_page_needs_nothing_but_itself(directory: Path, tmp_path: Path) -> None:
    step = Step("verify", "failed", "1 < 2 & 'quoted'", [["a", "b"], ["1", "<script>"]], [("more", [["c"], ["2"]])])
    page = report.write(tmp_path / "report", [step], plot_files.load(directory), "From a test.").read_text()
    assert page.count("<svg") == len(PLOTS)
    assert not re.search(r"(?:src|href)=[\"'](?!#)", page.replace("xlink:href", "href"))
    assert "<script>" not in page
    assert "1 &lt; 2" in page
    assert "prefers-color-scheme: dark" in page
    assert "suite mission, mode host" in page
    everything = json.loads((tmp_path / "report/report.json").read_text())
    assert everything["steps"][0]["name"] == "verify"
    assert set(everything["results"]) == {"mission", "prefill", "ampere", "fp8", "ladder", "accuracy"}
    assert sorted(path.stem for path in (tmp_path / "report/plots").iterdir()) == sorted(PLOTS)


def test_the_page_without_results_says_what_is_missing(tmp_path: Path) -> None:
    page = report.write(tmp_path, [], {}, "Nothing.").read_text()
    assert page.count("no data: there is no result file") == len(PLOTS)
    assert "<svg" not in page
    assert list((tmp_path / "plots").iterdir()) == []


def test_the_command_draws_a_report_and_names_the_folders_that_exist(directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert (
        CliRunner().invoke(cli.app, ["report", "--results", str(directory.parent), "--report", str(out)]).exit_code == 0
    )
    assert (out / "index.html").is_file()
    wrong = CliRunner().invoke(cli.app, ["report", "--results", str(directory.parent), "--gpu", "l4"])
    assert wrong.exit_code == running.EXIT_USAGE
    assert "h200" in wrong.output


def test_pages_show_plots_and_notice_changed_data(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    marker = "<!-- microsdpa:plot gpu=h200 name=latency -->\n<!-- microsdpa:end -->\n"
    (tmp_path / "README.md").write_text(marker)
    (tmp_path / "docs/page.md").write_text(marker)
    image = tmp_path / "docs/plots/h200_latency.svg"
    assert image in render.render(tmp_path, directory.parent)
    assert "](docs/plots/h200_latency.svg)" in (tmp_path / "README.md").read_text()
    assert "](plots/h200_latency.svg)" in (tmp_path / "docs/page.md").read_text()
    assert render.differing(tmp_path, directory.parent) == []
    image.write_text(image.read_text().replace("<!-- data ", "<!-- data 0"))
    assert set(render.differing(tmp_path, directory.parent)) == {image}
    (directory / "mission.json").unlink()
    render.render(tmp_path, directory.parent)
    assert "no data" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("options", ["gpu=h200", "gpu=h200 name=nope"])
def test_a_wrong_plot_marker_is_an_error(directory: Path, options: str) -> None:
    with pytest.raises(render.RenderError, match=r"page: (a plot marker needs|expected a plot called latency)"):
        render.rendered(f"<!-- microsdpa:plot {options} -->\n<!-- microsdpa:end -->\n", directory.parent, "page")


def test_only_steps_that_passed_with_the_same_code_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Step("bench fp8", "passed", "fine", [["a"], ["1"]], [("t", [["b"]])], data={"x": 1}, seconds=2.0)
    resume.Finished(tmp_path).keep(kept)
    assert resume.Finished(tmp_path).find("bench fp8") == kept
    assert resume.Finished(tmp_path, fresh=True).find("bench fp8") is None
    monkeypatch.setattr(resume, "_key", lambda: "other code")
    assert resume.Finished(tmp_path).find("bench fp8") is None
    monkeypatch.undo()
    kept.status = "failed"
    resume.Finished(tmp_path).keep(kept)
    assert resume.Finished(tmp_path).find("bench fp8") is None


def test_a_damaged_record_is_taken_again(tmp_path: Path) -> None:
    resume.Finished(tmp_path).keep(Step("info", "passed", "fine"))
    (tmp_path / "info.json").write_text("{")
    assert resume.Finished(tmp_path).find("info") is None


def test_on_a_gpu_a_reproduction_takes_every_suite_of_the_tables_and_the_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []

    def take(name: str) -> Any:
        return lambda *arguments, **options: taken.append(name) or Step(name, "passed", name)

    def bench(progress: Any, suite: str, **options: Any) -> Step:
        assert set(options) == {"output", "ahead"}
        taken.append(suite)
        return Step("bench", "passed", suite)

    for name in ("info", "compile", "verify", "probe"):
        monkeypatch.setattr(repro, f"{name}_step", take(name))
    monkeypatch.setattr(repro, "bench_step", bench)
    for module in (repro.roofline_page, repro.accuracy):
        monkeypatch.setattr(module, "step", take(module.__name__.rpartition(".")[2]))
    monkeypatch.setattr(repro, "_rehearse", lambda suites: repro.worker.Rehearsals([], 0))
    monkeypatch.setattr(repro.environment, "gpu_name", lambda: None)
    monkeypatch.setattr(repro.launcher, "device_error", lambda: None)
    repro.run(tmp_path)
    suites = ["mission", "small", "decode", "fp8", "real", "prefill"]
    assert taken == ["info", "compile", "verify", "probe", "roofline_page", *suites, "accuracy"]


def test_an_interrupted_reproduction_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def take(name: str, interrupt: bool = False) -> Any:
        def step(*arguments: Any, **options: Any) -> Step:
            taken.append(name)
            if interrupt and taken.count(name) == 1:
                raise KeyboardInterrupt
            return Step(name, "passed", name)

        return step

    for name in ("info", "compile", "verify", "probe", "bench"):
        monkeypatch.setattr(repro, f"{name}_step", take(name, interrupt=name == "verify"))
    monkeypatch.setattr(repro.roofline_page, "step", take("roofline"))
    with pytest.raises(KeyboardInterrupt):
        repro.run(tmp_path)
    ticks: list[str] = []
    repro.run(tmp_path, lambda title, total: ticks.append)
    assert taken == ["info", "compile", "verify", "verify", "probe", "roofline", "bench"]
    assert len(ticks) == 100
    assert (tmp_path / "index.html").is_file()


def test_a_library_has_one_colour_in_every_plot() -> None:
    assert colour_of("torch CUDNN") == colour_of("cuDNN FP8") != colour_of("torch")
    assert colour_of("flash-attn 4") == colour_of("flash-attn 3 FP8")
    assert colour_of("microsdpa fp8") == OURS
    assert len(set(COLOURS.values())) == len(COLOURS) - 1  # cuDNN is reached in two ways
    assert not set(FURTHER) & set(COLOURS.values())
    assert colour_of("new library") == colour_of("new library") in FURTHER


def test_labels_of_lines_do_not_lie_on_one_another() -> None:
    assert spread([0.0, 1.0, 10.0], 2.0, 0.0, 20.0) == [0.0, 2.0, 10.0]
    assert spread([18.0, 19.0, 19.5], 2.0, 0.0, 20.0) == [16.0, 18.0, 20.0]


def test_columns_that_are_mostly_empty_come_last() -> None:
    lines = [
        ["case", "rare", "ours", "best peer / ours"],
        ["a", "", "1", "2x"],
        ["b", "", "3", ""],
        ["c", "5", "4", ""],
    ]
    assert dense_first(lines)[0] == ["case", "ours", "best peer / ours", "rare"]
    assert dense_first(lines)[3] == ["c", "4", "", "5"]
