"""Gradients by hopper/backward in the emulator: right, free of races, in a fixed order the same bits each time."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gradient_calls import Expected, check, expected
from harness import Replacement

from microsdpa.emulate.run import EmulationError, Schedule, scheduled
from microsdpa.evidence import fuzz_check
from microsdpa.evidence.fuzz_calls import draw
from microsdpa.evidence.inputs import Case
from microsdpa.execution import gradients
from microsdpa.kernels.hopper.backward.spec import MANY_QUERIES, Tiling, choose
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.spec import Rejection

TARGET = "sm_90a"


def tiling_of(wanted: Expected, deterministic: bool = False) -> Tiling:
    tiling = choose(wanted.of.problem(TARGET), deterministic)
    assert isinstance(tiling, Tiling)
    return tiling


CASES = [
    Case(1, 2, 150, 200, 64),
    Case(1, 4, 200, 300, 64, heads_kv=2, causal="upper_left", dtype="bfloat16"),
    Case(2, 2, 100, 260, 128, layout="bshd"),
    Case(1, 4, 150, 130, 128, heads_kv=1, causal="lower_right"),
    Case(1, 1, 300, 140, 128, causal="lower_right"),  # queries that see nothing
    Case(1, 1, 40, 300, 64, causal="upper_left"),  # keys that nobody sees
    Case(1, 2, 70, 150, 72, dtype="bfloat16", scale=-0.2),
    Case(1, 1, 1, 1, 8),
    Case(1, 2, 70, 140, 256, heads_kv=1, causal="upper_left"),
    Case(1, 1, 150, 100, 136, dtype="bfloat16"),  # three parts of dQ
    Case(1, 1, 40, 140, 192, causal="upper_left"),  # keys that nobody sees
    Case(1, 2, 140, 150, 40, causal="upper_left"),  # products of 48 columns
    Case(1, 2, 100, 200, 80, heads_kv=1),  # of 64 and 16 in the parts of dQ
    Case(1, 1, 70, 140, 96, dtype="bfloat16", causal="lower_right"),
    Case(1, 1, 140, 70, 104),
    Case(1, 1, 70, 100, 160, causal="upper_left"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_right_in_two_orders(case: Case) -> None:
    wanted = expected(case, through_lse=True)
    reports = check(wanted, tiling_of(wanted), TARGET, same_bits=False)
    assert all(report.bank_conflicts == 0 for report in reports)


MASKED = [
    Case(1, 2, 300, 280, 64, masks=("window",)),
    Case(1, 2, 200, 300, 128, heads_kv=1, dtype="bfloat16", causal="lower_right", masks=("window",)),
    Case(1, 1, 400, 150, 64, causal="upper_left", masks=("window",)),  # queries behind the window of all keys
    Case(1, 1, 60, 600, 128, masks=("window",)),  # keys behind the window of all queries
    Case(1, 2, 150, 200, 64, masks=("softcap",), causal="upper_left"),
    Case(1, 2, 140, 130, 128, dtype="bfloat16", masks=("softcap",)),
    Case(2, 2, 150, 200, 64, masks=("alibi",), causal="lower_right"),
    Case(2, 2, 100, 140, 104, heads_kv=1, dtype="bfloat16", masks=("alibi",)),
    Case(1, 2, 150, 130, 64, masks=("sinks",)),
    Case(1, 4, 150, 200, 128, heads_kv=2, causal="upper_left", masks=("window", "softcap", "alibi", "sinks")),
    Case(1, 2, 90, 160, 192, dtype="bfloat16", masks=("window", "softcap", "alibi", "sinks")),
    Case(1, 1, 140, 100, 256, causal="lower_right", masks=("window",)),
    Case(3, 2, 150, 300, 64, masks=("padding",)),
    Case(2, 2, 100, 260, 128, heads_kv=1, dtype="bfloat16", causal="lower_right", masks=("padding", "softcap")),
    Case(2, 1, 70, 200, 192, masks=("padding",)),
    Case(2, 2, 280, 300, 64, masks=("documents",)),
    Case(2, 2, 200, 200, 128, heads_kv=1, dtype="bfloat16", causal="upper_left", masks=("documents",)),
    Case(1, 2, 140, 160, 72, masks=("documents", "softcap", "sinks")),
    Case(1, 1, 140, 150, 256, masks=("documents",)),
]


def masked(case: Case) -> Expected:
    """Gradients of slopes are not asked for: these kernels have none."""
    return expected(case, through_lse=True, wanted=("sinks",))


@pytest.mark.parametrize("case", MASKED, ids=str)
def test_gradients_of_scores_that_are_hidden_or_bent(case: Case) -> None:
    wanted = masked(case)
    reports = check(wanted, tiling_of(wanted), TARGET, same_bits=False)
    assert all(report.bank_conflicts == 0 for report in reports)


@pytest.mark.parametrize("case", [*MASKED[:4], MASKED[10]], ids=str)
def test_a_fixed_order_under_a_window(case: Case) -> None:
    wanted = masked(case)
    check(wanted, tiling_of(wanted, deterministic=True), TARGET)


@pytest.mark.parametrize("case", [MASKED[12], MASKED[13]], ids=str)
def test_a_fixed_order_under_a_mask_of_keys(case: Case) -> None:
    wanted = masked(case)
    check(wanted, tiling_of(wanted, deterministic=True), TARGET)


@pytest.mark.parametrize("masks", [("padding",), ("documents",)], ids=str)
def test_one_tile_of_keys_under_a_mask(masks: tuple[str, ...]) -> None:
    wanted = masked(Case(2, 2, 300, 120, 64, masks=masks))
    tiling = tiling_of(wanted)
    assert tiling.whole
    check(wanted, tiling, TARGET)


def test_ranges_are_not_counted_in_a_fixed_order() -> None:
    found = choose(expected(Case(1, 1, 300, 300, 64, masks=("documents",))).of.problem(TARGET), deterministic=True)
    assert isinstance(found, Rejection)
    assert "ranges of keys" in found.reason


def of_heads(seed: int, heads: int, queries: int, keys: int) -> torch.Tensor:
    """Ranges of any two keys, some without any; each head has its own."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(-20, keys + 20, (1, heads, queries, 2), generator=generator, dtype=torch.int32)
    return ends.sort(dim=3).values.where(torch.rand(1, heads, queries, 1, generator=generator) < 0.9, 7)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_heads_with_masks_of_their_own(head_dim: int) -> None:
    case = Case(1, 4, 140, 300, head_dim, heads_kv=2)
    hidden = torch.rand(1, 4, 1, 300, generator=torch.Generator().manual_seed(3)) < 0.3
    hidden[:, :3, :, :128] = False  # but a head of the second pair sees these
    for mask in (hidden, of_heads(5, 4, 140, 300)):
        wanted = expected(case, {"attn_mask": mask}, through_lse=True)
        check(wanted, tiling_of(wanted), TARGET, same_bits=False)


