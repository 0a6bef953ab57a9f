"""What goes wrong around a compilation: full disks, kills, interrupts and many processes at once."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from microsdpa.jit import cache
from microsdpa.jit.cache import CacheWarning, Entry, KernelCache

SIGNATURE = "ab" + "0" * 30
ENTRY = Entry(b"cubin" * 1000, "source", {"symbol": "kernel"})
SOON = 20
"""Seconds in which a process must have done what it is waited for: a lock that was left would hold it for longer."""


def _forked(function: Callable[[], object]) -> int:
    """Run a function in a process of its own, which leaves with 0 if it returns true; gives its id."""
    child = os.fork()
    if child:
        return child
    try:
        os._exit(0 if function() else 1)
    except BaseException:
        os._exit(2)


def _ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def fail() -> Entry:
    raise AssertionError("it must not be built")


def test_eight_processes_at_first_use_build_once(tmp_path: Path) -> None:
    built = tmp_path / "built"

    def build() -> Entry:
        with built.open("a") as file:
            file.write("x")
        time.sleep(0.2)
        return ENTRY

    def use() -> bool:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            entry, _ = KernelCache(tmp_path / "cache").get_or_build(SIGNATURE, build)
        return entry.cubin == ENTRY.cubin

    assert [_ended(child) for child in [_forked(use) for _ in range(8)]] == [0] * 8
    assert built.read_text() == "x"


@pytest.mark.parametrize("moment", ["compiling", "publishing"])
def test_a_process_that_is_killed_holds_nobody_up(tmp_path: Path, moment: str) -> None:
    reached = tmp_path / "reached"

    def wait(*_: object) -> Entry:
        reached.touch()
        time.sleep(600)
        return ENTRY

    def use() -> bool:
        if moment == "compiling":
            KernelCache(tmp_path / "cache").get_or_build(SIGNATURE, wait)
        else:
            cache.os.rename = wait  # type: ignore[attr-defined]
            KernelCache(tmp_path / "cache").get_or_build(SIGNATURE, lambda: ENTRY)
        return True

    child = _forked(use)
    _until(reached.exists)
    os.kill(child, signal.SIGKILL)
    assert _ended(child) == -signal.SIGKILL
    start = time.monotonic()
    found = KernelCache(tmp_path / "cache")
    assert found.get(SIGNATURE) is None
    assert found.get_or_build(SIGNATURE, lambda: ENTRY) == (ENTRY, False)
    assert time.monotonic() - start < SOON
    entry, was_there = found.get_or_build(SIGNATURE, fail)
    assert was_there
    assert entry.cubin == ENTRY.cubin


def test_an_interrupt_leaves_no_lock_and_no_entry(tmp_path: Path) -> None:
    def interrupted() -> Entry:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(SOON)  # the handler runs before this has passed
        return ENTRY

    found = KernelCache(tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores interrupts
    try:
        with pytest.raises(KeyboardInterrupt):
            found.get_or_build(SIGNATURE, interrupted)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not found.has(SIGNATURE)
    assert not list(tmp_path.rglob("staging-*"))
    # From another process too: nobody waits for a lock of this one.
    child = _forked(lambda: KernelCache(tmp_path).get_or_build(SIGNATURE, lambda: ENTRY) == (ENTRY, False))
    assert _ended(child) == 0
    assert found.get_or_build(SIGNATURE, fail)[1]


def test_a_disk_that_fills_up_in_a_file_costs_a_warning_only(tmp_path: Path) -> None:
    """The system refuses to write on in the middle of the cubin, as a full disk does."""

    def use() -> bool:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        with pytest.warns(CacheWarning, match=os.strerror(errno.EFBIG)):
            return KernelCache(tmp_path).get_or_build(SIGNATURE, lambda: ENTRY) == (ENTRY, False)

    assert _ended(_forked(use)) == 0
    assert not KernelCache(tmp_path).path(SIGNATURE).exists()
    assert not list(tmp_path.rglob("staging-*"))
    assert KernelCache(tmp_path).get_or_build(SIGNATURE, lambda: ENTRY) == (ENTRY, False)


def test_a_filled_cache_is_read_where_nothing_may_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    KernelCache(tmp_path).get_or_build(SIGNATURE, lambda: ENTRY)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for place in ("os.mkdir", "os.rename", "tempfile.mkdtemp", "filelock.FileLock.acquire"):
        monkeypatch.setattr(f"microsdpa.jit.cache.{place}", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entry, was_there = KernelCache(tmp_path).get_or_build(SIGNATURE, fail)
    assert was_there
    assert entry.cubin == ENTRY.cubin
