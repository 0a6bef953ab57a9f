"""FlashAttention's functions by their names: what they compute, what they refuse, where they are installed."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from microsdpa import flash_attn, reference
from microsdpa.errors import InvalidArgument, UnsupportedProblem
from microsdpa.evidence import compare
from microsdpa.flash_attn import interface

BOTH = pytest.mark.parametrize("module", [flash_attn, interface], ids=["2", "3"])
HALF = torch.float16


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape))).to(HALF)


def assert_close(got: torch.Tensor, expected: torch.Tensor, eager: torch.Tensor) -> None:
    assert compare.tolerance(eager, expected, got.dtype).admits(compare.measure(got, expected))


def both(inputs: Any, given: Any, **options: Any) -> tuple[Any, Any]:
    return tuple(reference.varlen(inputs, given, exact=exact, **options) for exact in (True, False))  # type: ignore[return-value]


@BOTH
@pytest.mark.parametrize("window", [(-1, -1), (3, 0), (2, None), None])
@pytest.mark.parametrize(("queries", "causal"), [(9, True), (5, True), (5, False)])
def test_dense(module: Any, window: Any, queries: int, causal: bool) -> None:
    q, k, v = tensor(2, queries, 4, 32), tensor(2, 9, 2, 32, seed=1), tensor(2, 9, 2, 32, seed=2)
    out, lse, *rest = module.flash_attn_func(q, k, v, causal=causal, window_size=window, return_attn_probs=True)
    ends = None if window in (None, (-1, -1)) else tuple(-1 if end is None else end for end in window)
    exact, eager = both((q, k, v), {}, causal=causal, masks={"window": ends})
    assert_close(out, exact[0], eager[0])
    torch.testing.assert_close(lse.double(), exact[1], rtol=1e-4, atol=1e-3)
    assert rest == ([None] if module is flash_attn else [])
    alone = module.flash_attn_func(q, k, v, causal=causal, window_size=window)
    assert torch.equal(alone, out)


@pytest.mark.parametrize("descales", [True, False])
def test_descales_of_narrow_keys(descales: bool) -> None:
    q, generator = tensor(2, 3, 4, 32), torch.Generator().manual_seed(1)
    k, v = (torch.randn(2, 9, 2, 32, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    given = {name: torch.rand(2, 2, generator=generator) for name in ("k_descale", "v_descale")} if descales else {}
    scales = {f"{name[0]}_scale": scale for name, scale in given.items()} or {
        name: torch.ones(()) for name in ("k_scale", "v_scale")
    }
    exact, eager = both((q, k, v), scales, causal=True)
    out = interface.flash_attn_func(q, k, v, causal=True, **given)
    assert_close(out, exact[0], eager[0])  # type: ignore[arg-type]
    lengths = torch.full((2,), 9, dtype=torch.int32)
    cached = interface.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True, **given)
    assert torch.equal(cached, out)  # type: ignore[arg-type]
    flat, offsets = (t.flatten(0, 1) for t in (q, k, v)), (torch.tensor([0, n, 2 * n]).int() for n in (3, 9))
    packed = interface.flash_attn_varlen_func(*flat, *offsets, 3, 9, causal=True, **given)
    assert torch.equal(packed, out.flatten(0, 1))  # type: ignore[union-attr, arg-type]


def test_dense_has_gradients() -> None:
    q, k, v = (tensor(1, 6, 2, 32, seed=seed).float().to(HALF).requires_grad_() for seed in range(3))
    flash_attn.flash_attn_func(q, k, v, causal=True).sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (q, k, v))
    with pytest.raises(UnsupportedProblem, match="deterministic"):
        flash_attn.flash_attn_func(q, k, v, deterministic=True)


@BOTH
def test_packed(module: Any) -> None:
    offsets, key_offsets = torch.tensor([0, 3, 3, 10]).int(), torch.tensor([0, 5, 9, 20]).int()
    q, k, v = tensor(10, 4, 32), tensor(20, 2, 32, seed=1), tensor(20, 2, 32, seed=2)
    out = module.flash_attn_varlen_func(q, k, v, offsets, key_offsets, 7, 11, causal=True, softcap=2.0)
    given = {"query_offsets": offsets, "key_offsets": key_offsets}
    exact, eager = both((q, k, v), given, causal=True, masks={"softcap": 2.0})
    assert_close(out, exact[0], eager[0])


@BOTH
def test_packed_queries_on_pages(module: Any) -> None:
    offsets, key_offsets = torch.tensor([0, 1, 5]).int(), torch.tensor([0, 7, 16]).int()
    q, k, v = tensor(5, 4, 32), tensor(6, 4, 2, 32, seed=1), tensor(6, 4, 2, 32, seed=2)
    table = torch.tensor([[3, 1, -1], [0, 5, 2]]).int()
    out = module.flash_attn_varlen_func(q, k, v, offsets, key_offsets, 4, 9, causal=True, block_table=table)
    lengths = torch.tensor([7, 9]).int()
    exact, eager = both((q, k, v), {"query_offsets": offsets, "page_table": table, "lengths": lengths}, causal=True)
    assert_close(out, exact[0], eager[0])


def test_the_signature_of_vllm() -> None:
    offsets, lengths = torch.tensor([0, 1, 5]).int(), torch.tensor([7, 9]).int()
    q, both_in_one = tensor(5, 4, 32), tensor(6, 2, 4, 64)  # [pages, H_kv, page, 2 D]: K beside V
    k, v = (t.transpose(1, 2) for t in both_in_one.split(32, dim=-1))
    table, sinks, out = torch.tensor([[3, 1, -1], [0, 5, 2]]).int(), tensor(4), torch.empty(5, 4, 32, dtype=HALF)
    got, lse = interface.flash_attn_varlen_func(
        **{"q": q, "k": k, "v": v, "max_seqlen_q": 4, "cu_seqlens_q": offsets, "max_seqlen_k": 9},
        **{"seqused_k": lengths, "softmax_scale": 0.2, "causal": True, "window_size": (5, 0)},
        **{"block_table": table, "out": out, "scheduler_metadata": None, "fa_version": 3, "num_splits": 4},
        **{"s_aux": sinks, "return_softmax_lse": True},
    )
    assert got is out
    given = {"query_offsets": offsets, "page_table": table, "lengths": lengths}
    masks = {"window": (5, 0), "sinks": sinks}
    exact, eager = both((q, k, v), given, causal=True, scale=0.2, masks=masks)
    assert_close(out, exact[0], eager[0])
    torch.testing.assert_close(lse.double(), exact[1], rtol=1e-4, atol=1e-3)


@BOTH
def test_a_cache_gets_new_keys(module: Any) -> None:
    q, k_cache, v_cache = tensor(2, 1, 4, 32), tensor(3, 20, 2, 32, seed=1), tensor(3, 20, 2, 32, seed=2)
    k, v = tensor(2, 1, 2, 32, seed=3), tensor(2, 1, 2, 32, seed=4)
    angles = torch.rand(20, 8)
    rotary = {"rotary_cos": angles.cos().to(HALF), "rotary_sin": angles.sin().to(HALF)}
    lengths, rows = torch.tensor([5, 19]).int(), torch.tensor([2, 0]).int()
    wanted_keys, wanted_values = k_cache.clone(), v_cache.clone()
    rotated = []
    for b in range(2):
        cos, sin = (rotary[name][int(lengths[b])].float() for name in ("rotary_cos", "rotary_sin"))
        for rows_ in (q[b, 0], k[b, 0]):
            x, y = rows_[:, :16:2].float(), rows_[:, 1:16:2].float()
            turned = torch.stack([x * cos - y * sin, x * sin + y * cos], dim=-1).flatten(1)
            rotated.append(torch.cat([turned.to(HALF), rows_[:, 16:]], dim=-1))
        wanted_keys[rows[b], lengths[b]], wanted_values[rows[b], lengths[b]] = rotated[-1], v[b, 0]
    arguments = {"k": k, "v": v, "cache_seqlens": lengths, "cache_batch_idx": rows, "causal": True, **rotary}
    out, lse = module.flash_attn_with_kvcache(q, k_cache, v_cache, **arguments, return_softmax_lse=True)
    torch.testing.assert_close(k_cache, wanted_keys)
    assert torch.equal(v_cache, wanted_values)
    query = torch.stack([rotated[0], rotated[2]])[:, None]
    exact, eager = both((query, wanted_keys[rows.long()], wanted_values[rows.long()]), {"lengths": lengths + 1})
    assert_close(out, exact[0], eager[0])
    assert lse.shape == (2, 4, 1)


@BOTH
def test_a_cache_of_one_length(module: Any) -> None:
    q, k, v = tensor(2, 1, 4, 32), tensor(2, 20, 2, 32, seed=1), tensor(2, 20, 2, 32, seed=2)
    out = module.flash_attn_with_kvcache(q, k, v, cache_seqlens=7)
    exact, eager = both((q, k[:, :7], v[:, :7]), {})
    assert_close(out, exact[0], eager[0])


REFUSED: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "dropout_p": ("flash_attn_func", flash_attn, {"dropout_p": 0.1}),
    "qv": ("flash_attn_func", interface, {"qv": torch.ones(1)}),
    "attention_chunk": ("flash_attn_func", interface, {"attention_chunk": 64}),
    "k_descale": ("flash_attn_func", interface, {"k_descale": torch.ones(1, 2)}),
    "q_descale": ("flash_attn_func", interface, {"q_descale": torch.ones(1, 2)}),
    "cache_leftpad": ("flash_attn_with_kvcache", flash_attn, {"cache_leftpad": torch.zeros(2).int()}),
    "rotary_seqlens": ("flash_attn_with_kvcache", interface, {"rotary_seqlens": torch.zeros(2).int()}),
    "cu_seqlens_k_new": ("flash_attn_with_kvcache", interface, {"cu_seqlens_k_new": torch.zeros(3).int()}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_honours_is_refused_by_name(name: str) -> None:
    function, module, changes = REFUSED[name]
    q, k, v = tensor(2, 1, 4, 32), tensor(2, 20, 2, 32), tensor(2, 20, 2, 32)
    with pytest.raises(UnsupportedProblem, match=rf"^{name}: no kernel"):
        getattr(module, function)(q, k, v, **changes)


def test_other_refusals_of_a_cache() -> None:
    q, k, v = tensor(2, 2, 4, 32), tensor(2, 20, 2, 32), tensor(2, 20, 2, 32)
    new = {"k": tensor(2, 2, 2, 32), "v": tensor(2, 2, 2, 32)}
    with pytest.raises(InvalidArgument, match=r"^cache_seqlens: expected the lengths"):
        flash_attn.flash_attn_with_kvcache(q, k, v, **new)
    with pytest.raises(UnsupportedProblem, match=r"^k: "):
        flash_attn.flash_attn_with_kvcache(q, k, v, k=tensor(2, 3, 2, 32), v=tensor(2, 3, 2, 32), cache_seqlens=4)
    with pytest.raises(UnsupportedProblem, match=r"^rotary_cos: "):
        flash_attn.flash_attn_with_kvcache(
            q, k, v, **new, cache_seqlens=4, rotary_cos=torch.ones(20, 8), rotary_sin=torch.ones(20, 8)
        )
    with pytest.raises(InvalidArgument, match=r"^seqused_k: expected lengths"):
        interface.flash_attn_varlen_func(q[0], k, v, torch.tensor([0, 2]).int(), block_table=torch.zeros(1, 2).int())


@pytest.fixture
def _installed() -> Iterator[None]:
    flash_attn.install()
    yield
    flash_attn.uninstall()
    assert "flash_attn" not in sys.modules


@pytest.mark.usefixtures("_installed")
def test_installed_modules_have_the_functions() -> None:
    two, inner, three = map(
        importlib.import_module, ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_interface")
    )
    assert two.flash_attn_func is inner.flash_attn_func is flash_attn.flash_attn_func
    assert three.flash_attn_with_kvcache is interface.flash_attn_with_kvcache
    assert two.__version__ == flash_attn.__version__
    assert importlib.util.find_spec("flash_attn") is not None
    flash_attn.install()  # once more changes nothing that matters
    assert importlib.import_module("flash_attn").flash_attn_func is flash_attn.flash_attn_func


def test_another_flash_attn_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", inspect)
    with pytest.raises(RuntimeError, match="flash_attn is imported already"):
        flash_attn.install()


def test_nothing_is_installed_unless_asked() -> None:
    code = "import microsdpa, sys; assert 'flash_attn' not in sys.modules and 'flash_attn_interface' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_distributions_are_listed_where_asked() -> None:
    flash_attn.install()
    assert "flash-attn" not in metadata.packages_distributions().get("flash_attn", [])
    flash_attn.install(distributions=True)
    try:
        assert metadata.version("flash_attn") == flash_attn.__version__
        assert metadata.version("flash-attn-3") == "3.0.0"
        found = metadata.packages_distributions()
        assert (found["flash_attn"], found["flash_attn_interface"]) == (["flash-attn"], ["flash-attn-3"])
        with pytest.raises(FileNotFoundError):
            metadata.distribution("flash-attn").locate_file("flash_attn.py")
    finally:
        flash_attn.uninstall()
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("flash-attn")


def test_another_distribution_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn-1.0.dist-info").mkdir()
    (tmp_path / "flash_attn-1.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: flash-attn\nVersion: 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match=r"flash-attn is there already, in version 1\.0"):
        flash_attn.install(distributions=True)
    assert "flash_attn" not in sys.modules
