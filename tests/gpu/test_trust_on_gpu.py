"""Values and states that callers meet: masks of any bytes, NaN, out of memory, inference mode, default devices."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import microsdpa
from microsdpa.evidence.inputs import Case, make
from microsdpa.kernels.problem import PRECISIONS, Precision

pytestmark = pytest.mark.gpu
QUERIES = {"ampere/general": 20, "ampere/mma": 4}
"""Kernels that read masks, by the queries of a call that suits them."""


@pytest.mark.parametrize("kernel", QUERIES)
@pytest.mark.parametrize("mask_type", [torch.float32, torch.float16, torch.bfloat16])
def test_nan_in_a_mask_is_nan_in_its_row(kernel: str, mask_type: torch.dtype) -> None:
    rows, dtype = QUERIES[kernel], torch.float16 if mask_type == torch.float32 else mask_type
    query, key, value = (torch.randn(1, 2, n, 64, device="cuda").to(dtype) for n in (rows, 200, 200))
    mask = torch.randn(rows, 200, device="cuda").to(mask_type)
    mask[1, 0], mask[2, 150], mask[3, :] = torch.nan, torch.nan, torch.nan
    out, lse = microsdpa.sdpa(query, key, value, attn_mask=mask, return_lse=True, impl=kernel)
    nan = torch.isin(torch.arange(rows, device="cuda"), torch.tensor([1, 2, 3], device="cuda"))
    assert torch.equal(out.isnan().all(dim=-1), nan.expand(1, 2, -1))
    assert torch.equal(out.isnan().any(dim=-1), nan.expand(1, 2, -1))
    assert torch.equal(lse.isnan(), nan.expand(1, 2, -1))


@pytest.mark.parametrize("kernel", QUERIES)
@pytest.mark.parametrize("transposed", [False, True])
def test_every_byte_of_a_bool_mask_that_is_not_zero_is_true(kernel: str, transposed: bool) -> None:
    query, key, value = (torch.randn(1, 2, n, 64, device="cuda").half() for n in (QUERIES[kernel], 256, 256))
    bytes_ = torch.randint(0, 256, (QUERIES[kernel], 256), device="cuda", dtype=torch.uint8)
    bytes_ *= (torch.rand(bytes_.shape, device="cuda") < 0.5).to(torch.uint8)
    bytes_ = bytes_.T.contiguous().T if transposed else bytes_
    found = microsdpa.sdpa(query, key, value, attn_mask=bytes_.view(torch.bool), impl=kernel)
    assert torch.equal(found, microsdpa.sdpa(query, key, value, attn_mask=bytes_ != 0, impl=kernel))  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("heads", [2, 128])
def test_nan_in_nan_out_with_8_bit_operands(precision: Precision, heads: int) -> None:
    query, key, value = make(Case(1, heads, 200, 300, 64), "cuda")
    query[0, 0, 3, 5], key[0, 1, 7, 9] = torch.nan, torch.nan
    out, lse = microsdpa.sdpa(query, key, value, precision=precision, return_lse=True)
    expected = torch.zeros(1, heads, 200, dtype=torch.bool, device="cuda")
    expected[0, 0, 3], expected[0, 1] = True, True
    assert torch.equal(out.isnan().all(dim=-1), expected)
    assert torch.equal(out.isnan().any(dim=-1), expected)
    assert torch.equal(lse.isnan(), expected)


def test_8_bit_values_in_inference_mode() -> None:
    with torch.inference_mode():
        tensors = make(Case(1, 2, 70, 90, 64), "cuda")
        q, k, v = (microsdpa.quantize(t.clone(), "e4m3", "head") for t in tensors)
        assert q.scale.is_inference()
        scales = {"q_scale": q.scale, "k_scale": k.scale, "v_scale": v.scale}
        first = microsdpa.sdpa(q.values, k.values, v.values, **scales)
        assert torch.equal(microsdpa.sdpa(q.values, k.values, v.values, **scales), first)  # type: ignore[arg-type]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = microsdpa.sdpa(q.values, k.values, v.values, **scales)
        graph.replay()
        assert torch.equal(captured, first)  # type: ignore[arg-type]


@contextmanager
def full() -> Iterator[None]:
    """For a block, the process may have no more memory than it has, and 64 MiB."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(0) + 64 * 2**20) / total, 0)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)


OPTIONS: list[dict[str, Any]] = [
    *({}, {"return_lse": True}, {"precision": "int8_fp8"}, {"window": (100, 0)}, {"impl": "ampere/mma"}),
]
LARGE = Case(8, 128, 1024, 1024, 64)
"""Its output has 128 MiB."""


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_out_of_memory_is_torchs_error_and_the_next_call_works(options: dict[str, Any]) -> None:
    large, small = make(LARGE, "cuda"), make(Case(1, 2, 70, 90, 64), "cuda")
    with full():
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. Tried to allocate"):
                microsdpa.sdpa(*large, **options)
            microsdpa.sdpa(*small, **options)
    torch.cuda.synchronize()


def test_a_plan_and_the_enabled_function_out_of_memory() -> None:
    large = make(LARGE, "cuda")
    plan = microsdpa.plan(*large)
    with full():
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            plan(*large)
        with microsdpa.enabled(), pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            F.scaled_dot_product_attention(*large)


@pytest.mark.parametrize("default", ["meta", "cuda", "cpu"])
def test_the_default_device_is_not_where_results_are(default: str) -> None:
    on_gpu = make(Case(1, 2, 20, 20, 64), "cuda")
    on_cpu = tuple(t.cpu() for t in on_gpu)
    options: list[dict[str, Any]] = [{}, {"softcap": 2.0}, {"causal": "lower_right"}]
    expected = [microsdpa.sdpa(*tensors, return_lse=True, **o) for o in options for tensors in (on_gpu, on_cpu)]
    torch.set_default_device(default)
    try:
        found = [microsdpa.sdpa(*tensors, return_lse=True, **o) for o in options for tensors in (on_gpu, on_cpu)]
        for tensors in (on_gpu, on_cpu):
            scale = microsdpa.quantize(tensors[0], "int8", "block").scale
            assert scale.device.type == tensors[0].device.type
    finally:
        torch.set_default_device(None)
    for got, want in zip(found, expected, strict=True):
        for one, other in zip(got, want, strict=True):
            assert one.device == other.device
            assert torch.equal(one, other)
