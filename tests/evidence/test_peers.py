from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from microsdpa import reference
from microsdpa.errors import InvalidArgument
from microsdpa.evidence import compare
from microsdpa.evidence.expectation import Expectation
from microsdpa.evidence.inputs import Case, make
from microsdpa.evidence.peers import PEERS, Implementation, choose, quantized, slug
from microsdpa.evidence.peers.flash_attn import FlashAttention2, FlashAttention3Fp8, FlashAttention4
from microsdpa.evidence.peers.flash_infer import FlashInfer
from microsdpa.evidence.peers.sage_attention import SageAttention
from microsdpa.evidence.peers.torch_sdpa import TorchMath, TorchSdpa

CASE = Case(2, 4, 40, 40, 32, heads_kv=2, causal="upper_left")


def test_every_peer_says_what_it_is() -> None:
    assert len({peer.name for peer in PEERS}) == len(PEERS)
    for peer in PEERS:
        assert peer.configuration, peer.name
        assert isinstance(peer().version, str)
        assert isinstance(peer().unavailable(), str)


def test_an_absent_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sageattention", None)
    assert "sageattention" in SageAttention().unavailable()
    broken = types.ModuleType("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", broken)
    assert FlashAttention2().unavailable() == "flash_attn has no flash_attn_func: pip install flash-attn"


def test_choosing_peers() -> None:
    assert [peer.name for peer in choose("torch-flash,torch", eight_bit=False)] == ["torch FLASH", "torch"]
    assert choose("none", eight_bit=True) == []
    assert all(not peer.arithmetic for peer in choose("all", eight_bit=False))
    assert len(choose("all", eight_bit=True)) == len(PEERS)
    with pytest.raises(InvalidArgument, match=r"expected all, none, or some of torch, torch-flash, .*got torch-fast"):
        choose("torch,torch-fast", eight_bit=False)
    assert slug("torch FLASH") == "torch-flash"


@pytest.mark.parametrize("peer", [TorchSdpa(), TorchMath()])
def test_torch_on_the_cpu_is_right(peer: Implementation) -> None:
    tensors = make(CASE)
    with peer.context():
        out = peer.decode(peer.bind(CASE, tensors, torch.empty_like(tensors[0]))())
    _, wrong = Expectation(CASE, tensors).check(out, peer.arithmetic)
    assert not wrong


def test_alignments_are_refused_where_they_matter() -> None:
    crossing = Case(1, 2, 8, 16, 32, causal="upper_left")
    assert TorchSdpa().refuses(crossing) == ""
    assert "aligns causal masks by lower_right" in FlashAttention4().refuses(crossing)
    assert FlashAttention4().refuses(CASE) == ""
    assert "batch size 1" in FlashInfer().refuses(CASE)
    assert "GiB" in TorchMath().refuses(Case(1, 64, 16384, 16384, 64))


def stand_in(calls: list[dict[str, Any]], lse: bool) -> Any:
    """A flash_attn_func that computes by the reference and notes its arguments."""

    def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        calls.append(options)
        scales = [options.get(f"{name}_descale") for name in "qkv"]
        tensors = []
        for x, scale in zip((q, k, v), scales, strict=True):
            x = x.transpose(1, 2).float()
            if scale is not None:
                x = x * scale.repeat_interleave(x.shape[1] // scale.shape[1], dim=1)[:, :, None, None]
            tensors.append(x)
        causal = "lower_right" if options.get("causal") else None
        out, _ = reference.oracle(*tensors, causal=causal, scale=options.get("softmax_scale"))
        out = out.half().transpose(1, 2)
        return (out, None) if lse else out

    return flash_attn_func


@pytest.mark.parametrize(
    ("peer", "module", "lse"),
    [
        (FlashAttention4(), "flash_attn.cute", True),
        (FlashAttention2(), "flash_attn", False),
        (FlashAttention3Fp8(), "flash_attn_interface", False),
    ],
)
def test_flash_attention_gets_its_layout_and_gives_ours(
    monkeypatch: pytest.MonkeyPatch, peer: Implementation, module: str, lse: bool
) -> None:
    calls: list[dict[str, Any]] = []
    fake = types.ModuleType(module)
    fake.flash_attn_func = stand_in(calls, lse)  # type: ignore[attr-defined]
    for name in (module, module.split(".")[0]):
        monkeypatch.setitem(sys.modules, name, fake)
    tensors = make(CASE)
    out = peer.decode(peer.bind(CASE, tensors, torch.empty_like(tensors[0]))())
    error, wrong = Expectation(CASE, tensors).check(out, peer.arithmetic)
    assert not wrong, error
    assert calls[0]["causal"]


def test_sage_attention_keeps_its_hands_off_the_shared_key(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("sageattention")

    def sageattn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        k -= k.mean(dim=2, keepdim=True)
        return reference.oracle(q, k, v, causal="upper_left")[0].half()

    fake.sageattn = sageattn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sageattention", fake)
    tensors = make(CASE)
    before = tensors[1].clone()
    out = SageAttention().bind(CASE, tensors, torch.empty_like(tensors[0]))()
    assert torch.equal(tensors[1], before)
    assert not Expectation(CASE, tensors).check(out, "int8")[1]


@pytest.mark.parametrize("arithmetic", ["e4m3", "int8"])
@pytest.mark.parametrize("causal", [None, "upper_left", "lower_right"])
def test_the_8_bit_reference_is_attention_with_an_8_bit_error(arithmetic: str, causal: Any) -> None:
    case = Case(1, 4, 50, 70, 64, heads_kv=2, causal=causal)
    tensors = make(case)
    expected, _ = reference.oracle(*tensors, causal=causal)
    found = compare.measure(quantized.eager(*tensors, causal, None, arithmetic), expected)
    low, high = (0.01, 0.09) if arithmetic == "e4m3" else (0.0005, 0.03)
    assert low < found.rel_l1 < high


def test_e4m3_codes_reach_448_and_zeros_stay_zeros() -> None:
    x = torch.randn(2, 4, 8, 16)
    codes, scale = quantized.per_tensor_e4m3(x)
    assert float(codes.float().abs().max()) == 448
    assert float((codes.float() * scale - x).abs().max()) <= float(x.abs().max()) * 2**-4
    codes, scale = quantized.per_head_e4m3(x, 2)
    assert scale.shape == (2, 2)
    assert float(codes.float()[0, :2].abs().max()) == 448
    assert not quantized.per_tensor_e4m3(torch.zeros(3))[0].float().any()
