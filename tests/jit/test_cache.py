from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from microsdpa.jit import compile_kernel
from microsdpa.jit.cache import CacheWarning, Entry, KernelCache, default_directory
from microsdpa.specs import KernelSpec

SIGNATURE = "ab" + "0" * 30
ENTRY = Entry(b"cubin", "source", {"symbol": "kernel"})


def fail() -> Entry:
    raise AssertionError("it must not be built again")


def test_an_entry_is_built_once_and_found_whole(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    assert cache.get_or_build(SIGNATURE, lambda: ENTRY) == (ENTRY, False)
    found, cached = cache.get_or_build(SIGNATURE, fail)
    assert cached
    assert (found.cubin, found.source, found.metadata["symbol"]) == (b"cubin", "source", "kernel")
    assert sorted(p.name for p in cache.path(SIGNATURE).iterdir()) == ["kernel.cubin", "metadata.json", "source.cu"]
    assert not list(tmp_path.rglob("staging-*"))


@pytest.mark.parametrize("damage", ["truncated", "foreign", "edited", "missing", "garbage"])
def test_a_damaged_entry_is_rebuilt_with_a_warning(tmp_path: Path, damage: str) -> None:
    cache = KernelCache(tmp_path)
    cache.get_or_build(SIGNATURE, lambda: ENTRY)
    path = cache.path(SIGNATURE)
    if damage == "truncated":
        (path / "kernel.cubin").write_bytes(b"cub")
    elif damage == "foreign":
        metadata = json.loads((path / "metadata.json").read_text())
        (path / "metadata.json").write_text(json.dumps(metadata | {"signature": "cd" + "0" * 30}))
    elif damage == "edited":
        (path / "source.cu").write_text("other")
    elif damage == "missing":
        (path / "metadata.json").unlink()
    else:
        (path / "metadata.json").write_text("[1, 2")
    with pytest.warns(CacheWarning, match="is damaged"):
        assert cache.get_or_build(SIGNATURE, lambda: ENTRY) == (ENTRY, False)
    assert cache.get_or_build(SIGNATURE, fail)[1]


def test_a_cache_that_is_no_directory_costs_a_warning_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(CacheWarning, match="MICROSDPA_CACHE_DIR"):
        assert KernelCache(tmp_path / "file").get_or_build(SIGNATURE, lambda: ENTRY) == (ENTRY, False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to read-only directories")
def test_a_read_only_cache_costs_a_warning_only(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.warns(CacheWarning, match="cannot be written"):
        assert KernelCache(tmp_path).get_or_build(SIGNATURE, lambda: ENTRY) == (ENTRY, False)


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES])
@pytest.mark.parametrize("call", ["mkdtemp", "fsync", "rename"])
def test_a_cache_that_cannot_be_written_costs_a_warning_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    place = "microsdpa.jit.cache.tempfile.mkdtemp" if call == "mkdtemp" else f"microsdpa.jit.cache.os.{call}"
    monkeypatch.setattr(place, refuse)
    with pytest.warns(CacheWarning, match=os.strerror(number)):
        assert KernelCache(tmp_path).get_or_build(SIGNATURE, lambda: ENTRY) == (ENTRY, False)
    monkeypatch.undo()
    assert not list(tmp_path.rglob("staging-*"))
    assert not KernelCache(tmp_path).path(SIGNATURE).exists()


def test_a_kernel_of_an_unwritable_cache_is_compiled_once_in_a_process(
    spec: KernelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MICROSDPA_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr("microsdpa.jit.build._memory", {})
    with pytest.warns(CacheWarning):
        first = compile_kernel(spec, "sm_89")
    assert compile_kernel(spec, "sm_89") is first


def test_the_environment_overrides_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MICROSDPA_CACHE_DIR", str(tmp_path))
    assert default_directory() == tmp_path
    monkeypatch.delenv("MICROSDPA_CACHE_DIR")
    assert default_directory().name == "microsdpa"


def test_concurrent_processes_compile_once(tmp_path: Path) -> None:
    """Four processes want one kernel at the same time; one compiles it, the others find it."""
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        from microsdpa.jit import compile_kernel
        from microsdpa.specs import catalogue
        kernel = compile_kernel(catalogue("sm_89")[0], "sm_89", Path(sys.argv[1]))
        print(kernel.cached, kernel.signature, len(kernel.cubin))
    """)
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    lines = [process.communicate(timeout=240)[0].split() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert sorted(line[0] for line in lines) == ["False", "True", "True", "True"]
    assert len({tuple(line[1:]) for line in lines}) == 1


def test_a_process_that_dies_while_it_compiles_leaves_no_lock_and_no_entry(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        from microsdpa.jit.cache import KernelCache
        KernelCache(Path(sys.argv[1])).get_or_build(sys.argv[2], lambda: os._exit(9))
    """)
    died = subprocess.run([sys.executable, "-c", code, str(tmp_path), SIGNATURE], check=False)
    assert died.returncode == 9
    assert KernelCache(tmp_path).get_or_build(SIGNATURE, lambda: ENTRY) == (ENTRY, False)
