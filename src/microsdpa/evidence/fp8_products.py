"""The two products of 8-bit attention by themselves: the FP8 GEMM and FP8 Q K^T (kernels/probes/fp8_products.cu)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch

from microsdpa.emulate import run
from microsdpa.errors import InvalidArgument
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.problem import target_of
from microsdpa.runtime import launcher

TILE = 64


class ProductParams(ctypes.Structure):
    """ProductParams of kernels/probes/fp8_products.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b", "c")),
        *((name, ctypes.c_int32) for name in ("m", "n", "k")),
        ("scale", ctypes.c_float),
    )


def specification(scores: bool) -> KernelSpec:
    """The kernel of Q K^T, or of the GEMM."""
    return KernelSpec(
        name=f"probe/{'fp8_scores' if scores else 'fp8_gemm'}",
        source="probes/fp8_products.cu",
        template="microsdpa::fp8_product",
        template_args=(("SCORES", "true" if scores else "false"),),
        threads=128,
        block_m=TILE,
        params="microsdpa::ProductParams",
    )


def gemm(a: torch.Tensor, b: torch.Tensor, a_scale: float = 1.0, b_scale: float = 1.0) -> torch.Tensor:
    """a_scale * b_scale * A B in FP16, of E4M3 values A [M, K] and B [K, N], on the GPU or in the emulator.

    Raises:
        InvalidArgument: the tensors are no such quantized values.
    """
    _check({"a": a, "b": b}, dims=2)
    if a.shape[1] != b.shape[0]:
        raise InvalidArgument(
            "b", expected=f"K = {a.shape[1]} rows, as a has columns", got=str(b.shape[0]), hint="transpose it"
        )
    return _run(False, a[None], b[None], b.shape[1], a_scale * b_scale)[0]


def scores(query: torch.Tensor, key: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """scale * Q K^T in FP16, [heads, S_q, S_k], of E4M3 values Q [heads, S_q, D] and K [heads, S_k, D].

    Raises:
        InvalidArgument: the tensors are no such quantized values.
    """
    _check({"query": query, "key": key}, dims=3)
    if (query.shape[0], query.shape[2]) != (key.shape[0], key.shape[2]):
        expected = f"[{query.shape[0]}, S_k, {query.shape[2]}]"
        raise InvalidArgument("key", expected=expected, got=str(list(key.shape)), hint="heads and D are query's")
    return _run(True, query, key, key.shape[1], scale)


def _check(tensors: dict[str, torch.Tensor], dims: int) -> None:
    for name, tensor in tensors.items():
        if (
            tensor.dtype != torch.float8_e4m3fn
            or tensor.dim() != dims
            or not tensor.is_contiguous()
            or not tensor.numel()
        ):
            raise InvalidArgument(
                name,
                expected=f"contiguous float8_e4m3fn values of {dims} dimensions",
                got=f"{tensor.dtype}, shape {list(tensor.shape)}",
                hint="quantize() makes them",
            )


def _run(is_scores: bool, a: torch.Tensor, b: torch.Tensor, columns: int, scale: float) -> torch.Tensor:
    batch, rows, common = a.shape
    c = torch.full((batch, rows, columns), torch.nan, dtype=torch.float16, device=a.device)
    spec = specification(is_scores)
    grid = (-(-rows // TILE) * -(-columns // TILE), batch, 1)

    def fill(addresses: Mapping[str, int]) -> ProductParams:
        return ProductParams(**addresses, m=rows, n=columns, k=common, scale=scale)

    if a.device.type == "cpu":
        run.one_kernel(spec, grid, fill, {"a": a, "b": b}, {"c": c})
    else:
        params = fill({"a": a.data_ptr(), "b": b.data_ptr(), "c": c.data_ptr()})
        target = target_of(torch.cuda.get_device_capability(a.device))
        launcher.launch_one(spec, target, grid, bytes(params), a.device.index)
    return c
