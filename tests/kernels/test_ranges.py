"""Ranges of sizes: every size in one has the kernel of the problem that it was found for."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from math import ceil
from typing import Any

import pytest

from microsdpa.kernels import ranges
from microsdpa.kernels.problem import MaskKind, Problem, PrologueKind
from microsdpa.kernels.ranges import SizeRange, range_of, search
from microsdpa.kernels.select import chosen

MASKS = (
    *(None, None, None, MaskKind(left=True), MaskKind(left=True, right=True), MaskKind(softcap=True)),
    *(MaskKind("bool", per_batch=True, bulk=True), MaskKind("float16", per_query=True), MaskKind(alibi=True)),
    MaskKind("uint8", per_query=True),
)
ROTATED = PrologueKind(64, angles="float32", rotates_key=False, query_norm="rms")


def drawn(random: random.Random) -> Problem:
    heads, mask = random.choice((1, 2, 8, 12, 32, 64)), random.choice(MASKS)
    keys = random.choice((random.randint(2, 300), random.randint(2, 5000), 128 * random.randint(1, 20), 40_000))
    kinds: tuple[dict[str, Any], ...] = ({}, {}, {}, {"dropout": True}, {"continued": True}, {"prologue": ROTATED})
    return Problem(
        batch=random.choice((1, 2, 3, random.randint(1, 16), random.randint(1, 300))),
        heads=heads,
        heads_kv=random.choice([count for count in (1, 2, 4, 8, 64) if heads % count == 0]),
        seqlen_q=random.choice((keys, keys, 1, random.randint(1, 300), random.randint(1, 5000))),
        seqlen_k=keys,
        head_dim=random.choice((24, 32, 64, 64, 80, 96, 128, 128, 160, 192, 256)),
        dtype="float16",
        causal=random.choice((None, None, "upper_left", "lower_right")),
        mask=mask,
        alignment=random.choice((16, 16, 16, 2)),
        target=random.choice(("sm_90a", "sm_90a", "sm_90a", "sm_89", "sm_80", "sm_120")),
        **random.choice(kinds if mask is None else kinds[:1]),
    )


@pytest.mark.parametrize("seed", range(6))
def test_every_size_has_the_same_kernel(seed: int) -> None:
    draw, found = random.Random(seed), 0
    for _ in range(120):
        problem = drawn(draw)
        spec = chosen(problem)
        if spec is None:
            continue
        others = search(problem, spec, "auto", draw.random() < 0.5)  # a number that were a key would be a TypeError
        if others is None:
            continue
        found += 1
        first_batch, last_batch, first, last, follows = others
        assert first_batch <= problem.batch <= last_batch
        assert first <= problem.seqlen_k <= last
        for _ in range(12):
            batch = draw.choice((first_batch, last_batch, draw.randint(first_batch, last_batch)))
            length = draw.choice((first, last, draw.randint(first, last)))
            queries = length if follows else problem.seqlen_q
            at = replace(problem, batch=batch, seqlen_q=queries, seqlen_k=length)
            assert chosen(at) is spec, (problem, others, at)
    assert found > 60


@pytest.mark.parametrize(
    ("problem", "batch_first", "expected"),
    [
        # Of rows that fill the chip, up to the sizes that are looked at.
        (Problem(20, 8, 8, 256, 256, 128, "float16"), True, SizeRange(17, 160, 193, 2047, True)),
        (Problem(20, 8, 8, 256, 256, 128, "float16"), False, SizeRange(17, 160, 129, 2047, True)),
        # The second last number of keys divides them among as many CTAs.
        (Problem(1, 32, 8, 1, 1031, 128, "float16"), False, SizeRange(1, 1, 1024, 2047, False)),
    ],
)
def test_a_range_ends_where_the_choice_changes(problem: Problem, batch_first: bool, expected: SizeRange) -> None:
    spec = chosen(problem)
    assert spec is not None
    assert range_of(problem, spec, batch_first=batch_first) == expected


def test_beside_tensors_of_masks_the_batch_size_stays() -> None:
    problem = Problem(4, 32, 8, 1, 700, 128, "float16", mask=MaskKind("bool", per_batch=True), target="sm_90a")
    spec = chosen(problem)
    assert spec is not None
    others = range_of(problem, spec)
    assert others is not None
    assert (others.first_batch, others.last_batch, others.queries_follow) == (4, 4, False)
    assert others.last > 1000


def test_a_plan_with_lists_of_tiles_is_of_its_length_alone() -> None:
    problem = Problem(1, 8, 8, 4096, 6140, 128, "float16", mask=MaskKind("bool", per_query=True), target="sm_90a")
    spec, longer = chosen(problem), problem.with_keys(6155)
    assert spec is not None
    assert spec is chosen(longer)
    assert spec.workspace_bytes(problem) < spec.workspace_bytes(longer)
    assert range_of(problem, spec) is None


@pytest.mark.parametrize("tensor", ["uint8", "int32"])
def test_tables_of_blocks_and_ranges_need_no_list_of_each_call(tensor: Any) -> None:
    problem = Problem(1, 8, 8, 4096, 6140, 128, "float16", mask=MaskKind(tensor, per_query=True), target="sm_90a")
    spec = chosen(problem)
    assert spec is not None
    assert spec.name == "hopper/throughput"
    assert spec.preparation is None
    assert spec.workspace_bytes(problem) == 0
    others = range_of(problem, spec)
    assert others is not None
    assert others.last > 10_000


def test_a_number_that_is_used_as_a_key_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(20, 8, 8, 256, 256, 128, "float16", target="sm_90a")
    spec = chosen(problem)
    assert spec is not None
    monkeypatch.setattr(ranges, "chosen", lambda problem, _: {problem.seqlen_k: spec}[256])
    assert range_of(problem, spec) is None
    with pytest.raises(TypeError, match="unhashable"):
        search(problem, spec, "auto", False)


ARITHMETIC: dict[str, Any] = {
    "sums": lambda b, s: b + s - 3 < 40,
    "differences": lambda b, s: 100 - b - s >= 60,
    "of two sizes": lambda b, s: s - b > 11,
    "products": lambda b, s: b * -(-s // 16) <= 12,
    "negative factors": lambda b, s: -2 * b * 3 < -20,
    "quotients": lambda b, s: b * s / 7 <= 11.5,
    "of a size": lambda b, s: 100 // b > s // 3 and 90 / b > 9,
    "rounded up": lambda b, s: ceil(s / 8) * b == 12,
    "remainders": lambda b, s: divmod(s, 8)[1] > 2 and s % 8 < 7,
    "equality": lambda b, s: s // 4 != 5 and b * 2 == 8,
    "as bool": lambda b, s: bool(s // 64) or bool(b - 4),
    "as numbers": lambda b, s: float(b) < 5 and list(range(30))[s] > 3,
    "the larger": lambda b, s: max(b * 5, s) - min(b, 2) > 17,
}


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("batch_first", [False, True])
def test_an_answer_is_the_same_in_all_of_the_range(name: str, batch_first: bool) -> None:
    question, batch, length = ARITHMETIC[name], 4, 21
    box = ranges._Box(batch, length, (1, 30, 2, 90), batch_first)
    sizes = ranges._Size(box, lambda batch, _: batch), ranges._Size(box, lambda _, length: length)
    expected = question(batch, length)
    with suppress(ranges._TooFew):
        assert question(*sizes) == expected
    first_batch, last_batch, first, last = box.ends
    assert first_batch <= batch <= last_batch
    assert first <= length <= last
    for at in range(first_batch, last_batch + 1):
        for keys in range(first, last + 1):
            assert question(at, keys) == expected, (at, keys)
