"""Signatures: the identity of a compiled kernel, from everything that can change its machine code."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable

from microsdpa.jit import nvrtc
from microsdpa.jit.source import expand, tokens, toolkit_headers
from microsdpa.kernels import KernelSpec

CACHE_FORMAT = 2


def _digest(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


_LAUNCH_FIELDS = (
    *("shared_bytes", "cluster", "split", "max_ctas", "tensor_maps", "programmatic", "workspace_row_bytes"),
    *("tile_lists", "counts"),
)


def _launch(spec: KernelSpec) -> dict[str, object]:
    """How the kernel is launched, where its specification departs from the plain way."""
    plain = {field.name: field.default for field in dataclasses.fields(KernelSpec)}
    found: dict[str, object] = {
        name: repr(getattr(spec, name)) for name in _LAUNCH_FIELDS if getattr(spec, name) != plain[name]
    }
    return {"launch": found} if found else {}


def _code(spec: KernelSpec, target: str, text: Callable[[str], str]) -> str:
    """The digest; `text` makes of a source's name what counts of it."""
    return _digest(
        {
            "name": spec.name,
            "expression": spec.expression,
            "flags": spec.flags,
            "target": target,
            "source": text(spec.source),
            **_launch(spec),
            **({"preparation": _code(spec.preparation, target, text)} if spec.preparation else {}),
            **({"next": _code(spec.next_kernel, target, text)} if spec.next_kernel else {}),
        }
    )


def code_signature(spec: KernelSpec, target: str) -> str:
    """Identity of what this project decides: source, headers, template arguments, flags, target, launch, what follows.

    It does not depend on the compiler found on a machine, so a measurement taken elsewhere can be told from a stale
    one; nor on comments and layout, which change no instruction.
    """
    return _code(spec, target, lambda source: tokens(expand(source)))


def signature(spec: KernelSpec, target: str) -> str:
    """Identity of the cubin: the code's, NVRTC's version, the toolkit headers' contents and the cache's format.

    Comments count: the cubin's line table points at the source's lines.
    """
    expanded = functools.cache(expand)
    return _digest(
        {
            "format": CACHE_FORMAT,
            "code": _code(spec, target, expanded),
            "nvrtc": nvrtc.version(),
            "headers": toolkit_headers(expanded(spec.source), nvrtc.include_directories()),
        }
    )
