"""The launcher on this machine, and its hot path against a stub of the CUDA driver, which needs no GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tvm_ffi import libinfo

from microsdpa.jit import nvrtc
from microsdpa.runtime import launcher

HERE = Path(__file__).parent


@pytest.mark.parametrize("lse", [None, False, True])
def test_cpu_tensors_miss(lse: bool | None) -> None:
    q = torch.zeros(1, 2, 3, 32, dtype=torch.float16)
    assert launcher.launch(q, q, q, torch.empty_like(q), lse, 0, None) is None


def test_the_driver_version_is_a_number() -> None:
    version = launcher.driver_version()
    assert version == 0 or version >= 11000


@pytest.mark.parametrize(("value", "enabled"), [(None, True), ("1", True), ("0", False)])
def test_the_environment_decides_about_programmatic_launch(value: str | None, enabled: bool) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "MICROSDPA_PDL"}
    if value is not None:
        environment["MICROSDPA_PDL"] = value
    code = f"from microsdpa.runtime import launcher; assert launcher.set_programmatic(True) is {enabled}"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def _build_launcher_for_a_cpu(compiler: str, includes: list[str], path: Path) -> None:
    """A launcher that takes torch's tensors on a CPU for those of a GPU: stubbed_direct.py calls it."""
    include = [*includes, libinfo.find_include_path()]
    subprocess.run(
        [
            *(compiler, "-std=c++17", "-O0", "-shared", "-fPIC", "-fvisibility=hidden", "-DMICROSDPA_DEVICE=kDLCPU"),
            *(option for directory in include for option in ("-isystem", directory)),
            *(str(Path(launcher.__file__).with_name("launcher.cc")), "-o", str(path)),
            *(libinfo.find_libtvm_ffi(), "-ldl"),
        ],
        check=True,
    )


def test_the_hot_path_with_a_stub_driver(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler to build the stub driver with")
    includes = [*nvrtc.include_directories(), libinfo.find_dlpack_include_path()]
    stubs = (
        ("stub_driver.cc", "libcuda.so.1", "libcuda.so.1"),
        ("stub_torch_cuda.cc", "libtorch_cuda.so", "stub_torch_cuda.so"),  # found by its soname where it is loaded
    )
    for source, soname, file in stubs:
        subprocess.run(
            [
                *(compiler, "-std=c++17", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{soname}"),
                *(option for directory in includes for option in ("-isystem", directory)),
                *(str(HERE / source), "-o", str(tmp_path / file)),
            ],
            check=True,
        )
    _build_launcher_for_a_cpu(compiler, includes, tmp_path / "cpu_launcher.so")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, sorted(HERE.glob("stubbed_*.py")))],
        env=os.environ | {"LD_LIBRARY_PATH": f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"},
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    print(run.stdout[-8000:], run.stderr[-2000:])
    assert run.returncode == 0
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout
