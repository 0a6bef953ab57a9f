"""sdpa with 8-bit operands as an operator of torch.ops.microsdpa, for torch.compile.

attention_eight_bit gives (output, LSE) of its arguments, which are those of sdpa; `window` is [left, right], scales are
tensors or else numbers, and the LSE is empty where `return_lse` is not set. `bfloat16` asks for an output of that type
where the values do not say which. It has no gradient. The module is imported with the package.
"""

from __future__ import annotations

from typing import Any

import torch

from microsdpa.attention import api
from microsdpa.call.scales import VALUE_DTYPES

_library = torch.library.Library("microsdpa", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "attention_eight_bit(Tensor query, Tensor key, Tensor value, Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, "
    "float? q_number, float? k_number, float? v_number, Tensor? attn_mask, Tensor? alibi_slopes, Tensor? sinks, "
    "str? causal, float? scale, bool enable_gqa, SymInt[2] window, float? softcap, str impl, str? precision, "
    "bool return_lse, bool bfloat16) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)  # type: ignore[no-untyped-call]
_OPTIONS = (
    *("attn_mask", "alibi_slopes", "sinks", "causal", "scale", "enable_gqa", "window", "softcap", "impl", "precision"),
    "return_lse",
)


def _output_type(query: torch.Tensor, value: torch.Tensor, bfloat16: bool) -> torch.dtype:
    """Type of the output: a 16-bit tensor's, or what is asked for."""
    of_values = torch.bfloat16 if bfloat16 else torch.float16
    return next((t.dtype for t in (query, value) if t.dtype not in VALUE_DTYPES), of_values)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    tensors, numbers, bfloat16 = rest[:3], rest[3:6], rest[-1]
    scales = [number if tensor is None else tensor for tensor, number in zip(tensors, numbers, strict=True)]
    named = dict(zip(_OPTIONS, rest[6:-1], strict=True))
    named["window"] = None if tuple(named["window"]) == (-1, -1) else tuple(named["window"])
    out = torch.empty_like(query, dtype=_output_type(query, value, bfloat16))
    named |= dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    found = api.sdpa(query, key, value, out=out, **named)
    return found if isinstance(found, tuple) else (found, found.new_empty(0, dtype=torch.float32))


_library.impl("attention_eight_bit", _attend, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


@torch.library.register_fake("microsdpa::attention_eight_bit", lib=_library)  # type: ignore[untyped-decorator]
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *_, return_lse, bfloat16 = rest
    shape = query.shape[:3] if return_lse else (0,)
    out = torch.empty_like(query, dtype=_output_type(query, value, bfloat16))
    return out, query.new_empty(shape, dtype=torch.float32)
