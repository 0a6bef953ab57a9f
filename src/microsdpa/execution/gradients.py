"""Gradients by this library's own kernels, on a GPU or in the emulator."""

from __future__ import annotations

import math

import torch

from microsdpa.call import tensors
from microsdpa.call.call import Inputs
from microsdpa.call.masks import Masks
from microsdpa.execution.quantized import Launch, run
from microsdpa.kernels import emulated_target
from microsdpa.kernels.ampere.backward import spec as backward_spec
from microsdpa.kernels.ampere.backward.spec import Tiling
from microsdpa.kernels.params import BackwardParams, MaskedParams, Params, Strides
from microsdpa.kernels.problem import ELEMENT_BYTES, VECTOR_BYTES, Causal, Problem
from microsdpa.runtime import launcher


def problem_of(given: dict[str, torch.Tensor], causal: Causal | None, masks: Masks, target: str) -> Problem:
    """The problem of a call's gradients; `given` are all [B, H, S, D] tensors by name."""
    query, key = given["query"], given["key"]
    dtype = tensors.DTYPES[query.dtype]
    return Problem(
        batch=query.shape[0],
        heads=query.shape[1],
        heads_kv=key.shape[1],
        seqlen_q=query.shape[2],
        seqlen_k=key.shape[2],
        head_dim=query.shape[3],
        dtype=dtype,
        causal=causal,
        mask=masks.kind,
        target=target,
        alignment=VECTOR_BYTES if all(map(tensors.is_aligned, given.values())) else ELEMENT_BYTES[dtype],
    )


def parameters(
    problem: Problem, given: dict[str, torch.Tensor], factor: float, masks: Masks
) -> tuple[BackwardParams, dict[str, int]]:
    """The kernels' parameter without addresses, and where each tensor's address belongs in it."""
    position, lowest, diagonal = masks.bounds(problem.causal, problem.seqlen_q, problem.seqlen_k)
    forward = MaskedParams(
        call=Params(
            batch=problem.batch,
            heads=problem.heads,
            heads_kv=problem.heads_kv,
            seqlen_q=problem.seqlen_q,
            seqlen_k=problem.seqlen_k,
            diagonal=diagonal,
            scale_log2=factor * math.log2(math.e),
        ),
        position=position,
        lowest=lowest,
        softcap_log2=(masks.softcap or 0.0) * math.log2(math.e),
    )
    key_heads, query_heads = backward_spec.heads_together(problem)
    params = BackwardParams(forward=forward, key_heads=key_heads, query_heads=query_heads)
    places: dict[str, int] = {}
    for name, tensor in given.items():
        strides = tensor.stride()[:3]
        if name.startswith("grad_"):
            setattr(params, f"{name}_strides", Strides(*strides))
        else:
            setattr(params.forward.call, f"{name}_strides", type(forward.call.query_strides)(*strides))
    for name in ("query", "key", "value", "out", "lse", "workspace"):
        places[name] = getattr(Params, name).offset
    for name, theirs in (("mask", "attn_mask"), ("slopes", "alibi_slopes"), ("sinks", "sinks")):
        places[theirs] = getattr(MaskedParams, name).offset
    for name in ("grad_out", "grad_lse", "grad_query", "grad_key", "grad_value"):
        places[name] = getattr(BackwardParams, name).offset
    if masks.attn_mask is not None:
        whole = problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k
        *outer, params.forward.mask_column_stride = masks.attn_mask.expand(whole).stride()
        params.forward.mask_strides = type(forward.mask_strides)(*outer)
    if masks.alibi_slopes is not None:
        strides_of = masks.alibi_slopes.expand(problem.batch, problem.heads).stride()
        params.forward.slope_batch_stride, params.forward.slope_head_stride = strides_of
    if masks.sinks is not None:
        (params.forward.sink_head_stride,) = masks.sinks.stride()
    return params, places


def gradients(
    grads: tuple[torch.Tensor, torch.Tensor | None],
    inputs: Inputs,
    result: tuple[torch.Tensor, torch.Tensor],
    causal: Causal | None,
    scale: float | None,
    masks: Masks,
    tiling: Tiling | None = None,
    target: str | None = None,
) -> list[torch.Tensor]:
    """Gradients of query, key and value; arguments as in backward.gradients()."""
    (grad_out, grad_lse), (query, key, value), (out, lse) = grads, inputs, result
    emulated = query.device.type == "cpu"
    if grad_out.stride(3) != 1 and grad_out.shape[3] > 1:
        grad_out = grad_out.contiguous()
    given = {"query": query, "key": key, "value": value, "out": out, "grad_out": grad_out}
    made = {f"grad_{name}": torch.empty_like(given[name]) for name in ("query", "key", "value")}
    target = target or (emulated_target("auto") if emulated else launcher.target_of_device(query.device))
    problem = problem_of(given | made, causal, masks, target)
    factor = problem.head_dim**-0.5 if scale is None else scale
    params, places = parameters(problem, given | made, factor, masks)
    read = given | {"lse": lse.contiguous()} | masks.tensors
    if grad_lse is not None:
        read["grad_lse"] = grad_lse.float().contiguous()
    workspace = torch.empty(backward_spec.workspace_bytes(problem), dtype=torch.uint8, device=query.device)
    tiling = tiling or backward_spec.choose(problem)
    pointers = tuple((places[name], name, 0) for name in (*read, *made, "workspace"))
    terms = Launch(backward_spec.terms(problem), backward_spec.terms_grid(problem), params, pointers)
    sums = Launch(
        backward_spec.gradients(problem, tiling), backward_spec.gradients_grid(problem, tiling), params, pointers
    )
    run(terms, {name: tensor for name, tensor in read.items() if name != "value"}, {"workspace": workspace}, emulated)
    only_terms = "out", "lse", "grad_lse", "sinks"
    summed = {name: tensor for name, tensor in read.items() if name not in only_terms}
    run(sums, summed | {"workspace": workspace}, made, emulated)
    return list(made.values())
