"""A kernel that was built before runs in a process that finds no compiler and no other program."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from microsdpa.emulate import build
from microsdpa.errors import CompileError
from microsdpa.jit import cache

CALL = """
import sys
import torch, microsdpa
q, k, v = torch.randn(3, 1, 2, 20, 32, dtype=torch.float16).unbind()
if sys.argv[1] == "other":
    q, k, v = (t.bfloat16() for t in (q, k, v))
out = microsdpa.sdpa(q, k, v, impl="emulate:ladder/01")
expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())
assert (out - expected).abs().max() < 5e-3
"""
NOWHERE = {"PATH": "/none", "CXX": ""}


def call(which: str, **changes: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CALL, which]
    return subprocess.run(command, env=os.environ | changes, capture_output=True, text=True, check=False)


def test_a_kernel_in_the_cache_needs_no_compiler() -> None:
    cold = call("one")
    assert cold.returncode == 0, cold.stderr
    warm = call("one", **NOWHERE)
    assert warm.returncode == 0, warm.stderr


def test_a_kernel_that_is_not_there_says_so(tmp_path: Path) -> None:
    """The cache has the runtime, which is loaded before any kernel, and nothing else."""
    build.runtime()
    for entry in cache.stored(cache.default_directory()):
        if entry.kind == build.KIND and json.loads((entry.path / "metadata.json").read_text())["kernel"] == "runtime":
            shutil.copytree(entry.path, tmp_path / entry.path.relative_to(cache.default_directory()))
    own = {"MICROSDPA_CACHE_DIR": str(tmp_path)}
    other = call("other", **own, **NOWHERE)
    assert other.returncode != 0
    assert "the emulator needs a C++ compiler, and finds neither g++ nor clang++" in other.stderr
    assert "does not have this kernel" in other.stderr


def test_guards_are_those_that_nm_finds(tmp_path: Path) -> None:
    source, library = tmp_path / "guards.cc", tmp_path / "guards.so"
    source.write_text(
        "struct Made { Made(); int value; };\n"
        "int first() { static thread_local Made made; return made.value; }\n"
        "int second() { static thread_local Made made; return made.value; }\n"
    )
    subprocess.run([build.compiler(), "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    lines = subprocess.run(["nm", "--defined-only", str(library)], capture_output=True, text=True, check=True).stdout
    listed = [int(line.split()[0], 16) for line in lines.splitlines() if line.split()[-1].startswith("_ZGV")]
    assert len(listed) == 2
    assert sorted(build._guards(library)) == sorted(listed)


def test_an_empty_cache_and_no_compiler_raise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MICROSDPA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_compiler_version", build.compiler)
    monkeypatch.setenv("PATH", "/none")
    monkeypatch.delenv("CXX", raising=False)
    build.compiler.cache_clear()
    build._built.cache_clear()
    try:
        with pytest.raises(CompileError, match=f"the cache {tmp_path} does not have this kernel"):
            build._key("sources")
    finally:
        build.compiler.cache_clear()
        build._built.cache_clear()
