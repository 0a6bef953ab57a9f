"""Mutations at the edges of kernels: one key that is missing, an overflow, strides beyond 32 bits, registers in flight.

Files are found by what they say, so that a kernel may be moved.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from harness import run_inline

from microsdpa import reference
from microsdpa.call.masks import Masks
from microsdpa.emulate import run
from microsdpa.emulate.run import EmulationError, Schedule
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, make, make_masks
from microsdpa.evidence.verify import problem_of
from microsdpa.jit.source import KERNELS_DIR
from microsdpa.kernels import FAMILIES, KernelSpec
from microsdpa.kernels.ampere.mma import tiles as ampere_tiles
from microsdpa.kernels.ampere.mma.spec import specification
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.select import select

WRONG = "wrong answer"
FAR = 2**31 + 64
"""Elements between two heads or rows: more than 32 bits hold."""
Tensors = tuple[torch.Tensor, ...]


def of_family(part: str) -> Callable[[Problem], KernelSpec]:
    """The kernel of the one production family whose name has this part."""
    (name,) = [family.name for family in FAMILIES if family.name.endswith(part)]
    return lambda problem: select(problem, name).spec


def stream(problem: Problem) -> KernelSpec:
    found = specification(problem, ampere_tiles.STREAM_DEEP)
    assert isinstance(found, KernelSpec)
    return found


def tiled(problem: Problem) -> KernelSpec:
    found = specification(problem, ampere_tiles.Tiling(64, 1, 2))
    assert isinstance(found, KernelSpec)
    return found


def jump(tensors: Tensors) -> Tensors:
    """One key whose score is larger than the others' by a factor of 2^17: it alone overflows FP16."""
    query, key, value = torch.ones_like(tensors[0]), torch.zeros_like(tensors[1]), tensors[2]
    key[:, :, 150] = 17.0 * 0.6931 / 8.0
    return query, key, value


def loud_padding(tensors: Tensors) -> Tensors:
    """The first 16 keys, which padding hides, have far larger products than all others."""
    query, key, value = tensors[0].abs(), tensors[1].clone(), tensors[2]
    key[:, :, :16] = key[:, :, :16].abs() * 4
    return query, key, value


def apart(dimension: int) -> Callable[[Tensors], Tensors]:
    """Batch entries, heads or rows that are FAR from one another in memory, which nothing else is written to."""

    def change(tensors: Tensors) -> Tensors:
        found = []
        for tensor in tensors:
            strides = list(tensor.stride())
            strides[dimension] = FAR
            memory = torch.empty(FAR + 2**16, dtype=tensor.dtype)
            found.append(memory.as_strided(tensor.shape, strides).copy_(tensor))
        return tuple(found)

    return change


@dataclass(frozen=True)
class Mutant:
    """One replacement in the file below `part` that has the text, the call that shows it, and what is said of it."""

    name: str
    part: str
    old: str
    new: str
    case: Case
    kernel: Callable[[Problem], KernelSpec]
    said: str = WRONG
    change: Callable[[Tensors], Tensors] = lambda tensors: tensors


PAIR = Case(1, 2, 2, 2, 64)
LOST = f"outside every buffer|{WRONG}"
PASSED_OVER = "if (min(keys, first_visible) >= BLOCK_N) return;"
ONE_LESS = "if (min(keys, first_visible) >= BLOCK_N - 1) return;"
MUTANTS = [
    Mutant(
        *("stream: tail of one key", "stream", "shared.seen_by_all + warp_row) / BLOCK_N;"),
        *("shared.seen_by_all + warp_row) / BLOCK_N + (params.seqlen_k % BLOCK_N == BLOCK_N - 1);",),
        *(Case(1, 1, 140, 319, 64), stream),
    ),
    Mutant(
        *("general: tail of one key", "masks", ": params.call.seqlen_k;", ": params.call.seqlen_k + 1;"),
        *(Case(1, 1, 40, 127, 64, masks=("softcap",)), of_family("general")),
    ),
    Mutant(
        *("latency: tail of one key", "latency", "if (visible(0) < BLOCK_N) hide(s);"),
        *("if (visible(0) < BLOCK_N - 1) hide(s);", Case(1, 1, 64, 255, 64), of_family("latency")),
    ),
    Mutant(
        *("latency: tail of one key under masks", "latency", "int end = params.call.seqlen_k;"),
        *("int end = params.call.seqlen_k + 1;", Case(1, 1, 64, 255, 64, masks=("softcap",)), of_family("latency")),
    ),
    Mutant(
        *("latency: hidden keys have probabilities", "latency", "i % 2) ? found : 0.0f;", "i % 2) ? found : found;"),
        *(Case(1, 1, 64, 255, 64, masks=("bool",)), of_family("latency")),
    ),
    Mutant(
        *("latency: probabilities below FP16's range", "latency", "LEAST_SUM = 0.015625f;", "LEAST_SUM = 0.0f;"),
        *(Case(1, 1, 64, 512, 64, masks=("left padding",)), of_family("latency"), WRONG, loud_padding),
    ),
    Mutant(
        *("latency: largest number of a mask not waited for", "latency", "named_barrier_sync(MASKS_READ, THREADS);"),
        *("", Case(1, 1, 64, 256, 64, masks=("additive",)), of_family("latency"), "race|nothing has written|barrier"),
    ),
    Mutant("split: tail of one key", "split", PASSED_OVER, ONE_LESS, Case(1, 2, 130, 575, 64), of_family("split")),
    Mutant(
        *("throughput: tail of one key", "throughput", PASSED_OVER, ONE_LESS),
        *(Case(1, 2, 130, 255, 64), of_family("throughput")),
    ),
    Mutant(
        *("latency: overflow at 16 times the limit", "latency", "LARGEST_SUM = 65504.0f", "LARGEST_SUM = 1048064.0f"),
        *(Case(1, 1, 16, 320, 64), of_family("latency"), WRONG, jump),
    ),
    Mutant(
        *("heads: stride in 32 bits", "head.cuh", "head * params.query_strides.head;"),
        *("head * static_cast<int32>(params.query_strides.head);", PAIR, stream, LOST, apart(1)),
    ),
    Mutant(
        *("mma: stride of heads in 32 bits", "mma", "head_kv * params.key_strides.head;"),
        *("head_kv * static_cast<int32>(params.key_strides.head);", PAIR, tiled, LOST, apart(1)),
    ),
]


