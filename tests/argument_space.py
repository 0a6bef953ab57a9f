"""Calls of sdpa at random, over its whole argument space, and what their results may be: for hypothesis.

tests/emulate and tests/gpu draw from the same space.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from microsdpa import reference
from microsdpa.evidence import compare

HALVES = (torch.float16, torch.bfloat16)
LSE_SLACK = 1e-5
"""What FP32 may cost the LSE, as a part of the largest: rounded scores, which its tolerance is from, can be exact."""


@dataclass(frozen=True)
class Form:
    """What kernels are compiled for, beside the head dimension: the rest of a call is free.

    Attributes:
        mask: type of attn_mask.
        left: whether the window has a left end; `right` likewise.
        sinks: type of the sinks.
    """

    dtype: torch.dtype
    mask: torch.dtype | None = None
    left: bool = False
    right: bool = False
    softcap: bool = False
    alibi: bool = False
    sinks: torch.dtype | None = None


@st.composite
def forms(draw: st.DrawFn) -> Form:
    """Any form."""
    dtype = draw(st.sampled_from(HALVES))
    return Form(
        dtype,
        draw(st.sampled_from([None, torch.bool, torch.int32, dtype, torch.float32])),
        *(draw(st.booleans()) for _ in range(4)),
        draw(st.sampled_from([None, dtype, torch.float32])),
    )


@st.composite
def calls(draw: st.DrawFn, form: st.SearchStrategy[Form], head_dims: st.SearchStrategy[int]) -> dict[str, Any]:
    """Keyword arguments of sdpa, with CPU tensors."""
    kind, head_dim = draw(form, label="form"), draw(head_dims, label="D")
    batch, heads_kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    seqlen_q, seqlen_k = draw(st.integers(1, 100), label="S_q"), draw(st.integers(1, 150), label="S_k")
    heads = heads_kv * group
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000), label="seed"))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def tensor(heads: int, seqlen: int) -> torch.Tensor:
        layout = draw(st.sampled_from(["bhsd", "bshd", "sbhd", "unaligned", "every other row", "shared heads"]))
        if layout == "bshd":
            return normal(batch, seqlen, heads, head_dim).to(kind.dtype).transpose(1, 2)
        if layout == "sbhd":
            return normal(seqlen, batch, heads, head_dim).to(kind.dtype).permute(1, 2, 0, 3)
        if layout == "unaligned":
            return normal(batch, heads, seqlen, head_dim + 3).to(kind.dtype)[..., 1:-2]
        if layout == "every other row":
            return normal(batch, heads, 2 * seqlen, head_dim).to(kind.dtype)[:, :, 1::2]
        if layout == "shared heads":
            return normal(batch, 1, seqlen, head_dim).to(kind.dtype).expand(-1, heads, -1, -1)
        return normal(batch, heads, seqlen, head_dim).to(kind.dtype)

    found: dict[str, Any] = {
        "query": tensor(heads, seqlen_q),
        "key": tensor(heads_kv, seqlen_k),
        "value": tensor(heads_kv, seqlen_k),
        "causal": draw(st.sampled_from([None, "upper_left", "lower_right"]), label="causal"),
        "scale": draw(st.sampled_from([None, 0.0, -0.2, 0.5]), label="scale"),
        "enable_gqa": True,
    }
    if kind.mask is not None:
        shape = [size if draw(st.booleans()) else 1 for size in (batch, heads, seqlen_q, seqlen_k)]
        if kind.mask == torch.int32:
            shape[3] = 2
        shown = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.1, 0.5, 0.9, 1.0]), label="shown")
        some = torch.randint(-3, seqlen_k + 4, shape, generator=generator).int()
        ends = torch.where(torch.rand(shape, generator=generator) < 0.1, 2**31 - 1, some)  # no end of a sequence
        mask = (
            shown
            if kind.mask == torch.bool
            else ends
            if kind.mask == torch.int32
            else normal(*shape).where(shown, -torch.inf).to(kind.mask)
        )
        leading = next((i for i, size in enumerate(shape) if size > 1), 4)
        mask = mask[(0,) * draw(st.integers(0, leading), label="dropped dimensions")]
        if mask.dim() >= 2 and draw(st.booleans(), label="mask the other way round in memory"):
            mask = mask.mT.contiguous().mT
        found["attn_mask"] = mask
    if kind.left or kind.right:
        ends = st.integers(0, 160)
        found["window"] = (draw(ends) if kind.left else -1, draw(ends) if kind.right else -1)
    if kind.softcap:
        found["softcap"] = draw(st.sampled_from([0.5, 5.0, 50.0]), label="softcap")
    if kind.alibi:
        found["alibi_slopes"] = torch.rand(
            (batch, heads) if draw(st.booleans(), label="slopes of a batch") else (heads,), generator=generator
        )
    if kind.sinks is not None:
        found["sinks"] = normal(heads).to(kind.sinks)
    return found


def moved(call: dict[str, Any], device: str) -> dict[str, Any]:
    """A call with its tensors on a device, strides and offsets as they were."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        return memory.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return {name: move(value) if isinstance(value, torch.Tensor) else value for name, value in call.items()}


def assert_right(out: torch.Tensor, lse: torch.Tensor, call: dict[str, Any]) -> None:
    """Output and LSE of a call on the CPU: within twice the error of plain arithmetic in its type and one rounding.

    Where plain arithmetic happens to be exact, what rounding P once may cost is allowed: one rounding of V.
    """
    options = {name: value for name, value in call.items() if name != "enable_gqa"}
    (expected, expected_lse), (eager, eager_lse) = reference.oracle(**options), reference.eager(**options)
    errors = compare.measure(out.cpu(), expected)
    rounding = compare.UNIT_ROUNDOFF[out.dtype] * float(call["value"].abs().max())
    assert errors.max_abs <= compare.tolerance(eager, expected, out.dtype).max_abs + rounding, errors
    lse_errors = compare.measure(lse.cpu(), expected_lse)
    largest = float(expected_lse.where(expected_lse.isfinite(), 0.0).abs().max())
    allowed = compare.tolerance(eager_lse, expected_lse, torch.float32).max_abs + LSE_SLACK * (1.0 + largest)
    assert lse_errors.max_abs <= allowed, lse_errors
