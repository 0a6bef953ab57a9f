"""A simulation of hopper/throughput's schedule: which CTA computes which query tiles, and when the last one is done.

A CTA takes as long as its tiles: so many clocks for a tile of keys, more around a query tile, and more for the tiles on
the causal diagonal. These three are fitted, by the kernel's tiles, to the lengths FITTED of a recording of suite
schedule; the other lengths are predicted. The launch is done when the CTA with most to do is, or somewhat later where
the tensors take as long from memory.

That suite has zeros in its tensors. Products of random numbers reach the power limit, where the clock falls by up to a
quarter; zeros draw less, so that the clock stays nearer to its top. What it is comes from the recording.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass

import torch

from microsdpa.evidence import results
from microsdpa.evidence.wording import provenance
from microsdpa.kernels.chip import chip_of
from microsdpa.kernels.hopper.throughput.spec import Tiles, choose, is_dealt
from microsdpa.kernels.problem import ELEMENT_BYTES, Problem

SUITE = "schedule"
NOT_RECORDED = f"*Not recorded yet: `microsdpa bench --suite {SUITE} --output benchmarks/results`, on an H200.*\n"
SECTION_BYTES = 16 << 20
"""Of K and V of the heads of a causal section, unless more of them have a CTA for each tile (tile_scheduler.cuh)."""
FEW_ROUNDS = 2
"""Of a launch whose heads are one section, unless their query tiles are about as long."""
FITTED = (512, 2048, 16384)
"""Lengths that constants are fitted to."""
FITS = 5
"""Rounds of a fit: which CTA is the last depends on the constants."""
START_US = 1.5
"""From the launch to the first product: parameters, descriptors, the first tiles of Q and K."""
MEMORY_BYTES_PER_US = 4.0e6
"""Read and written, of an H200: chosen on the recording of suite schedule, with TOGETHER."""
TOGETHER = 3.0
"""CTAs compute while others wait for memory: the cube of the launch's time is the sum of the cubes of both."""


@dataclass(frozen=True)
class Load:
    """What a CTA computes: query tiles, tiles of keys of all of them, and query tiles with a causal diagonal."""

    query_tiles: int
    key_tiles: int
    diagonals: int


@dataclass(frozen=True)
class Clocks:
    """Of an SM: for a tile of keys, around a query tile, and for a diagonal."""

    tile: float
    around: float
    diagonal: float

    def of(self, load: Load) -> float:
        """Of a CTA."""
        return load.key_tiles * self.tile + load.query_tiles * self.around + load.diagonals * self.diagonal


@dataclass(frozen=True)
class Cell:
    """A recorded case: its problem, the kernel's tiles, and microseconds and clock in MHz as measured."""

    problem: Problem
    tiles: Tiles
    measured_us: float
    mhz: float