@pytest.mark.parametrize(
    ("mask", "share"),
    [
        (torch.arange(1024).lt(200)[None, None, None], 2 / 8),
        # Four documents of 256 tokens.
        (torch.stack([torch.arange(1024) // 256 * 256, torch.arange(1024) // 256 * 256 + 256], 1).int(), 1 / 4),
    ],
    ids=["padding", "documents"],
)
def test_tiles_that_a_mask_hides_are_not_multiplied(mask: torch.Tensor, share: float) -> None:
    products = []
    for masks in ({}, {"attn_mask": mask}):
        wanted = expected(Case(1, 2, 1024, 1024, 64, heads_kv=1), masks)
        report = gradients.emulate(wanted.of, tiling_of(wanted), TARGET)[1]
        products.append(report.counters["tensor_instructions"])
    whole, seen = products
    assert seen == whole * share


@pytest.mark.parametrize("left", [0, 70, 200], ids="{} keys before".format)
def test_a_fixed_order_under_a_window_without_an_end(left: int) -> None:
    wanted = expected(Case(1, 1, 300, 420, 64), {"window": (left, -1)})
    check(wanted, tiling_of(wanted, deterministic=True), TARGET)


@pytest.mark.parametrize("softcap", [2e-4, 0.3, 50.0, 4000.0])
def test_soft_caps_of_every_size(softcap: float) -> None:
    wanted = expected(Case(1, 1, 140, 150, 64, scale=0.5), {"softcap": softcap})
    check(wanted, tiling_of(wanted), TARGET, same_bits=False)


def test_many_queries_under_a_window() -> None:
    wanted = masked(Case(1, 2, 250, 300, 128, causal="lower_right", masks=("window", "softcap")))
    check(wanted, MANY_QUERIES, TARGET, same_bits=False)


@pytest.mark.parametrize("masks", [("softcap",), ("alibi", "sinks")], ids=str)
def test_one_tile_of_keys_with_scores_that_are_bent(masks: tuple[str, ...]) -> None:
    wanted = masked(Case(1, 2, 150, 120, 64, causal="upper_left", masks=masks))
    tiling = tiling_of(wanted)
    assert tiling.whole
    check(wanted, tiling, TARGET)


def test_tiles_outside_a_window_are_not_multiplied() -> None:
    products = []
    for window in (None, (127, 0)):
        wanted = expected(Case(1, 1, 1024, 1024, 64), {"window": window})
        report = gradients.emulate(wanted.of, tiling_of(wanted), TARGET)[1]
        products.append(report.counters["tensor_instructions"])
    whole, near = products
    assert near == whole * 15 / 64


WHOLE = [
    Case(1, 4, 300, 128, 64, heads_kv=2, causal="upper_left"),
    Case(1, 2, 70, 50, 64, dtype="bfloat16", layout="bshd"),
    Case(1, 2, 100, 110, 128, causal="lower_right"),
    Case(1, 2, 150, 128, 128, heads_kv=1, scale=-0.2),
    Case(1, 1, 1, 1, 72),
    Case(1, 2, 80, 100, 80),
    Case(1, 1, 150, 40, 24, causal="upper_left"),
]


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_one_tile_of_keys_needs_no_sums_in_memory(case: Case) -> None:
    wanted = expected(case, through_lse=True)
    tiling = tiling_of(wanted)
    assert tiling.whole
    assert len(check(wanted, tiling, TARGET)) == 2  # kernels, and the same bits in any order


def test_queries_that_see_no_key_take_sums_in_memory() -> None:
    assert not tiling_of(expected(Case(1, 1, 300, 128, 64, causal="lower_right"))).whole


FIXED = [*CASES[:2], CASES[4], CASES[5], CASES[8]]


@pytest.mark.parametrize("case", FIXED, ids=str)
def test_a_fixed_order_gives_the_same_bits(case: Case) -> None:
    wanted = expected(case, through_lse=True)
    check(wanted, tiling_of(wanted, deterministic=True), TARGET)


@pytest.mark.parametrize("case", [Case(1, 1, 140, 200, 128), Case(1, 1, 140, 200, 128, causal="upper_left")], ids=str)
def test_other_tilings_are_right(case: Case) -> None:
    wanted = expected(case)
    check(wanted, replace(tiling_of(wanted), query_stages=2), TARGET, same_bits=False)


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "fixed order"])
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 2, 250, 200, 128, dtype="bfloat16"),
        Case(1, 2, 170, 300, 120, heads_kv=1, causal="upper_left"),
        Case(1, 1, 161, 140, 128, causal="lower_right"),  # queries that see nothing
    ],
    ids=str,
)
def test_the_tiling_for_many_queries_is_right(case: Case, deterministic: bool) -> None:
    wanted = expected(case, through_lse=True)
    tiling = replace(MANY_QUERIES, in_order=deterministic)
    reports = check(wanted, tiling, TARGET, same_bits=deterministic)
    assert all(report.bank_conflicts == 0 for report in reports)


