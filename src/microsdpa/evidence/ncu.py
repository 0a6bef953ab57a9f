"""Nsight Compute: the metrics that are asked for, how it is run, and what its report says."""

from __future__ import annotations

import csv
import glob
import io
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from microsdpa.errors import MicrosdpaError

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = (
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "drain",
    "imc_miss",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "no_instruction",
    "not_selected",
    "short_scoreboard",
    "sleeping",
    "wait",
)
EVERYWHERE: dict[str, str] = {
    "duration_us": "gpu__time_duration.sum",
    "registers": "launch__registers_per_thread",
    "tensor_active_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "tensor_instructions": "sm__inst_executed_pipe_tensor.sum",
    "fp16_tensor_instructions": "sm__inst_executed_pipe_tensor_op_hmma.sum",
    "int8_tensor_instructions": "sm__inst_executed_pipe_tensor_op_imma.sum",
    "fp32_fma_threads": "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",
    "fp16_fma_threads": "smsp__sass_thread_inst_executed_op_hfma_pred_on.sum",
    "special_function_instructions": "sm__inst_executed_pipe_xu.sum",
    "load_sectors_per_request": "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
    "store_sectors_per_request": "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio",
    "load_bytes_per_sector": "smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.ratio",
    "store_bytes_per_sector": "smsp__sass_average_data_bytes_per_sector_mem_global_op_st.ratio",
    "async_copies": "smsp__inst_executed_op_ldgsts.sum",
    "async_copy_bytes_per_sector": "smsp__sass_average_data_bytes_per_sector_mem_global_op_ldgsts.ratio",
    "occupancy_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "theoretical_occupancy_pct": "sm__maximum_warps_per_active_cycle_pct",
    "active_warps": "smsp__warps_active.avg.per_cycle_active",
    "eligible_warps": "smsp__warps_eligible.avg.per_cycle_active",
    "issue_active_pct": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "shared_load_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "shared_store_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "dram_pct": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_read_bytes": "dram__bytes_read.sum",
    "l2_pct": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
} | {f"stall_{name}": STALL.format(name) for name in STALLS}
"""Name here -> name in Nsight Compute, of metrics that ga100, ad104 and gh100 have."""

FP8 = {"fp8_tensor_operations": "sm__ops_path_tensor_src_fp8.sum"}
HOPPER = {
    "warpgroup_instructions": "sm__inst_executed_pipe_tensor_op_gmma.sum",
    "bulk_copies": "sm__inst_executed_pipe_tma.sum",
    "warpgroup_active_pct": (
        "sm__pipe_tensor_type_hmma_hgmma_qgmma_imma_igmma_bmma_bgmma_cycles_active.avg.pct_of_peak_sustained_elapsed"
    ),
    "stall_gmma": STALL.format("gmma"),
}

SCALES = {
    **{"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3, "second": 1e6, "s": 1e6},
    **{"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9},
}
"""What a unit of Nsight Compute is in microseconds, or in bytes."""

FORBIDDEN = "ERR_NVGPUCTRPERM"
PERMISSION_HINT = (
    "this user may not read the GPU's counters: run as root, or let the driver allow it "
    "(options nvidia NVreg_RestrictProfilingToAdminUsers=0 in /etc/modprobe.d, then reload the driver); "
    "in a container add the capability SYS_ADMIN"
)
MISSING_HINT = (
    "ncu was not found: install NVIDIA Nsight Compute (of the CUDA toolkit, or the package nsight-compute "
    "of NVIDIA's repositories) and put it on PATH"
)


class ProfilerError(MicrosdpaError, RuntimeError):
    """Nsight Compute could not be run, or its report could not be read; the message says what to do."""


@dataclass(frozen=True)
class Launch:
    """One profiled launch.

    Attributes:
        metrics: by the names of this module; those that the GPU does not have are absent.
    """

    kernel: str
    grid: str
    block: str
    metrics: dict[str, float]


def metrics_for(target: str) -> dict[str, str]:
    """The metrics that a target has: {"tensor_active_pct": "sm__pipe_tensor...", ...}."""
    return (
        EVERYWHERE | (FP8 if target in ("sm_89", "sm_90a", "sm_120") else {}) | (HOPPER if target == "sm_90a" else {})
    )


def find() -> str | None:
    """Path of ncu: PATH's, a CUDA toolkit's, or that of an installation of its own; None when there is none."""
    places = ["/usr/local/cuda/bin/ncu", *sorted(glob.glob("/opt/nvidia/nsight-compute/*/ncu"), reverse=True)]
    return shutil.which("ncu") or next((place for place in places if Path(place).is_file()), None)


def profile(command: Sequence[str], target: str, stdin: str) -> list[Launch]:
    """Profile what `command` launches between cudaProfilerStart and cudaProfilerStop. Clocks are left alone.

    Raises:
        ProfilerError: ncu is missing, forbidden, or failed.
    """
    tool = find()
    if tool is None:
        raise ProfilerError(MISSING_HINT)
    metrics = metrics_for(target)
    with tempfile.TemporaryDirectory() as directory:
        report = f"{directory}/profile"
        options = ["--clock-control", "none", "--profile-from-start", "off", "--metrics", ",".join(metrics.values())]
        run = subprocess.run(
            [tool, *options, "--export", report, *command], input=stdin, capture_output=True, text=True, check=False
        )
        said = run.stdout + run.stderr
        if FORBIDDEN in said:
            raise ProfilerError(PERMISSION_HINT)
        if not Path(f"{report}.ncu-rep").is_file():
            lines = [line for line in said.splitlines() if line.strip()]
            raise ProfilerError(f"ncu profiled nothing: {' '.join(lines[-2:]) or f'exit code {run.returncode}'}")
        page = subprocess.run(
            [tool, "--import", f"{report}.ncu-rep", "--csv", "--page", "raw"],
            capture_output=True,
            text=True,
            check=False,
        )
    return parse(page.stdout, metrics)


def parse(text: str, metrics: dict[str, str]) -> list[Launch]:
    """The launches of `ncu --csv --page raw`: a line of names, a line of units, then a line a launch.

    Raises:
        ProfilerError: the text is no such page.
    """
    start = text.find('"ID"')
    rows = list(csv.reader(io.StringIO(text[start:]))) if start >= 0 else []
    if len(rows) < 3 or "Kernel Name" not in rows[0]:
        raise ProfilerError(f"expected Nsight Compute's raw page as CSV, got {text[:200]!r}")
    names, units = rows[0], rows[1]
    launches = []
    for row in rows[2:]:
        cells = dict(zip(names, zip(row, units, strict=True), strict=True))
        found = {}
        for name, metric in metrics.items():
            value, unit = cells.get(metric, ("", ""))
            number = _number(value)
            if number is not None:
                found[name] = number * SCALES.get(unit, 1.0)
        launches.append(Launch(cells["Kernel Name"][0], cells["Grid Size"][0], cells["Block Size"][0], found))
    return launches


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None
