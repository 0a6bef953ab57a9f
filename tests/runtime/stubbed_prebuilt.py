"""A call whose kernel comes out of the wheel microsdpa-kernels, where there is no compiler and the cache is empty."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
from fake_cuda import last, record, tensor
from stub_harness import ADDRESSES, _clean

from microsdpa.errors import CompileError
from microsdpa.evidence import pack
from microsdpa.jit import CompiledKernel, nvrtc, prebuilt
from microsdpa.jit.inspect import Resources
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.select import select
from microsdpa.runtime import launcher

__all__ = ["_clean"]

SHAPE = (1, 8, 512, 64)


def test_a_call_launches_a_kernel_of_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(1, 8, 8, 512, 512, 64, "float16", target="sm_89")
    spec = select(problem).spec
    tensors = [tensor(SHAPE, address) for address in ADDRESSES]
    call = (*tensors, None, 0, None)

    figures = Resources(64, 0, 0, 0, 0)
    # The stub driver loads nothing but machine code that begins with "cubin".
    kernel = CompiledKernel(spec, "sm_89", "signature", b"cubin of the wheel", "kernel", figures, "", 1.0, True)
    with zipfile.ZipFile(pack.write([kernel], tmp_path)) as wheel:
        wheel.extractall(tmp_path / "site")

    def no_compiler() -> str:
        raise CompileError("NVRTC 13 cannot be loaded", log="", source=None)

    monkeypatch.setattr(nvrtc, "version", no_compiler)
    monkeypatch.setenv("MICROSDPA_CACHE_DIR", str(tmp_path / "cache"))
    prebuilt.package.cache_clear()
    with pytest.raises(CompileError, match="NVRTC 13 cannot be loaded"):
        launcher.prepare(problem, spec, call)

    monkeypatch.syspath_prepend(tmp_path / "site")
    prebuilt.package.cache_clear()
    try:
        launcher.prepare(problem, spec, call)
        before = record.launches
        assert launcher.launch(*call)
        assert record.launches == before + 1
        assert last().threads == spec.threads
    finally:
        prebuilt.package.cache_clear()
        sys.modules.pop(prebuilt.FOLDER, None)
