"""The example that serves a small random Llama: its tokens are those of dense attention."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import microsdpa

PATH = Path(__file__).parents[2] / "examples/continuous_batching.py"
CLOSE = 0.06
"""Logits of BF16 activations that may come in another order: they are sums of about ten numbers up to 4."""


@pytest.fixture(scope="module")
def example() -> ModuleType:
    sys.path.insert(0, str(PATH.parent))  # where paged_llama is, as for a script
    spec = importlib.util.spec_from_file_location("continuous_batching", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(PATH.parent))
    return module


def dense_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """Logits [S, vocabulary] of one sequence, by dense attention on tensors that are rotated here."""
    c, x = model.config, model.embedding[torch.tensor(tokens)]

    def normal(rows: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(rows, (rows.shape[-1],))

    def rotated(rows: torch.Tensor) -> torch.Tensor:  # [S, heads, D]
        one, other = rows.float().chunk(2, dim=-1)
        cos, sin = (angles[: len(tokens), None] for angles in (model.cos, model.sin))
        return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1).to(rows.dtype)

    for layer in model.layers:
        rows = F.linear(normal(x), layer["qkv"]).view(len(tokens), -1, c.head_dim)
        query, key, value = rows.split([c.heads, c.heads_kv, c.heads_kv], dim=1)
        inputs = (t.transpose(0, 1)[None] for t in (rotated(query), rotated(key), value))
        out = microsdpa.sdpa(*inputs, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        x = x + F.linear(out.flatten(1), layer["out"])
        gate, up = F.linear(normal(x), layer["up"]).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * up, layer["down"])
    return F.linear(normal(x), model.head).float()


def check(model: Any, request: Any) -> int:
    """Every token has the largest dense logit, or one as large but for rounding; gives how many have the largest."""
    logits = dense_logits(model, [*request.prompt, *request.tokens[:-1]])[len(request.prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(request.tokens)[:, None])[:, 0]
    assert ((logits.amax(dim=1) - chosen) < CLOSE).all()
    return int((logits.argmax(dim=1) == torch.tensor(request.tokens)).sum())


def test_requests_that_come_and_go_get_the_tokens_of_dense_attention(example: ModuleType) -> None:
    server = example.Server(example.Model(example.Config(), "cpu"), "cpu")
    requests = [server.add([(7 * i + j) % 500 for j in range(1 + 6 * i)], 5 + 3 * i) for i in range(5)]
    for _ in range(4):
        assert server.step()
    requests += [server.add([3 * i + 1, 2], 12) for i in range(7)]  # more than there are slots
    while server.step():
        assert len(server.running) <= example.MOST_SEQUENCES
    assert sorted(server.free_pages) == list(range(example.PAGES))
    assert [len(request.tokens) for request in requests] == [request.steps for request in requests]
    equal = sum(check(server.model, request) for request in requests)
    total = sum(request.steps for request in requests)
    assert equal >= 0.97 * total
    assert len({token for request in requests for token in request.tokens}) > total / 4


def test_two_hundred_steps_of_one_request(example: ModuleType) -> None:
    server = example.Server(example.Model(example.Config(), "cpu"), "cpu")
    request = server.add([1, 2, 3], 200)
    while server.step():
        pass
    assert check(server.model, request) >= 195


def test_a_request_waits_until_there_are_pages(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "PAGES", 6)
    server = example.Server(example.Model(example.Config(), "cpu"), "cpu")
    first, second = server.add([1] * 60, 4), server.add([2] * 40, 4)
    server.step()
    assert (len(first.tokens), len(second.tokens)) == (1, 0)
    while server.step():
        pass
    assert len(second.tokens) == 4
    with pytest.raises(ValueError, match="prompt and steps"):
        server.add([1] * 600, 1)


def test_it_runs_alone(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    assert "steps for 162 tokens" in capsys.readouterr().out