@pytest.mark.parametrize(
    ("case", "block_m"),
    [
        (Case(1, 1, 2048, 200, 128), 80),
        (Case(1, 1, 2047, 200, 128), 64),
        (Case(1, 1, 8192, 200, 120, causal="upper_left"), 80),
        (Case(1, 1, 8191, 200, 128, causal="lower_right"), 64),
        (Case(1, 1, 9000, 200, 112), 64),
        (Case(1, 1, 9000, 200, 64), 128),
        (Case(1, 1, 9000, 128, 128), 64),
    ],
    ids=str,
)
def test_many_queries_have_larger_tiles(case: Case, block_m: int) -> None:
    problem = Problem(
        *(case.batch, case.heads, case.kv_heads, case.seqlen_q, case.seqlen_k, case.head_dim),
        case.dtype,
        causal=case.causal,
        target=TARGET,
    )
    tiling = choose(problem)
    assert isinstance(tiling, Tiling)
    assert tiling.block_m == block_m
    dropping = choose(replace(problem, dropout=True))
    assert isinstance(dropping, Tiling)
    assert dropping.block_m != 80


def test_tiles_past_the_diagonal_are_not_multiplied() -> None:
    products = []
    for causal in (None, "upper_left"):
        wanted = expected(Case(1, 1, 512, 512, 64, causal=causal))  # type: ignore[arg-type]
        report = gradients.emulate(wanted.of, tiling_of(wanted), TARGET)[1]
        products.append(report.counters["tensor_instructions"])
    whole, half = products
    assert half == whole * 10 / 16


