"""FlashAttention-3 from the library that benchmarks/peers/fa3/build.py makes, under the name that its package has."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os

import torch

LIBRARY = "MICROSDPA_FA3_LIBRARY"
"""The environment variable with the path of the library."""
HEAD_DIMS = (64, 128, 256)
_TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2}


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "row", "head"))]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Tensor:
        return cls(tensor.data_ptr(), *tensor.stride()[:3])


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, _Tensor) for name in ("query", "key", "value", "out")),
        *((name, ctypes.c_void_p) for name in ("lse", "q_scale", "k_scale", "v_scale", "tile_counter")),
        *((name, ctypes.c_int32) for name in ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_k", "head_dim")),
        *((name, ctypes.c_int32) for name in ("type", "causal", "multiprocessors")),
        ("scale", ctypes.c_float),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """The library, loaded once.

    Raises:
        OSError: the environment variable is not set, or its file is not that library.
    """
    path = os.environ.get(LIBRARY)
    if not path:
        raise OSError(f"{LIBRARY} is not set: see benchmarks/peers/fa3/build.py")
    with contextlib.suppress(OSError):  # it takes the driver's functions from whoever has loaded them for all
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL(path)
    if not hasattr(loaded, "fa3_forward") or loaded.fa3_size_of_arguments() != ctypes.sizeof(_Arguments):
        raise OSError(f"{path} was not built by this version of benchmarks/peers/fa3/build.py: build it again")
    loaded.fa3_commit.restype = ctypes.c_char_p
    loaded.fa3_forward.argtypes = [ctypes.POINTER(_Arguments), ctypes.c_void_p]
    return loaded


def version() -> str:
    """The commit of FlashAttention that the library was built from."""
    text = library().fa3_commit()
    assert isinstance(text, bytes)
    return text.decode()


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q [B, S_q, H, D] on k and v [B, S_k, H_kv, D]: [B, S_q, H, D] in q's type, BF16 for E4M3.

    Args:
        q: FP16, BF16 or E4M3, on a Hopper GPU, of a head dimension in HEAD_DIMS, dense in its last dimension.
        k: of q's type.
        v: of q's type.
        softmax_scale: factor of the scores; None for 1 / sqrt(D).
        causal: aligned to the lower right.
        q_descale: [B, H_kv] float32, of E4M3 alone; `k_descale` and `v_descale` likewise.

    Raises:
        RuntimeError: the library does not have this head dimension or type, or CUDA reports an error.
    """
    batch, seqlen_q, heads, head_dim = q.shape
    out_type = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    out = torch.empty(q.shape, dtype=out_type, device=q.device)
    lse = torch.empty(batch, heads, seqlen_q, dtype=torch.float32, device=q.device)
    counter = torch.empty(1, dtype=torch.int32, device=q.device)
    scales = [None if one is None else one.data_ptr() for one in (q_descale, k_descale, v_descale)]
    arguments = _Arguments(
        *(_Tensor.of(tensor) for tensor in (q, k, v, out)),
        lse.data_ptr(),
        *scales,
        counter.data_ptr(),
        *(batch, heads, k.shape[2], seqlen_q, k.shape[1], head_dim),
        *(_TYPES.get(q.dtype, -1), causal, _multiprocessors(q.device)),
        1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale,
    )
    stream = torch.cuda.current_stream(q.device).cuda_stream
    if error := library().fa3_forward(ctypes.byref(arguments), stream):
        raise RuntimeError(f"FlashAttention-3: error {error} for {q.dtype} and head dimension {head_dim}")
    return out
