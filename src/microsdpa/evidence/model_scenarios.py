"""What a tiny model is run through, once for each attention: padding, caches, chunks, generation, compilation."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from microsdpa.evidence import tiny
from microsdpa.evidence.tiny import LENGTH, NotTiny

COMPILED = "compiled"
Run = Callable[[Any], torch.Tensor]


def _logits(output: Any) -> torch.Tensor:
    for name in ("sample", "logits", "logits_per_image", "last_hidden_state", "image_embeds", "pooler_output"):
        found = getattr(output, name, None)
        if isinstance(found, torch.Tensor):
            return found.float().cpu()
    first = output[0] if isinstance(output, (tuple, list)) else next(iter(output.values()))
    if not isinstance(first, torch.Tensor):
        raise NotTiny(f"its output is a {type(output).__name__}, which is not known here")
    return first.float().cpu()


def _seen(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The rows of tokens that are no padding."""
    mask = mask[:, -logits.shape[1] :].cpu().bool()
    return logits[mask] if logits.dim() >= 2 and logits.shape[:2] == mask.shape else logits


def forward(model: Any, side: str = "", call: Any = None, **options: Any) -> torch.Tensor:
    """One forward pass, by `call` or else the model; with padding on a side if there is one."""
    if isinstance(model, functools.partial):  # of diffusers, with its inputs
        return _logits(model())
    given = {name: value.to(model.device) for name, value in tiny.inputs(model).items()}
    given = {n: v.to(model.dtype) if v.is_floating_point() else v for n, v in given.items()}
    call = model if call is None else call
    if not side:
        return _logits(call(**given, **options))
    mask = tiny.padding(side).to(model.device)
    found = _logits(call(**given, attention_mask=mask, **options))
    return found if model.config.is_encoder_decoder else _seen(found, mask)


def _chunks(model: Any) -> torch.Tensor:
    """A prompt in chunks of 7 and 5 tokens, then three tokens one at a time."""
    return _cached(model, None, (7, 5, 1, 1, 1))


def _static(model: Any) -> torch.Tensor:
    """The same with a static cache, and a chunk of 3 at the end."""
    from transformers import StaticCache

    return _cached(model, StaticCache(config=model.config, max_cache_len=24), (LENGTH, 1, 1, 3))


def _cached(model: Any, cache: Any, lengths: tuple[int, ...]) -> torch.Tensor:
    total = sum(lengths)
    ids = tiny.tokens(total).to(model.device)
    mask = tiny.padding("left", total).to(model.device)
    parts, start = [], 0
    for length in lengths:
        stop = start + length
        output = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(_logits(output))
        start = stop
    return _seen(torch.cat(parts, dim=1), mask)


def _kept(model: Any) -> torch.Tensor:
    return forward(model, logits_to_keep=3)


def _kept_static(model: Any) -> torch.Tensor:
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=24)
    return forward(model, logits_to_keep=1, past_key_values=cache, use_cache=True)


def _generated(model: Any, **options: Any) -> torch.Tensor:
    """The chosen tokens, as numbers that differ by one or more where a token does."""
    given = {"input_ids": tiny.tokens().to(model.device), "attention_mask": tiny.padding("left").to(model.device)}
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "disable_compile": True} | options
    return model.generate(**given, **options).float().cpu()  # type: ignore[no-any-return]


def _assisted(model: Any) -> torch.Tensor:
    given = {"input_ids": tiny.tokens()[:1].to(model.device)}
    assistant = copy.deepcopy(model)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    return model.generate(**given, assistant_model=assistant, **options).float().cpu()  # type: ignore[no-any-return]


def padded_side(model: Any) -> str:
    """Where a model of tokens is padded in the compiled scenario: "left"; "" for one that takes none."""
    return "left" if "input_ids" in tiny.inputs(model) else ""


def _compiled(model: Any) -> torch.Tensor:
    torch._dynamo.reset()
    return forward(model, padded_side(model), torch.compile(model, backend="eager"))


def scenarios(family: str, device: str) -> dict[str, Run]:
    """What a model of a family is run through."""
    found: dict[str, Run] = {"plain": forward}
    if family in ("decoder", "encoder", "encoder-decoder"):
        found |= {"padded right": lambda m: forward(m, "right"), "padded left": lambda m: forward(m, "left")}
    if family == "decoder":
        found |= {"last logits": _kept, "chunks": _chunks, "static cache": _static, "static first": _kept_static}
    # Tokens are compared where no rounding can make a tie.
    if family in ("decoder", "encoder-decoder") and device == "cpu":
        found |= {
            "generate": _generated,
            "generate static": lambda m: _generated(m, cache_implementation="static"),
            "beam search": lambda m: _generated(m, num_beams=2),
        }
    if family == "decoder" and device == "cpu":
        found["assisted"] = _assisted
    if device == "cpu" and family != "diffusion":
        found[COMPILED] = _compiled
    return found
