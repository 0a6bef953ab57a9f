"""The examples over several processes, by gloo; the one that needs GPUs says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCH_DOOR = "context_parallel_of_torch.py"


@pytest.mark.parametrize("name", ["context_parallel.py", "context_parallel_of_diffusers.py", TORCH_DOOR])
def test_two_processes(name: str) -> None:
    if name == TORCH_DOOR and torch.cuda.device_count() < 2:
        pytest.skip("torch's context_parallel has no flash attention on CPUs: two GPUs are needed")
    if name.endswith("of_diffusers.py"):
        pytest.importorskip("diffusers", reason="diffusers is of the extra integrations")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run([*launcher, str(EXAMPLES / name)], check=False, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "relative error" in run.stdout
