"""The frozen description of one call: what sdpa was given, grouped, before any of it is looked at.

Every way to call attention makes a Call, or hands on its parts. A further operand is one field here, one check in
validate.py and one line of the plans' key (docs/architecture.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from microsdpa.call.dropout import Random
from microsdpa.call.options import CONTINUED_BIT, PLAIN, Options
from microsdpa.call.prologue import Prologue
from microsdpa.call.sequences import Sequences

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""query, key and value."""


class MaskTensors(NamedTuple):
    """Tensors among the masks of a call."""

    attn_mask: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


class Scales(NamedTuple):
    """Scales of 8-bit values: numbers or tensors."""

    q_scale: object = None
    k_scale: object = None
    v_scale: object = None


NO_TENSORS, NO_SCALES = MaskTensors(), Scales()


def mask_tensors(
    attn_mask: torch.Tensor | None, alibi_slopes: torch.Tensor | None, sinks: torch.Tensor | None
) -> MaskTensors:
    """These, or NO_TENSORS itself if there is none: a launch compares with it."""
    if attn_mask is None and alibi_slopes is None and sinks is None:
        return NO_TENSORS
    return MaskTensors(attn_mask, alibi_slopes, sinks)


def scales_of(q_scale: object, k_scale: object, v_scale: object) -> Scales:
    """These, or NO_SCALES itself if there is none."""
    if q_scale is None and k_scale is None and v_scale is None:
        return NO_SCALES
    return Scales(q_scale, k_scale, v_scale)


class Call(NamedTuple):
    """Arguments of sdpa, not validated yet.

    Attributes:
        inputs: query [B, H, S_q, D], key and value [B, H_kv, S_k, D].
        masks: tensors that decide about the scores; the window and the soft cap are among the options.
        scales: of 8-bit values, or of an 8-bit cache; NO_SCALES itself where there are none.
        out: tensor to write to; None for one that is allocated.
        sequences: where sequences of many lengths lie; query, key and value then have the layouts of sdpa_varlen.
        random: of a call that drops probabilities; None for random numbers that are taken when it runs.
        prologue: norms and rotary embedding of query and key; None for none.
        previous: output and LSE of other keys, which the call goes on from and writes to; None for none.
    """

    inputs: Inputs
    masks: MaskTensors = NO_TENSORS
    scales: Scales = NO_SCALES
    options: Options = PLAIN
    return_lse: bool = False
    out: torch.Tensor | None = None
    sequences: Sequences | None = None
    random: Random | None = None
    prologue: Prologue | None = None
    previous: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def code(self) -> int:
        """The number of the call's options in the plans' keys.

        Raises:
            KeyError: one of them is not valid.
        """
        code = self.options.code if self.prologue is None else self.options.code | self.prologue.code
        return code if self.previous is None else code | CONTINUED_BIT

    @property
    def shift(self) -> int:
        """Position of the first query less that of the first key, as masks count them."""
        query, key, _ = self.inputs
        return key.shape[2] - query.shape[2] if self.options.causal == "lower_right" else 0

    @property
    def has_values(self) -> bool:
        """Whether all inputs are 8-bit values, with scales; those of a cache are its own matter."""
        return self.scales is not NO_SCALES and self.sequences is None

    @property
    def is_eight_bit(self) -> bool:
        """Whether kernels with 8-bit operands compute the call: it names a precision, or gives scales."""
        return self.options.precision is not None or self.has_values
