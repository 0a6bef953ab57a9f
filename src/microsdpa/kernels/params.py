"""The parameters of kernels with 16-bit operands, as ctypes: as in kernels/common/."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from microsdpa.kernels.problem import Problem


class Params(ctypes.Structure):
    """AttentionParams of kernels/common/params.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "lse", "workspace")),
        *((f"{name}_strides", ctypes.c_int64 * 3) for name in ("query", "key", "value", "out")),
        *((name, ctypes.c_int32) for name in ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_k", "diagonal")),
        ("scale_log2", ctypes.c_float),
    )

    @classmethod
    def of(cls, problem: Problem, diagonal: int, scale: float) -> Params:
        """Those of a problem, without addresses and strides. `diagonal` is the causal one, `scale` that of Q K^T."""
        return cls(
            batch=problem.batch,
            heads=problem.heads,
            heads_kv=problem.heads_kv,
            seqlen_q=problem.seqlen_q,
            seqlen_k=problem.seqlen_k,
            diagonal=diagonal,
            scale_log2=scale * math.log2(math.e),
        )


class MaskedParams(ctypes.Structure):
    """MaskedParams of kernels/common/mask_params.cuh."""

    _fields_ = (
        ("call", Params),
        *((name, ctypes.c_void_p) for name in ("mask", "slopes", "sinks")),
        ("mask_strides", ctypes.c_int64 * 3),
        *(
            (name, ctypes.c_int64)
            for name in ("mask_column_stride", "slope_batch_stride", "slope_head_stride", "sink_head_stride")
        ),
        *((name, ctypes.c_int32) for name in ("position", "lowest")),
        ("softcap_log2", ctypes.c_float),
    )


class DropoutParams(ctypes.Structure):
    """DropoutParams of kernels/common/dropout_params.cuh."""

    _fields_ = (
        ("drawn", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("seed", "offset")),
        ("state", ctypes.c_void_p),
        ("kept", ctypes.c_uint32),
        ("scale", ctypes.c_float),
    )


class DroppedParams(ctypes.Structure):
    """Dropped<MaskedParams> of kernels/common/dropout_params.cuh."""

    _fields_ = (("call", MaskedParams), ("dropout", DropoutParams))


class PrologueParams(ctypes.Structure):
    """PrologueParams of kernels/common/prologue_params.cuh."""

    TENSORS = ("cos", "sin", "query_positions", "key_positions", "query_weight", "query_bias", "key_weight", "key_bias")
    _fields_ = (
        *((name, ctypes.c_void_p) for name in TENSORS),
        *((f"{name}_stride", ctypes.c_int64) for name in ("cos", "sin", "query_positions", "key_positions")),
        *((name, ctypes.c_int32) for name in ("positions", "query_first", "key_first")),
        ("eps", ctypes.c_float),
    )


class ProloguedParams(ctypes.Structure):
    """Prologued of kernels/common/prologue_params.cuh."""

    _fields_ = (("masked", MaskedParams), ("prologue", PrologueParams))


class Strides(ctypes.Structure):
    """Distances in elements from one batch entry, head and row to the next."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("batch", "head", "row"))


class BackwardParams(ctypes.Structure):
    """BackwardParams of kernels/common/backward_params.cuh."""

    _fields_ = (
        ("forward", MaskedParams),
        *((name, ctypes.c_void_p) for name in ("grad_out", "grad_lse", "grad_query", "grad_key", "grad_value")),
        *((f"{name}_strides", Strides) for name in ("grad_out", "grad_query", "grad_key", "grad_value")),
        *((name, ctypes.c_void_p) for name in ("grad_mask", "grad_slopes", "grad_sinks", "slope_parts")),
        ("grad_mask_strides", Strides),
        ("grad_mask_column_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("mask_batch", "mask_heads", "mask_rows", "mask_columns")),
        *((name, ctypes.c_int32) for name in ("parts_of_slope", "slope_batch", "key_heads", "query_heads")),
    )


class DroppedBackwardParams(ctypes.Structure):
    """Dropped<BackwardParams> of kernels/common/dropout_params.cuh."""

    _fields_ = (("call", BackwardParams), ("dropout", DropoutParams))
