"""Kernels that the package microsdpa-kernels has compiled: found by the signature of their code, without a compiler.

`microsdpa pack` makes the package: a folder for each target with two files per kernel, SIGNATURE.cubin.z and
SIGNATURE.json, and about.json, which has the version of microsdpa that it was made for. Another one does not use it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import warnings
import zlib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from microsdpa.jit.cache import Entry

NAME, FOLDER, ABOUT = "microsdpa-kernels", "microsdpa_kernels", "about.json"
BINARY = ".cubin.z"
"""How a kernel's file ends: machine code, compressed to a quarter by zlib."""
FORMAT = 1
"""Of the package's files; another one is not read."""


class PrebuiltWarning(UserWarning):
    """The package microsdpa-kernels is there and is not used, or is damaged; kernels are compiled instead."""


@dataclass(frozen=True)
class Package:
    """What is installed.

    Attributes:
        directory: of its files.
        kernels: their number for each target.
        nvrtc: version of the compiler that made them.
        refusal: why none of them is used; empty when they are.
    """

    directory: Path
    kernels: dict[str, int]
    nvrtc: str
    refusal: str


@functools.cache
def package() -> Package | None:
    """The installed package, or None when there is none; a warning says so when it is of no use."""
    found = importlib.util.find_spec(FOLDER)
    for place in (found.submodule_search_locations or []) if found else []:
        if Path(place, ABOUT).is_file():
            read = _read(Path(place))
            if read.refusal:
                warnings.warn(f"{read.refusal}; kernels are compiled instead", PrebuiltWarning, stacklevel=4)
            return read
    return None


def _read(directory: Path) -> Package:
    own = metadata.version("microsdpa")
    try:
        about = json.loads((directory / ABOUT).read_text(encoding="utf-8"))
        made, form = about["microsdpa"], about["format"]
        kernels, nvrtc = dict(about["kernels"]), str(about["nvrtc"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Package(directory, {}, "", f"{NAME}: {directory / ABOUT} cannot be read ({error}); install it again")
    refusal = ""
    if made != own:
        refusal = (
            f"{NAME} was made for microsdpa {made}, and this is {own}: pip install {NAME}=={own}, "
            "or make it with microsdpa pack"
        )
    elif form != FORMAT:
        refusal = f"{NAME}: expected files of format {FORMAT}, got {form}: install it again"
    return Package(directory, kernels, nvrtc, refusal)


def serves(target: str) -> bool:
    """Whether there are kernels for a target: else nobody has to know a kernel's code signature."""
    there = package()
    return there is not None and not there.refusal and target in there.kernels


def has(code: str, target: str) -> bool:
    """Whether there is a kernel with this code signature for a target."""
    there = package()
    return there is not None and serves(target) and (there.directory / target / f"{code}.json").is_file()


def find(code: str, target: str) -> Entry | None:
    """The kernel with this code signature for a target; None when there is none that can be used."""
    there = package()
    if there is None or not has(code, target):
        return None
    path = there.directory / target / code
    try:
        described: dict[str, Any] = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        cubin = zlib.decompress(path.with_suffix(BINARY).read_bytes())
        if described["target"] != target:
            raise ValueError(f"it is of {described['target']}")
        if described["cubin_sha256"] != hashlib.sha256(cubin).hexdigest():
            raise ValueError("its bytes are not what was written")
    except (OSError, ValueError, KeyError, TypeError, zlib.error) as error:
        warnings.warn(
            f"{path.with_suffix(BINARY)} is damaged ({error}): install {NAME} again; compiling it",
            PrebuiltWarning,
            stacklevel=3,
        )
        return None
    return Entry(cubin, "", described)


def absence(target: str) -> str:
    """Why the package has nothing for a kernel of `target` that was not found; empty when none is installed."""
    there = package()
    if there is None:
        return ""
    if there.refusal:
        return there.refusal
    if target not in there.kernels:
        return f"{NAME} has kernels for {', '.join(there.kernels)}, and none for {target}"
    return f"{NAME} has {there.kernels[target]} kernels for {target}, and this is none of them"
