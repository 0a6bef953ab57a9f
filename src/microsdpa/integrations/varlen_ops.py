"""sdpa_varlen as operators of torch.ops.microsdpa, for torch.compile. Imported with the package.

attention_varlen gives (output, LSE) of its arguments, which are those of sdpa_varlen; `window` is [left, right]. The
LSE is empty where `return_lse` is not set. attention_varlen_append writes new keys and values to the cache, key and
value, too. Neither has a gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from microsdpa.attention import varlen
from microsdpa.call.tensors import new_output

_library = torch.library.Library("microsdpa", "FRAGMENT")  # type: ignore[no-untyped-call]
_REST = (
    "Tensor? query_offsets, Tensor? key_offsets, Tensor? lengths, Tensor? page_table, SymInt? max_queries, "
    "Tensor? rotary_cos, Tensor? rotary_sin, bool rotary_interleaved, bool causal, float? scale, bool return_lse, "
    "SymInt[2] window, float? softcap, Tensor? alibi_slopes, Tensor? sinks, str impl, "
    "bool batch_invariant, Tensor? k_scale, Tensor? v_scale, "
    "Tensor? q_norm=None, Tensor? k_norm=None, float norm_eps=1e-06) -> (Tensor, Tensor)"
)
for _signature in (
    f"attention_varlen(Tensor query, Tensor key, Tensor value, {_REST}",
    "attention_varlen_append(Tensor query, Tensor(a!) key, Tensor(b!) value, Tensor new_key, Tensor new_value, "
    + _REST,
):
    _library.define(_signature, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]

_NAMES = (
    *("query_offsets", "key_offsets", "lengths", "page_table", "max_queries"),
    *("rotary_cos", "rotary_sin", "rotary_interleaved", "causal", "scale", "return_lse"),
    *("window", "softcap", "alibi_slopes", "sinks", "impl", "batch_invariant", "k_scale", "v_scale"),
    *("q_norm", "k_norm", "norm_eps"),
)
Result = tuple[torch.Tensor, torch.Tensor]


def _call(inputs: tuple[torch.Tensor, ...], rest: tuple[Any, ...], **new: torch.Tensor) -> Result:
    given = dict(zip(_NAMES, rest, strict=False)) | new  # the last ones have defaults
    left, right = given["window"]
    given["window"] = None if (left, right) == (-1, -1) else (left, right)
    found = varlen.sdpa_varlen(*inputs, **given)
    return found if isinstance(found, tuple) else (found, _no_lse(found))


def _no_lse(out: torch.Tensor) -> torch.Tensor:
    return out.new_empty(0, dtype=torch.float32)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> Result:
    return _call((query, key, value), rest)


def _append(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> Result:
    new_key, new_value, *others = rest
    return _call((query, key, value), tuple(others), new_key=new_key, new_value=new_value)


_library.impl("attention_varlen", _attend, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("attention_varlen_append", _append, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


def _shown(query: torch.Tensor, value: torch.Tensor, rest: tuple[Any, ...]) -> Result:
    """What a tracer sees of a result."""
    given = dict(zip(_NAMES, rest, strict=False))
    out = new_output(query, value)
    if not given["return_lse"]:
        return out, _no_lse(out)
    *batch, rows, heads, _ = query.shape
    shape = [*batch, heads, rows]
    return out, query.new_empty(shape, dtype=torch.float32)


@torch.library.register_fake("microsdpa::attention_varlen", lib=_library)  # type: ignore[untyped-decorator]
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> Result:
    return _shown(query, value, rest)


@torch.library.register_fake("microsdpa::attention_varlen_append", lib=_library)  # type: ignore[untyped-decorator]
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    *rest: Any,
) -> Result:
    return _shown(query, value, rest)
