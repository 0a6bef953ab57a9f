"""Plans that C++ makes for sizes in a range, beside those that Python makes; test_launcher.py runs this file."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_cuda import KDL_BFLOAT, KDL_FLOAT, Launch, install_allocator, integer, record, set_integer, tensor
from stub_harness import PRIMARY, _clean, library

from microsdpa.call.masks import Masks
from microsdpa.call.options import OPTIONS
from microsdpa.emulate.abi import VarlenParams
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.ranges import SizeRange, range_of
from microsdpa.kernels.select import chosen
from microsdpa.kernels.spec import ONE_LENGTH_PARAMS, VARLEN_PARAMS
from microsdpa.runtime import launcher

__all__ = ["_clean"]

PROBLEMS, SIZES = 40, 8
APART = 2**44
"""Bytes between tensors, which are larger than any of them."""
WINDOWS = (None, None, (127, 0), (64, 64))


@pytest.fixture(autouse=True)
def _functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel is a function of its own, and no memory is kept: allocations have the bytes of the plan."""
    specs: list[KernelSpec] = []

    def load(spec: KernelSpec, _: int | None) -> tuple[int, int]:
        if spec not in specs:
            specs.append(spec)
        return 0x3000 + specs.index(spec), PRIMARY

    monkeypatch.setattr(launcher, "_loaded_specs", {})
    monkeypatch.setattr(launcher, "_compiled", lambda spec, _: spec)
    monkeypatch.setattr(launcher, "load_kernel", load)


def drawn(random: random.Random) -> tuple[Problem, tuple[int, int] | None]:
    """A problem and its window."""
    heads, window = random.choice((4, 8, 12, 32)), random.choice(WINDOWS)
    keys = random.choice((random.randint(2, 400), random.randint(2, 6000), 128 * random.randint(1, 16)))
    problem = Problem(
        batch=random.choice((1, 2, random.randint(1, 40))),
        heads=heads,
        heads_kv=random.choice([count for count in (1, 4, heads) if heads % count == 0]),
        seqlen_q=random.choice((keys, keys, 1, random.randint(1, 300))),
        seqlen_k=keys,
        head_dim=random.choice((32, 64, 64, 80, 128, 128, 256)),
        dtype=random.choice(("float16", "bfloat16")),
        causal=random.choice((None, "upper_left", "lower_right")),
        mask=Masks(window=window).kind,
        target=random.choice(("sm_90a", "sm_90a", "sm_89")),
    )
    return problem, window


def call_of(problem: Problem, window: tuple[int, int] | None, lse: int, padding: int = 0) -> list[Any]:
    """Arguments of a call that poses a problem; `padding`: elements behind each head of K."""
    code = KDL_BFLOAT if problem.dtype == "bfloat16" else KDL_FLOAT
    queries = problem.batch, problem.heads, problem.seqlen_q, problem.head_dim
    keys = problem.batch, problem.heads_kv, problem.seqlen_k, problem.head_dim
    of_head = problem.seqlen_k * problem.head_dim + padding
    strides = problem.heads_kv * of_head, of_head, problem.head_dim, 1
    options = OPTIONS[False, problem.causal, problem.heads != problem.heads_kv, "auto", None]
    given = [
        tensor(queries, APART, code=code),
        tensor(keys, 2 * APART, code=code, strides=strides),
        tensor(keys, 3 * APART, code=code),
        tensor(queries, 4 * APART, code=code),
        tensor(queries[:3], lse, bits=32),
        options,
        None,
    ]
    return given if window is None else [*given, None, None, None, *window, None]


def launched(call: list[Any], spec: KernelSpec) -> list[bytes]:
    """What the driver is asked for by a call, launch by launch, and the scratch memory that was allocated."""
    before = record.launches
    set_integer("stub_last_bytes", -1)
    set_integer("stub_tensor_maps", len(spec.tensor_maps))
    set_integer("stub_masked", int(spec.params != "microsdpa::AttentionParams"))
    set_integer("stub_capturing", 1)
    try:
        assert launcher.launch(*call) is True
    finally:
        for name in ("stub_tensor_maps", "stub_masked", "stub_capturing"):
            set_integer(name, 0)
    assert record.launches - before == len(spec.stages)
    found = [Launch.from_buffer_copy(record.history[i % len(record.history)]) for i in range(before, record.launches)]
    for launch in found:
        launch.params.workspace = 1 if launch.params.workspace else 0
        if spec.params in (VARLEN_PARAMS, ONE_LENGTH_PARAMS):  # every captured launch has counters of its own
            ctypes.memset(ctypes.byref(launch.params, VarlenParams.arrivals.offset), 0, 8)
    return [*map(bytes, found), integer("stub_last_bytes").to_bytes(8, "little", signed=True)]


