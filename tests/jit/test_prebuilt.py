"""The wheel microsdpa-kernels: what is in it, who finds it, and when it is refused."""

from __future__ import annotations

import json
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import microsdpa
from microsdpa.errors import CompileError
from microsdpa.evidence import pack
from microsdpa.jit import CompiledKernel, compile_kernel, is_compiled, nvrtc, prebuilt
from microsdpa.jit.inspect import Resources
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.select import select

TARGET = "sm_90a"
Install = Callable[..., Path]


def made(spec: KernelSpec, target: str = TARGET) -> CompiledKernel:
    """A kernel whose machine code is a word: nothing here looks at it."""
    resources = Resources(64, 0, 0, 0, 0)
    return CompiledKernel(spec, target, "signature", b"code", "name", resources, "", 1.0, True)


@pytest.fixture
def headline() -> KernelSpec:
    return select(Problem(1, 8, 8, 512, 512, 64, "float16", target=TARGET)).spec


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a wheel of kernels; there is no compiler, and nothing in the cache."""

    def no_compiler() -> str:
        raise CompileError("NVRTC 13 cannot be loaded", log="", source=None)

    def into_path(compiled: list[CompiledKernel], **about: object) -> Path:
        with zipfile.ZipFile(pack.write(compiled, tmp_path / "dist")) as wheel:
            wheel.extractall(tmp_path / "site")
        file = tmp_path / "site" / prebuilt.FOLDER / prebuilt.ABOUT
        file.write_text(json.dumps(json.loads(file.read_text()) | about))
        monkeypatch.syspath_prepend(tmp_path / "site")
        monkeypatch.setattr(nvrtc, "version", no_compiler)
        monkeypatch.setenv("MICROSDPA_CACHE_DIR", str(tmp_path / "cache"))
        prebuilt.package.cache_clear()
        return tmp_path / "site" / prebuilt.FOLDER

    yield into_path
    prebuilt.package.cache_clear()
    sys.modules.pop(prebuilt.FOLDER, None)


def test_a_kernel_of_the_wheel_needs_no_compiler(install: Install, headline: KernelSpec) -> None:
    install([made(headline)])
    assert is_compiled(headline, TARGET)
    found = compile_kernel(headline, TARGET)
    assert (found.cubin, found.symbol, found.cached, found.resources.registers) == (b"code", "name", True, 64)


def test_a_target_that_the_wheel_lacks_is_named(install: Install, headline: KernelSpec) -> None:
    install([made(headline)])
    spec = select(Problem(1, 8, 8, 512, 512, 64, "float16", target="sm_89")).spec
    with pytest.raises(CompileError, match="microsdpa-kernels has kernels for sm_90a, and none for sm_89"):
        compile_kernel(spec, "sm_89")


def test_another_configuration_is_not_taken_for_it(install: Install, headline: KernelSpec) -> None:
    install([made(headline)])
    spec = select(Problem(1, 8, 8, 512, 512, 64, "bfloat16", target=TARGET)).spec
    with pytest.raises(CompileError, match="microsdpa-kernels has 1 kernels for sm_90a, and this is none of them"):
        compile_kernel(spec, TARGET)


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"microsdpa": "0.0.9"}, rf"was made for microsdpa 0.0.9, and this is {microsdpa.__version__}: pip install"),
        ({"format": 99}, "expected files of format 1, got 99: install it again"),
        ({"kernels": None}, "about.json cannot be read"),
    ],
)
def test_another_version_is_refused_and_says_so(
    install: Install, headline: KernelSpec, about: dict[str, object], reason: str
) -> None:
    install([made(headline)], **about)
    with (
        pytest.warns(prebuilt.PrebuiltWarning, match=f"{reason}.*; kernels are compiled instead"),
        pytest.raises(CompileError, match=reason),
    ):
        compile_kernel(headline, TARGET)


@pytest.mark.parametrize("change", ["cut", "other code", "other target"])
def test_damaged_machine_code_is_not_loaded(install: Install, headline: KernelSpec, change: str) -> None:
    kernel = made(headline)
    place = install([kernel]) / TARGET
    binary = place / f"{kernel.code_signature}{prebuilt.BINARY}"
    if change == "cut":
        binary.write_bytes(binary.read_bytes()[:-3])
    elif change == "other code":
        binary.write_bytes(zlib.compress(b"others"))
    else:
        described = place / f"{kernel.code_signature}.json"
        described.write_text(described.read_text().replace(TARGET, "sm_80"))
    with pytest.warns(prebuilt.PrebuiltWarning, match="is damaged"), pytest.raises(CompileError):
        compile_kernel(headline, TARGET)


def test_without_the_wheel_nothing_is_said_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    prebuilt.package.cache_clear()
    assert prebuilt.package() is None
    assert prebuilt.absence(TARGET) == ""
    prebuilt.package.cache_clear()


@pytest.mark.parametrize("target", pack.TARGETS)
def test_the_common_configurations_have_what_calls_choose(target: str) -> None:
    common = pack.common(target)
    assert len(common) == len(set(common)) > 100
    for sizes in ((1, 8, 8, 512, 512, 64), (8, 32, 8, 1, 4096, 128), (1, 16, 16, 16384, 16384, 128)):
        for stage in select(Problem(*sizes, "bfloat16", target=target)).spec.stages:  # type: ignore[arg-type]
            assert stage in common


def test_the_wheel_is_the_same_every_time(tmp_path: Path, headline: KernelSpec) -> None:
    first, second = (pack.write([made(headline)], tmp_path / name).read_bytes() for name in ("one", "two"))
    assert first == second
    with zipfile.ZipFile(tmp_path / "one" / f"microsdpa_kernels-{microsdpa.__version__}-py3-none-any.whl") as wheel:
        record = wheel.read(f"microsdpa_kernels-{microsdpa.__version__}.dist-info/RECORD").decode()
        assert {line.split(",")[0] for line in record.splitlines()} == set(wheel.namelist())
