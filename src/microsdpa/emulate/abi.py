"""The structs of runtime/launch.h, as ctypes."""

from __future__ import annotations

import ctypes

MAX_BUFFERS, MAX_GUARDS, MAX_SITES, MESSAGE_BYTES = 24, 16, 128, 4096


ARRIVALS = 1024
"""Counters of a launch, as in runtime/arrivals.h."""


class VarlenParams(ctypes.Structure):
    """VarlenParams of kernels/common/varlen_params.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "lse", "workspace", "arrivals")),
        *((name, ctypes.c_void_p) for name in ("query_offsets", "key_offsets", "lengths", "page_table")),
        *((name, ctypes.c_void_p) for name in ("slopes", "sinks")),
        *((f"{name}_strides", ctypes.c_int64 * 3) for name in ("query", "key", "value", "out")),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("lse_batch_stride", "lse_head_stride", "slope_batch_stride", "slope_head_stride"),
                *("sink_head_stride", "table_stride"),
            )
        ),
        ("page_factor", ctypes.c_uint64),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("page_shift", "page_size", "pages", "most_keys", "most_queries"),
                *("batch", "heads", "heads_kv", "left", "right", "appends", "part_heads"),
            )
        ),
        *((name, ctypes.c_float) for name in ("scale_log2", "softcap_log2")),
    )


class OneLengthParams(ctypes.Structure):
    """OneLengthParams of kernels/common/varlen_params.cuh."""

    _fields_ = (
        ("call", VarlenParams),
        *((name, ctypes.c_int32) for name in ("units", "row_tiles", "key_tiles", "parts", "each")),
    )


class AppendParams(ctypes.Structure):
    """AppendParams of kernels/common/varlen_params.cuh."""

    _fields_ = (
        ("call", VarlenParams),
        *((name, ctypes.c_void_p) for name in ("new_key", "new_value", "rotary_cos", "rotary_sin", "rotated")),
        *((f"{name}_strides", ctypes.c_int64 * 3) for name in ("new_key", "new_value")),
        *((name, ctypes.c_int64) for name in ("cos_stride", "sin_stride")),
        *((name, ctypes.c_int32) for name in ("positions", "queries")),
    )


class CacheParams(ctypes.Structure):
    """CacheParams of kernels/common/varlen_params.cuh."""

    _fields_ = (
        ("append", AppendParams),
        *((name, ctypes.c_void_p) for name in ("key_scale", "value_scale")),
        *((f"{name}_strides", ctypes.c_int64 * 3) for name in ("key_scale", "value_scale")),
    )


class NormedParams(ctypes.Structure):
    """NormedParams of kernels/common/varlen_params.cuh."""

    _fields_ = (
        ("cached", CacheParams),
        *((name, ctypes.c_void_p) for name in ("query_norm", "key_norm")),
        ("norm_eps", ctypes.c_float),
    )


PLACE_BITS, PLACE_CALLS = 21, 3
"""A place in a kernel library has that many calls of that many bits each."""
VIEW_ALIGNMENT = 128
"""Bytes that the tensor views, which follow the parameters, start on."""


class TensorView(ctypes.Structure):
    """A tensor as bulk copies see it, in the place of a CUtensorMap."""

    MAGIC = 0x6D736470612E746D

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("sizes", ctypes.c_int64 * 4),
        ("strides", ctypes.c_int64 * 3),
        *((name, ctypes.c_int64) for name in ("box_columns", "box_rows", "swizzle", "element_bytes")),
        ("magic", ctypes.c_uint64),
        ("box_heads", ctypes.c_int64),
        ("unused", ctypes.c_uint64 * 2),
    )


class Buffer(ctypes.Structure):
    """A tensor's memory, as the kernel may use it."""

    _fields_ = (
        ("name", ctypes.c_char * 16),
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("writable", ctypes.c_int32),
        ("padding", ctypes.c_int32),
    )


class Launch(ctypes.Structure):
    """One launch of a kernel library."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("entry", "anchor", "image", "params", "params_bytes")),
        ("grid", ctypes.c_int64 * 3),
        *(
            (name, ctypes.c_int32)
            for name in (
                "threads",
                "dynamic_shared_bytes",
                "buffer_count",
                "workers",
                "late",
                "count_banks",
                "cluster",
                "programmatic",
                "backwards",
            )
        ),
        ("seed", ctypes.c_uint64),
        ("guard_count", ctypes.c_int64),
        ("guards", ctypes.c_uint64 * MAX_GUARDS),
        ("buffers", Buffer * MAX_BUFFERS),
    )


class SiteCounters(ctypes.Structure):
    """Shared-memory accesses of one place in the code."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("place", "requests", "wavefronts", "ideal"))


COUNTERS = (
    "global_read_bytes",
    "global_write_bytes",
    "shared_read_bytes",
    "shared_write_bytes",
    "async_copy_bytes",
    "block_barriers",
    "named_barriers",
    "warp_barriers",
    "warp_shuffles",
    "tensor_instructions",
    "tensor_flops",
    "exp2_operations",
    "bulk_copy_bytes",
    "peer_bytes",
    "mbarrier_phases",
    "cluster_barriers",
    "bank_requests",
    "bank_wavefronts",
    "bank_ideal",
)


class Counters(ctypes.Structure):
    """What a launch did, summed over its blocks."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in COUNTERS)


class Outcome(ctypes.Structure):
    """How a launch ended."""

    _fields_ = (
        ("failed", ctypes.c_int32),
        ("site_count", ctypes.c_int32),
        ("counters", Counters),
        ("sites", SiteCounters * MAX_SITES),
        ("message", ctypes.c_char * MESSAGE_BYTES),
    )
