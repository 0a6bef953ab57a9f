from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from microsdpa.emulate.build import compiler
from microsdpa.errors import InvalidArgument
from microsdpa.evidence import repro, suites, survey, timing
from microsdpa.evidence.devices import DEVICES
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.results import read
from microsdpa.evidence.step import Together
from microsdpa.jit.cache import Entry, KernelCache
from microsdpa.kernels import catalogue
from microsdpa.kernels.problem import PRECISIONS
from microsdpa.runtime import launcher
from microsdpa_cli import app as cli
from microsdpa_cli import names, running, upkeep
from microsdpa_cli.console import Lines

ROOT = Path(__file__).parents[2]
NO_GPU = launcher.device_error()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repro, "emulated_cases", lambda: [("ampere/mma", Case(1, 2, 9, 12, 32))])
    monkeypatch.setattr(repro, "verify_cases", lambda: [Case(1, 2, 9, 12, 32), Case(1, 1, 7, 3, 64, seed=1)])
    monkeypatch.setattr(repro, "needs_gpu", lambda case: "")


@pytest.fixture
def few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    few = lambda target, every=False: catalogue(target)[:2]  # noqa: E731
    monkeypatch.setattr("microsdpa.evidence.repro.catalogue", few)


def test_info_as_text_and_json() -> None:
    text = run("info")
    assert text.exit_code == 0
    assert "nvrtc\t" in text.stdout
    data = json.loads(run("info", "--json").stdout)["data"]
    assert data["torch"]
    assert "ladder/01_scalar" in data["kernels"]
    if NO_GPU:
        assert data["kernels"]["ladder/01_scalar"] == NO_GPU


@pytest.mark.usefixtures("few_kernels")
def test_compile_prints_a_table_and_takes_targets_both_ways() -> None:
    result = run("compile", "--arch", "sm_89", "sm_90a", "--json")
    assert result.exit_code == 0
    rows = json.loads(result.stdout)["data"]
    assert [row["target"] for row in rows] == ["sm_89", "sm_89", "sm_90a", "sm_90a"]
    for row in rows:
        assert row["registers"] > 16
        assert row["spill_bytes"] == 0
        kernel, instruction = ("ampere/mma", "HMMA:") if row["target"] == "sm_89" else ("hopper/latency", "HGMMA:")
        assert row["kernel"] == kernel
        assert row["tensor_instructions"].startswith(instruction)
        assert row["failure"] == ""


def test_compile_refuses_an_unknown_target() -> None:
    result = run("compile", "--arch", "ada")
    assert result.exit_code == running.EXIT_USAGE
    assert "expected a name such as 'sm_89'" in result.output


@pytest.mark.usefixtures("few_kernels")
def test_compile_fails_when_a_kernel_does_not_compile() -> None:
    result = run("compile", "--arch", "sm_81")
    assert result.exit_code == running.EXIT_FAILED
    assert "compile: failed: 0 of 2" in result.stdout
    assert "generates no code for sm_81" in result.stdout


def test_compile_fails_for_a_target_that_no_kernel_supports() -> None:
    result = run("compile", "--arch", "sm_75")
    assert result.exit_code == running.EXIT_FAILED
    assert "no kernel supports sm_75" in result.stdout


@pytest.mark.usefixtures("few_cases")
def test_verify_checks_cases_and_writes_a_result_file(tmp_path: Path) -> None:
    result = run("verify", "--output", str(tmp_path))
    assert result.exit_code == 0
    assert "2 of 2 cases passed" in result.stdout
    if NO_GPU:
        assert f"by ampere/mma in the emulator, on the CPU (not on a GPU: {NO_GPU})" in result.stdout
    files = list(tmp_path.rglob("verify.json"))
    assert [row["status"] for row in read(files[0])["rows"]] == ["ok", "ok"]


@pytest.mark.parametrize(
    "output", [["--output", "/some/where"], ["--output=/some/where"], ["--log", "/a/file", "--output", "/some/where"]]
)
def test_a_recorded_command_names_no_directory_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, output: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["microsdpa", "verify", *output, "--impl", "ladder/01"])
    assert running.command_line() == "microsdpa verify --impl ladder/01"


