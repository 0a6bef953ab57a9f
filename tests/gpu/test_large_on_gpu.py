"""Tensors of more than 2^31 elements and 2^32 bytes, and numbers of tiles at the limits; their memory is named."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import microsdpa
from microsdpa import reference
from microsdpa.errors import UnsupportedProblem
from microsdpa.evidence import compare, verify_eight_bit
from microsdpa.evidence.inputs import Case
from microsdpa.kernels import FAMILIES
from microsdpa.kernels.problem import PRECISIONS, Precision
from microsdpa.kernels.quantize.spec import SCHEMES

pytestmark = pytest.mark.gpu
GIB = 2**30


@pytest.fixture(autouse=True)
def _give_back() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def need(gib: float) -> None:
    """Skip where the GPU's free memory is less."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free GPU memory, there are {free / GIB:.1f}")


def filled(*shape: int) -> torch.Tensor:
    """Random numbers: a part is drawn and repeated, by another offset in each head, as drawing all would take long."""
    whole = torch.empty(shape, dtype=torch.float16, device="cuda")
    flat = whole.view(-1)
    part = torch.randn(2**20 - 3, device="cuda").half()
    for first in range(0, flat.numel(), part.numel()):
        count = min(part.numel(), flat.numel() - first)
        flat[first : first + count] = part[:count]
    return whole


def assert_ends(tensors: tuple[torch.Tensor, ...], out: torch.Tensor, lse: torch.Tensor | None, **options: Any) -> None:
    """The first and the last head of all batch entries are right, which lie farthest apart."""
    for b, h in ((0, 0), (-1, -1)):
        group = tensors[0].shape[1] // tensors[1].shape[1]
        h_kv = 0 if h == 0 else tensors[1].shape[1] - 1
        assert group * tensors[1].shape[1] == tensors[0].shape[1]
        one = tensors[0][b, h][None, None], tensors[1][b, h_kv][None, None], tensors[2][b, h_kv][None, None]
        expected, expected_lse = reference.oracle(*one, **options)
        plain, _ = reference.eager(*one, **options)
        got = out[b, h][None, None]
        assert compare.tolerance(plain, expected, out.dtype).admits(compare.measure(got, expected)), (b, h)
        if lse is not None:
            torch.testing.assert_close(lse[b, h][None, None].double(), expected_lse, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("causal", [None, "upper_left"])
@pytest.mark.parametrize("impl", ["auto", *(family.name for family in FAMILIES)])
def test_the_last_head_lies_beyond_2_31_elements(impl: str, causal: str | None) -> None:
    """2.15e9 elements and 4.3e9 bytes a tensor; also more batch entries than a grid has CTAs along y."""
    need(20)
    tensors = tuple(filled(4097, 16, 512, 64) for _ in range(3))
    assert tensors[0].numel() > 2**31
    try:
        out, lse = microsdpa.sdpa(*tensors, causal=causal, return_lse=True, impl=impl)  # type: ignore[arg-type]
    except UnsupportedProblem as refusal:
        pytest.skip(str(refusal))
    assert_ends(tensors, out, lse, causal=causal)


@pytest.mark.parametrize("options", [{}, {"window": (100, 0), "causal": "lower_right"}], ids=["plain", "window"])
@pytest.mark.parametrize("seqlen_q", [1, 16, 200])
def test_one_head_of_keys_is_longer_than_2_31_elements(seqlen_q: int, options: dict[str, Any]) -> None:
    """A row's number times its stride needs 64 bits within a head: 2^25 + 9 keys of 64, and 128 apart."""
    need(75)  # of which the oracle takes two thirds
    query = filled(1, 1, seqlen_q, 64)
    key, value = (filled(1, 1, 2**25 + 9, 128)[..., :64] for _ in range(2))
    out, lse = microsdpa.sdpa(query, key, value, return_lse=True, **options)
    # The last queries alone: scores of all of them would not fit the memory in FP64.
    assert_ends((query[:, :, -2:], key, value), out[:, :, -2:], lse[:, :, -2:], **options)


@pytest.mark.parametrize("impl", ["auto", "ampere/mma", "ampere/general", "hopper/throughput"])
@pytest.mark.parametrize("seqlen_q", [2**22, 2**22 + 1, 2**25 + 3])
def test_many_queries_of_one_key(seqlen_q: int, impl: str) -> None:
    """The tiles of a head times the heads that lie in L2 together are 2^32 and more."""
    need(20)
    query, key, value = filled(1, 1, seqlen_q, 64), filled(1, 1, 1, 64), filled(1, 1, 1, 64)
    try:
        out = microsdpa.sdpa(query, key, value, impl=impl)
    except UnsupportedProblem as refusal:
        pytest.skip(str(refusal))
    assert torch.equal(out, value.expand_as(query))  # type: ignore[arg-type]


@pytest.mark.parametrize("heads", [2**15, 2**16])
def test_many_query_heads_of_one_key(heads: int) -> None:
    """The heads of a section, as hopper/throughput deals them, were counted in 32 bits."""
    need(4)
    query, key, value = filled(1, heads, 65, 64), filled(1, 1, 1, 64), filled(1, 1, 1, 64)
    for impl in ("auto", "hopper/throughput"):
        try:
            out = microsdpa.sdpa(query, key, value, is_causal=True, enable_gqa=True, impl=impl)
        except UnsupportedProblem as refusal:
            pytest.skip(str(refusal))
        assert torch.equal(out, value.expand_as(query))  # type: ignore[arg-type]


@pytest.mark.parametrize("mask_type", [torch.bool, torch.float32])
def test_a_mask_of_more_than_2_31_elements(mask_type: torch.dtype) -> None:
    need(16 if mask_type == torch.float32 else 8)
    query, key, value = filled(1, 2, 2**15 + 1, 64), filled(1, 2, 2**15 + 8, 64), filled(1, 2, 2**15 + 8, 64)
    mask = torch.zeros(1, 2, 2**15 + 1, 2**15 + 8, dtype=mask_type, device="cuda")
    assert mask.numel() > 2**31
    mask[..., -1] = True if mask_type == torch.bool else 1e4  # every query sees the last key alone
    out = microsdpa.sdpa(query, key, value, attn_mask=mask)
    assert torch.equal(out, value[:, :, -1:].expand_as(query))  # type: ignore[arg-type]


def test_a_large_mask_is_followed_to_its_last_row() -> None:
    need(8)
    query, key, value = filled(1, 2, 2**15 + 1, 64), filled(1, 2, 2**15 + 8, 64), filled(1, 2, 2**15 + 8, 64)
    mask = torch.zeros(1, 2, 2**15 + 1, 2**15 + 8, dtype=torch.bool, device="cuda")
    mask[0, 1, -1, 7] = True
    out = microsdpa.sdpa(query, key, value, attn_mask=mask)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out[0, 1, -1], value[0, 1, 7])
    assert int((out != 0).any(dim=-1).sum()) == 1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_8_bit_operands_beyond_2_31_elements(precision: Precision) -> None:
    need(40)
    tensors = tuple(filled(4097, 16, 512, 64) for _ in range(3))
    out, lse = microsdpa.sdpa(*tensors, precision=precision, return_lse=True)
    spec, case = microsdpa.explain(*tensors, precision=precision).spec, Case(1, 16, 512, 512, 64)
    for b in (0, -1):
        _, plain = verify_eight_bit.specified([t[b][None].cpu() for t in tensors], SCHEMES[precision])
        expected, _ = reference.oracle(*plain)
        allowed = verify_eight_bit.allowed(plain, case, SCHEMES[precision].operands, expected, spec)
        assert ((out[b][None].cpu().double() - expected).abs() <= allowed).all()
        _, alone = microsdpa.sdpa(*(t[b][None] for t in tensors), precision=precision, return_lse=True)
        torch.testing.assert_close(lse[b][None], alone, rtol=0, atol=2e-2)


