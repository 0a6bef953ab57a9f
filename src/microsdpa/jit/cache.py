"""The on-disk cache of compiled kernels: entries appear whole or not at all, and are checked when read.

An entry is a directory named by its signature: the binary, source.cu (expanded) and metadata.json. It is written in a
staging directory beside it, flushed to disk and renamed into place. A cache that cannot be written costs a compile in
each process and a warning, never an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import platformdirs

LOCK_TIMEOUT_SECONDS = 120


class CacheWarning(UserWarning):
    """The kernel cache is damaged or cannot be used; kernels are compiled again."""


@dataclass(frozen=True)
class Entry:
    """One cached kernel: the cubin, the expanded source and what is known of them."""

    cubin: bytes
    source: str
    metadata: dict[str, Any]


def default_directory() -> Path:
    """MICROSDPA_CACHE_DIR when set, else the user's cache directory."""
    override = os.environ.get("MICROSDPA_CACHE_DIR")
    return Path(override) if override else Path(platformdirs.user_cache_dir("microsdpa"))


class KernelCache:
    """Compiled kernels below `directory`, shared by concurrent processes."""

    def __init__(self, directory: Path, binary: str = "kernel.cubin") -> None:
        self.directory = directory
        self.binary = binary

    def path(self, signature: str) -> Path:
        """Directory of the entry with this signature, whether it exists or not."""
        return self.directory / signature[:2] / signature

    def get(self, signature: str) -> Entry | None:
        """The entry, or None when there is none; a damaged one is removed with a warning."""
        path = self.path(signature)
        if not path.is_dir():
            return None
        try:
            return self._read(path, signature)
        except (OSError, ValueError, KeyError, TypeError) as error:
            warnings.warn(f"cache entry {path} is damaged ({error}); compiling again", CacheWarning, stacklevel=2)
            shutil.rmtree(path, ignore_errors=True)
            return None

    def get_or_build(self, signature: str, build: Callable[[], Entry]) -> tuple[Entry, bool]:
        """The entry and whether it was found; concurrent processes that miss build it once."""
        entry = self.get(signature)
        if entry is not None:
            return entry, True
        with self._lock(signature) as locked:
            if locked:
                entry = self.get(signature)
                if entry is not None:
                    return entry, True
            entry = build()
            if locked:
                self._publish(signature, entry)
        return entry, False

    @contextlib.contextmanager
    def _lock(self, signature: str) -> Iterator[bool]:
        path = self.directory / "locks" / f"{signature}.lock"
        lock = filelock.FileLock(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=LOCK_TIMEOUT_SECONDS)
        except (OSError, filelock.Timeout) as error:
            self._warn_unusable(error)
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def _publish(self, signature: str, entry: Entry) -> None:
        path = self.path(signature)
        metadata = entry.metadata | {
            "signature": signature,
            "cubin_sha256": hashlib.sha256(entry.cubin).hexdigest(),
            "source_sha256": hashlib.sha256(entry.source.encode()).hexdigest(),
        }
        staging: str | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            staging = tempfile.mkdtemp(prefix="staging-", dir=path.parent)
            _write(Path(staging, self.binary), entry.cubin)
            _write(Path(staging, "source.cu"), entry.source.encode())
            _write(Path(staging, "metadata.json"), json.dumps(metadata, indent=1).encode())
            _sync_directory(Path(staging))
            os.rename(staging, path)
            _sync_directory(path.parent)
        except OSError as error:
            if staging:
                shutil.rmtree(staging, ignore_errors=True)
            if not path.is_dir():  # else another process that did not wait for the lock was faster
                self._warn_unusable(error)

    def _read(self, path: Path, signature: str) -> Entry:
        metadata = json.loads((path / "metadata.json").read_text(encoding="utf-8"))
        cubin = (path / self.binary).read_bytes()
        source = (path / "source.cu").read_text(encoding="utf-8")
        if metadata["signature"] != signature:
            raise ValueError("it belongs to another signature")
        if metadata["cubin_sha256"] != hashlib.sha256(cubin).hexdigest():
            raise ValueError(f"{self.binary} is not what was written")
        if metadata["source_sha256"] != hashlib.sha256(source.encode()).hexdigest():
            raise ValueError("source.cu is not what was written")
        return Entry(cubin, source, metadata)

    def _warn_unusable(self, error: Exception) -> None:
        warnings.warn(
            f"the kernel cache {self.directory} cannot be written ({error}); kernels stay in memory and every process "
            "compiles its own; set MICROSDPA_CACHE_DIR to a writable directory",
            CacheWarning,
            stacklevel=4,
        )


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def keep_failed_source(text: str) -> str | None:
    """Write a source that did not compile where its author can read it; gives its path, None when no place takes it."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="microsdpa-failed-", suffix=".cu", delete=False, encoding="utf-8"
        ) as file:
            file.write(text)
        return file.name
    except OSError:
        return None