@pytest.mark.usefixtures("few_cases")
def test_verify_fails_when_a_case_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = repro.check

    def wrong(*arguments: Any) -> Any:
        outcome = right(*arguments)
        object.__setattr__(outcome, "failure", "made to fail")
        return outcome

    monkeypatch.setattr(repro, "check", wrong)
    result = run("verify")
    assert result.exit_code == running.EXIT_FAILED
    assert "made to fail" in result.stdout


@pytest.mark.skipif(NO_GPU is None, reason="this machine has a GPU")
@pytest.mark.parametrize("command", [["bench"], ["probe"]])
def test_what_cannot_run_here_says_why_and_exits_3(command: list[str]) -> None:
    result = run(*command)
    assert result.exit_code == running.EXIT_CANNOT_RUN
    assert "not run" in result.stdout
    assert str(NO_GPU) in result.stdout


@pytest.mark.parametrize("arguments", [["ladder/01_scalar"], ["auto", "--causal", "lower_right", "--early"]])
def test_emulate_prints_counters_and_the_error(arguments: list[str]) -> None:
    result = run("emulate", *arguments, "--shape", "1,4,2,20,33,64", "--dtype", "bfloat16", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)["data"]
    assert data["counters"]["block_barriers"] > 0
    assert data["error"]["max_abs"] <= data["error"]["tolerance"]["max_abs"]
    assert all(site["conflicts"] == 0 for site in data["bank_sites"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ladder/01_scalar", "--shape", "1,2,3"], "expected B,H,S_q,S_k,D"),
        (["ladder/01_scalar", "--shape", "1,2,0,4,32"], "expected B,H,S_q,S_k,D"),
        (["ladder/01_scalar", "--shape", "1,4,3,8,8,32"], "H_kv must divide H"),
        (["ladder/01_scalar", "--dtype", "float64"], "float64"),
    ],
)
def test_emulate_refuses_bad_arguments(arguments: list[str], message: str) -> None:
    result = run("emulate", *arguments)
    assert result.exit_code == running.EXIT_USAGE
    assert message in result.output


