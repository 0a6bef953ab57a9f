"""Seed and offset of a call's dropout, from torch's generators."""

from __future__ import annotations

import threading

import torch

from microsdpa.call.dropout import Random, check

NUMBERS = 4
"""What a call takes of the generator's stream. Each probability has a number of its own beside the offset."""
_LARGEST_DRAWN = 2**62
_taking = threading.Lock()
"""Two threads must not take the same offset."""


def draw(device: torch.device) -> torch.Tensor:
    """Seed and offset as two int64 that torch's generator of the device gives, in its stream: each replay of a graph,
    and each call of what torch.compile made, has others.
    """
    return torch.randint(_LARGEST_DRAWN, (2,), dtype=torch.int64, device=device)


def begin(query: torch.Tensor, dropout_p: float) -> Random:
    """take() for an eager call whose gradient may be asked for, ahead of its other checks.

    Raises:
        InvalidArgument: `dropout_p` is no probability.
    """
    check(dropout_p)
    return take(query, True)


def take(query: torch.Tensor, keep: bool) -> Random:
    """The random numbers of an eager call, whose probability is valid; with `keep` their state for a backward pass.

    On a GPU they are seed and offset of torch's generator, which is moved on, as torch's own attention does it. In a
    capture these are not known yet, and on a CPU its generator has none: two numbers are drawn.
    """
    device = query.device
    if not query.is_cuda or torch.cuda.is_current_stream_capturing():
        return Random(draw(device))
    generator = torch.cuda.default_generators[device.index]
    with _taking:
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.set_offset(offset + NUMBERS)
    state = torch.empty(2, dtype=torch.int64, device=device) if keep else None
    return Random(None, seed if seed < 2**63 else seed - 2**64, offset, state)
