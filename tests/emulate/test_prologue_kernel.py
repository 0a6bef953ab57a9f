"""Norms and rotary embedding in the launch of attention: the kernels that have them, in the emulator, against FP64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from microsdpa import reference
from microsdpa.call.call import Call, MaskTensors, mask_tensors
from microsdpa.call.options import Options
from microsdpa.call.prologue import Prologue
from microsdpa.emulate.run import Schedule, scheduled
from microsdpa.evidence import compare
from microsdpa.execution import forward
from microsdpa.execution.prologue import composed

KERNELS = ("hopper/latency", "ampere/general")
SCHEDULES = (Schedule(0, late=True), Schedule(1, late=False))


def tables(columns: int, dtype: torch.dtype, positions: int = 1400) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(float(positions)), 10000 ** -torch.arange(0, 1, 2 / columns))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def weights(head_dim: int, dtype: torch.dtype, biased: bool = False) -> Any:
    weight = (torch.rand(head_dim) + 0.5).to(dtype)
    return (weight, torch.randn(head_dim).to(dtype)) if biased else weight


Case = tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]
"""Sizes, what is done to Q and K, and further arguments."""
CASES: dict[str, Case] = {
    "two rounds": ((1, 1, 1, 64, 512, 64), {"rotary": 64, "norms": True}, {}),
    "causal, 16-bit tables": (
        (1, 2, 1, 70, 200, 64),
        {"rotary": 64, "norms": True, "tables": torch.float16},
        {"causal": "lower_right"},
    ),
    "interleaved, LayerNorm": (
        (1, 2, 1, 17, 130, 64),
        {"rotary": 32, "interleaved": True, "norms": True, "layer": True},
        {},
    ),
    "bfloat16, D = 128": ((2, 1, 1, 33, 300, 128), {"rotary": 128, "positions": 5, "dtype": torch.bfloat16}, {}),
    "a ring, Q alone": (
        (1, 1, 1, 40, 1300, 64),
        {"rotary": 64, "q_alone": True, "positions": (torch.arange(40) * 3, None)},
        {},
    ),
    "D = 72, positions in memory": (
        (2, 1, 1, 33, 190, 72),
        {"rotary": 48, "positions": (torch.randint(-3, 1500, (2, 33)), torch.arange(190, dtype=torch.int32))},
        {},
    ),
    "D = 96, a window": ((1, 1, 1, 64, 200, 96), {"norms": True, "rotary": 96}, {"window": (64, 64)}),
    "a mask of numbers": ((1, 1, 1, 20, 130, 64), {"rotary": 64}, {"attn_mask": torch.randn(20, 130)}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=["late", "early"])
def test_a_kernel_computes_them_in_its_launch(kernel: str, name: str, schedule: Schedule) -> None:
    check(kernel, CASES[name], schedule)


AHEAD: dict[str, tuple[str, Case]] = {
    "split keys": ("ampere/mma", ((1, 8, 2, 3, 700, 64), {"rotary": 64, "norms": True}, {"causal": "lower_right"})),
    "layer, interleaved": (
        "ampere/mma",
        ((2, 3, 3, 33, 65, 80), {"rotary": 48, "interleaved": True, "norms": True, "layer": True}, {}),
    ),
    "keys as they are": (
        "ampere/mma",
        ((1, 4, 2, 1, 300, 128), {"rotary": 128, "q_alone": True, "positions": (299, None)}, {}),
    ),
    "lists of tiles": (
        "hopper/throughput",
        ((1, 2, 1, 130, 200, 64), {"rotary": 64, "norms": True}, {"attn_mask": torch.rand(130, 200) > 0.4}),
    ),
    "rows on two bytes, D = 24": (
        "auto",
        ((1, 2, 2, 20, 40, 24), {"rotary": 16, "norms": True, "tables": torch.float16, "odd": True}, {}),
    ),
}


@pytest.mark.parametrize("name", AHEAD)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=["late", "early"])
def test_a_launch_ahead_computes_them(name: str, schedule: Schedule) -> None:
    """For kernels that take Q and K as they are: the rows lie in scratch memory, ahead of the kernel's own."""
    kernel, case = AHEAD[name]
    check(kernel, case, schedule)


def check(kernel: str, case: Case, schedule: Schedule) -> None:
    """Compare a call with FP64, by the error that one rounding of Q and K makes."""
    (batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim), how, rest = case
    torch.manual_seed(1)
    dtype, narrow = how.get("dtype", torch.float16), how.get("tables", torch.float32)
    q = torch.randn(batch, heads, seqlen_q, head_dim).to(dtype)
    k, v = (torch.randn(batch, heads_kv, seqlen_k, head_dim).to(dtype) for _ in range(2))
    if how.get("odd"):
        q, k = (torch.nn.functional.pad(t, (1, 0))[..., 1:] for t in (q, k))
    norm = weights(head_dim, narrow, how.get("layer", False)) if how.get("norms") or how.get("q_alone") else None
    prologue = Prologue(
        tables(how["rotary"], narrow),
        how.get("interleaved", False),
        how.get("positions"),
        norm,
        None if how.get("q_alone") else norm,
    )
    impl = "emulate" if kernel == "auto" else f"emulate:{kernel}"
    masks: MaskTensors = mask_tensors(rest.get("attn_mask"), None, None)
    options = Options(False, rest.get("causal"), None, heads != heads_kv, rest.get("window"), None, impl)
    call = Call((q, k, v), masks, options=options, return_lse=True, prologue=prologue)
    with scheduled(schedule):
        out, lse = forward.first_call(call)
    exact, exact_lse = reference.oracle(*composed((q, k, v), prologue, call.shift, torch.float64), **rest)
    rounded, rounded_lse = reference.eager(*composed((q, k, v), prologue, call.shift), **rest)
    tolerance = 2 * float((rounded - exact).abs().max()) + torch.finfo(dtype).eps
    assert float((out - exact).abs().max()) <= tolerance
    assert lse is not None
    assert float((lse - exact_lse).abs().max()) <= 2 * float((rounded_lse - exact_lse).abs().max()) + 1e-3


@pytest.mark.parametrize("kernel", KERNELS)
def test_large_scores_are_computed_again_from_what_is_there(kernel: str) -> None:
    """The second pass of hopper/latency finds Q and K changed already."""
    q, k, v = (torch.randn(1, 1, 64, 64).half() for _ in range(3))
    prologue = Prologue(tables(64, torch.float32), q_norm=torch.full((64,), 12.0), k_norm=torch.full((64,), 12.0))
    call = Call((q, k, v), options=Options(impl=f"emulate:{kernel}"), prologue=prologue)
    out, _ = forward.first_call(call)
    exact, _ = reference.oracle(*composed((q, k, v), prologue, 0))
    assert compare.measure(out, exact).max_abs < 4e-3
