"""set_attention_backend("microsdpa") on small, randomly initialised diffusion transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import microsdpa
from microsdpa.integrations import dropin

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: pip install '.[integrations]'")
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn  # noqa: E402

from microsdpa.integrations.diffusers import NAME, register  # noqa: E402


@pytest.fixture(autouse=True)
def _native() -> Iterator[None]:
    """set_attention_backend also sets what models use that have none of their own."""
    with attention_backend("native"):
        yield


def random(seed: int = 1) -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator)


def flux() -> tuple[Any, dict[str, Any]]:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    normal = random()
    return model, {
        "hidden_states": normal(2, 16, 4),
        "encoder_hidden_states": normal(2, 7, 32),
        "pooled_projections": normal(2, 32),
        "timestep": torch.tensor([0.3, 0.9]),
        "img_ids": normal(16, 3),
        "txt_ids": normal(7, 3),
    }


def wan() -> tuple[Any, dict[str, Any]]:
    """A video model, with cross attention; its head dimension is no multiple of 16."""
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    normal = random()
    inputs = {"hidden_states": normal(1, 4, 2, 8, 8), "encoder_hidden_states": normal(1, 7, 16)}
    return model, inputs | {"timestep": torch.tensor([3])}


def qwen() -> tuple[Any, dict[str, Any]]:
    """Prompts of two lengths: the padding comes as a mask."""
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    normal = random()
    return model, {
        "hidden_states": normal(2, 16, 16),
        "encoder_hidden_states": normal(2, 7, 16),
        "encoder_hidden_states_mask": torch.arange(7) < torch.tensor([[7], [3]]),
        "timestep": torch.tensor([0.3, 0.9]),
        "img_shapes": [[(1, 4, 4)]] * 2,
    }


def run(model: Any, inputs: dict[str, Any], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    there = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    for name, x in there.items():
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            there[name] = x.to(dtype)
    with torch.no_grad():
        return model.to(device, dtype)(**there).sample.float().cpu()


@pytest.mark.parametrize(
    ("impl", "device"), [("auto", "cpu"), ("emulate", "cpu"), pytest.param("auto", "cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("make", [flux, wan, qwen])
def test_a_diffusion_transformer_computes_what_it_does_stock(
    make: Callable[[], tuple[Any, dict[str, Any]]], impl: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against itself in FP32, the error is no more than twice that of the same type with diffusers' own backend."""
    torch.manual_seed(0)
    model, inputs = make()
    exact = run(model.eval(), inputs, torch.float32)
    stock = run(model, inputs, torch.bfloat16)
    calls: list[bool] = []
    attend = dropin.attend
    monkeypatch.setattr(
        dropin, "attend", lambda call, *a, **options: calls.append(call[3] is not None) or attend(call, *a, **options)
    )
    register(strict=True, impl=impl)
    model.set_attention_backend(NAME)
    ours = run(model, inputs, torch.bfloat16, device)
    assert (ours - exact).abs().max() <= 2 * (stock - exact).abs().max() + 1e-3 * exact.abs().max()
    assert calls
    assert all(calls) if make is qwen else not any(calls)


def test_a_mask_of_keys_and_grouped_heads() -> None:
    register(strict=True)
    normal = random()
    query, key, value = normal(2, 9, 4, 16).half(), normal(2, 5, 2, 16).half(), normal(2, 5, 2, 16).half()
    mask = torch.arange(5) < torch.tensor([[5], [2]])
    options = {"attn_mask": mask, "scale": 0.3, "enable_gqa": True}
    with attention_backend(NAME):
        ours = dispatch_attention_fn(query, key, value, **options)
    stock = dispatch_attention_fn(query, key, value, **options, backend=AttentionBackendName.NATIVE)
    assert ours.shape == (2, 9, 4, 16)
    torch.testing.assert_close(ours, stock, rtol=2e-3, atol=2e-3)


def test_what_it_does_not_do_is_native_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = flux()
    register()
    dropin._logged.clear()
    stock = run(model.eval(), inputs, torch.float32)
    model.set_attention_backend(NAME)
    assert torch.equal(run(model, inputs, torch.float32), stock)
    assert len([record for record in caplog.records if "torch.float32" in record.message]) == 1
    register(strict=True)
    with pytest.raises(microsdpa.UnsupportedProblem, match=r"torch\.float32"):
        run(model, inputs, torch.float32)


def test_the_name_is_one_of_diffusers() -> None:
    register()
    register()
    name = AttentionBackendName(NAME)
    assert name is AttentionBackendName["MICROSDPA"]
    assert [each for each in AttentionBackendName if each.value == NAME] == [name]
    half = torch.zeros(1, 2, 2, 16).half()
    options = {"window_size": 3, "sinks": half, "unused": None}
    with pytest.raises(microsdpa.UnsupportedProblem, match="no argument window_size and sinks"):
        dispatch_attention_fn(half, half, half, attention_kwargs=options, backend=name)
    with pytest.raises(microsdpa.UnsupportedProblem, match="context parallelism"):
        dispatch_attention_fn(half, half, half, backend=name, parallel_config=object())
    with pytest.raises(microsdpa.InvalidArgument, match="impl"):
        register(impl="fastest")


@pytest.mark.parametrize("masked", [False, True])
def test_the_lse_comes_with_the_output(masked: bool) -> None:
    register()
    normal = random()
    query, key, value = normal(2, 9, 4, 16).half(), normal(2, 5, 2, 16).half(), normal(2, 5, 2, 16).half()
    mask = torch.arange(5) < torch.tensor([[5], [2]]) if masked else None
    options: dict[str, Any] = {"attn_mask": mask, "scale": 0.3, "enable_gqa": True}
    with attention_backend(NAME):
        out, lse = dispatch_attention_fn(query, key, value, **options, attention_kwargs={"return_lse": True})
        assert torch.equal(out, dispatch_attention_fn(query, key, value, **options))
    assert lse.shape == (2, 9, 4)
    scores = torch.einsum("bqhd,bkhd->bqhk", query.float(), key.repeat_interleave(2, dim=2).float()) * 0.3
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(dim=-1), rtol=1e-4, atol=1e-4)
    with pytest.raises(microsdpa.UnsupportedProblem, match=r"torch\.float32"), attention_backend(NAME):
        dispatch_attention_fn(*(t.float() for t in (query, key, value)), attention_kwargs={"return_lse": True})


def test_a_compiled_call_is_one_graph() -> None:
    register(strict=True)
    query = random()(1, 6, 2, 16).half()

    def call(query: torch.Tensor) -> torch.Tensor:
        return dispatch_attention_fn(query, query, query, backend=AttentionBackendName(NAME))

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(call, backend="aot_eager", fullgraph=True)(query), call(query))
