"""torch's operator for packed sequences and pages, as torch.nn.attention.varlen calls it: here with the CPU's key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import microsdpa
from microsdpa import reference
from microsdpa.evidence import compare
from microsdpa.execution import nodes
from microsdpa.integrations import flash_packed

varlen = pytest.importorskip("torch.nn.attention.varlen")
OFFSETS, KEY_OFFSETS = torch.tensor([0, 3, 3, 10]).int(), torch.tensor([0, 5, 9, 20]).int()
TABLE, LENGTHS = torch.tensor([[3, 1, -1], [0, 5, 2], [4, -1, -1]]).int(), torch.tensor([7, 9, 2]).int()


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """CPU tensors go through the kernels that flash_backend gives to CUDA's."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    for name, kernel in flash_packed.kernels(lambda name: None, nodes.nothing).items():
        library.impl(name, kernel, "CPU", with_keyset=True)
    yield
    library._destroy()


def check(got: torch.Tensor, lse: torch.Tensor, inputs: Any, given: dict[str, torch.Tensor], **options: Any) -> None:
    exact, eager = (reference.varlen(inputs, given, exact=exact, **options) for exact in (True, False))
    for found, want, plain in zip((got, lse), exact, eager, strict=True):
        assert compare.tolerance(plain, want, found.dtype).admits(compare.measure(found, want))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (4, 0), (2, 3)])
def test_varlen_attn_of_packed_keys(on_cpu: None, window: tuple[int, int]) -> None:
    q, k, v = tensor(10, 4, 32), tensor(20, 2, 32, seed=1), tensor(20, 2, 32, seed=2)
    wants = varlen.AuxRequest(lse=True)
    given = {"window_size": window, "enable_gqa": True, "return_aux": wants, "scale": 0.3}
    out, lse = varlen.varlen_attn(q, k, v, OFFSETS, KEY_OFFSETS, 7, 11, **given)
    ends = {"query_offsets": OFFSETS, "key_offsets": KEY_OFFSETS}
    masks = {"window": None if window == (-1, -1) else window}
    check(out, lse, (q, k, v), ends, masks=masks, scale=0.3)


def test_varlen_attn_of_pages_and_into_a_given_tensor(on_cpu: None) -> None:
    if flash_packed.IN_PLACE not in dir(torch.ops.aten):
        pytest.skip(f"torch {torch.__version__} has no pages and no out variant")
    q, k, v = tensor(10, 4, 32), tensor(6, 4, 2, 32, seed=1), tensor(6, 4, 2, 32, seed=2)
    out = torch.empty_like(q)
    given = {"window_size": (-1, 0), "enable_gqa": True, "seqused_k": LENGTHS, "block_table": TABLE}
    lse = varlen.AuxRequest(lse=True)
    _, found = varlen.varlen_attn_out(out, q, k, v, OFFSETS, None, 7, 12, return_aux=lse, **given)
    ends = {"query_offsets": OFFSETS, "page_table": TABLE, "lengths": LENGTHS}
    check(out, found, (q, k, v), ends, causal=True)
    for splits in (1, 3):
        assert torch.equal(out, varlen.varlen_attn(q, k, v, OFFSETS, None, 7, 12, num_splits=splits, **given))


def test_varlen_attn_below_autograd(on_cpu: None) -> None:
    q, k, v = (tensor(10, 2, 32, seed=seed).requires_grad_() for seed in range(3))
    out = varlen.varlen_attn(q, k, v, OFFSETS, OFFSETS, 7, 7, window_size=(-1, 0))
    assert out.requires_grad  # its gradient is torch's own, which no CPU has
    with torch.no_grad():
        assert torch.equal(out, varlen.varlen_attn(q, k, v, OFFSETS, OFFSETS, 7, 7, window_size=(-1, 0)))


def test_one_split_is_batch_invariance(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if "num_splits" not in str(torch.ops.aten._flash_attention_forward.default._schema):
        pytest.skip(f"torch {torch.__version__} has no num_splits")
    asked = []

    def noted(*given: Any, **options: Any) -> Any:
        asked.append(options["batch_invariant"])
        return microsdpa.sdpa_varlen(*given, **options)

    monkeypatch.setattr(flash_packed, "sdpa_varlen", noted)
    q = tensor(10, 2, 32)
    for splits in (None, 1, 2):
        varlen.varlen_attn(q, q, q, OFFSETS, OFFSETS, 7, 7, num_splits=splits)
    assert asked == [False, True, False]


def test_dense_tensors_and_slopes(on_cpu: None) -> None:
    q, k, v, slopes = tensor(2, 5, 4, 32), tensor(2, 9, 4, 32, seed=1), tensor(2, 9, 4, 32, seed=2), torch.rand(4)
    operator = torch.ops.aten._flash_attention_forward
    out, lse, state, *_ = operator(q, k, v, None, None, 5, 9, 0.0, True, False, alibi_slopes=slopes)
    check(out, lse, (q, k, v), {}, causal=True, masks={"alibi_slopes": slopes})
    assert state.dtype == torch.uint64


@pytest.mark.parametrize("given", [{"dropout_p": 0.2}, {"return_debug_mask": True}])
def test_what_is_torchs_own(on_cpu: None, given: dict[str, Any]) -> None:
    q = tensor(10, 2, 32)
    calls = {"dropout_p": 0.0, "is_causal": False, "return_debug_mask": False} | given
    with pytest.raises(microsdpa.UnsupportedProblem, match=next(iter(given))):
        torch.ops.aten._flash_attention_forward(q, q, q, OFFSETS, OFFSETS, 7, 7, **calls)


def test_torchs_own_kernel_gets_all_arguments() -> None:
    class Torchs:
        def call_boxed(self, keyset: Any, *given: Any, **further: Any) -> Any:
            return len(given), further

    for name, kernel in flash_packed.kernels(lambda name: Torchs(), nodes.nothing).items():
        count = 10 + (name == flash_packed.IN_PLACE)
        given = [None] * (count - 3) + [0.5, False, False]
        assert kernel(None, *given, num_splits=2, scale=0.1) == (count, {"num_splits": 2, "scale": 0.1})