def test_the_means_of_2_26_heads() -> None:
    """Of 2^32 numbers, B * H_kv * D: the last head's were those of the first."""
    need(110)
    query, key, value = (filled(2**16, 2**10, 1, 64) for _ in range(3))
    out, lse = microsdpa.sdpa(query, key, value, precision="int8_fp8", return_lse=True)
    for part in (slice(0, 1), slice(-1, None)):
        few = microsdpa.sdpa(query[part], key[part], value[part], precision="int8_fp8", return_lse=True)
        assert torch.equal(out[part], few[0])
        torch.testing.assert_close(lse[part], few[1], rtol=0, atol=1e-4)


def test_strides_of_more_than_2_32_bytes() -> None:
    """Few elements, far apart: batch, head and row strides are followed in 64 bits by every kernel."""
    need(38)
    memory, output = (torch.zeros(9 * GIB, dtype=torch.float16, device="cuda") for _ in range(2))
    inputs = [torch.randn(2, 2, 70, 64, device="cuda").half() for _ in range(3)]
    strides = (4 * GIB + 64, 2 * GIB + 6400, 64, 1)
    for name in ("auto", *(family.name for family in FAMILIES)):
        views = []
        for i, tensor in enumerate(inputs):
            views.append(memory.as_strided((2, 2, 70, 64), strides, 2**20 * i).copy_(tensor))
        out = output.as_strided((2, 2, 70, 64), strides).fill_(torch.nan)
        try:
            microsdpa.sdpa(*views, out=out, impl=name)
            expected = microsdpa.sdpa(*inputs, impl=name)
        except UnsupportedProblem as refusal:
            print(f"{name}: {refusal}")
            continue
        torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("shape", [(1, 2**28, 8, 16), (2**16, 2**15, 1, 16)])
def test_what_does_not_fit_a_launch_is_refused(shape: tuple[int, ...]) -> None:
    """Tensors of one element that are spread by strides of 0: nothing as large is there."""
    query = torch.zeros(1, 1, 1, 16, dtype=torch.float16, device="cuda").expand(shape)
    key = torch.zeros(1, 1, 1, 16, dtype=torch.float16, device="cuda").expand(shape[0], 1, 1, 16)
    with pytest.raises(UnsupportedProblem, match="exceed"):
        microsdpa.sdpa(query, key, key, enable_gqa=True, impl="ampere/mma")
