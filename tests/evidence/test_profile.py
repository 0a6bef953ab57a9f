from __future__ import annotations

import dataclasses
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from microsdpa.evidence import ncu, profile, results
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.ncu import Launch
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.select import select
from microsdpa.runtime import launcher
from microsdpa_cli import app as cli
from microsdpa_cli import running

NAMES = ["ID", "Kernel Name", "Block Size", "Grid Size", *ncu.metrics_for("sm_90a").values()]
STALL_BY_LONG_SCOREBOARD = ncu.STALL.format("long_scoreboard")


def page(**values: str) -> str:
    """A raw page of one launch; metrics that are not given are empty, as ncu writes those that a GPU lacks."""
    metrics = ncu.metrics_for("sm_90a")
    given = {metrics[name]: value for name, value in values.items()}
    units = ["", "", "", ""] + ["ms" if n == "gpu__time_duration.sum" else "" for n in NAMES[4:]]
    row = ["0", "void kernel<__half, 64>(Params)", "(128, 1, 1)", "(256, 1, 1)", *(given.get(n, "") for n in NAMES[4:])]
    lines = [",".join(f'"{cell}"' for cell in line) for line in (NAMES, units, row)]
    return "==PROF== Connected to process 7\n" + "\n".join(lines) + "\n"


def spec(**fields: Any) -> KernelSpec:
    base = select(Problem(1, 8, 8, 512, 512, 64, "float16"), "ladder/01_scalar").spec
    return dataclasses.replace(base, **fields)


GOOD = {
    "tensor_active_pct": 41.0,
    "occupancy_pct": 30.0,
    "theoretical_occupancy_pct": 37.5,
    "load_bytes_per_sector": 32.0,
    "store_bytes_per_sector": 24.0,
    "async_copies": 4096.0,
    "stall_long_scoreboard": 0.1,
    "stall_wait": 0.9,
}


def outcomes(metrics: dict[str, float], kernel: KernelSpec, tensor: bool = True) -> dict[str, str]:
    return {gate.name: gate.outcome for gate in profile.gates(Launch("k", "", "", metrics), kernel, tensor)}


def test_the_raw_page_is_read_with_its_units() -> None:
    text = page(duration_us="0.0578", tensor_active_pct="41.5", async_copies="1,064,960")
    (launch,) = ncu.parse(text, ncu.metrics_for("sm_90a"))
    assert launch.kernel.startswith("void kernel")
    assert (launch.grid, launch.block) == ("(256, 1, 1)", "(128, 1, 1)")
    assert launch.metrics == {
        "duration_us": pytest.approx(57.8),
        "tensor_active_pct": 41.5,
        "async_copies": 1_064_960,
    }


@pytest.mark.parametrize("text", ["", "==PROF== nothing\n", '"ID","Process"\n"",""\n', "no report"])
def test_what_is_no_raw_page_is_refused(text: str) -> None:
    with pytest.raises(ncu.ProfilerError, match="expected Nsight Compute's raw page"):
        ncu.parse(text, {})


def test_every_target_has_its_own_metrics() -> None:
    assert "fp8_tensor_operations" not in ncu.metrics_for("sm_80")
    assert "bulk_copies" not in ncu.metrics_for("sm_89")
    assert {"fp8_tensor_operations", "bulk_copies"} <= set(ncu.metrics_for("sm_90a"))


def test_a_good_kernel_passes_every_gate() -> None:
    assert set(outcomes(GOOD, spec()).values()) == {"passed"}


@pytest.mark.parametrize(
    ("changed", "gate"),
    [
        ({"tensor_active_pct": 19.0}, "tensor pipe > 20%"),
        ({"occupancy_pct": 20.0}, "occupancy >= 25%"),
        ({"load_bytes_per_sector": 16.0}, "efficiency of loads >= 70%"),
        ({"store_bytes_per_sector": 16.0}, "efficiency of stores >= 70%"),
        ({"stall_long_scoreboard": 2.0}, "copies overlap arithmetic"),
    ],
)
def test_each_gate_can_fail(changed: dict[str, float], gate: str) -> None:
    found = outcomes(GOOD | changed, spec())
    assert found.pop(gate) == "failed"
    assert set(found.values()) == {"passed"}


def test_wgmma_counts_as_tensor_work() -> None:
    assert (
        outcomes(GOOD | {"tensor_active_pct": 0, "warpgroup_active_pct": 55.0}, spec())["tensor pipe > 20%"] == "passed"
    )


