"""Doors of suite doors to 8-bit operands beside masks, and to 8-bit keys and values beside queries of 16 bits."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

import microsdpa
from microsdpa import Quantized
from microsdpa.evidence import doors as plain
from microsdpa.evidence import signatures
from microsdpa.evidence.doors import HEADLINE, Door, Side, against_oracle, not_torchs
from microsdpa.evidence.inputs import Case, Masking, dense_mask, make_masks, masks_of
from microsdpa.evidence.peers import Call, Tensors
from microsdpa.evidence.peers.ours import ARITHMETIC, QuantizedTensors
from microsdpa.evidence.peers.quantized import QUANTIZED
from microsdpa.kernels.problem import CacheKind, CacheType, Precision
from microsdpa.kernels.quantize.spec import SCHEMES

MASKINGS: tuple[Masking, ...] = (
    "left padding",
    "float32",
    "window",
    "documents",
    "blocks 50%",
    "softcap",
    "alibi",
    "sinks",
)
"""One of each argument of sdpa that is a mask, and numbers beside booleans."""
QUANTIZING: dict[Precision, Masking] = {
    "fp8": "left padding",
    "fp8_fast": "left padding",
    "int8_fp8": "left padding",
    "int8_fp16": "window",
}
"""A mask beside each precision, of which the last one's kernel reads none from memory."""
DECODING = Case(8, 32, 1, 1024, 128, heads_kv=8, dtype="bfloat16", causal="lower_right")
CACHE_MASKINGS: tuple[Masking, ...] = ("window", "softcap", "alibi", "sinks")
LACKING = "8-bit arithmetic"


def _where(tensors: Tensors, kernel: str) -> dict[str, Any]:
    """No argument on a GPU, as programs call; elsewhere the kernel runs in the emulator."""
    return {} if tensors[0].is_cuda else {"impl": f"emulate:{kernel}"}


def _masks(case: Case, tensors: Tensors) -> dict[str, Any]:
    """The arguments of a case's masks, of which documents are given by their ids."""
    if "documents" in case.masks:
        return {"document_ids": plain.document_ids(case, tensors[0].device)}
    return make_masks(case, tensors[0].device.type)


def _kind(case: Case, tensors: Tensors) -> dict[str, Any]:
    kind = masks_of(case, tensors[0].device.type).kind_in_memory
    return {"mask_kind": asdict(kind)} if kind else {}


