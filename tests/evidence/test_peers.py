from __future__ import annotations

import itertools
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from microsdpa import reference
from microsdpa.errors import InvalidArgument
from microsdpa.evidence import compare
from microsdpa.evidence.expectation import Expectation
from microsdpa.evidence.inputs import Case, Masking, make
from microsdpa.evidence.peers import PEERS, Implementation, choose, fa3_library, quantized, slug, torch_flex
from microsdpa.evidence.peers.flash_attn import FlashAttention2, FlashAttention3, FlashAttention3Fp8, FlashAttention4
from microsdpa.evidence.peers.flash_infer import FlashInfer
from microsdpa.evidence.peers.sage_attention import SageAttention
from microsdpa.evidence.peers.torch_flex import TorchFlex
from microsdpa.evidence.peers.torch_sdpa import TorchMath, TorchSdpa
from microsdpa.kernels.problem import Causal

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


def test_a_library_of_flash_attention_3_is_checked_before_it_is_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "libother.so"
    source = tmp_path / "other.cc"
    source.write_text(
        'extern "C" int fa3_forward() { return 0; }\nextern "C" int fa3_size_of_arguments() { return 8; }'
    )
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(other), str(source)], check=True)
    for path, said in ((tmp_path / "absent.so", "cannot open"), (other, "build it again")):
        fa3_library.library.cache_clear()
        monkeypatch.setenv(fa3_library.LIBRARY, str(path))
        assert said in FlashAttention3().unavailable()
        assert FlashAttention3().version == ""
    assert FlashAttention3().refuses(Case(1, 1, 64, 64, 96)).endswith("no head dimension 96")
    assert "no masks" in FlashAttention3().refuses(Case(1, 1, 64, 64, 64, masks=("window",)))
    assert not FlashAttention3().refuses(Case(1, 1, 64, 64, 64, causal="lower_right"))
    monkeypatch.delenv(fa3_library.LIBRARY)
    assert "pip install flash_attn_3" in FlashAttention3().unavailable()


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


MASKINGS: list[tuple[tuple[Masking, ...], Causal | None]] = [
    (("bool",), None),
    (("padding",), "upper_left"),
    (("left padding",), None),
    (("additive",), "lower_right"),
    (("float32",), None),
    (("window",), "lower_right"),
    (("window as a mask",), None),
    (("documents",), "upper_left"),
    (("documents",), None),
    (("blocks 30%",), None),
    (("softcap",), "upper_left"),
    (("alibi",), "upper_left"),
    (("alibi", "window"), None),
]


@pytest.mark.parametrize(("masks", "causal"), MASKINGS)
@pytest.mark.parametrize("peer", [TorchMath(), TorchFlex()])
def test_masks_mean_the_same_to_torch(
    monkeypatch: pytest.MonkeyPatch, peer: Implementation, masks: tuple[Masking, ...], causal: Causal | None
) -> None:
    case = Case(2, 4, 150, 150, 32, heads_kv=2, causal=causal, masks=masks)
    monkeypatch.setattr(torch_flex, "_compiled", lambda: flex_attention)
    if refusal := peer.refuses(case):
        assert isinstance(peer, TorchMath)
        assert masks == ("softcap",), refusal
        return
    tensors = make(case)
    with peer.context():
        out = peer.bind(case, tensors, torch.empty_like(tensors[0]))()
    error, wrong = Expectation(case, tensors).check(out, "")
    assert not wrong, (wrong, error)


def test_flex_attention_is_given_the_blocks_that_are_shown() -> None:
    case = Case(1, 2, 1024, 1024, 32, masks=("blocks 30%",))
    made = torch_flex.block_mask(case, "cpu")
    assert int(made.full_kv_num_blocks.sum()) == round(0.3 * 64)
    assert int(made.kv_num_blocks.sum()) == 0
    assert torch_flex.block_mask(CASE, "cpu").kv_num_blocks.shape[:2] == (1, 1)
    assert TorchFlex().refuses(Case(1, 2, 8, 8, 32, masks=("sinks",))) == "it has no sinks"


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


@pytest.mark.parametrize("masks", [("window 1024",), ("window", "softcap"), ("documents",), ("alibi",), ("padding",)])
def test_flash_attention_has_windows_and_packed_sequences(
    monkeypatch: pytest.MonkeyPatch, masks: tuple[Masking, ...]
) -> None:
    case = Case(1, 2, 80, 80, 32, causal="upper_left", masks=masks)
    peer = FlashAttention4()
    if masks[0] in ("alibi", "padding"):
        assert peer.refuses(case) == f"it has no argument for {masks[0]}"
        return
    assert peer.refuses(case) == ""
    assert peer.refuses(Case(2, 2, 80, 90, 32, masks=masks))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> Any:
        ends = given.get("window_size", (None, None))
        options = {
            "causal": "lower_right" if given["causal"] else None,
            "scale": given["softmax_scale"],
            "window": tuple(-1 if end is None else end for end in ends),
            "softcap": given.get("softcap"),
        }
        return reference.oracle(*(x.transpose(1, 2) for x in (q, k, v)), **options)[0].half().transpose(1, 2), None  # type: ignore[arg-type]

    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> Any:
        starts = given.pop("cu_seqlens_q").tolist()
        assert given.pop("cu_seqlens_k").tolist() == starts
        assert starts[-1] == len(q)
        assert given["max_seqlen_q"] == max(b - a for a, b in itertools.pairwise(starts))
        spans = [tuple(x[None, a:b] for x in (q, k, v)) for a, b in itertools.pairwise(starts)]
        return torch.cat([attend(*span, **given)[0][0] for span in spans]), None

    fake = types.ModuleType("flash_attn.cute")
    fake.flash_attn_func, fake.flash_attn_varlen_func = attend, packed  # type: ignore[attr-defined]
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, fake)
    tensors = make(case)
    out = peer.decode(peer.bind(case, tensors, torch.empty_like(tensors[0]))())
    error, wrong = Expectation(case, tensors).check(out, "")
    assert not wrong, error


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


def test_e4m3_values_reach_448_and_zeros_stay_zeros() -> None:
    x = torch.randn(2, 4, 8, 16)
    values, scale = quantized.per_tensor_e4m3(x)
    assert float(values.float().abs().max()) == 448
    assert float((values.float() * scale - x).abs().max()) <= float(x.abs().max()) * 2**-4
    values, scale = quantized.per_head_e4m3(x, 2)
    assert scale.shape == (2, 2)
    assert float(values.float()[0, :2].abs().max()) == 448
    assert not quantized.per_tensor_e4m3(torch.zeros(3))[0].float().any()