def test_emulate_names_unknown_kernels_and_refused_shapes() -> None:
    for arguments, message in (
        (["nope"], "impl: expected 'auto', 'emulate', or one of"),
        (["ladder/01_scalar", "--shape", "1,2,8,8,48"], "nearest supported: head_dim 64"),
    ):
        command = [sys.executable, "-m", "microsdpa", "emulate", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == running.EXIT_USAGE
        assert message in result.stderr


def test_bench_refuses_unknown_modes() -> None:
    result = run("bench", "--modes", "graph,fast")
    assert result.exit_code == running.EXIT_USAGE
    assert "expected some of graph, graph_nopdl, cold, eager, host, got fast" in result.output


def test_an_error_of_the_library_is_a_message_and_exit_code_2() -> None:
    command = [sys.executable, "-m", "microsdpa", "bench", "--suite", "nope"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == running.EXIT_USAGE
    assert result.stderr.startswith(
        "InvalidArgument: suite: expected one of ampere, backward, block, context_parallel, decode, doors, fp8, "
        "ladder, masked, mission, prefill, prefill_fp8, real, schedule, serving, small, start, steps, wild, got 'nope'"
    )
    assert result.stdout == ""


@pytest.mark.usefixtures("few_cases", "few_kernels")
def test_repro_writes_a_report_and_names_what_did_not_run(tmp_path: Path) -> None:
    result = run("repro", "--report", str(tmp_path))
    assert result.exit_code == 0
    steps = {step["name"]: step for step in json.loads((tmp_path / "report.json").read_text())["steps"]}
    assert list(steps)[:6] == ["info", "compile", "verify", "probe", "roofline", "bench"]
    page = (tmp_path / "index.html").read_text()
    for fetched in ("src=", "<link", "@import", "url("):  # self-contained; SVG refers to parts of itself only
        assert fetched not in page.replace("url(#", "")
    for step in steps.values():
        assert step["status"] in ("passed", "not run")
        assert step["summary"].split(";")[0].split("'")[0] in page.replace("&#39;", "'")
    if NO_GPU:
        assert steps["bench"]["status"] == "not run"
        assert NO_GPU in steps["bench"]["summary"]


@pytest.mark.usefixtures("few_cases", "few_kernels")
def test_repro_fails_when_a_step_breaks_and_still_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("the driver went away")

    monkeypatch.setattr(repro, "check", broken)
    result = run("repro", "--report", str(tmp_path))
    assert result.exit_code == running.EXIT_FAILED
    assert "RuntimeError: the driver went away" in (tmp_path / "index.html").read_text()


def test_evidence_check_passes_on_this_checkout() -> None:
    result = run("evidence", "check", "--root", str(ROOT))
    assert result.exit_code == 0, result.output


def test_evidence_check_fails_on_a_table_that_was_edited(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    edited = (ROOT / "README.md").read_text().replace("<!-- microsdpa:end -->", "edited\n<!-- microsdpa:end -->", 1)
    (tmp_path / "README.md").write_text(edited)
    committed = str(ROOT / "benchmarks/results")
    result = run("evidence", "check", "--root", str(tmp_path), "--results", committed)
    assert result.exit_code == running.EXIT_FAILED
    assert "microsdpa evidence render" in result.output
    assert run("evidence", "render", "--root", str(tmp_path), "--results", committed).exit_code == 0
    assert (tmp_path / "README.md").read_text() == (ROOT / "README.md").read_text()


def commands() -> list[list[str]]:
    groups = {"evidence": upkeep.evidence, "cache": upkeep.cache}
    found = [[str(one.name)] for one in cli.app.registered_commands]
    return found + [[name, str(one.name)] for name, group in groups.items() for one in group.registered_commands]


def test_the_version_and_help() -> None:
    assert run("--version").stdout.strip() == "0.1.0"
    listing = run("--help").stdout
    assert "Exit codes: 0" in listing
    assert "..." not in listing.replace("[ARGS]...", "")  # no summary is cut off


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_has_an_example_that_its_parser_accepts(command: list[str]) -> None:
    helped = run(*command, "--help")
    assert helped.exit_code == 0
    example = helped.stdout.rsplit("Example: ", 1)[1].split()
    assert example[: 1 + len(command)] == ["microsdpa", *command]
    main = typer.main.get_command(cli.app)
    for name in command:
        main = main.commands[name]  # type: ignore[attr-defined]
    main.make_context(command[-1], example[1 + len(command) :])


@pytest.mark.parametrize("option", [["--backward"], ["--log", "log"]])
def test_options_of_random_calls_want_their_number(option: list[str]) -> None:
    result = run("verify", *option)
    assert result.exit_code == 2
    assert f"{option[0][2:]}: expected --fuzz N beside it, got none" in " ".join(result.output.split())


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["verify", "--help"], ["cache", "prune", "--help"]])
def test_version_and_help_load_no_torch(arguments: list[str]) -> None:
    code = f"import sys; sys.argv = ['microsdpa', *{arguments!r}]\nimport microsdpa_cli\n"
    code += (
        "try: microsdpa_cli.main()\nexcept SystemExit as end: assert not end.code\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_names_in_help_are_those_of_the_library() -> None:
    assert names.MODES == timing.MODES
    assert names.PRECISIONS == PRECISIONS
    assert tuple(DEVICES) == names.DEVICES
    assert tuple(suites.names()) == names.SUITES
    assert names.TARGETS == survey.TARGETS
    assert (names.RESULTS, names.GPU) == (repro.COMMITTED, repro.COMMITTED_GPU)


def test_doctor_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = {line["what"]: line for line in json.loads(run("doctor", "--json").stdout)["data"]}
    assert found["torch"]["state"] == found["NVRTC"]["state"] == "ok"
    if NO_GPU:
        assert found["GPU"] == {"what": "GPU", "state": "missing", "found": NO_GPU, "to do": "use a machine with a GPU"}
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MICROSDPA_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    compiler.cache_clear()
    found = {line["what"]: line for line in json.loads(run("doctor", "--json").stdout)["data"]}
    compiler.cache_clear()
    assert "MICROSDPA_CACHE_DIR" in found["kernel cache"]["to do"]
    assert found["emulator"]["state"] == "missing"


def test_the_cache_is_shown_and_pruned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MICROSDPA_CACHE_DIR", str(tmp_path))
    for signature in ("ab" * 16, "cd" * 16):
        kernels = KernelCache(tmp_path)
        kernels.get_or_build(signature, lambda: Entry(b"binary", "source", {}))
    old = tmp_path / "ab" / ("ab" * 16)
    for file in old.iterdir():
        os.utime(file, (1e9, 1e9))
    assert "2 entries of" in run("cache", "show").stdout
    assert "would remove 1 of 2 entries" in run("cache", "prune", "--dry-run").stdout
    assert old.is_dir()
    assert "removed 1 of 2 entries" in run("cache", "prune").stdout
    assert [path.name for path in tmp_path.iterdir() if path.name != "locks"] == ["cd"]
    assert "removed 1 of 1 entries" in run("cache", "prune", "--days", "0").stdout


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["repro", "--report", "/proc/x"], "report: expected a directory that can be written, got '/proc/x'"),
        (["report", "--report", "/proc/x", "--results", str(ROOT / "benchmarks/results")], "report: expected a dir"),
        (["evidence", "check", "--root", "/tmp"], "results: expected a directory of result files"),
    ],
)
def test_a_directory_that_cannot_be_used_is_named(command: list[str], message: str) -> None:
    result = run(*command)
    assert result.exit_code == running.EXIT_USAGE, result.output
    assert message in " ".join(result.output.replace("\n", " ").split())


