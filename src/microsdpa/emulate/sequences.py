"""The parameter of kernels for sequences of many lengths in calls of one length."""

from __future__ import annotations

import ctypes
import math

from microsdpa.call.masks import Masks
from microsdpa.emulate import abi
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.hopper.varlen.spec import shares_of
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.registry import varlen_kernel
from microsdpa.kernels.spec import VARLEN_PARAMS


def sequence_params(
    spec: KernelSpec,
    problem: Problem,
    addresses: dict[str, int],
    strides: dict[str, tuple[int, ...]],
    masks: Masks,
    scale: float,
) -> abi.VarlenParams | abi.OneLengthParams:
    """The parameter of a call whose sequences have one length each: that of the specification.

    runtime/sequences.h fills it so. `strides` are those of Q, K, V and O, and of slopes and sinks where there are some.
    """
    rules, (left, right) = varlen_kernel(spec), masks.ends
    divided = rules.divides_keys(spec, problem, problem.batch * problem.seqlen_q)
    params = abi.VarlenParams(
        **addresses,
        lse_batch_stride=problem.heads * problem.seqlen_q,
        lse_head_stride=problem.seqlen_q,
        page_factor=1 << 32,
        page_shift=32,
        page_size=1,
        pages=problem.batch,
        most_keys=problem.seqlen_k,
        most_queries=problem.seqlen_q,
        batch=problem.batch,
        heads=problem.heads,
        heads_kv=problem.heads_kv,
        left=min(left, problem.seqlen_k),
        right=0 if problem.causal else min(right, problem.seqlen_k),
        part_heads=max(1, problem.heads_kv // spec.max_ctas) if divided else 0,
        scale_log2=scale * math.log2(math.e),
        softcap_log2=(masks.softcap or 0.0) * math.log2(math.e),
    )
    for name in ("query", "key", "value", "out"):
        setattr(params, f"{name}_strides", (ctypes.c_int64 * 3)(*strides[name][:3]))
    if "slopes" in strides:
        params.slope_batch_stride, params.slope_head_stride = strides["slopes"]
    if "sinks" in strides:
        (params.sink_head_stride,) = strides["sinks"]
    if spec.params == VARLEN_PARAMS:
        return params
    return abi.OneLengthParams(params, *shares_of(spec, problem))