def loads(problem: Problem, tiles: Tiles, clocks: Clocks) -> list[Load]:
    """What each CTA computes of a problem whose rows fill their tiles, in the order of tile_scheduler.cuh.

    Queries stand before the first key, at the left end of the causal mask. `clocks` decide which CTA takes the next
    query tile, where CTAs take them as they come to them.
    """
    of_head, heads = -(-problem.seqlen_q // tiles.block_m), problem.batch * problem.heads
    causal, section_heads = problem.causal is not None, heads
    ctas = min(chip_of(problem.target).sms, heads * of_head)
    if causal:
        row_bytes, group = 2 * problem.head_dim * ELEMENT_BYTES[problem.dtype], problem.heads // problem.heads_kv
        at_once = max(ctas // (group * of_head), 1)
        key_heads = min(max(SECTION_BYTES // row_bytes // problem.seqlen_k, at_once), problem.batch * problem.heads_kv)
        whole = heads * of_head <= FEW_ROUNDS * ctas and problem.seqlen_k // 2 < problem.seqlen_q
        section_heads = heads if whole else min(heads, key_heads * group)
    sections = [min(section_heads, heads - first) for first in range(0, heads, section_heads)]

    def seen(in_section: int, index: int) -> int:
        """Tiles of keys of a section's query tile."""
        rows = (of_head - index // in_section) * tiles.block_m if causal else problem.seqlen_k
        return -(-min(rows, problem.seqlen_k) // tiles.block_n)

    found: list[list[int]] = [[] for _ in range(ctas)]
    if is_dealt(problem, tiles):
        free = [(0.0, cta) for cta in range(ctas)]
        for in_section in sections:
            for index in range(in_section * of_head):
                clock, cta = free[0]
                found[cta].append(seen(in_section, index))
                heapq.heapreplace(free, (clock + clocks.of(_load(found[cta][-1:], causal)), cta))
        return [_load(keys, causal) for keys in found]
    rounds = -(-section_heads * of_head // ctas)
    shift = rounds * ctas - section_heads * of_head if rounds % 2 == 0 else ctas // len(sections)
    shift = 0 if rounds == 1 else shift
    for cta, section, turn in itertools.product(range(ctas), range(len(sections)), range(rounds)):
        place = (cta + section % ctas * (ctas - shift)) % ctas if causal else cta
        backwards = causal and (turn if rounds > 1 else section) % 2 == 1
        index = turn * ctas + (ctas - 1 - place if backwards else place)
        if index < sections[section] * of_head:
            found[cta].append(seen(sections[section], index))
    return [_load(keys, causal) for keys in found]


def _load(key_tiles: list[int], causal: bool) -> Load:
    """Of query tiles with so many tiles of keys each."""
    return Load(len(key_tiles), sum(key_tiles), len(key_tiles) if causal else 0)


def memory_us(problem: Problem) -> float:
    """Microseconds in which device memory reads Q, K and V once, and takes O."""
    rows = 2 * problem.heads * problem.seqlen_q + 2 * problem.heads_kv * problem.seqlen_k
    return problem.batch * rows * problem.head_dim * ELEMENT_BYTES[problem.dtype] / MEMORY_BYTES_PER_US


def fit(cells: list[Cell]) -> Clocks:
    """The constants of one kind of tiles by least squares of relative errors, from cells of both kinds of masks."""
    clocks = Clocks(cells[0].tiles.tile_clocks, cells[0].tiles.around_clocks, 0.0)
    for _ in range(FITS):
        last = [max(loads(cell.problem, cell.tiles, clocks), key=clocks.of) for cell in cells]
        rows, wanted = [], []
        for cell, load in zip(cells, last, strict=True):
            whole = (cell.measured_us - START_US) ** TOGETHER
            own = max(whole - memory_us(cell.problem) ** TOGETHER, 0.0)
            weight = own / whole  # of a relative error of the CTA's own time, in that of the launch
            clock = own ** (1 / TOGETHER) * cell.mhz
            rows.append([weight * tiles / clock for tiles in (load.key_tiles, load.query_tiles, load.diagonals)])
            wanted.append([weight])
        system, target = torch.tensor(rows, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64)
        found = torch.linalg.lstsq(system, target, driver="gelsd").solution
        clocks = Clocks(*(float(value) for value in found[:, 0]))
    return clocks


def predicted_us(cell: Cell, clocks: Clocks) -> float:
    """Microseconds of the launch."""
    own = max(map(clocks.of, loads(cell.problem, cell.tiles, clocks))) / cell.mhz
    return START_US + math.pow(own**TOGETHER + memory_us(cell.problem) ** TOGETHER, 1 / TOGETHER)


def imbalance(cell: Cell, clocks: Clocks) -> float:
    """Clocks of the CTA with most to do over those of the mean one."""
    found = [clocks.of(load) for load in loads(cell.problem, cell.tiles, clocks)]
    return max(found) * len(found) / sum(found)


def cells_of(result: results.Result) -> list[Cell]:
    """Those of a recording that hopper/throughput ran."""
    found = []
    for row in result["rows"]:
        if row["status"] != "ok" or row["kernel"] != "hopper/throughput" or not row.get("sm_clock_mhz"):
            continue
        shape, causal = row["shape"], None if row["mask"] == "none" else row["mask"]
        sizes = shape["b"], shape["h"], shape["h_kv"], shape["s_q"], shape["s_k"], shape["d"]
        problem = Problem(*sizes, row["inputs"], causal, target="sm_90a")
        found.append(Cell(problem, choose(problem), row["median_us"], row["sm_clock_mhz"]))
    return found


def lines(cells: list[Cell]) -> list[list[str]]:
    """A header, then a line for each cell: its time as measured and as predicted, and how even the CTAs' work is."""
    kinds: dict[str, list[Cell]] = {}
    for cell in cells:
        kinds.setdefault(f"D = {cell.problem.head_dim}, {cell.tiles}", []).append(cell)
    found = [["tiles", "S", "mask", "measured, us", "predicted, us", "predicted / measured", "longest / mean CTA"]]
    for name, members in kinds.items():
        clocks = fit([cell for cell in members if cell.problem.seqlen_k in FITTED])
        for cell in members:
            problem, predicted = cell.problem, predicted_us(cell, clocks)
            note = " (fitted)" if problem.seqlen_k in FITTED else ""
            numbers = [f"{cell.measured_us:.1f}", f"{predicted:.1f}", f"{predicted / cell.measured_us:.3f}{note}"]
            causal = "causal" if problem.causal else "none"
            found.append([name, str(problem.seqlen_k), causal, *numbers, f"{imbalance(cell, clocks):.3f}"])
    return found


def markdown(result: results.Result) -> str:
    """The table of a recording."""
    head, *rest = lines(cells_of(result))
    table = [head, ["---", "---:", "---", *["---:"] * 4], *rest]
    return "".join(f"| {' | '.join(line)} |\n" for line in table) + f"\n{provenance(result)}"
