"""This library: an output allocated, as peers do, or given; plain and prepared calls; 16 and 8 bits."""

from __future__ import annotations

from typing import Any

import torch

import microsdpa
from microsdpa import eight_bit
from microsdpa.eight_bit_launches import quantize_query_key_value, run_attention
from microsdpa.evidence import signatures
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.peers.implementation import Call, Implementation, Tensors, is_plain
from microsdpa.specs.eight_bit import OPERANDS, Operands
from microsdpa.specs.quantize import RECIPES


def _options(case: Case) -> dict[str, Any]:
    return {"causal": case.causal, "scale": case.scale, "enable_gqa": case.kv_heads != case.heads}


class Microsdpa(Implementation):
    """microsdpa.sdpa, or a microsdpa.plan, with one `impl`."""

    name = "microsdpa"

    def __init__(self, impl: str = "auto", write_out: bool = False, prepared: bool = False) -> None:
        self.impl = impl
        self.write_out = write_out
        self.prepared = prepared
        self.variant = " ".join(["plan"] * prepared + ["out="] * write_out)
        self.where = "host" if self.variant else ""

    @property
    def version(self) -> str:
        """Of this package."""
        return microsdpa.__version__

    def identity(self, case: Case, tensors: Tensors) -> dict[str, object]:
        """The kernel, and what was asked for."""
        found = microsdpa.explain(*tensors, **_options(case), impl=self.impl)
        return signatures.of_call(found, tensors[0]) | {"requested": self.impl}

    def bind(self, case: Case, tensors: Tensors, out: torch.Tensor) -> Call:
        """The plain spelling of each call: a timed call carries no argument that it does not need."""
        query, key, value = tensors
        options: dict[str, object] = {}
        if not is_plain(case):
            options |= _options(case)
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


class MicrosdpaEightBit(Implementation):
    """microsdpa.sdpa(precision=), which quantises in the call, or its attention alone, on codes made before."""

    name = "microsdpa"

    def __init__(self, precision: Operands, codes: bool = False) -> None:
        self.precision: Operands = precision
        self.codes = codes
        self.arithmetic = "e4m3" if precision == "fp8" else precision
        self.op = "sdpa" if codes else "quantize+sdpa"
        self.variant = f"{precision} codes" if codes else precision
        self.where = "device" if codes else ""

    @property
    def version(self) -> str:
        """Of this package."""
        return microsdpa.__version__

    def identity(self, case: Case, tensors: Tensors) -> dict[str, object]:
        """The kernel, and the one that quantises where the call does."""
        found = microsdpa.explain(*tensors, **_options(case), precision=self.precision, impl=_impl(tensors))
        return signatures.of_call(found, tensors[0], quantizes=not self.codes) | {"precision": self.precision}

    def bind(self, case: Case, tensors: Tensors, out: torch.Tensor) -> Call:
        """On codes there is no public call: a query of two codes, as some precisions make, is this library's own."""
        query, key, value = tensors
        options, impl = _options(case), _impl(tensors)
        if not self.codes:
            if impl == "auto" and is_plain(case):
                sdpa, precision = microsdpa.sdpa, self.precision
                return lambda: sdpa(query, key, value, precision=precision)
            return lambda: microsdpa.sdpa(query, key, value, precision=self.precision, impl=impl, **options)
        how = False, case.causal, case.scale, options["enable_gqa"], None, impl
        call = eight_bit.check(query, key, value, self.precision, eight_bit.NO_SCALES, *how)
        assert call is not None
        codes = quantize_query_key_value(*tensors, RECIPES[self.precision], call.emulated)

        def attend() -> torch.Tensor:
            run_attention(call.selection.spec, call.problem, codes, out, None, call.scale, call.emulated)
            return out

        return attend


def _impl(tensors: Tensors) -> str:
    return "auto" if tensors[0].is_cuda else "emulate"


def ours(impl: str) -> list[Implementation]:
    """Every way to call this library that is measured; those with 8 bits have an `arithmetic`."""
    ways = [(write_out, prepared) for prepared in (False, True) for write_out in (False, True)]
    found: list[Implementation] = [Microsdpa(impl, write_out, prepared) for write_out, prepared in ways]
    return found + [MicrosdpaEightBit(precision, codes) for precision in OPERANDS for codes in (False, True)]
