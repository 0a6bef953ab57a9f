"""Which versions of the other libraries the integrations are made for."""

from __future__ import annotations

import re
from importlib import metadata

SUPPORTED = {"transformers": ((5, 18), (5, 23)), "diffusers": ((0, 39), (0, 42))}
"""First and last minor version of each library that the tests of this package have passed with."""


def check(library: str) -> None:
    """Refuse a version of a library that its integration was not tested with.

    Raises:
        ImportError: the library is not installed, or is older or newer than the supported range.
    """
    first, last = SUPPORTED[library]
    expected = f"{_text(first)} to {_text(last)}"
    try:
        found = metadata.version(library)
    except metadata.PackageNotFoundError:
        raise ImportError(
            f"microsdpa.integrations.{library}: expected {library} {expected}, found no {library}; "
            f"pip install '{library}=={_text(last)}.*'"
        ) from None
    numbers = re.match(r"(\d+)\.(\d+)", found)
    version = (int(numbers[1]), int(numbers[2])) if numbers else None
    if version is None or not first <= version <= last:
        raise ImportError(
            f"microsdpa.integrations.{library}: expected {library} {expected}, found {library} {found}; "
            f"pip install '{library}=={_text(last)}.*', or use microsdpa.enable(), which needs no integration"
        )


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