@pytest.mark.parametrize(
    ("head_dim", "filled", "share"), [(80, 128, 80 / 128), (40, 64, 48 / 64), (160, 192, (4 * 160 + 192) / (5 * 192))]
)
def test_few_columns_are_multiplied_that_a_head_does_not_have(head_dim: int, filled: int, share: float) -> None:
    operations = []
    for columns in (head_dim, filled):
        wanted = expected(Case(1, 1, 128, 128 if columns <= 128 else 64, columns))
        tiling = replace(tiling_of(wanted), whole=False)
        operations.append(gradients.emulate(wanted.of, tiling, TARGET)[1].counters["tensor_flops"])
    own, all_of_them = operations
    assert own == pytest.approx(all_of_them * share)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case(1, 1, 40, 40, 264), "head_dim 264"),
        (Case(1, 1, 40, 40, 36), "head_dim 36"),
        (Case(1, 1, 40, 40, 64, masks=("bool",)), "bool"),
        (Case(1, 1, 300, 120, 64, masks=("float32",)), "float32"),
        (Case(1, 1, 40, 40, 64, layout="unaligned"), "tensor maps"),
    ],
    ids=str,
)
def test_what_is_left_to_the_other_kernels(case: Case, reason: str) -> None:
    found = choose(expected(case).of.problem(TARGET))
    assert isinstance(found, Rejection)
    assert reason in found.reason


@dataclass(frozen=True)
class Mutant(Replacement):
    """One replacement in one file, the call that shows it, and what is said of it."""

    case: Case
    said: str
    deterministic: bool = False


