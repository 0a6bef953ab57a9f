"""The machine and the software that a result was taken on."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

import microsdpa
from microsdpa.evidence import nvml
from microsdpa.jit import nvrtc
from microsdpa.kernels.problem import target_of
from microsdpa.runtime import launcher

READING_SECONDS = 0.005
"""Between two readings of the GPU's state."""


def _run(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def commit() -> str:
    """The commit of the checkout that this package comes from, "-dirty" when it is changed.

    Outside a checkout MICROSDPA_COMMIT says it, when it is the hash of one; else "unknown".
    """
    package = Path(__file__).resolve().parents[1]
    top = _run("git", "-C", str(package), "rev-parse", "--show-toplevel")
    if top and Path(top).resolve() / "src/microsdpa" == package:
        head = _run("git", "-C", top, "rev-parse", "HEAD")
        if head:
            dirty = _run("git", "-C", top, "status", "--porcelain", "--untracked-files=no")
            return head + ("-dirty" if dirty else "")
    said = os.environ.get("MICROSDPA_COMMIT", "")
    return said if is_commit(said) else "unknown"


def is_commit(text: str) -> bool:
    """Whether a text is a commit's hash, perhaps shortened, perhaps with "-dirty" behind it."""
    return re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", text) is not None


def gpu_slug(name: str | None) -> str:
    """Folder name of a GPU's results: "NVIDIA H200" gives "h200"; no GPU gives "cpu".

    The size and type of its memory are no part of it: "NVIDIA H100 80GB HBM3" gives "h100".
    """
    if not name:
        return "cpu"
    memory = re.compile(r"\d+gb|hbm\w*", re.IGNORECASE)
    words = [w for w in name.split() if w.lower() not in {"nvidia", "geforce", "tesla"} and not memory.fullmatch(w)]
    return re.sub(r"[^a-z0-9]+", "-", "".join(words).lower()).strip("-")


def gpu_name() -> str | None:
    """Name of the current GPU; None where there is none."""
    return None if launcher.device_error() else torch.cuda.get_device_name(torch.cuda.current_device())


def describe() -> dict[str, object]:
    """The `environment` object of a result file; GPU fields are null on a machine without one."""
    version = launcher.driver_version()
    described: dict[str, object] = {
        "gpu": None,
        "driver": None,
        "cuda": None,
        "target": None,
        "multiprocessors": None,
        "sm_clock_mhz": None,
        "power_cap_w": None,
        "driver_cuda": f"{version // 1000}.{version % 1000 // 10}" if version else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "nvrtc": nvrtc.version(),
        "microsdpa": microsdpa.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
    }
    if launcher.device_error() is None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        described |= {
            "gpu": properties.name,
            "cuda": torch.version.cuda,
            "target": target_of((properties.major, properties.minor)),
            "multiprocessors": properties.multi_processor_count,
        }
        fields = _run(
            "nvidia-smi",
            f"--id=GPU-{properties.uuid}",
            "--query-gpu=driver_version,clocks.sm,power.limit",
            "--format=csv,noheader,nounits",
        )
        if fields:
            driver, clock, power = (field.strip() for field in fields.split(","))
            described |= {"driver": driver, "sm_clock_mhz": _number(clock), "power_cap_w": _number(power)}
    return described


def gpu_uuid() -> str:
    """UUID of the current GPU, as the driver's management library names it."""
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def gpu_state(work: Callable[[], object], settling_seconds: float) -> dict[str, object]:
    """Clocks, power and temperature of the current GPU while `work` runs; empty where they cannot be read.

    They are means of readings, from `settling_seconds` after its beginning to its end.
    """
    device = torch.cuda.current_device()
    uuid = gpu_uuid()

    def busy() -> None:
        with torch.cuda.device(device):  # a thread begins on the first device
            work()

    worker = threading.Thread(target=busy)
    worker.start()
    try:
        time.sleep(settling_seconds)
        readings = [nvml.state(uuid)]
        while True:
            time.sleep(READING_SECONDS)
            found = nvml.state(uuid)
            if not worker.is_alive():
                break
            readings.append(found)
    finally:
        worker.join()
    known = [name for name in readings[0] if all(name in one for one in readings)]
    return {name: round(sum(one[name] for one in readings) / len(readings), 3) for name in known}


def max_sm_clock_mhz() -> float | None:
    """The highest SM clock of the current GPU; None without nvidia-smi."""
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    answer = _run("nvidia-smi", f"--id=GPU-{uuid}", "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits")
    return _number(answer) if answer else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
