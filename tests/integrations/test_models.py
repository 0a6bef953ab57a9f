"""The models sweep: a sample of it, and that it finds what is wrong. `microsdpa models` runs all of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from microsdpa.evidence import model_processes, model_results, models, results, tiny
from microsdpa.evidence.tiny import Candidate

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[integrations]'")
from microsdpa.integrations import transformers as integration

PADDED = ("plain", "padded right", "padded left")
CACHED = (*PADDED, "last logits", "chunks", "static cache", "static first")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("microsdpa")
    level = logger.level
    models._quiet()
    yield
    logger.setLevel(level)


@pytest.mark.parametrize(
    ("family", "kind", "only"),
    [
        ("decoder", "llama", ()),
        ("decoder", "gemma4_text", (*CACHED, "assisted", "generate static", "compiled")),
        ("decoder", "gemma2", CACHED),
        ("decoder", "gpt_oss", (*CACHED, "compiled")),
        ("decoder", "mistral", (*CACHED, "beam search")),
        ("decoder", "deepseek_v32", PADDED),
        ("decoder", "glm_moe_dsa", ("padded left",)),
        ("decoder", "axk2", ("padded left",)),
        ("decoder", "mistral_large4_text", ("padded left",)),
        ("decoder", "deepseek_v4", ("plain", "padded left")),
        ("decoder", "minimax_m3_vl_text", ("plain", "padded right", "chunks")),
        ("encoder-decoder", "t5", (*PADDED, "generate")),
        ("encoder-decoder", "bigbird_pegasus", PADDED),
        ("encoder-decoder", "marian", (*PADDED, "generate")),
        ("encoder", "bert", PADDED),
        ("speech", "whisper", ("plain",)),
        ("vision", "vit", ("plain",)),
        ("vision", "clip", ("plain",)),
        ("tower", "qwen2_vl", ("plain",)),
    ],
)
def test_a_model_agrees_with_its_eager_attention(family: str, kind: str, only: tuple[str, ...]) -> None:
    import transformers

    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    found = models.check(Candidate(family, kind), "cpu", torch.float32, only)
    assert found.outcome == "agrees", f"{found.reason}; {found.scenarios}"
    ran = [outcome.name for outcome in found.scenarios if outcome.error is not None]
    assert ran == [o.name for o in found.scenarios], f"not run: {found.scenarios}"
    assert found.calls, found.reason


@pytest.mark.parametrize("kind", ["bloom", "codegen", "xglm"])
def test_a_model_that_would_misread_a_mask_is_refused(kind: str) -> None:
    found = models.check(Candidate("decoder", kind), "cpu", torch.float32, PADDED)
    assert found.outcome == "refused"
    assert f"modeling_{kind} has an attention of its own" in found.reason


def test_a_lost_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sdpa = integration.api.sdpa
    monkeypatch.setattr(integration.api, "sdpa", lambda *a, **options: sdpa(*a, **options | {"attn_mask": None}))
    found = models.check(Candidate("decoder", "llama"), "cpu", torch.float32, PADDED)
    assert found.outcome == "differs"
    assert {outcome.name for outcome in found.scenarios if outcome.wrong} == {"padded left"}


def test_what_cannot_be_made_says_why() -> None:
    found = models.check(Candidate("decoder", "blt"), "cpu", torch.float32)
    assert found.outcome == "not made"
    assert "million parameters" in found.reason
    assert models.check(Candidate("decoder", "no_such_model"), "cpu", torch.float32).outcome == "not made"


def test_half_precision_may_err_twice_as_much_as_eager() -> None:
    found = models.check(Candidate("decoder", "llama"), "cpu", torch.bfloat16, ("padded left",))
    assert found.outcome == "agrees"
    assert found.scenarios[0].allowed is not None
    assert 0 < found.scenarios[0].error < found.scenarios[0].allowed < 1  # type: ignore[operator]


def test_candidates_are_many_and_each_once() -> None:
    found = tiny.candidates()
    assert len(found) == len({(c.family, c.kind) for c in found}) > 250
    assert {"decoder", "encoder", "encoder-decoder", "speech", "vision", "tower"} <= {c.family for c in found}


def test_a_result_file_and_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends is a row, and new ones check the models after it; a scenario that eager loses is left out."""
    monkeypatch.setattr(model_processes, "WORKER", ["-c", _DYING_WORKER])
    monkeypatch.setattr(model_processes, "number_of_processes", lambda device: 2)
    step = models.step(kinds=("llama", "gpt2", "bloom", "vit"), output=tmp_path)
    assert step.status == "failed"
    stored: dict[str, Any] = results.read(next(tmp_path.rglob("models.json")))
    outcomes = {row["case"]: row["outcome"] for row in stored["rows"]}
    assert outcomes == {
        "decoder: bloom": "refused",
        "decoder: gpt2": "differs",
        "decoder: llama": "agrees",
        "vision: vit": "agrees",
    }
    assert [row["case"] for row in stored["rows"]] == list(outcomes)
    llama = stored["rows"][2]["scenarios"]
    assert llama["plain"]["error"] is not None
    assert llama["lost"] == {"error": None, "allowed": None, "reason": "not run: eager loses the device: CUDA error: x"}
    text = model_results.markdown(stored)
    assert "| decoder | agrees | 1 |" in text
    assert "- its process ended with 3: " in text


_DYING_WORKER = """
import os, sys
from microsdpa.evidence import model_scenarios, models

def lose(model):
    raise RuntimeError("CUDA error: x")

def check_or_die(candidate, *rest, **options):
    return os._exit(3) if candidate.kind == "gpt2" else check(candidate, *rest, **options)

check, models.check_again = models.check_again, check_or_die
llamas = {"plain": model_scenarios.forward, "lost": lose}
models.scenarios = lambda family, device: llamas if family == "decoder" else {"plain": model_scenarios.forward}
models.main()
"""