FOLDER = "hopper/backward/"
PLAIN, LONG, WIDE = Case(1, 1, 140, 140, 64), Case(1, 1, 400, 140, 64), Case(1, 1, 140, 70, 192)
MUTANTS = [
    Mutant(
        *("no fence ahead of a reduction", FOLDER + "products.cuh"),
        *("dq[4 * i + 3]);\n  }\n  fence_proxy_async();\n", "dq[4 * i + 3]);\n  }\n"),
        *(PLAIN, "no fence.proxy.async"),
    ),
    Mutant(
        *("sums are written over that are still read", FOLDER + "products.cuh"),
        *("thread, bool first) {\n  if (!first)", "thread, bool first) {\n  if (false)"),
        *(LONG, "race|in flight|still|a wait is missing"),
    ),
    Mutant(
        *("a reduction is not waited for", FOLDER + "producer.cuh", "          tma_store_wait_read<0>();\n", ""),
        *(PLAIN, "still reads|in flight"),
    ),
    Mutant(
        *(
            "a turn ends too early",
            FOLDER + "producer.cuh",
            "          tma_store_wait();\n",
            "          tma_store_wait_read<1>();\n",
        ),
        *(PLAIN, "end of a turn", True),
    ),
    Mutant(
        *("dQ is written over that is still read", FOLDER + "products.cuh"),
        *(
            "  bool first) {\n  if (!first)",
            "  bool first) {\n  if (false)",
        ),
        *(Case(1, 1, 400, 100, 64), "race|in flight|still|a wait is missing"),
    ),
    Mutant(
        *("dQ without the scale", FOLDER + "consumer.cuh", "dq, call.scale_log2 * LN_2", "dq, 1.0f"),
        *(Case(1, 1, 140, 100, 64), "grad_query"),
    ),
    Mutant(
        *("dS is read before it is there", FOLDER + "consumer.cuh"),
        *("    mbarrier_wait(shared.ds_full[turn % 2], turn / 2 % 2);\n", ""),
        *(PLAIN, "race|nothing has written|a wait is missing"),
    ),
    Mutant(
        *("dS is written over that is still read", FOLDER + "consumer.cuh"),
        *("    mbarrier_wait(shared.ds_empty[turn % 2], turn / 2 % 2 ^ 1);\n", ""),
        *(LONG, "race|in flight|still|a wait is missing"),
    ),
    Mutant(
        *("dK is written over K that is still read", FOLDER + "consumer.cuh"),
        "    named_barrier_sync(KEYS_READ, CONSUMERS * WARPGROUP_THREADS);\n    store(*this, grad_key",
        *("    store(*this, grad_key", PLAIN, "race|in flight"),
    ),
    Mutant(
        *("a tile of queries is given back too early", FOLDER + "consumer.cuh"),
        *("    accumulate_keys(ds, shared.query[query_stage]);\n",),
        "    release(shared.query_empty[query_stage]);\n    accumulate_keys(ds, shared.query[query_stage]);\n",
        *(Case(1, 1, 600, 100, 64), "race|in flight|arrival|deadlock"),
    ),
    Mutant(
        *("sums begin with what was there", FOLDER + "prepare.cu"),
        *("make_float4(0.0f, 0.0f, 0.0f, 0.0f)", "sums[i + threadIdx.x]", PLAIN, "grad_query is off"),
    ),
    Mutant(
        *("the diagonal is one key further", FOLDER + "products.cuh"),
        *("M::RIGHT ? key - of.call.diagonal - first_query : 0,",),
        "M::RIGHT ? key - of.call.diagonal - first_query - 1 : 0,",
        *(Case(1, 1, 140, 140, 128, causal="upper_left"), "is off"),
    ),
    Mutant(
        *("a window begins a key later", FOLDER + "products.cuh", "last = key - of.masks.lowest - first_query;"),
        *("last = key - of.masks.lowest - first_query - 1;", Case(1, 1, 140, 140, 64, masks=("window",)), "is off"),
    ),
    Mutant(
        *("queries at the end of a window are left out", FOLDER + "shared.cuh"),
        *("call.seqlen_k) - params.forward.masks.lowest);", "call.seqlen_k) - params.forward.masks.lowest - 64);"),
        *(Case(1, 1, 400, 140, 64, masks=("window",)), "is off"),
    ),
    Mutant(
        *("scores are capped, and their gradient is not", FOLDER + "products.cuh"),
        *("p[4 * n + e] *= slant[e];", "(void)slant[e];", Case(1, 1, 140, 140, 64, masks=("softcap",)), "is off"),
    ),
    Mutant(
        *("a slope is the first head's", FOLDER + "products.cuh", "head * of.masks.slope_head_stride];"),
        *("0 * of.masks.slope_head_stride];", Case(1, 2, 140, 140, 64, masks=("alibi",)), "is off"),
    ),
    Mutant(
        *("a key is seen that the mask hides", FOLDER + "products.cuh", "(M::HIDES_KEYS && !of_head.shown[half])"),
        *("false", Case(3, 1, 140, 300, 64, masks=("padding",)), "is off"),
    ),
    Mutant(
        *("the end of a range is among its keys", FOLDER + "products.cuh", "key >= ends.last"),
        *("key > ends.last", Case(1, 1, 140, 300, 64, masks=("documents",)), "is off"),
    ),
    Mutant(
        *("a tile of queries is left out whose ranges end among the keys", FOLDER + "shared.cuh"),
        *(
            "ends[1] > first_key)",
            "ends[1] > first_key + 64)",
            Case(1, 1, 600, 600, 64, masks=("documents",)),
            "is off",
        ),
    ),
    Mutant(
        *("a warp does not tell the others what it has found", FOLDER + "shared.cuh"),
        *(
            "of_warps[warp][0] = first, of_warps[warp][1] = last;\n    __syncthreads();",
            "of_warps[warp][0] = first, of_warps[warp][1] = last;",
        ),
        *(Case(1, 1, 600, 600, 64, masks=("documents",)), "race|nothing has written|off"),
    ),
    Mutant(
        *("P of a large head is read before it is there", FOLDER + "wide_consumer.cuh"),
        *(
            "    named_barrier_sync(P_THERE, Base::BOTH);\n",
            "",
            WIDE,
            "race|nothing has written|deadlock|a wait is missing",
        ),
    ),
    Mutant(
        *("dQ of a large head begins without dS", FOLDER + "wide_consumer.cuh"),
        *(
            "    named_barrier_sync(SCORES_THERE, Base::BOTH);\n",
            "",
            WIDE,
            "race|nothing has written|deadlock|a wait is missing",
        ),
    ),
    Mutant(
        *("dK of a large head is written over K that is still read", FOLDER + "wide_consumer.cuh"),
        *("    named_barrier_sync(KEYS_READ, Base::BOTH);", "", WIDE, "race|in flight|deadlock|a wait is missing"),
    ),
    Mutant(
        *("the last head of a group is left out", FOLDER + "shared.cuh", "turns = tiles * group;"),
        *("turns = tiles * max(1, group - 1);", Case(1, 2, 70, 100, 64, heads_kv=1), "grad_.* is off"),
    ),
]


