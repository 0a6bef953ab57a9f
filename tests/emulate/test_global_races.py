"""Races in global memory: blocks that meet there by counters and by turns, and what is missing where they do not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness import kernel, run_inline, run_kernel

from microsdpa.emulate.run import EmulationError, Schedule

KERNEL = """template <int UNUSED>
__global__ void kernel(const __grid_constant__ Params p) {
  __shared__ bool last;
  unsigned* counter = reinterpret_cast<unsigned*>(p.out + 512);
  const unsigned zero = 0x7fc00000u;  // output is NaN at first
  int32* number = reinterpret_cast<int32*>(p.out + 640);
%s
}
}
"""
COUNTED = """  p.out[64 * blockIdx.x + threadIdx.x] = p.in[threadIdx.x];
  OWN_FENCE
  BARRIER
  if (threadIdx.x == 0) {
    FENCE
    const unsigned before = COUNT;
    FENCE_BEHIND
    last = before == zero + 1;
  }
  BARRIER_BEHIND
  if (last) p.out[256 + threadIdx.x] = p.out[threadIdx.x ^ 1] + p.out[64 + (threadIdx.x ^ 1)];
"""
BY_ONE_FENCE = {
    "OWN_FENCE": "",
    "BARRIER": "__syncthreads();",
    "FENCE": "__threadfence();",
    "COUNT": "atomicAdd(counter, 1u)",
    "FENCE_BEHIND": "__threadfence();",
    "BARRIER_BEHIND": "__syncthreads();",
}
BY_OWN_FENCES = BY_ONE_FENCE | {"OWN_FENCE": "__threadfence();", "FENCE": ""}
TURNS = """  if (blockIdx.x == 1) {
    if (threadIdx.x == 0) wait_for_turn(number, 1);
    BARRIER_BEHIND
    p.out[256 + threadIdx.x] = 2 * p.out[threadIdx.x ^ 1];
  } else {
    p.out[threadIdx.x] = p.in[threadIdx.x];
    BARRIER
    if (threadIdx.x == 0) end_turn(number, 1);
  }
"""
BY_TURNS = {"BARRIER": "__syncthreads();", "BARRIER_BEHIND": "__syncthreads();"}
RIGHT = {"a fence of the one that counts": (COUNTED, BY_ONE_FENCE), "a fence of each": (COUNTED, BY_OWN_FENCES)} | {
    "turns": (TURNS, BY_TURNS)
}
MISSING = [
    *(("one fence", COUNTED, BY_ONE_FENCE, name) for name in ("BARRIER", "FENCE", "FENCE_BEHIND")),
    *(("own fences", COUNTED, BY_OWN_FENCES, name) for name in ("OWN_FENCE", "BARRIER", "FENCE_BEHIND")),
    *(("turns", TURNS, BY_TURNS, name) for name in BY_TURNS),
]


def filled(text: str, parts: dict[str, str]) -> str:
    return KERNEL % re.sub(r"\b[A-Z]{2,}(_[A-Z]+)*\b", lambda found: parts.get(found[0], found[0]), text)


def schedules() -> Iterator[Schedule]:
    return (Schedule(seed, True, backwards) for seed in range(3) for backwards in (False, True))


@pytest.mark.parametrize("name", RIGHT)
def test_blocks_that_synchronise_pass(tmp_path: Path, name: str) -> None:
    text, parts = RIGHT[name]
    other = 2 * (torch.arange(64) ^ 1).float()
    library = kernel(filled(text, parts), tmp_path, 64)
    for schedule in schedules():
        if name == "turns" and schedule.backwards:  # the block that waits must not begin first
            continue
        out, _ = run_kernel(library, 64, schedule, blocks=2)
        assert torch.equal(out[256:320], other)


@pytest.mark.parametrize(
    ("way", "text", "parts", "missing"), MISSING, ids=[f"{way}: {name}" for way, _, _, name in MISSING]
)
def test_what_is_missing_shows_in_every_schedule(
    tmp_path: Path, way: str, text: str, parts: dict[str, str], missing: str
) -> None:
    library = kernel(filled(text, parts | {missing: ""}), tmp_path, 64)
    for schedule in schedules():
        if way == "turns" and schedule.backwards:
            continue
        with pytest.raises(EmulationError) as caught:
            run_kernel(library, 64, schedule, blocks=2)
        said = caught.value.problem
        access = r"race: this (reads|writes) global memory that thread \d+ of block \d (wrote|read) at inline.cu:"
        assert re.search(access, said), said
        assert "no counter behind fences, and no turn, between the two" in said


def test_a_block_must_not_write_what_another_one_may_still_read(tmp_path: Path) -> None:
    text = "  if (blockIdx.x) p.out[threadIdx.x] = 1.0f; else p.out[64 + threadIdx.x] = p.out[threadIdx.x];\n"
    library = kernel(KERNEL % text, tmp_path, 64)
    for schedule in schedules():
        with pytest.raises(EmulationError, match=r"race: this (writes .* read|reads .* wrote) at inline.cu:") as caught:
            run_kernel(library, 64, schedule, blocks=2)
        assert "of block" in caught.value.problem


def test_blocks_may_write_the_same_to_one_place(tmp_path: Path) -> None:
    out, _ = run_inline(KERNEL % "  p.out[threadIdx.x] = p.in[threadIdx.x];\n", tmp_path, 64, blocks=3)
    assert torch.equal(out[:64], torch.arange(64).float())


def test_threads_of_a_block_need_a_barrier(tmp_path: Path) -> None:
    text = "  p.out[threadIdx.x] = 1.0f;\n  %s\n  p.out[64 + threadIdx.x] = p.out[63 - threadIdx.x];\n"
    run_inline(KERNEL % (text % "__syncthreads();"), tmp_path / "right", 64)
    with pytest.raises(EmulationError, match=r"wrote at inline\.cu:7, with no barrier between the two"):
        run_inline(KERNEL % (text % "__syncwarp();"), tmp_path / "wrong", 64)
