"""Values whose head dimension is not that of query and key, as in DeepSeek's attention: 192 and 128."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import microsdpa
from microsdpa import reference
from microsdpa.evidence import compare
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.select import select

EMULATED = "emulate:hopper/throughput"


def _inputs(
    head_dim: int, value_dim: int, dtype: torch.dtype = torch.float16, lengths: tuple[int, int] = (70, 90)
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(head_dim + value_dim)
    query = torch.randn(1, 4, lengths[0], head_dim, generator=generator).to(dtype)
    key = torch.randn(1, lengths[1], 2, head_dim, generator=generator).to(dtype).transpose(1, 2)
    value = torch.randn(1, 2, lengths[1], value_dim, generator=generator).to(dtype)
    return query, key, value


def _check(inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], out: torch.Tensor, **options: Any) -> None:
    causal = "upper_left" if options.pop("is_causal", False) else options.pop("causal", None)
    expected, _ = reference.oracle(*inputs, causal=causal, **options)
    eager, _ = reference.eager(*inputs, causal=causal, **options)
    assert out.shape == expected.shape
    assert compare.measure(out, expected).max_abs <= compare.tolerance(eager, expected, out.dtype).max_abs


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"causal": "lower_right", "window": (40, 0)}], ids=str)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (128, 72), (64, 24), (80, 64)])
def test_the_output_has_the_columns_of_value(head_dim: int, value_dim: int, options: dict[str, Any]) -> None:
    inputs = _inputs(head_dim, value_dim)
    out = microsdpa.sdpa(*inputs, **options, enable_gqa=True, impl=EMULATED)
    assert isinstance(out, torch.Tensor)
    _check(inputs, out, **options)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(32, 24), (192, 128)])
def test_ctas_that_share_keys_write_the_columns_of_value(head_dim: int, value_dim: int) -> None:
    inputs = _inputs(head_dim, value_dim, lengths=(20, 1100))
    assert "Dividing" in str(microsdpa.explain(*inputs, enable_gqa=True, impl=EMULATED))
    out = microsdpa.sdpa(*inputs, enable_gqa=True, impl=EMULATED)
    assert isinstance(out, torch.Tensor)
    _check(inputs, out)


@pytest.mark.parametrize("impl", ["auto", EMULATED])
def test_the_lse_masks_and_an_output_of_ones_own(impl: str) -> None:
    inputs = _inputs(192, 128, torch.bfloat16)
    mask = torch.rand(70, 90) < 0.7
    given = torch.full((1, 70, 4, 128), torch.nan, dtype=torch.bfloat16).transpose(1, 2)
    out, lse = microsdpa.sdpa(*inputs, attn_mask=mask, enable_gqa=True, out=given, return_lse=True, impl=impl)
    assert out is given
    _check(inputs, out, attn_mask=mask)
    torch.testing.assert_close(lse.double(), reference.oracle(*inputs, attn_mask=mask)[1], rtol=0, atol=2e-3)


def test_memory_follows_that_of_query() -> None:
    query, key, value = _inputs(192, 128)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    out = microsdpa.sdpa(query, key, value, enable_gqa=True, impl=EMULATED)
    assert isinstance(out, torch.Tensor)
    assert out.transpose(1, 2).is_contiguous()


def test_plans_and_operators_have_it_too() -> None:
    inputs = _inputs(192, 128)
    expected = microsdpa.sdpa(*inputs, enable_gqa=True, impl=EMULATED)
    plan = microsdpa.plan(*inputs, enable_gqa=True, impl=EMULATED)
    assert torch.equal(plan(*inputs), expected)
    assert torch.equal(plan(*inputs, out=torch.empty(1, 4, 70, 128, dtype=torch.float16)), expected)
    rest = None, None, None, None, None, True, [-1, -1], None, EMULATED
    assert torch.equal(torch.ops.microsdpa.attention(*inputs, *rest)[0], expected)
    assert torch.equal(torch.ops.microsdpa.attention_output(*inputs, *rest), expected)
    assert "192, 64, 2" in str(microsdpa.explain(*inputs, enable_gqa=True, impl=EMULATED))


def test_a_graph_knows_the_output_ahead() -> None:
    inputs = _inputs(64, 24)

    @torch.compile(fullgraph=True, backend="eager")
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        found = microsdpa.sdpa(query, key, value, enable_gqa=True)
        assert isinstance(found, torch.Tensor)
        return found.reshape(query.shape[0], -1, value.shape[-1]) + 1

    expected = microsdpa.sdpa(*inputs, enable_gqa=True)
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(attend(*inputs), expected.reshape(1, -1, 24) + 1)


def test_on_a_cpu_it_is_torchs_with_gradients() -> None:
    leaves = [tensor.requires_grad_() for tensor in _inputs(64, 24)]
    out = microsdpa.sdpa(*leaves, enable_gqa=True, softcap=20.0)
    assert isinstance(out, torch.Tensor)
    gradients = torch.autograd.grad(out.float().square().sum(), leaves)
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    query, key, value = exact[0], *(tensor.repeat_interleave(2, dim=1) for tensor in exact[1:])
    weights = (20 * (query @ key.mT * 64**-0.5 / 20).tanh()).softmax(dim=-1)
    for got, want in zip(gradients, torch.autograd.grad((weights @ value).square().sum(), exact), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)


def test_what_no_kernel_has_is_refused_in_words() -> None:
    query, key, value = _inputs(192, 128)
    with pytest.raises(microsdpa.UnsupportedProblem, match="no gradient with 192 columns of query and 128 of value"):
        microsdpa.sdpa(query.requires_grad_(), key, value, enable_gqa=True, impl=EMULATED)
    query = query.detach()
    with pytest.raises(microsdpa.UnsupportedProblem, match="one head dimension for Q, K and V, not 192 and 128"):
        microsdpa.sdpa(query, key, value, enable_gqa=True, impl="emulate:ampere/mma")
    with pytest.raises(microsdpa.UnsupportedProblem, match="a value padded to 192 columns"):
        microsdpa.sdpa(query, key, value, enable_gqa=True, impl="emulate")  # of sm_89
    with pytest.raises(microsdpa.UnsupportedProblem, match="128 columns of V are more than the 96 of the tiles for 96"):
        microsdpa.sdpa(query[..., :96], key[..., :96], value, enable_gqa=True, impl=EMULATED)
    with pytest.raises(microsdpa.InvalidArgument, match=r"out: expected shape \[1, 4, 70, 128\]"):
        microsdpa.sdpa(query, key, value, enable_gqa=True, out=torch.empty_like(query))
    with pytest.raises(microsdpa.InvalidArgument, match="value: expected head dimension D = 192"):
        microsdpa.sdpa(query, key, value, enable_gqa=True, precision="fp8")


@pytest.mark.parametrize("sizes", [(1, 8, 8, 512, 512), (4, 16, 16, 4096, 4096), (1, 1, 1, 1, 30000)])
def test_any_size_goes_to_the_kernel_that_has_it(sizes: tuple[int, int, int, int, int]) -> None:
    problem = Problem(*sizes, 64, "float16", value_dim=32)
    found = select(problem)
    assert found.spec.name == "hopper/throughput"
    plain = select(Problem(*sizes, 64, "float16"), "hopper/throughput").spec
    assert isinstance(plain, KernelSpec)
    # CTAs that share keys write the output without bulk copies, which know its columns.
    expected = {name: re.sub("(Dividing<.*), 64>", r"\1, 32>", value) for name, value in plain.template_args}
    assert dict(found.spec.template_args) == expected
    assert problem.flops < Problem(*sizes, 64, "float16").flops


def test_the_drop_in_takes_it() -> None:
    query, key, value = _inputs(64, 24)
    expected = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    with microsdpa.enabled(strict=True):
        found = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    assert torch.equal(found, expected)
    with microsdpa.enabled(strict=True, impl=EMULATED):
        found = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    _check((query, key, value), found)
