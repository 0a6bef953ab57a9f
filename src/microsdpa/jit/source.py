"""Kernel sources: one self-contained text per kernel, with the project's headers expanded in place."""

from __future__ import annotations

import functools
import hashlib
import posixpath
import re
import time
from collections.abc import Iterator
from pathlib import Path

KERNELS_DIR = Path(__file__).resolve().parent.parent / "kernels"

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"(?P<local>[^"]+)"|<(?P<system>[^>]+)>)', re.MULTILINE)
_PRAGMA_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[ \t]*$", re.MULTILINE)


State = tuple[int, int, int, int]
"""What changes with a file: its inode, size, and times of the last changes of its bytes and of itself."""
Files = dict[Path, State]

_expanded: dict[tuple[str, Path, Path | None], tuple[Files, str]] = {}
"""Texts that were expanded, and the files that each was made of."""
SETTLED_NS = 2_000_000_000
"""Age of a file's last change from which on its state tells of a later one, also where clocks of files are coarse."""


def expand(source: str, root: Path = KERNELS_DIR, overrides: Path | None = None) -> str:
    """The text of `source` (a path below `root`) with every `#include "..."` expanded once, transitively.

    A header ptx/NAME is taken from `overrides`, when given: other bodies for the instructions of the same name.

    #line directives keep the compiler's messages, and profilers, pointing at the original files.

    Raises:
        FileNotFoundError: an included file does not exist; the message names the file that includes it.
    """
    asked = (source, root, overrides)
    files, text = _expanded.get(asked, ({}, ""))
    if files and all(_state(path) == state for path, state in files.items()):
        return text
    files, seen = {}, set[str]()
    text = _expand(source, root, overrides, seen, files)
    latest = max(max(changes) for _, _, *changes in files.values())
    if latest < time.time_ns() - SETTLED_NS:
        _expanded[asked] = files, text
    else:
        _expanded.pop(asked, None)
    return text


def _state(path: Path) -> State | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _expand(name: str, root: Path, overrides: Path | None, seen: set[str], files: Files) -> str:
    seen.add(name)
    path = (overrides if overrides and name.startswith("ptx/") else root) / name
    lines = [f'#line 1 "{name}"']
    if state := _state(path):  # before it is read: a change in between is seen the next time
        files[path] = state
    text = _PRAGMA_ONCE.sub("", path.read_text(encoding="utf-8"))
    for number, line in enumerate(text.splitlines(), start=1):
        match = _INCLUDE.match(line) if "include" in line else None
        if not match or not match["local"]:
            lines.append(line)
            continue
        header = posixpath.normpath(posixpath.join(posixpath.dirname(name), match["local"]))
        if not ((overrides if overrides and header.startswith("ptx/") else root) / header).is_file():
            raise FileNotFoundError(f"{name}:{number}: no file {match['local']!r}")
        if header not in seen:
            lines += [_expand(header, root, overrides, seen, files), f'#line {number + 1} "{name}"']
        else:
            lines.append("")
    return "\n".join(lines)


_TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[\w.]+|\s+|(?:[-+*/%&|^=!<>]=|\+\+|--|&&|\|\||<<|->|::)|.""",
    re.DOTALL,
)


@functools.lru_cache(maxsize=64)
def tokens(expanded: str) -> str:
    """What the compiler makes of a source: its tokens, one space apart, without comments, layout and #line directives.

    Preprocessor directives keep lines of their own.
    """
    lines: list[list[str]] = [[]]
    for match in _TOKEN.finditer(expanded.replace("\\\n", " ")):
        token = match[0]
        in_directive = lines[-1][:1] == ["#"]
        if token.startswith(("//", "/*")) or token.isspace():
            if in_directive and "\n" in token:
                lines.append([])
            continue
        if token == "#" and not in_directive:
            lines.append([])
        lines[-1].append(token)
    return "\n".join(" ".join(line) for line in lines if line and line[:2] != ["#", "line"])


@functools.lru_cache(maxsize=64)
def _headers_below(header: str, directories: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """(name, SHA-256) of a toolkit header and of all that it includes, from the first directory that has each."""
    found: dict[str, str] = {}
    waiting = [header]
    while waiting:
        name = waiting.pop()
        path = next((p for p in (Path(d) / name for d in directories) if p.is_file()), None)
        if name in found or path is None:
            continue
        data = path.read_bytes()
        found[name] = hashlib.sha256(data).hexdigest()
        waiting += _included(data)
    return tuple(sorted(found.items()))


def _included(data: bytes) -> Iterator[str]:
    """Names that a header includes: of its megabytes, only lines with the word are looked at."""
    at = data.find(b"include")
    while at >= 0:
        end = data.find(b"\n", at)
        end = len(data) if end < 0 else end
        line = data[data.rfind(b"\n", 0, at) + 1 : end]
        if match := _INCLUDE.match(line.decode("utf-8", errors="replace")):
            yield match["local"] or match["system"]
        at = data.find(b"include", end)


def toolkit_headers(expanded: str, directories: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """(name, SHA-256) of every CUDA toolkit header that an expanded source includes, transitively."""
    found: dict[str, str] = {}
    for match in _INCLUDE.finditer(expanded):
        found.update(_headers_below(match["system"], directories))
    return tuple(sorted(found.items()))