def sizes_in(others: SizeRange, random: random.Random) -> tuple[int, int]:
    """A batch size and a length of a range, often at its ends."""
    first_batch, last_batch, first, last, _ = others
    batch = random.choice((first_batch, last_batch, random.randint(first_batch, last_batch)))
    return batch, random.choice((first, last, random.randint(first, last)))


def of_sizes(problem: Problem, others: SizeRange, batch: int, length: int) -> Problem:
    queries = length if others.queries_follow else problem.seqlen_q
    return replace(problem, batch=batch, seqlen_q=queries, seqlen_k=length)


@pytest.mark.parametrize("seed", range(8))
def test_plans_are_those_that_python_makes(seed: int) -> None:
    install_allocator()
    draw, met = random.Random(seed), 0
    for _ in range(PROBLEMS):
        problem, window = drawn(draw)
        spec = chosen(problem)
        assert spec is not None
        others = range_of(problem, spec, batch_first=draw.random() < 0.5)
        if others is None:
            continue
        for _ in range(SIZES):
            at = of_sizes(problem, others, *sizes_in(others, draw))
            call = call_of(at, window, draw.choice((5 * APART, 5 * APART + 64)), draw.choice((0, 0, 64)))
            found = []
            for whose, reach in ((problem, others), (at, None)):
                library.clear_plans()
                expected = chosen(whose)
                assert expected is not None
                launcher.prepare(whose, expected, call_of(whose, window, 5 * APART) if reach else call, reach)
                found.append(launched(call, expected))
            assert found[0] == found[1], (problem, others, at, spec)
            met += 1
    assert met > PROBLEMS * SIZES / 2


OUTSIDE: dict[str, Callable[[SizeRange], tuple[int, int]]] = {
    "a larger batch": lambda others: (others.last_batch + 1, others.last),
    "a smaller batch": lambda others: (others.first_batch - 1, others.first),
    "longer": lambda others: (others.last_batch, others.last + 1),
    "shorter": lambda others: (others.first_batch, others.first - 1),
}


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("queries", [1, 600])
def test_sizes_outside_have_no_plan(outside: str, queries: int) -> None:
    problem = Problem(20, 8, 8, queries, 600, 128, "float16", target="sm_90a")
    spec = chosen(problem)
    assert spec is not None
    others = SizeRange(18, 25, 500, 700, queries == 600)
    launcher.prepare(problem, spec, call_of(problem, None, 5 * APART), others)
    inside = of_sizes(problem, others, 18, 700)
    assert launcher.launch(*call_of(inside, None, 5 * APART)) is True
    wrong = of_sizes(problem, others, *OUTSIDE[outside](others))
    assert launcher.launch(*call_of(wrong, None, 5 * APART)) is None


@pytest.mark.parametrize(
    "changes", [{"seqlen_q": 599}, {"seqlen_k": 601}, {"heads": 16}, {"head_dim": 64}, {"dtype": "bfloat16"}]
)
def test_what_is_no_size_of_the_range_stays_as_it_is(changes: dict[str, Any]) -> None:
    problem = Problem(20, 8, 8, 600, 600, 128, "float16", target="sm_90a")
    spec = chosen(problem)
    assert spec is not None
    launcher.prepare(problem, spec, call_of(problem, None, 5 * APART), SizeRange(1, 64, 2, 2000, True))
    other = replace(problem, **changes)
    assert launcher.launch(*call_of(other, None, 5 * APART)) is None
    assert launcher.launch(*call_of(problem, (3, -1), 5 * APART)) is None


def test_ranges_of_one_kind_stand_beside_one_another() -> None:
    problem = Problem(20, 8, 8, 600, 600, 128, "float16", target="sm_90a")
    spec = chosen(problem)
    assert spec is not None
    for batch in range(1, 40):
        own = replace(problem, batch=batch)
        launcher.prepare(own, spec, call_of(own, None, 5 * APART), SizeRange(batch, batch, 2, 2000, True))
    at = [replace(problem, batch=batch, seqlen_q=700, seqlen_k=700) for batch in (39, 34, 1)]
    found = [launcher.launch(*call_of(one, None, 5 * APART)) for one in at]
    assert found == [True, True, None]  # of the last ones, so that a look-up does not grow with their number
    library.clear_plans()
    assert launcher.launch(*call_of(at[0], None, 5 * APART)) is None