def mutated(directory: Path, mutant: Mutant) -> Path:
    """A copy of the CUDA sources with the mutant's replacement."""
    root = directory / "cuda"
    shutil.copytree(KERNELS_DIR, root)
    places = [
        path
        for path in sorted(root.rglob("*.cu*"))
        if mutant.part in str(path.relative_to(root)) and mutant.old in path.read_text()
    ]
    assert places, f"no file of {mutant.part} reads {mutant.old!r}"
    for path in places:
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
    return root


def verdict(mutant: Mutant, root: Path, schedule: Schedule) -> str:
    """What the emulator says of the call, or WRONG, or nothing."""
    case, masks = mutant.case, make_masks(mutant.case)
    query, key, value = mutant.change(make(case))
    problem = problem_of(case, "sm_90a")
    out, lse = torch.full(query.shape, torch.nan, dtype=query.dtype), torch.full(query.shape[:3], torch.nan)
    try:
        run.attention(
            *(mutant.kernel(problem), problem, (query, key, value, out, lse), case.scale),
            schedule=schedule,
            masks=Masks(**masks),
            root=root,
        )
    except EmulationError as error:
        return error.problem
    given = [tensor.clone(memory_format=torch.contiguous_format) for tensor in (query, key, value)]
    expected = reference.oracle(*given, causal=case.causal, scale=case.scale, **masks)
    plain = reference.eager(*given, causal=case.causal, scale=case.scale, **masks)
    # A key that is counted and should not be is a part in hundreds of the output: the LSE shows it.
    for got, exact, rough in zip((out, lse), expected, plain, strict=True):
        if not compare.tolerance(rough, exact, got.dtype).admits(compare.measure(got, exact)):
            return WRONG
    return ""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutation_at_an_edge_is_caught(tmp_path: Path, mutant: Mutant) -> None:
    root = mutated(tmp_path, mutant)
    for schedule in (Schedule(0, late=True), Schedule(1, late=False)):
        assert verdict(mutant, KERNELS_DIR, schedule) == ""
        said = verdict(mutant, root, schedule)
        assert re.search(mutant.said, said), said or "it passed"


REGISTERS_OF_A = """
  struct Tile { float x[64]; };
  Tile& tile = dynamic_shared<Tile>();
  tile.x[threadIdx.x] = tile.x[threadIdx.x + 32] = 0.0f;
  emulator::fence_proxy_async();
  __syncthreads();
  float d[4];
  uint32 a[4] = {};
  const uint64 b = matrix_descriptor(&tile, 128, 256, Swizzle::NONE);
  wgmma_fence();
  wgmma<__half, 8>(d, a, b, false);
  wgmma_commit();
  BEFORE wgmma_wait<0>();
  BEHIND p.out[threadIdx.x] = d[0] + a[0];
"""
WRITE = "a[0] = 1;"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("in_flight", [False, True])
def test_registers_of_a_are_read_until_the_wait(tmp_path: Path, late: bool, in_flight: bool) -> None:
    places = (WRITE, "") if in_flight else ("", WRITE)
    body = REGISTERS_OF_A.replace("BEFORE", places[0]).replace("BEHIND", places[1])
    text = f"template <int UNUSED>\n__global__ void kernel(const __grid_constant__ Params p) {{{body}}}\n}}\n"
    if not in_flight:
        run_inline(text, tmp_path, schedule=Schedule(0, late=late))
        return
    with pytest.raises(EmulationError, match="registers of A of lane 0 were written while this wgmma was in flight"):
        run_inline(text, tmp_path, schedule=Schedule(0, late=late))
