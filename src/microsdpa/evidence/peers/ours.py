"""This library: allocating its output, as its peers do, and writing to a given one; plain and prepared calls."""

from __future__ import annotations

import torch

import microsdpa
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.peers.implementation import Call, Implementation, Tensors, is_plain


class Microsdpa(Implementation):
    """microsdpa.sdpa, or a microsdpa.plan, with one `impl`."""

    name = "microsdpa"

    def __init__(self, impl: str = "auto", write_out: bool = False, prepared: bool = False) -> None:
        self.impl = impl
        self.write_out = write_out
        self.prepared = prepared
        self.variant = " ".join(["plan"] * prepared + ["out="] * write_out)

    @property
    def version(self) -> str:
        """Of this package."""
        return microsdpa.__version__

    def bind(self, case: Case, tensors: Tensors, out: torch.Tensor) -> Call:
        """The plain spelling of each call: a timed call carries no argument that it does not need."""
        query, key, value = tensors
        options: dict[str, object] = {}
        if not is_plain(case):
            options = {"causal": case.causal, "scale": case.scale, "enable_gqa": case.kv_heads != case.heads}
        if self.impl != "auto":
            options["impl"] = self.impl
        if self.prepared:
            plan = microsdpa.plan(query, key, value, **options)  # type: ignore[arg-type]
            if self.write_out:
                return lambda: plan(query, key, value, out=out)
            return lambda: plan(query, key, value)
        if self.write_out:
            options["out"] = out
        sdpa = microsdpa.sdpa
        return lambda: sdpa(query, key, value, **options)  # type: ignore[arg-type]
