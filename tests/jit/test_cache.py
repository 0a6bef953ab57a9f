from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from microsdpa.emulate import build as emulator
from microsdpa.jit import build, compile_kernel
from microsdpa.jit import signature as signatures
from microsdpa.jit.cache import CacheWarning, Entry, KernelCache, default_directory
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.select import select

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


def test_what_a_process_left_that_was_ended_is_removed_later(tmp_path: Path) -> None:
    """A younger directory may be that of a process which writes another entry at this moment."""
    cache = KernelCache(tmp_path)
    folder = cache.path(SIGNATURE).parent
    for name, hours in (("staging-old", 2), ("staging-young", 0.1)):
        (folder / name / SIGNATURE).mkdir(parents=True)
        (folder / name / SIGNATURE / "kernel.cubin").write_bytes(b"cu")
        then = time.time() - hours * 3600
        os.utime(folder / name, (then, then))
    cache.get_or_build(SIGNATURE, lambda: ENTRY)
    assert [path.name for path in folder.glob("staging-*")] == ["staging-young"]
    assert cache.get_or_build(SIGNATURE, fail)[1]


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


@pytest.mark.parametrize("what", ["file", "link"])
@pytest.mark.parametrize("level", ["entry", "folder"])
def test_what_is_no_directory_gives_way_to_an_entry(tmp_path: Path, level: str, what: str) -> None:
    cache = KernelCache(tmp_path)
    place = cache.path(SIGNATURE) if level == "entry" else cache.path(SIGNATURE).parent
    place.parent.mkdir(exist_ok=True)
    if what == "file":
        place.write_text("no directory")
    else:
        place.symlink_to(tmp_path / "nothing")
    with pytest.warns(CacheWarning, match="is no directory; compiling again") as caught:
        assert cache.get_or_build(SIGNATURE, lambda: ENTRY) == (ENTRY, False)
    assert len(caught) == 1
    assert cache.get_or_build(SIGNATURE, fail)[1]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002, 0o000])
def test_entries_are_as_readable_as_the_umask_says(tmp_path: Path, umask: int) -> None:
    """A cache that root bakes into an image is everybody's to read, and nobody's to write."""
    before = os.umask(umask)
    try:
        cache = KernelCache(tmp_path / "new" / "cache")
        cache.get_or_build(SIGNATURE, lambda: ENTRY)
    finally:
        os.umask(before)
    entry = cache.path(SIGNATURE)
    for directory in (entry, entry.parent, cache.directory, cache.directory.parent):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o755 & ~umask
    for file in entry.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o644 & ~umask
    assert cache.get_or_build(SIGNATURE, fail)[1]


@pytest.mark.parametrize("level", [".", "ab", f"ab/{SIGNATURE}"])
def test_a_cache_that_everybody_may_write_is_not_used(tmp_path: Path, level: str) -> None:
    cache = KernelCache(tmp_path)
    other = Entry(b"another cubin", "source", {})
    cache.get_or_build(SIGNATURE, lambda: other)
    (tmp_path / level).chmod(0o777)
    with pytest.warns(CacheWarning, match="is writable by everybody .mode 0777., and what lies there would be loaded"):
        assert cache.get_or_build(SIGNATURE, lambda: ENTRY) == (ENTRY, False)
    assert cache.get(SIGNATURE) is None
    assert not cache.has(SIGNATURE)
    (tmp_path / level).chmod(0o775)
    assert cache.get_or_build(SIGNATURE, fail)[0].cubin == other.cubin


@pytest.mark.parametrize(("owner", "trusted"), [(0, True), (4711, True), (4712, False)])
def test_only_caches_of_the_user_and_root_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, trusted: bool
) -> None:
    cache = KernelCache(tmp_path)
    cache.get_or_build(SIGNATURE, lambda: ENTRY)
    monkeypatch.setattr("microsdpa.jit.cache.os.geteuid", lambda: 4711)
    real = Path.stat

    def owned(path: Path, **options: bool) -> os.stat_result:
        found = list(real(path, **options))
        found[stat.ST_UID] = owner
        return os.stat_result(found)

    monkeypatch.setattr(Path, "stat", owned)
    assert cache.has(SIGNATURE) == trusted
    if trusted:
        assert cache.get_or_build(SIGNATURE, fail)[1]
        return
    with pytest.warns(CacheWarning, match=r"belongs to user 4712, not to this one \(4711\) or root"):
        assert cache.get_or_build(SIGNATURE, lambda: ENTRY) == (ENTRY, False)


def test_an_entry_that_may_not_be_read_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KernelCache(tmp_path)
    cache.get_or_build(SIGNATURE, lambda: ENTRY)

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refuse)
        with pytest.warns(CacheWarning, match="cannot be read by this user .*chmod -R a"):
            assert cache.get_or_build(SIGNATURE, lambda: ENTRY) == (ENTRY, False)
    assert cache.get_or_build(SIGNATURE, fail)[1]


def test_the_emulator_loads_no_library_that_everybody_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MICROSDPA_CACHE_DIR", str(tmp_path))
    made = tmp_path / "built.so"
    made.write_bytes(b"library")
    path = emulator._materialize(SIGNATURE, lambda _: made, "", {"kernel": "name"})
    assert tmp_path in path.parents
    path.parent.chmod(0o777)
    with pytest.warns(CacheWarning, match="is writable by everybody"):
        path = emulator._materialize(SIGNATURE, lambda _: made, "", {"kernel": "name"})
    assert tmp_path not in path.parents
    assert path.read_bytes() == b"library"


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
    """Eight processes want one kernel at the same time; one compiles it, the others find it.

    They are forked from one that has imported what they need, which takes two seconds of a processor.
    """
    code = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        from microsdpa.jit import compile_kernel
        from microsdpa.kernels import catalogue
        spec, (gate, start) = catalogue("sm_89")[0], os.pipe()
        for _ in range(8):
            if os.fork() == 0:
                os.close(start)
                os.read(gate, 1)  # until the parent has all of them
                kernel = compile_kernel(spec, "sm_89", Path(sys.argv[1]))
                os.write(1, f"{kernel.cached} {kernel.signature} {len(kernel.cubin)}\\n".encode())
                os._exit(0)
        os.close(start)
        sys.exit(any([os.wait()[1] for _ in range(8)]))
    """)
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=240)
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert len(lines) == 8
    assert sorted(line[0] for line in lines) == ["False", *["True"] * 7]
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


def test_a_kernel_that_is_there_is_found_without_reading_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than all else that the first call of a process looks at."""
    spec = select(Problem(1, 2, 2, 64, 64, 32, "float16", target="sm_89"), "ladder/01_scalar").spec
    expected = compile_kernel(spec, "sm_89")

    def refuse(_: str) -> str:
        raise AssertionError("tokens are read")

    monkeypatch.setattr(signatures, "tokens", refuse)
    build._memory.clear()
    found = compile_kernel(spec, "sm_89")
    assert (found.cached, found.cubin) == (True, expected.cubin)
    with pytest.raises(AssertionError, match="tokens are read"):
        _ = found.code_signature
