"""Calls with sequences of many lengths: their launch, the emulator, torch on a CPU."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import torch

from microsdpa import reference
from microsdpa.call.cache import has_each_token, kernel_strides, narrowed
from microsdpa.call.call import Inputs, Scales
from microsdpa.call.masks import Masks
from microsdpa.call.options import VARLEN_OPTIONS
from microsdpa.call.sequences import Sequences
from microsdpa.call.validate import Checked
from microsdpa.errors import UnsupportedProblem
from microsdpa.execution import torch_cpu
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.ampere.varlen import spec as kernel
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.registry import varlen_kernel
from microsdpa.runtime import launcher


def foreign_call(checked: Checked, out: torch.Tensor) -> launcher.Call:
    """The launcher's arguments for a call."""
    call, masks, sequences = checked.call, checked.masks, checked.call.sequences
    assert sequences is not None
    options = checked.causal is not None, sequences.rotary_interleaved, sequences.batch_invariant, call.options.impl
    code = VARLEN_OPTIONS[options]
    given = *call.inputs, out, call.return_lse, code, checked.scale
    tensors = None, masks.alibi_slopes, masks.sinks
    return *given, *tensors, *masks.ends, masks.softcap, *checked.scales, *sequences[:-2]


def kernels_of(checked: Checked, problem: Problem, spec: KernelSpec) -> tuple[KernelSpec, ...]:
    """The kernels of a call: that of attention, and ahead of it one that writes to the cache if that one does not.

    Raises:
        UnsupportedProblem: impl names a kernel whose bits depend on the batch, and batch_invariant is asked for.
    """
    sequences = checked.call.sequences
    assert sequences is not None
    if sequences.batch_invariant:
        if checked.kernel == "hopper/varlen":
            raise UnsupportedProblem(
                "hopper/varlen divides keys by what the batch has, and batch_invariant=True asks for parts of one size",
                nearest="impl='auto', or batch_invariant=False",
            )
        spec = kernel.batch_invariant(problem)
    if not sequences.appended:
        return (spec,)
    if kernel.appends_itself(spec, problem):
        return (kernel.appending(spec, problem, sequences.change),)
    return kernel.append(problem, sequences.change), spec


def parameters(
    checked: Checked,
    problem: Problem,
    spec: KernelSpec,
    addresses: dict[str, int],
    append: KernelSpec | None = None,
) -> ctypes.Structure:
    """The parameter of the kernel of attention, or of `append` ahead of it, as runtime/varlen.h fills it."""
    fill = {
        "microsdpa::NormedParams": normed_parameters,
        "microsdpa::CacheParams": cache_parameters,
        "microsdpa::AppendParams": append_parameters,
        "microsdpa::VarlenParams": _parameters,
    }
    return fill[(append or spec).params](checked, problem, spec, addresses)


def _parameters(checked: Checked, problem: Problem, spec: KernelSpec, addresses: dict[str, int]) -> ctypes.Structure:
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
        appends=sequences.new_key is not None,
        part_heads=_part_heads(spec, problem, sequences.queries(query)),
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


