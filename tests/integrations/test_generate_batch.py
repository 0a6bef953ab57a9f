"""generate_batch of transformers through flash_attn.install(): the tokens of its own attention."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(600)
def test_a_model_generates_the_tokens_of_torchs_attention() -> None:
    pytest.importorskip("transformers", reason="transformers is of the extra integrations")
    script = Path(__file__).with_name("batched_generation.py")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    calls = int(run.stdout.splitlines()[-1].split()[0])
    assert calls >= 2 * 8  # two layers, eight tokens of three sequences at a time
