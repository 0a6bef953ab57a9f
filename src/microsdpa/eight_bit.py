"""Attention with 8-bit operands: sdpa(precision=), which quantises first, and sdpa of codes with their scales.

Calls are made of one or two launches whose parameters Python fills: they are asynchronous and may be captured in a CUDA
graph, as those of sdpa; on the host they take longer, because no plan is kept for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from microsdpa import arguments, eight_bit_arguments
from microsdpa.errors import UnsupportedProblem
from microsdpa.problem import Causal, target_of
from microsdpa.quantize import CODE_DTYPE
from microsdpa.runtime import launcher
from microsdpa.specs import KernelSpec, emulated_target
from microsdpa.specs.eight_bit import (
    EIGHT_BIT_FAMILIES,
    EightBitProblem,
    eight_bit_family_named,
)
from microsdpa.specs.eight_bit_params import (
    ByteStrides,
    ChannelScales,
    EightBitParams,
    QuantizeParams,
    RowScales,
)
from microsdpa.specs.quantize import RECIPES, Recipe, fused, fused_grid
from microsdpa.specs.spec import Grid

ALL_ROWS = 31
"""Shift that gives every row the first scale."""


@dataclass(frozen=True)
class Codes:
    """Quantised operands of one call.

    Attributes:
        query: [B, H, S_q, terms * D] codes; with two terms a row's second half is what its first half lacks.
        key: [B, H_kv, S_k, D] codes.
        value: [B, H_kv, S_k, D] codes, or the tensor itself where `value_scale` is None.
        query_scale: a scalar, [B, H] or [B, H, blocks of S_q], in FP32.
        key_scale: a scalar, [B, H_kv] or [B, H_kv, blocks of S_k].
        value_scale: a scalar, [B, H_kv] or [B, H_kv, D].
        key_mean: [B, H_kv, D]: what was taken off K.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_scale: torch.Tensor
    key_scale: torch.Tensor
    value_scale: torch.Tensor | None
    key_mean: torch.Tensor | None = None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    precision: str | None,
    scales: tuple[object, object, object],
    is_causal: bool,
    causal: Causal | None,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    out: torch.Tensor | None,
    impl: str,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """sdpa for a call that names a precision or gives scales."""
    alignment = arguments.check_causal(is_causal, causal)
    scale = arguments.check_scale(scale)
    kernel, emulated = eight_bit_arguments.check_impl(impl)
    if precision is not None:
        operands = eight_bit_arguments.check_precision(precision, scales)
        arguments.check_tensors(query, key, value, enable_gqa)
        dtype, terms = query.dtype, RECIPES[operands].query_terms
    else:
        operands, dtype = eight_bit_arguments.check_codes(query, key, value, enable_gqa, out)
        terms = 1
    arguments.check_grad({"query": query, "key": key, "value": value})
    eight_bit_arguments.check_place(query, emulated)
    result = torch.empty(query.shape, dtype=dtype, device=query.device)
    if out is not None:
        meets = any(arguments.memory_ranges_meet(out, t) for t in (query, key, value) if isinstance(out, torch.Tensor))
        arguments.check_out(out, result, meets)
        result = out
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device) if return_lse else None
    if query.numel() == 0 or key.shape[2] == 0:
        result.zero_()
        return result if lse is None else (result, lse.fill_(-torch.inf))
    eight_bit_arguments.check_aligned({"query": query, "key": key, "value": value, "out": result})

    problem = EightBitProblem(
        batch=query.shape[0],
        heads=query.shape[1],
        heads_kv=key.shape[1],
        seqlen_q=query.shape[2],
        seqlen_k=key.shape[2],
        head_dim=query.shape[3],
        dtype=arguments.DTYPES[dtype],
        causal=alignment,
        target=_target(query, emulated),
        operands=operands,
        query_terms=terms,
    )
    spec = choose(problem, kernel)
    if precision is not None:
        codes = quantize_query_key_value(query, key, value, RECIPES[operands], emulated)
    else:
        codes = Codes(query, key, value, *eight_bit_arguments.check_scales(query, key, value, scales))
    factor = problem.head_dim**-0.5 if scale is None else scale
    run_attention(spec, problem, codes, result, lse, factor, emulated)
    if lse is not None and codes.key_mean is not None:
        # Scores were those of K without its mean.
        mean = codes.key_mean.repeat_interleave(problem.heads // problem.heads_kv, dim=1)
        lse += factor * (query.float() @ mean[..., None]).squeeze(-1)
    return result if lse is None else (result, lse)


def choose(problem: EightBitProblem, kernel: str) -> KernelSpec:
    """The kernel called `kernel`, or for "auto" the first that computes the problem.

    Raises:
        UnsupportedProblem: there is none.
    """
    named = eight_bit_family_named(kernel)
    reasons = []
    for family in EIGHT_BIT_FAMILIES if named is None else (named,):
        result = family.specify(problem)
        if isinstance(result, KernelSpec):
            return result
        reasons.append((family.name, result))
    why = "; ".join(f"{name}: {rejection.reason}" for name, rejection in reasons)
    raise UnsupportedProblem(why, nearest=reasons[0][1].nearest)


def quantize_query_key_value(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, recipe: Recipe, emulated: bool
) -> Codes:
    """Quantise validated FP16 or BF16 tensors in one launch; quantize.py says what the codes are."""
    batch, heads, seqlen_q, head_dim = query.shape
    heads_kv, seqlen_k = key.shape[1], key.shape[2]
    device = query.device

    def codes(like: torch.Tensor, code: str, terms: int = 1) -> torch.Tensor:
        return torch.empty((*like.shape[:3], terms * head_dim), dtype=CODE_DTYPE[code], device=device)

    shapes = {
        "query_scale": (batch, heads, -(-seqlen_q // recipe.block)),
        "key_scale": (batch, heads_kv, -(-seqlen_k // recipe.block)),
        "value_scale": (batch, heads_kv, head_dim) if recipe.value else None,
        "key_mean": (batch, heads_kv, head_dim) if recipe.smooth else None,
    }
    sizes = [math.prod(shape) if shape else 0 for shape in shapes.values()]
    floats = torch.empty(sum(sizes), dtype=torch.float32, device=device)
    parts = {
        name: part.view(shape) if shape else None
        for (name, shape), part in zip(shapes.items(), torch.split(floats, sizes), strict=True)
    }
    value_codes = codes(value, recipe.value) if recipe.value else None
    query_scale, key_scale = parts["query_scale"], parts["key_scale"]
    assert query_scale is not None
    assert key_scale is not None
    result = Codes(
        query=codes(query, recipe.code, recipe.query_terms),
        key=codes(key, recipe.code),
        value=value if value_codes is None else value_codes,
        query_scale=query_scale,
        key_scale=key_scale,
        value_scale=parts["value_scale"],
        key_mean=parts["key_mean"],
    )
    inputs = {"query": query, "key": key, "value": value}
    outputs = {"query_codes": result.query, "key_codes": result.key, "floats": floats}
    if value_codes is not None:
        outputs["value_codes"] = value_codes

    def fill(addresses: Mapping[str, int]) -> QuantizeParams:
        floats_at = {
            name: addresses["floats"] + 4 * int(part.storage_offset())
            for name, part in parts.items()
            if part is not None
        }
        return QuantizeParams(
            **{name: address for name, address in addresses.items() if name != "floats"},
            **floats_at,
            query_strides=_byte_strides(query),
            key_strides=_byte_strides(key),
            value_strides=_byte_strides(value),
            batch=batch,
            heads=heads,
            heads_kv=heads_kv,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            root=head_dim**-0.5,
        )

    spec = fused(recipe, arguments.DTYPES[query.dtype], head_dim)
    grid = fused_grid(recipe, batch, heads, heads_kv, seqlen_q, seqlen_k)
    _launch(spec, grid, fill, inputs, outputs, emulated)
    return result


def run_attention(
    spec: KernelSpec,
    problem: EightBitProblem,
    codes: Codes,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    emulated: bool,
) -> None:
    """Run an attention kernel on quantised operands; `scale` is the softmax's."""
    inputs = {"query": codes.query, "key": codes.key, "value": codes.value}
    inputs |= {"query_scale": codes.query_scale, "key_scale": codes.key_scale}
    if codes.value_scale is not None:
        inputs["value_scale"] = codes.value_scale
    outputs = {"out": out} if lse is None else {"out": out, "lse": lse}

    def fill(addresses: Mapping[str, int]) -> EightBitParams:
        params = EightBitParams(
            **{name: addresses[name] for name in ("query", "key", "value")},
            **{name: addresses[name] for name in outputs},
            query_strides=_byte_strides(codes.query),
            key_strides=_byte_strides(codes.key),
            value_strides=_byte_strides(codes.value),
            out_strides=_byte_strides(out),
            query_scale=_row_scales(codes.query_scale, addresses["query_scale"], problem.seqlen_q),
            key_scale=_row_scales(codes.key_scale, addresses["key_scale"], problem.seqlen_k),
            batch=problem.batch,
            heads=problem.heads,
            heads_kv=problem.heads_kv,
            seqlen_q=problem.seqlen_q,
            seqlen_k=problem.seqlen_k,
            diagonal=problem.seqlen_k - problem.seqlen_q if problem.causal == "lower_right" else 0,
            scale_log2=scale * math.log2(math.e),
        )
        if codes.value_scale is not None:
            strides = (*codes.value_scale.stride(), 0, 0, 0)[:3]
            params.value_scale = ChannelScales(addresses["value_scale"], *strides)
        return params

    _launch(spec, spec.grid(problem), fill, inputs, outputs, emulated)


def _byte_strides(tensor: torch.Tensor) -> ByteStrides:
    return ByteStrides(*(stride * tensor.element_size() for stride in tensor.stride()[:3]))


def _row_scales(scale: torch.Tensor, address: int, seqlen: int) -> RowScales:
    batch, head = (*scale.stride(), 0, 0)[:2]
    if scale.dim() < 3:
        return RowScales(address, batch, head, ALL_ROWS, 0)
    block = eight_bit_arguments.block_of(seqlen, scale.shape[2])
    return RowScales(address, batch, head, block.bit_length() - 1, scale.stride(2))


def _target(query: torch.Tensor, emulated: bool) -> str:
    if emulated:
        return emulated_target("auto")
    if reason := launcher.device_error():
        raise UnsupportedProblem(reason, nearest="CPU tensors with impl='emulate'")
    return target_of(torch.cuda.get_device_capability(query.device))


def _launch(
    spec: KernelSpec,
    grid: Grid,
    fill: Callable[[Mapping[str, int]], EightBitParams | QuantizeParams],
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    emulated: bool,
) -> None:
    """Run a kernel whose parameters `fill` makes of the tensors' addresses."""
    if emulated:
        from microsdpa.emulate import run  # not imported with the package: few programs need it

        run.one_kernel(spec, grid, fill, inputs, outputs)
        return
    device = next(iter(outputs.values())).device
    params = fill({name: tensor.data_ptr() for name, tensor in {**inputs, **outputs}.items()})
    launcher.launch_one(spec, target_of(torch.cuda.get_device_capability(device)), grid, bytes(params), device.index)