def _part_heads(spec: KernelSpec, problem: Problem, queries: int) -> int:
    """Key heads of which a CTA takes a part of all keys; 0 where it has a tile of queries."""
    rules = varlen_kernel(spec)
    if not rules.divides_keys(spec, problem, queries):
        return 0
    return int(max(1, problem.heads_kv // rules.grid_of(spec, problem, queries)[0]))


def append_parameters(
    checked: Checked, problem: Problem, spec: KernelSpec, addresses: dict[str, int]
) -> ctypes.Structure:
    """The parameter of a kernel that appends, as runtime/varlen.h fills it."""
    from microsdpa.emulate import abi

    sequences = checked.call.sequences
    assert sequences is not None
    own = {name: addresses[name] for name in (*sequences.appended, "rotated") if name in addresses}
    rest = {name: address for name, address in addresses.items() if name not in own}
    params = abi.AppendParams(
        call=_parameters(checked, problem, spec, rest), **own, queries=sequences.queries(checked.call.inputs[0])
    )
    for name in ("new_key", "new_value"):
        if name in sequences.appended:
            setattr(params, f"{name}_strides", (ctypes.c_int64 * 3)(*row_strides(sequences.appended[name])))
    if sequences.rotary_cos is not None and sequences.rotary_sin is not None:
        params.cos_stride, params.sin_stride = sequences.rotary_cos.stride(0), sequences.rotary_sin.stride(0)
        params.positions = sequences.rotary_cos.shape[0]
    return params


def cache_parameters(
    checked: Checked, problem: Problem, spec: KernelSpec, addresses: dict[str, int]
) -> ctypes.Structure:
    """The parameter of a kernel with an 8-bit cache, as runtime/varlen.h fills it."""
    from microsdpa.emulate import abi

    own = {name: addresses[name] for name in ("key_scale", "value_scale") if name in addresses}
    rest = {name: address for name, address in addresses.items() if name not in own}
    params = abi.CacheParams(append=append_parameters(checked, problem, spec, rest), **own)
    key = checked.call.inputs[1]
    for name, scale in (("key_scale", checked.scales.k_scale), ("value_scale", checked.scales.v_scale)):
        if isinstance(scale, torch.Tensor):
            setattr(params, f"{name}_strides", (ctypes.c_int64 * 3)(*kernel_strides(key, scale)))
    return params


def normed_parameters(
    checked: Checked, problem: Problem, spec: KernelSpec, addresses: dict[str, int]
) -> ctypes.Structure:
    """The parameter of a kernel that makes norms, as runtime/varlen.h fills it."""
    from microsdpa.emulate import abi

    sequences, names = checked.call.sequences, {"q_norm": "query_norm", "k_norm": "key_norm"}
    assert sequences is not None
    own = {names[name]: address for name, address in addresses.items() if name in names}
    rest = {name: address for name, address in addresses.items() if name not in names}
    cached = cache_parameters(checked, problem, spec, rest)
    return abi.NormedParams(cached=cached, **own, norm_eps=sequences.norm_eps)


def row_strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Of [B, S, H, D], or [S, H, D]: from batch entry to batch entry (0 without), head to head and row to row."""
    *batch, row, head, _ = tensor.stride()
    return batch[0] if batch else 0, head, row


def lse_strides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Of [B, H, S_q], or [H, queries]: from batch entry to batch entry (0 without) and head to head."""
    return (shape[1] * shape[2], shape[2]) if len(shape) == 3 else (0, shape[1])


def emulate(
    checked: Checked,
    problem: Problem,
    spec: KernelSpec,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    root: Path | None = None,
) -> None:
    """Run the kernel of a call in the emulator; `root` is the tree that its source is taken from, if it is another."""
    from microsdpa.emulate import abi, run

    call, masks, sequences = checked.call, checked.masks, checked.call.sequences
    assert sequences is not None
    checked = checked._replace(call=call._replace(out=out))
    query, key, value = call.inputs
    inputs = {"query": query, "key": key, "value": value, **sequences.tensors}
    if masks.alibi_slopes is not None:
        inputs["slopes"] = masks.alibi_slopes
    if masks.sinks is not None:
        inputs["sinks"] = masks.sinks
    for name, scale in (("key_scale", checked.scales.k_scale), ("value_scale", checked.scales.v_scale)):
        if isinstance(scale, torch.Tensor):
            inputs[name] = scale
    *ahead, spec = kernels_of(checked, problem, spec)
    if ahead:
        (append,) = ahead
        queries, changes_query = sequences.queries(query), sequences.change.changes_query
        given = {name: tensor for name, tensor in inputs.items() if name not in ("key", "value", "slopes", "sinks")}
        rotated = torch.empty(query.shape, dtype=query.dtype, device="cpu")
        written = {"key": key, "value": value} | ({"rotated": rotated} if changes_query else {})
        if problem.cache is not None and problem.cache.each_token and sequences.new_key is not None:
            written |= {name: given.pop(name) for name in ("key_scale", "value_scale")}
        run.one_kernel(
            append,
            kernel.append_grid(problem, queries, sequences.new_key is not None, changes_query),
            lambda addresses: parameters(checked, problem, spec, addresses, append),
            given | sequences.appended,
            written,
            root=root,
        )
        if changes_query:
            inputs["query"] = rotated
            checked = checked._replace(call=checked.call._replace(inputs=(rotated, key, value)))
    outputs = {"out": out} | ({} if lse is None else {"lse": lse})
    if sequences.appended and not ahead:
        inputs |= sequences.appended
        outputs |= {name: inputs.pop(name) for name in ("key", "value")}
    if spec.tensor_maps:
        inputs |= {name: _rows_last(inputs[name]) for name in {box.tensor for box in spec.tensor_maps}}
    grid = varlen_kernel(spec).grid_of(spec, problem, sequences.queries(query))
    # All bits set are NaN in every type: what is read before it is written shows in the output.
    workspace = torch.full((varlen_kernel(spec).workspace_bytes(spec),), 0xFF, dtype=torch.uint8, device="cpu")
    arrivals = torch.zeros(abi.ARRIVALS, dtype=torch.int32, device="cpu")
    outputs |= {"workspace": workspace, "arrivals": arrivals}
    run.one_kernel(
        spec, grid, lambda addresses: parameters(checked, problem, spec, addresses), inputs, outputs, root=root
    )
    assert not arrivals.any(), "every counter is zero again after a launch"


def _rows_last(cache: torch.Tensor) -> torch.Tensor:
    """Queries, keys or values as bulk copies see them: [pages or B, H, rows, D]."""
    return (cache if cache.dim() == 4 else cache[None]).transpose(1, 2)


def attend_on_cpu(checked: Checked) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and, on demand, LSE of CPU tensors, by torch's own attention, a sequence at a time."""
    call, masks, sequences = checked.call, checked.masks, checked.call.sequences
    assert sequences is not None
    out = checked.output()
    inputs, given = call.inputs, sequences.tensors
    for name, scale in (("k_scale", checked.scales.k_scale), ("v_scale", checked.scales.v_scale)):
        if isinstance(scale, torch.Tensor):
            given[name] = scale
    if sequences.appended:
        inputs, appended = _append_on_cpu(inputs, sequences, checked.scales)
        given |= appended
    out.zero_()
    lse = torch.full(checked.lse_shape, -torch.inf, dtype=torch.float32, device=out.device)
    if masks.sinks is not None:
        lse.copy_(masks.sinks.float()[:, None].expand_as(lse))
    for b, one in enumerate(reference.sequences(inputs, given)):
        query, key, value = one.tensors
        if key.dtype != query.dtype:  # what an 8-bit cache stands for
            query, key, value = query.float(), key.float(), value.float()
        if not query.shape[2] or not key.shape[2]:
            continue
        slopes = masks.alibi_slopes
        slopes = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        bias = reference.lower_right_bias(query, key, checked.causal is not None, masks.window, slopes)
        own = Masks(None if bias is None else bias.float()[None], None, masks.softcap, None, masks.sinks)
        got, got_lse = torch_cpu.attend(query, key, value, None, checked.scale, own, call.return_lse)
        undefined = one.undefined(bias)
        one.rows(out).copy_(got[0].transpose(0, 1).masked_fill(undefined[:, None, None], torch.nan))
        if got_lse is not None:
            one.lse_rows(lse).copy_(got_lse[0].masked_fill(undefined, torch.nan))
    return out, lse if call.return_lse else None


def _append_on_cpu(inputs: Inputs, sequences: Sequences, scales: Scales) -> tuple[Inputs, dict[str, torch.Tensor]]:
    """Write new keys and values to the cache; gives rotated queries beside it, and the lengths that hold now."""
    query, key, value = inputs
    assert sequences.lengths is not None
    most, page = sequences.most_keys(key), key.shape[1]
    lengths, rotated = sequences.lengths.clamp(0, most), query.clone()
    for b, one in enumerate(reference.sequences(inputs, sequences.tensors)):
        rows = one.rows(query)
        position = torch.arange(rows.shape[0], device=query.device) + lengths[b]
        one.rows(rotated).copy_(_changed(rows, position, sequences, sequences.q_norm))
        if sequences.new_key is None or sequences.new_value is None:
            continue
        new_key, new_value = one.rows(sequences.new_key), one.rows(sequences.new_value)
        new_key = _changed(new_key, position, sequences, sequences.k_norm)
        kept = position < most
        position = position[kept]
        pages = position // page if sequences.page_table is None else sequences.page_table[b, position // page].long()
        place = (torch.full_like(position, b), position) if sequences.page_table is None else (pages, position % page)
        exists = (
            (pages >= 0) & (pages < key.shape[0]) if sequences.page_table is not None else torch.ones_like(kept[kept])
        )
        place = place[0][exists], place[1][exists]
        for cache, scale, new in ((key, scales.k_scale, new_key), (value, scales.v_scale, new_value)):
            rows = new[kept][exists]
            if not isinstance(scale, torch.Tensor):
                cache[place] = rows
                continue
            each_token = has_each_token(cache, scale)
            of_heads = None if each_token else (scale[b] if scale.dim() == 2 else scale).expand(rows.shape[:-1])
            cache[place], found = narrowed(rows, cache.dtype, of_heads)
            if each_token:
                scale[place] = found
    given = sequences.tensors
    if sequences.new_key is not None:
        counts = [one.tensors[0].shape[2] for one in reference.sequences(inputs, sequences.tensors)]
        given["lengths"] = lengths + torch.tensor(counts, dtype=torch.int32, device=lengths.device)
    return (rotated, key, value), given


def _changed(
    rows: torch.Tensor, position: torch.Tensor, sequences: Sequences, norm: torch.Tensor | None
) -> torch.Tensor:
    """Rows [S, heads, D] with their norm, rotated at their positions [S], computed in FP32 and rounded once."""
    angles = None
    if sequences.rotary_cos is not None and sequences.rotary_sin is not None:
        angles = sequences.rotary_cos, sequences.rotary_sin
    found = reference.changed_rows(
        rows.transpose(0, 1)[None],
        (norm, None),
        sequences.norm_eps,
        angles,
        position,
        interleaved=sequences.rotary_interleaved,
        dtype=torch.float32,
    )
    return found[0].transpose(0, 1).to(rows.dtype)
