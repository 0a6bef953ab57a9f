"""sdpa with norms and rotary embedding as an operator of torch.ops.microsdpa, for torch.compile.

attention_prologued gives (output, LSE) of its arguments, which are those of sdpa; `window` is [left, right], and the
LSE is empty where `return_lse` is not set. Positions are tensors, or else the first ones of queries and keys.
It has no gradient. The module is imported with the package.
"""

from __future__ import annotations

from typing import Any

import torch

from microsdpa.attention import api

_library = torch.library.Library("microsdpa", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "attention_prologued(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? alibi_slopes, "
    "Tensor? sinks, str? causal, float? scale, bool enable_gqa, SymInt[2] window, float? softcap, str impl, "
    "bool return_lse, Tensor? cos, Tensor? sin, Tensor? query_positions, Tensor? key_positions, "
    "Tensor? query_weight, Tensor? query_bias, Tensor? key_weight, Tensor? key_bias, SymInt query_first, "
    "SymInt key_first, float norm_eps, bool interleaved, bool layer_norm, bool rotates_key) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)  # type: ignore[no-untyped-call]
_MASKS = "attn_mask", "alibi_slopes", "sinks", "causal", "scale", "enable_gqa", "window", "softcap", "impl"


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    named = dict(zip(_MASKS, rest[:9], strict=True))
    named["window"] = None if tuple(named["window"]) == (-1, -1) else tuple(named["window"])
    return_lse, cos, sin, *positions = rest[9:14]
    query_weight, query_bias, key_weight, key_bias, *firsts, eps, interleaved, layer, rotates_key = rest[14:]
    in_place = [first if given is None else given for given, first in zip(positions, firsts, strict=True)]
    norms = [
        (weight, bias) if layer and weight is not None else weight
        for weight, bias in ((query_weight, query_bias), (key_weight, key_bias))
    ]
    found = api.sdpa(
        *(query, key, value),
        **named,
        return_lse=return_lse,
        rotary=None if cos is None else (cos, sin),
        rotary_interleaved=interleaved,
        rotary_positions=None if cos is None else (in_place[0], in_place[1] if rotates_key else None),
        q_norm=norms[0],
        k_norm=norms[1],
        norm_eps=eps,
    )
    return found if isinstance(found, tuple) else (found, found.new_empty(0, dtype=torch.float32))


_library.impl("attention_prologued", _attend, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


@torch.library.register_fake("microsdpa::attention_prologued", lib=_library)  # type: ignore[untyped-decorator]
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shape = query.shape[:3] if rest[9] else (0,)
    return torch.empty_like(query), query.new_empty(shape, dtype=torch.float32)