def test_what_a_kernel_is_without_by_design_is_explained() -> None:
    found = outcomes(GOOD | {"tensor_active_pct": 0.0, "async_copies": 0.0}, spec(), tensor=False)
    assert found["tensor pipe > 20%"] == "explained"
    assert found["copies overlap arithmetic"] == "explained"
    assert (
        outcomes(GOOD | {"occupancy_pct": 12.0}, spec(low_occupancy="one CTA an SM"))["occupancy >= 25%"] == "explained"
    )


def test_an_fp8_kernel_must_have_run_fp8_instructions() -> None:
    fp8 = spec(template_args=(("T", "__nv_fp8_e4m3"),))
    assert outcomes(GOOD, fp8)["FP8 instructions > 0"] == "failed"
    assert outcomes(GOOD | {"fp8_tensor_operations": 1e6}, fp8)["FP8 instructions > 0"] == "passed"


def test_a_kernel_that_moves_everything_in_bulk_has_no_sectors_to_judge() -> None:
    bulk = {k: v for k, v in GOOD.items() if "bytes_per_sector" not in k} | {"async_copies": 0.0, "bulk_copies": 64.0}
    assert set(outcomes(bulk, spec()).values()) == {"passed"}
    assert not any("efficiency" in name for name in outcomes(bulk, spec()))


def test_stall_reasons_are_shares() -> None:
    assert profile.stall_shares({"stall_wait": 3.0, "stall_barrier": 1.0, "active_warps": 9}) == {
        "wait": 0.75,
        "barrier": 0.25,
    }
    assert profile.stall_shares({}) == {}


def tool(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_missing_profiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu, "find", lambda: None)
    with pytest.raises(ncu.ProfilerError, match="install NVIDIA Nsight Compute"):
        ncu.profile(["true"], "sm_90a", "")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'; exit 1",
            "run as root, or let the driver",
        ),
        ("echo '==ERROR== no kernels'; exit 1", "ncu profiled nothing: ==ERROR== no kernels"),
        ("exit 9", "ncu profiled nothing: exit code 9"),
    ],
)
def test_a_profiler_that_fails_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, message: str
) -> None:
    monkeypatch.setattr(ncu, "find", lambda: tool(tmp_path / "ncu", script))
    with pytest.raises(ncu.ProfilerError, match=message):
        ncu.profile(["true"], "sm_90a", "")


def test_the_profiler_is_asked_for_the_marked_region_and_leaves_the_clocks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "page").write_text(page(tensor_active_pct="33"))
    script = (
        f'echo "$@" >> {tmp_path}/asked\n'
        f'if [ "$1" = --import ]; then cat {tmp_path}/page; exit; fi\n'
        'while [ "$1" != --export ]; do shift; done; touch "$2.ncu-rep"'
    )
    monkeypatch.setattr(ncu, "find", lambda: tool(tmp_path / "ncu", script))
    (launch,) = ncu.profile(["python", "program"], "sm_90a", "{}")
    assert launch.metrics["tensor_active_pct"] == 33
    asked = (tmp_path / "asked").read_text()
    assert "--clock-control none --profile-from-start off --metrics gpu__time_duration.sum," in asked
    assert asked.splitlines()[0].endswith("python program")


def test_a_profile_is_a_valid_result_with_the_kernels_signature(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launches = ncu.parse(
        page(tensor_active_pct="0", occupancy_pct="30", load_bytes_per_sector="16"), ncu.metrics_for("sm_90a")
    )
    monkeypatch.setattr(launcher, "device_error", lambda: None)
    monkeypatch.setattr(profile.torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(ncu, "profile", lambda command, target, stdin: launches)
    case = Case(1, 8, 512, 512, 64)
    environment = {name: None for name in ("gpu", "driver", "cuda", "sm_clock_mhz", "power_cap_w")} | {
        "torch": "2",
        "python": "3",
    }
    monkeypatch.setattr("microsdpa.evidence.environment.describe", lambda: environment)
    step = profile.step(case, "ladder/01_scalar", tmp_path, "microsdpa profile")
    assert step.status == "failed"
    assert "efficiency of loads >= 70%: 50%" in step.summary
    (row,) = results.read(tmp_path / "cpu/profile_ladder_01_scalar.json")["rows"]
    assert row["kernel"] == "ladder/01_scalar"
    assert row["signature"]
    assert row["metrics"]["occupancy_pct"] == 30
    assert [gate["outcome"] for gate in row["gates"]] == ["explained", "passed", "failed", "explained"]


@pytest.mark.skipif(launcher.device_error() is None, reason="this machine has a GPU")
def test_the_command_needs_a_gpu() -> None:
    result = CliRunner().invoke(cli.app, ["profile", "ladder/01_scalar"])
    assert result.exit_code == running.EXIT_CANNOT_RUN
    assert "profiles on a GPU" in result.stdout
