"""The examples of models at batch size 1: what they compute is what plain attention gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loading import EXAMPLES, load

import microsdpa
from microsdpa import reference

NAMES = "action_expert", "speech_encoder", "llama_decode"


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any) -> torch.Tensor:
    """sdpa as torch's operators."""
    rows = []
    for x, norm in ((query, given["q_norm"]), (key, given["k_norm"])):
        layer = isinstance(norm, tuple)
        angles = given.get("rotary")
        at = torch.arange(x.shape[2])
        pair = norm if layer else (norm, None)
        rows.append(reference.changed_rows(x, pair, angles=angles, positions=at, layer=layer, dtype=torch.float32))
    found = F.scaled_dot_product_attention(*rows, value.float(), enable_gqa=True).to(value.dtype)
    return found if given.get("out") is None else given["out"].copy_(found)


@pytest.mark.parametrize("name", NAMES[:2])
def test_an_example_gives_what_plain_attention_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example = load(name)
    found = example.main()
    monkeypatch.setattr(microsdpa, "sdpa", plain)
    expected = example.main()
    assert found.isfinite().all()
    assert (found.float() - expected.float()).abs().max() < 0.02


def plain_varlen(query: torch.Tensor, *cache: torch.Tensor, **given: Any) -> torch.Tensor:
    """sdpa_varlen of one new token of one sequence, as torch's operators."""
    first = int(given["lengths"])
    angles = given["rotary_cos"], given["rotary_sin"]
    at = torch.tensor([first])
    turned = [
        reference.changed_rows(x.transpose(1, 2), angles=angles, positions=at, dtype=torch.float32)
        for x in (query, given["new_key"])
    ]
    for kept, new in zip(cache, (turned[1].transpose(1, 2), given["new_value"]), strict=True):
        kept[:, first] = new[:, 0]
    key, value = (kept[:, : first + 1].transpose(1, 2).float() for kept in cache)
    found = F.scaled_dot_product_attention(turned[0], key, value, enable_gqa=True)
    return found.transpose(1, 2).to(query.dtype)


def test_the_decoder_gives_the_tokens_of_plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("llama_decode")
    tokens = example.main(8)
    assert len(set(tokens)) > 2
    monkeypatch.setattr(microsdpa, "sdpa_varlen", plain_varlen)
    assert example.main(8) == tokens


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 100