def test_repro_has_one_progress_whose_estimate_is_of_all_that_is_left() -> None:
    told: list[str] = []

    def progress(title: str, total: int) -> Callable[[str], None]:
        assert (title, total) == ("repro", 100)
        return told.append

    together = Together(progress, "repro", {"compile": 30, "verify": 60, "bench": 10})
    advance = together.of("compile")("compile", 3)
    advance("first")
    assert told == ["compile: first"] * 10
    together.end("compile", "passed")
    assert len(told) == 30
    together.of("verify")("verify", 1)("case")
    assert told[-1] == "verify: case"
    assert len(told) == 90
    together.end("verify", "passed")
    together.end("bench", "not run")
    assert len(told) == 100


@pytest.mark.parametrize("targets", [["ada"], ["sm_75"]])
def test_pack_refuses_a_target_without_kernels(targets: list[str], tmp_path: Path) -> None:
    result = run("pack", *targets, "--output", str(tmp_path))
    assert result.exit_code == running.EXIT_USAGE or isinstance(result.exception, InvalidArgument)
    assert not list(tmp_path.iterdir())


def test_pack_writes_a_wheel_of_compiled_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("microsdpa.evidence.pack.common", lambda target: catalogue(target)[:2])
    result = run("pack", "sm_89", "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "pack: passed: 2 kernels in" in result.stdout
    (wheel,) = tmp_path.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        kernels = [name for name in archive.namelist() if name.endswith(".cubin.z")]
        assert all(zlib.decompress(archive.read(name)).startswith(b"\x7fELF") for name in kernels)
    assert len(kernels) == 2


def test_an_interrupted_repro_says_that_it_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(repro, "run", interrupted)
    result = run("repro", "--report", str(tmp_path))
    assert result.exit_code == running.EXIT_INTERRUPTED
    assert "the same command goes on after the last finished step" in result.output


def test_progress_without_a_terminal_is_lines_with_an_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 0.0, 4.0, 12.0, 14.0])
    advance = Lines(lambda: next(times)).start("verify", 6)
    for case in ("first", "second", "third"):
        advance(case)
    assert capsys.readouterr().err == "verify: 2 of 6, about 24 s left (second)\n"


@pytest.mark.parametrize("precision", ["fp8", "int8_fp16"])
def test_emulate_runs_kernels_of_8_bits(precision: str) -> None:
    result = run("emulate", "auto", "--precision", precision, "--shape", "1,2,1,20,33,64", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)["data"]
    assert data["kernel"] == "ada/mma_8bit"
    assert 0 < data["error"]["max_abs"] <= data["error"]["tolerance"]["max_abs"]


def test_missing_command_line_packages_are_named() -> None:
    code = "import sys; sys.modules['typer'] = None; from microsdpa_cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "pip install 'microsdpa[cli]'" in result.stderr


def test_verify_of_another_targets_ptx_needs_a_gpu_and_a_target_that_has_one() -> None:
    wrong = run("verify", "--ptx", "sm_90a")
    assert wrong.exit_code == running.EXIT_USAGE
    assert "such as 'sm_89'" in wrong.output
    if NO_GPU:
        result = run("verify", "--ptx", "sm_89")
        assert result.exit_code == running.EXIT_CANNOT_RUN
        assert "PTX is compiled by the driver of a GPU" in result.stdout
