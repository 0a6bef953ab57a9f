"""Norms and rotary embedding of Q and K as torch's operators: on a CPU, and where autograd or a tracer looks on."""

from __future__ import annotations

import torch

from microsdpa import reference
from microsdpa.call.call import Inputs
from microsdpa.call.prologue import Prologue


def composed(inputs: Inputs, prologue: Prologue, shift: int, dtype: torch.dtype | None = None) -> Inputs:
    """Query, key and value with the norms and the embedding of a call, which check() has admitted.

    They are computed in FP32 and rounded once to the inputs' type, as kernels do; or computed and given in `dtype`.
    """
    query, key, value = inputs
    norms, firsts = prologue.norms, prologue.firsts(shift)
    found = []
    for i, (rows, positions) in enumerate(zip((query, key), prologue.pair, strict=True)):
        rotates = prologue.rotary is not None and (i == 0 or prologue.rotates_key)
        norm = norms[2 * i], norms[2 * i + 1]
        if not rotates and norm[0] is None:
            found.append(rows if dtype is None else rows.to(dtype))
            continue
        if not isinstance(positions, torch.Tensor):
            positions = torch.arange(firsts[i], firsts[i] + rows.shape[2], device=rows.device)
        changed = reference.changed_rows(
            rows,
            norm,
            prologue.eps,
            prologue.rotary if rotates else None,
            positions,
            layer=prologue.is_layer_norm,
            interleaved=prologue.interleaved,
            dtype=torch.float32 if dtype is None else dtype,
        )
        found.append(changed.to(rows.dtype) if dtype is None else changed)
    return found[0], found[1], value if dtype is None else value.to(dtype)
