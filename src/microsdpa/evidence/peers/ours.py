"""This library: an output allocated, as peers do, or given; plain and prepared calls; 16 and 8 bits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

import microsdpa
from microsdpa import Quantized
from microsdpa.call import call
from microsdpa.call.options import Options
from microsdpa.call.validate import check
from microsdpa.evidence import signatures
from microsdpa.evidence.inputs import Case, make_masks, masks_of
from microsdpa.evidence.peers import quantized
from microsdpa.evidence.peers.implementation import Call, Implementation, Tensors, is_plain
from microsdpa.execution.choice import problem_of
from microsdpa.execution.quantized import quantize_query_key_value, run_attention
from microsdpa.kernels import family_named
from microsdpa.kernels.eight_bit import ALL_HEAD_DIMS
from microsdpa.kernels.problem import PRECISIONS, Precision
from microsdpa.kernels.quantize.spec import SCHEMES
from microsdpa.kernels.select import select

WIDE_PROBABILITIES = ("ladder/08_fp8_scalar", "ladder/09_fp8_mma")
"""Rungs on E4M3 values that do not round P to E4M3, but to 16 bits or not at all."""

ARITHMETIC: dict[str, str] = {"fp8": "e4m3"}
"""Of operands that are called otherwise than what they are rounded to."""


def _options(case: Case) -> dict[str, Any]:
    return {"causal": case.causal, "scale": case.scale, "enable_gqa": case.kv_heads != case.heads}


class Microsdpa(Implementation):
    """microsdpa.sdpa, or a microsdpa.plan, with one `impl`."""

    name = "microsdpa"
    takes_masks = True

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
        query, key, value = tensors
        masks = make_masks(case, query.device.type)
        found = microsdpa.explain(query, key, value, **_options(case), impl=self.impl, **masks)
        kind = masks_of(case, query.device.type).kind_in_memory
        of_masks = {"mask_kind": asdict(kind)} if kind else {}
        return signatures.of_call(found, tensors[0]) | {"requested": self.impl} | of_masks

    def bind(self, case: Case, tensors: Tensors, out: torch.Tensor) -> Call:
        """The plain spelling of each call: a timed call carries no argument that it does not need."""
        query, key, value = tensors
        masks = make_masks(case, query.device.type)
        options: dict[str, object] = {}
        if not is_plain(case):
            options |= _options(case) | masks
        if self.impl != "auto":
            options["impl"] = self.impl
        if self.prepared:
            plan = microsdpa.plan(query, key, value, **options)  # type: ignore[arg-type]
            given: dict[str, Any] = {name: mask for name, mask in masks.items() if name not in ("window", "softcap")}
            if self.write_out:
                return lambda: plan(query, key, value, out=out, **given)
            return lambda: plan(query, key, value, **given)
        if self.write_out:
            options["out"] = out
        sdpa = microsdpa.sdpa
        return lambda: sdpa(query, key, value, **options)  # type: ignore[call-overload]


class MicrosdpaEightBit(Implementation):
    """microsdpa.sdpa(precision=), which quantizes in the call, or its attention alone, on quantized values."""

    name = "microsdpa"

    def __init__(self, precision: Precision, is_quantized: bool = False) -> None:
        self.precision: Precision = precision
        self.is_quantized = is_quantized
        self.arithmetic = ARITHMETIC.get(SCHEMES[precision].operands, precision)
        self.op = "sdpa" if is_quantized else "quantize+sdpa"
        self.variant = f"{precision} quantized" if is_quantized else precision
        self.where = "device" if is_quantized else ""

    @property
    def version(self) -> str:
        """Of this package."""
        return microsdpa.__version__

    def identity(self, case: Case, tensors: Tensors) -> dict[str, object]:
        """The kernel, and the one that quantizes where the call does."""
        found = microsdpa.explain(*tensors, **_options(case), precision=self.precision, impl=_impl(tensors))
        return signatures.of_call(found, tensors[0], quantizes=not self.is_quantized) | {"precision": self.precision}

    def bind(self, case: Case, tensors: Tensors, out: torch.Tensor) -> Call:
        """On quantized values there is no public call: queries of two terms, as some precisions make, are internal."""
        query, key, value = tensors
        options, impl = _options(case), _impl(tensors)
        if not self.is_quantized:
            if impl == "auto" and is_plain(case):
                sdpa, precision = microsdpa.sdpa, self.precision
                return lambda: sdpa(query, key, value, precision=precision)
            return lambda: microsdpa.sdpa(query, key, value, precision=self.precision, impl=impl, **options)
        given = Options(False, case.causal, case.scale, options["enable_gqa"], impl=impl, precision=self.precision)
        checked = check(call.Call(tensors, options=given))
        problem = problem_of(checked)
        spec = select(problem, checked.kernel).spec
        inputs = quantize_query_key_value(*tensors, SCHEMES[self.precision], checked.emulated)

        def attend() -> torch.Tensor:
            run_attention(spec, problem, inputs, out, None, checked.factor, checked.emulated)
            return out

        return attend


@dataclass(frozen=True)
class QuantizedTensors:
    """Q, K and V as a rung with 8-bit operands is measured with: E4M3, a scale a head."""

    quantized: tuple[Quantized, Quantized, Quantized]

    @classmethod
    def of(cls, tensors: Tensors) -> QuantizedTensors:
        """Quantized values of 16-bit tensors."""
        query, key, value = (microsdpa.quantize(tensor, "e4m3", "head") for tensor in tensors)
        return cls((query, key, value))

    @property
    def values(self) -> Tensors:
        """What sdpa takes."""
        query, key, value = (one.values for one in self.quantized)
        return query, key, value

    @property
    def scales(self) -> dict[str, Any]:
        """And its scales."""
        return {f"{name}_scale": one.scale for name, one in zip("qkv", self.quantized, strict=True)}

    def dequantized(self) -> Tensors:
        """The tensors that they stand for, in FP32."""
        query, key, value = (one.dequantize() for one in self.quantized)
        return query, key, value


class MicrosdpaRung(Implementation):
    """microsdpa.sdpa on quantized values that were made before, by a rung of the ladder that takes such."""

    name = "microsdpa"
    arithmetic = "e4m3"

    def __init__(self, impl: str) -> None:
        self.impl = impl
        self.rounding = f"{quantized.QUANTIZED}{'float16' if impl in WIDE_PROBABILITIES else 'e4m3'}"

    @property
    def version(self) -> str:
        """Of this package."""
        return microsdpa.__version__

    def stands_for(self, case: Case, tensors: Tensors) -> Tensors | None:
        """Its quantized values times their scales."""
        return QuantizedTensors.of(tensors).dequantized()

    def identity(self, case: Case, tensors: Tensors) -> dict[str, object]:
        """The kernel, and what its operands are."""
        values, options = self._call(case, tensors)
        found = microsdpa.explain(*values, **options)
        return signatures.of_call(found, tensors[0]) | {"requested": self.impl, "operands": "fp8"}

    def bind(self, case: Case, tensors: Tensors, out: torch.Tensor) -> Call:
        """The public call."""
        values, options = self._call(case, tensors)
        sdpa = microsdpa.sdpa
        return lambda: sdpa(*values, out=out, **options)

    def _call(self, case: Case, tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
        made = QuantizedTensors.of(tensors)
        impl = self.impl if tensors[0].is_cuda else f"emulate:{self.impl}".removesuffix(":auto")
        return made.values, made.scales | _options(case) | {"impl": impl}


class MicrosdpaOneTerm(MicrosdpaRung):
    """The call of a user who has quantized values: one term a query, a scale a head, as 8-bit peers compute.

    It is held against the tensors that the quantized values were made of, as those peers are.
    """

    where = "device"
    variant = "e4m3, one term"

    def __init__(self) -> None:
        super().__init__("auto")
        self.rounding = ""

    def refuses(self, case: Case) -> str:
        """The head dimensions that 8 bits lack."""
        return "" if case.head_dim in ALL_HEAD_DIMS else f"8-bit operands have head dimensions {ALL_HEAD_DIMS}"

    def stands_for(self, case: Case, tensors: Tensors) -> Tensors | None:
        """Nothing else than the tensors."""
        return None


def _impl(tensors: Tensors) -> str:
    return "auto" if tensors[0].is_cuda else "emulate"


def ours(impl: str) -> list[Implementation]:
    """Every way to call this library that is measured; those with 8 bits have an `arithmetic`."""
    family = family_named(impl)
    if family and family.eight_bit:
        return [MicrosdpaRung(impl)]
    ways = [(write_out, prepared) for prepared in (False, True) for write_out in (False, True)]
    found: list[Implementation] = [Microsdpa(impl, write_out, prepared) for write_out, prepared in ways]
    if impl == "auto":
        found.append(MicrosdpaOneTerm())
    return found + [
        MicrosdpaEightBit(precision, is_quantized) for precision in PRECISIONS for is_quantized in (False, True)
    ]
