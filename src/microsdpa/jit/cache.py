"""The on-disk cache of compiled kernels: entries appear whole or not at all, and are checked when read.

An entry is a directory named by its signature: the binary, source.cu (expanded) and metadata.json. It is written in a
staging directory beside it, flushed to disk and renamed into place. A cache that cannot be written costs a compile in
each process and a warning, never an error.

What is found is loaded into the process, so the cache must be the user's or root's, and nothing of it may be writable
by everybody. Any other is neither read nor written, with a warning. The process writes directories of mode 0755 and
files of mode 0644 at most, less what its umask takes off: whoever may read them has the use of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import platformdirs

LOCK_TIMEOUT_SECONDS = 120
DIRECTORY_MODE, FILE_MODE = 0o755, 0o644
"""Before the umask."""
STAGING = "staging-"
"""What names of directories begin with that an entry is written in."""
ABANDONED_SECONDS = 3600
"""Age from which on such a directory is that of a process that was ended: to write an entry takes milliseconds."""


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
    """Compiled kernels below `directory`, in the folder `kind` of it, shared by concurrent processes."""

    def __init__(self, directory: Path, binary: str = "kernel.cubin", kind: str = "") -> None:
        self.directory = directory
        self.binary = binary
        self._folder = directory / kind

    def path(self, signature: str) -> Path:
        """Directory of the entry with this signature, whether it exists or not."""
        return self._folder / signature[:2] / signature

    def has(self, signature: str) -> bool:
        """Whether there is an entry with this signature that may be read."""
        return self.path(signature).is_dir() and not self.distrust(signature)

    def distrust(self, signature: str) -> str:
        """Why somebody else could have written the entry with this signature; empty when nobody could."""
        path = self.path(signature)
        for level in dict.fromkeys((self.directory, self._folder, path.parent, path)):
            try:
                found = level.stat()
            except OSError:
                return ""  # there is no such directory, nor one below it
            if found.st_uid not in (os.geteuid(), 0):
                return f"{level} belongs to user {found.st_uid}, not to this one ({os.geteuid()}) or root"
            if found.st_mode & stat.S_IWOTH:
                return f"{level} is writable by everybody (mode {stat.S_IMODE(found.st_mode):04o})"
        return ""

    def get(self, signature: str) -> Entry | None:
        """The entry, or None when there is none; a damaged one is removed with a warning."""
        path = self.path(signature)
        if not self.has(signature):
            _remove_obstacle(path.parent)
            _remove_obstacle(path)
            return None
        try:
            return self._read(path, signature)
        except PermissionError as error:
            warnings.warn(
                f"cache entry {path} cannot be read by this user ({error}); compiling again; "
                f"make it readable: chmod -R a+rX {self.directory}",
                CacheWarning,
                stacklevel=2,
            )
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            warnings.warn(f"cache entry {path} is damaged ({error}); compiling again", CacheWarning, stacklevel=2)
            shutil.rmtree(path, ignore_errors=True)
            return None

    def get_or_build(self, signature: str, build: Callable[[], Entry]) -> tuple[Entry, bool]:
        """The entry and whether it was found; concurrent processes that miss build it once."""
        if reason := self.distrust(signature):
            warnings.warn(
                f"the kernel cache {self.directory} is not used: {reason}, and what lies there would be loaded into "
                "this process; set MICROSDPA_CACHE_DIR to a directory of your own, or chown and chmod o-w this one",
                CacheWarning,
                stacklevel=3,
            )
            return build(), False
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
            _make_directory(path.parent)
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
        private: str | None = None
        try:
            _make_directory(path.parent)
            _remove_abandoned(path.parent)
            private = tempfile.mkdtemp(prefix=STAGING, dir=path.parent)
            staging = Path(private, signature)
            staging.mkdir(DIRECTORY_MODE)
            _write(staging / self.binary, entry.cubin)
            _write(staging / "source.cu", entry.source.encode())
            _write(staging / "metadata.json", json.dumps(metadata, indent=1).encode())
            _sync_directory(staging)
            os.rename(staging, path)
            _sync_directory(path.parent)
        except OSError as error:
            if not path.is_dir():  # else another process that did not wait for the lock was faster
                self._warn_unusable(error)
        finally:
            if private:
                shutil.rmtree(private, ignore_errors=True)

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


@dataclass(frozen=True)
class Stored:
    """An entry of a cache, as it lies on the disk.

    Attributes:
        kind: the folder of the cache that it is in; empty for kernels of GPUs.
        bytes: of its files.
        used: when its binary was read or written last, in seconds since the epoch, to about a day.
    """

    path: Path
    kind: str
    bytes: int
    used: float


def stored(directory: Path) -> list[Stored]:
    """The entries of the cache in `directory`, of every kind."""
    found = []
    for metadata in directory.rglob("metadata.json"):
        path = metadata.parent
        if path.parent.name != path.name[:2] or path.parent.name.startswith(STAGING):
            continue
        with contextlib.suppress(OSError):  # another process is removing it
            states = [file.stat() for file in path.iterdir()]
            used = max(max(state.st_atime, state.st_mtime) for state in states)
            kind = path.parent.parent.relative_to(directory).as_posix()
            found.append(Stored(path, "" if kind == "." else kind, sum(state.st_size for state in states), used))
    return sorted(found, key=lambda entry: str(entry.path))


def remove(entry: Stored) -> bool:
    """Remove an entry, whole or not at all for those who look for it; whether that could be done."""
    try:
        staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=entry.path.parent))
        os.rename(entry.path, staging / entry.path.name)
        shutil.rmtree(staging)
        with contextlib.suppress(OSError):  # others lie beside it
            entry.path.parent.rmdir()
    except OSError:
        return False
    return True


def _remove_obstacle(path: Path) -> None:
    """Remove a file, or a link that leads nowhere, which lies where a directory of the cache belongs."""
    if path.is_dir() or not os.path.lexists(path):
        return
    warnings.warn(f"cache entry {path} is no directory; compiling again", CacheWarning, stacklevel=3)
    with contextlib.suppress(OSError):  # of another user's, or a directory by now; publishing says what fails
        path.unlink()


def _remove_abandoned(folder: Path) -> None:
    """Remove what processes have left in a folder of the cache that were ended while they wrote an entry."""
    for path in folder.glob(f"{STAGING}*"):
        with contextlib.suppress(OSError):  # another process is removing it
            if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _make_directory(path: Path) -> None:
    """Make a directory and those above it that are missing, none of them writable by others than the user."""
    for level in (*reversed(path.parents), path):
        if not level.is_dir():
            level.mkdir(DIRECTORY_MODE, exist_ok=True)


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_failed: dict[str, str] = {}
"""Paths of the sources that this process has kept, by their digest."""


def keep_failed_source(text: str) -> str | None:
    """Write a source that did not compile where its author can read it, once in a process.

    Gives its path, or None when no place takes it.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()
    if os.path.isfile(_failed.get(digest, "")):
        return _failed[digest]
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="microsdpa-failed-", suffix=".cu", delete=False, encoding="utf-8"
        ) as file:
            file.write(text)
    except OSError:
        return None
    _failed[digest] = file.name
    return file.name
