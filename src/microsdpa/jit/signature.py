"""Signatures: the identity of a compiled kernel, from everything that can change its machine code."""

from __future__ import annotations

import hashlib
import json

from microsdpa.jit import nvrtc
from microsdpa.jit.source import expand, toolkit_headers
from microsdpa.specs import KernelSpec

CACHE_FORMAT = 1


def _digest(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def code_signature(spec: KernelSpec, target: str) -> str:
    """Identity of what this project decides: source, headers, template arguments, flags, target.

    It does not depend on the compiler found on a machine, so a measurement taken elsewhere can be told from a stale
    one.
    """
    return _digest(
        {
            "name": spec.name,
            "expression": spec.expression,
            "flags": spec.flags,
            "target": target,
            "source": expand(spec.source),
        }
    )


def signature(spec: KernelSpec, target: str) -> str:
    """Identity of the cubin: the code's, NVRTC's version, the toolkit headers' contents and the cache's format."""
    return _digest(
        {
            "format": CACHE_FORMAT,
            "code": code_signature(spec, target),
            "nvrtc": nvrtc.version(),
            "headers": toolkit_headers(expand(spec.source), nvrtc.include_directories()),
        }
    )
