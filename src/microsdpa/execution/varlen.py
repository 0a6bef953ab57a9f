"""Calls with sequences of many lengths: their launch, the emulator, torch on a CPU."""

from __future__ import annotations

import ctypes
import math

import torch

from microsdpa import reference
from microsdpa.call.masks import Masks
from microsdpa.call.options import VARLEN_OPTIONS
from microsdpa.call.validate import Checked
from microsdpa.execution import torch_cpu
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.ampere.varlen import spec as kernel
from microsdpa.kernels.problem import Problem
from microsdpa.runtime import launcher


def foreign_call(checked: Checked, out: torch.Tensor) -> launcher.Call:
    """The launcher's arguments for a call."""
    call, masks, sequences = checked.call, checked.masks, checked.call.sequences
    assert sequences is not None
    code = VARLEN_OPTIONS[checked.causal is not None, call.options.impl]
    given = *call.inputs, out, call.return_lse, code, checked.scale
    tensors = None, masks.alibi_slopes, masks.sinks
    return *given, *tensors, *masks.ends, masks.softcap, *launcher.NO_SCALES, *sequences


def parameters(checked: Checked, problem: Problem, spec: KernelSpec, addresses: dict[str, int]) -> ctypes.Structure:
    """The kernel's parameter, as runtime/varlen.h fills it."""
    from microsdpa.emulate import abi

    call, masks, sequences = checked.call, checked.masks, checked.call.sequences
    assert sequences is not None
    query, key, value = call.inputs
    page_size = key.shape[1] if sequences.page_table is not None else 1
    shift = 32 + (page_size - 1).bit_length()
    left, right = masks.ends
    batch_stride, head_stride = lse_strides(checked.lse_shape)
    params = abi.VarlenParams(
        **addresses,
        lse_batch_stride=batch_stride,
        lse_head_stride=head_stride,
        table_stride=sequences.page_table.stride(0) if sequences.page_table is not None else 0,
        page_factor=-(-(1 << shift) // page_size),
        page_shift=shift,
        page_size=page_size,
        pages=key.shape[0],
        most_keys=problem.seqlen_k,
        most_queries=query.shape[0 if sequences.query_offsets is not None else 1],
        batch=problem.batch,
        heads=problem.heads,
        heads_kv=problem.heads_kv,
        left=min(left, kernel.MOST_KEYS),
        right=0 if checked.causal else min(right, kernel.MOST_KEYS),
        divides_keys=kernel.divides_keys(spec, problem, sequences.queries(query)),
        scale_log2=checked.factor * math.log2(math.e),
        softcap_log2=(masks.softcap or 0.0) * math.log2(math.e),
    )
    for name, tensor in (("query", query), ("key", key), ("value", value), ("out", checked.output())):
        setattr(params, f"{name}_strides", (ctypes.c_int64 * 3)(*row_strides(tensor)))
    if masks.alibi_slopes is not None:
        slopes = masks.alibi_slopes.expand(problem.batch, problem.heads)
        params.slope_batch_stride, params.slope_head_stride = slopes.stride()
    if masks.sinks is not None:
        (params.sink_head_stride,) = masks.sinks.stride()
    return params


def row_strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Of [B, S, H, D], or [S, H, D]: from batch entry to batch entry (0 without), head to head and row to row."""
    *batch, row, head, _ = tensor.stride()
    return batch[0] if batch else 0, head, row


def lse_strides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Of [B, H, S_q], or [H, queries]: from batch entry to batch entry (0 without) and head to head."""
    return (shape[1] * shape[2], shape[2]) if len(shape) == 3 else (0, shape[1])


def emulate(checked: Checked, problem: Problem, spec: KernelSpec, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Run the kernel of a call in the emulator."""
    from microsdpa.emulate import run

    call, masks, sequences = checked.call, checked.masks, checked.call.sequences
    assert sequences is not None
    checked = checked._replace(call=call._replace(out=out))
    query, key, value = call.inputs
    inputs = {"query": query, "key": key, "value": value, **sequences.tensors}
    if masks.alibi_slopes is not None:
        inputs["slopes"] = masks.alibi_slopes
    if masks.sinks is not None:
        inputs["sinks"] = masks.sinks
    grid = kernel.grid_of(spec, problem, sequences.queries(query))
    # All bits set are NaN in every type: what is read before it is written shows in the output.
    workspace = torch.full((kernel.workspace_bytes(spec),), 0xFF, dtype=torch.uint8, device="cpu")
    arrivals = torch.zeros(spec.max_ctas, dtype=torch.int32, device="cpu")
    outputs = {"out": out, "workspace": workspace, "arrivals": arrivals} | ({} if lse is None else {"lse": lse})
    run.one_kernel(spec, grid, lambda addresses: parameters(checked, problem, spec, addresses), inputs, outputs)
    assert not arrivals.any(), "every counter is zero again after a launch"


def attend_on_cpu(checked: Checked) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and, on demand, LSE of CPU tensors, by torch's own attention, a sequence at a time."""
    call, masks, sequences = checked.call, checked.masks, checked.call.sequences
    assert sequences is not None
    out = checked.output().zero_()
    lse = torch.full(checked.lse_shape, -torch.inf, dtype=torch.float32, device=out.device)
    if masks.sinks is not None:
        lse.copy_(masks.sinks.float()[:, None].expand_as(lse))
    for b, one in enumerate(reference.sequences(call.inputs, sequences.tensors)):
        query, key, value = one.tensors
        if not query.shape[2] or not key.shape[2]:
            continue
        slopes = masks.alibi_slopes
        slopes = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        bias = reference.lower_right_bias(query, key, checked.causal is not None, masks.window, slopes)
        own = Masks(None if bias is None else bias.float()[None], None, masks.softcap, None, masks.sinks)
        got, got_lse = torch_cpu.attend(query, key, value, None, checked.scale, own, call.return_lse)
        one.rows(out).copy_(got[0].transpose(0, 1))
        if got_lse is not None:
            one.lse_rows(lse).copy_(got_lse[0])
    return out, lse if call.return_lse else None
