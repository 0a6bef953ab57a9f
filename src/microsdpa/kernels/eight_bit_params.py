"""The parameters of the 8-bit kernels, as ctypes: as in kernels/common/eight_bit_params.cuh and kernels/quantize/."""

from __future__ import annotations

import ctypes

from microsdpa.kernels.params import MaskedParams, Params


class ByteStrides(ctypes.Structure):
    """Distances in bytes from one batch entry, head and row to the next."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("batch", "head", "row"))


class RowScales(ctypes.Structure):
    """Scales for blocks of 2**shift rows."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("shift", ctypes.c_int32),
        ("step", ctypes.c_int32),
    )


class ChannelScales(ctypes.Structure):
    """Scales for channels."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "channel")))


class EightBitParams(ctypes.Structure):
    """EightBitParams of kernels/common/eight_bit_params.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "lse")),
        *((f"{name}_strides", ByteStrides) for name in ("query", "key", "value", "out")),
        ("query_scale", RowScales),
        ("key_scale", RowScales),
        ("value_scale", ChannelScales),
        *((name, ctypes.c_int32) for name in ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_k", "diagonal")),
        ("scale_log2", ctypes.c_float),
    )


class EightBitMasked(ctypes.Structure):
    """EightBitMasked of kernels/hopper/common/eight_bit_masks.cuh."""

    _fields_ = (("call", EightBitParams), *MaskedParams._fields_[1:])


class ScaledParams(ctypes.Structure):
    """Scaled<AttentionParams> of kernels/hopper/latency/operands.cuh."""

    _fields_ = (
        ("call", Params),
        ("query_scale", RowScales),
        ("key_scale", RowScales),
        ("value_scale", ChannelScales),
    )


class ScaledMaskedParams(ctypes.Structure):
    """Scaled<MaskedParams> of kernels/hopper/latency/operands.cuh."""

    _fields_ = (
        ("call", MaskedParams),
        ("query_scale", RowScales),
        ("key_scale", RowScales),
        ("value_scale", ChannelScales),
    )


class QuantizeParams(ctypes.Structure):
    """QuantizeParams of kernels/quantize/fused.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value")),
        *((f"quantized_{name}", ctypes.c_void_p) for name in ("query", "key", "value")),
        *((name, ctypes.c_void_p) for name in ("query_scale", "key_scale", "value_scale", "key_mean")),
        *((f"{name}_strides", ByteStrides) for name in ("query", "key", "value")),
        *((name, ctypes.c_int32) for name in ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_k")),
        *((name, ctypes.c_int32) for name in ("tile_rows", "part_rows", "sum_rows")),
        ("root", ctypes.c_float),
    )


class RestoreLseParams(ctypes.Structure):
    """RestoreLseParams of kernels/quantize/restore_lse.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key_mean", "lse")),
        ("query_strides", ByteStrides),
        *((name, ctypes.c_int32) for name in ("batch", "heads", "heads_kv", "seqlen_q")),
        ("scale", ctypes.c_float),
    )