def test_random_calls_have_right_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that `verify --backward --fuzz` draws, as far as these kernels compute them."""
    emulate, made = gradients.emulate, []

    def by_these(of: gradients.Gradient, tiling: gradients.AnyTiling, target: str) -> None:
        found = choose(of.problem(TARGET), deterministic=len(made) % 2 == 1)
        if isinstance(found, Rejection) or "grad_slopes" in of.made:
            emulate(of, tiling, target)
        else:
            made.append(emulate(of, found, TARGET))

    monkeypatch.setattr(gradients, "emulate", by_these)
    for call in draw(16, 11, True, ("backward",)):
        outcome = fuzz_check.check(call, "cpu")
        assert outcome.kind in ("passed", "refused"), outcome
    assert len(made) >= 4


def verdict(case: Case, deterministic: bool, schedule: Schedule, **options: Any) -> str:
    wanted = masked(case)
    for tensor in wanted.of.made.values():
        tensor.fill_(torch.nan)
    try:
        with scheduled(schedule):
            gradients.emulate(wanted.of, tiling_of(wanted, deterministic), TARGET, **options)
    except EmulationError as error:
        return error.problem
    return wanted.wrong()


original = functools.cache(verdict)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutation_is_caught(tmp_path: Path, mutant: Mutant) -> None:
    root = mutant.tree(tmp_path)
    said = []
    for schedule in (Schedule(0, late=True), Schedule(1, late=False)):
        assert original(mutant.case, mutant.deterministic, schedule) == ""
        said.append(verdict(mutant.case, mutant.deterministic, schedule, root=root))
    assert any(re.search(mutant.said, one) for one in said if one), said