def _of_values(case: Case, tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    made = QuantizedTensors.of(tensors)
    return made.values, made.scales | _masks(case, tensors) | _where(tensors, "hopper/latency_8bit")


def _values(case: Case, tensors: Tensors) -> Call:
    given, options = _of_values(case, tensors)
    return lambda: microsdpa.sdpa(*given, **options)


def _values_checked(case: Case, tensors: Tensors, found: torch.Tensor) -> tuple[dict[str, object], str]:
    return against_oracle(case, QuantizedTensors.of(tensors).dequantized(), found, QUANTIZED + "e4m3")


def _values_ran(case: Case, tensors: Tensors) -> dict[str, Any]:
    given, options = _of_values(case, tensors)
    ran = signatures.of_call(microsdpa.explain(*given, **options), tensors[0])
    return ran | {"requested": "auto", "operands": "fp8"} | _kind(case, tensors)


def _quantizing_options(case: Case, precision: Precision, tensors: Tensors) -> dict[str, Any]:
    kernel = "hopper/throughput_8bit_qk" if precision == "int8_fp16" else "hopper/latency_8bit"
    return _masks(case, tensors) | _where(tensors, kernel)


def _quantizing(case: Case, precision: Precision, tensors: Tensors) -> Call:
    options = _quantizing_options(case, precision, tensors)
    return lambda: microsdpa.sdpa(*tensors, precision=precision, **options)


def _quantizing_ran(case: Case, precision: Precision, tensors: Tensors) -> dict[str, Any]:
    options = _quantizing_options(case, precision, tensors)
    found = microsdpa.explain(*tensors, precision=precision, **options)
    return signatures.of_call(found, tensors[0], quantizes=True) | {"precision": precision} | _kind(case, tensors)


class Cache(NamedTuple):
    """8-bit keys and values [B, H_kv, S, D], and what their scales belong to."""

    format: CacheType
    granularity: Literal["head", "token"]

    def of(self, tensors: Tensors) -> tuple[Quantized, Quantized]:
        """Keys and values of 16 bits as such ones."""
        one_each: dict[str, Any] = {"granularity": "block", "block": 1} if self.granularity == "token" else {}
        shared: dict[str, Any] = {"granularity": "head"} | one_each
        key, value = (microsdpa.quantize(tensor, self.format, **shared) for tensor in tensors[1:])
        return key, value

    def call(self, case: Case, tensors: Tensors) -> Call:
        """sdpa beside them."""
        key, value = self.of(tensors)
        options: dict[str, Any] = {"k_scale": key.scale, "v_scale": value.scale, "causal": case.causal}
        options |= {"enable_gqa": case.kv_heads != case.heads} | make_masks(case, tensors[0].device.type)
        options |= _where(tensors, "ampere/varlen")
        query, keys, values = tensors[0], key.values, value.values
        return lambda: microsdpa.sdpa(query, keys, values, **options)

    def checked(self, case: Case, tensors: Tensors, found: torch.Tensor) -> tuple[dict[str, object], str]:
        """The output against the oracle of the numbers that keys and values stand for."""
        key, value = self.of(tensors)
        return against_oracle(case, (tensors[0], key.dequantize(), value.dequantize()), found)

    def ran(self, case: Case, _: Tensors) -> dict[str, Any]:
        """The kernel for sequences of many lengths."""
        kind = CacheKind(self.format, self.granularity == "token")
        return plain.of_varlen(case, 0, kind, masks_of(case).kind)


def _dense(case: Case, tensors: Tensors) -> Call:
    mask = dense_mask(case, tensors[0].device.type) if case.masks else None
    return lambda: F.scaled_dot_product_attention(*tensors, attn_mask=mask, enable_gqa=True)


def doors(headline: Case = HEADLINE, decoding: Case = DECODING) -> Iterator[Door]:
    """Each mask beside E4M3 values, one beside each precision, and one token of sequences with an 8-bit cache.

    torch's side of the latter is its call on a cache of 16 bits.
    """
    for masking in MASKINGS:
        case = replace(headline, masks=(masking,))
        side = Side(functools.partial(_values, case), check=functools.partial(_values_checked, case))
        yield Door("sdpa of 8-bit values", side, not_torchs(LACKING), case, ran=functools.partial(_values_ran, case))
    for precision, masking in QUANTIZING.items():
        case = replace(headline, masks=(masking,))
        arithmetic = ARITHMETIC.get(SCHEMES[precision].operands, precision)
        yield Door(
            f"sdpa(precision={precision})",
            Side(
                functools.partial(_quantizing, case, precision),
                check=functools.partial(against_oracle, case, arithmetic=arithmetic),
            ),
            not_torchs(LACKING),
            case,
            ran=functools.partial(_quantizing_ran, case, precision),
        )
    for cache in (Cache("e4m3", "head"), Cache("int8", "head"), Cache("e4m3", "token"), Cache("int8", "token")):
        maskings: tuple[Masking | None, ...] = (None, *CACHE_MASKINGS) if cache == Cache("e4m3", "head") else (None,)
        for masked in maskings:
            case = replace(decoding, masks=(masked,) if masked else ())
            side = Side(functools.partial(cache.call, case), check=functools.partial(cache.checked, case))
            lacking = masked in ("softcap", "sinks")
            torchs = not_torchs(str(masked)) if lacking else Side(functools.partial(_dense, case))
            text = f"{cache.format} cache, a scale of each {cache.granularity}"
            yield Door("sdpa", side, torchs, case, text, ran=functools.partial(cache.ran, case))
