"""Deliberately broken kernels, each one replacement in one file, and what the emulator must say."""

from __future__ import annotations

import dataclasses

from harness import Replacement

WRONG = "wrong answer"

ROW_SUMS, HOPPER = "test/row_sums.cu", "test/hopper_product.cu"
SCALAR, SOFTMAX, TILE = "ladder/01_scalar.cu", "common/softmax.cuh", "common/tile.cuh"


@dataclasses.dataclass(frozen=True)
class Mutant(Replacement):
    """A replacement in one file, and what the emulator must say: a part of its error, or WRONG."""

    caught_by: str


MUTANTS = [
    Mutant(
        "wait removed",
        ROW_SUMS,
        "    microsdpa::cp_async_wait<1>();\n",
        "",
        "in flight: a wait is missing|nothing has written|race",
    ),
    Mutant(
        "wait that lets one more group be in flight", ROW_SUMS, "cp_async_wait<1>", "cp_async_wait<2>", "in flight|race"
    ),
    Mutant(
        "commit removed",
        ROW_SUMS,
        "    }\n    microsdpa::cp_async_commit();\n",
        "    }\n",
        "in flight: a wait is missing",
    ),
    Mutant(
        "barrier after the wait removed",
        ROW_SUMS,
        "    microsdpa::cp_async_wait<1>();\n    __syncthreads();\n",
        "    microsdpa::cp_async_wait<1>();\n",
        "in flight|race|nothing has written",
    ),
    Mutant(
        "barrier before the next copy removed",
        ROW_SUMS,
        "    __syncthreads();  // the next tile's copy overwrites what slower warps still read\n",
        "",
        "race: this writes .* read at",
    ),
    Mutant(
        "stale stage read", ROW_SUMS, "shared.key[tile % 2]", "shared.key[(tile + 1) % 2]", "in flight|race|nothing"
    ),
    Mutant(
        "copy into the stage in use", ROW_SUMS, "shared.key[(tile + 1) % 2],", "shared.key[tile % 2],", "in flight|race"
    ),
    Mutant(
        "swizzle mismatch",
        ROW_SUMS,
        "keys + swizzled(n * 8 + lane % 8, step * 2 + lane / 8 % 2)",
        "keys + (n * 8 + lane % 8) * DIM + (step * 2 + lane / 8 % 2) * 8",
        WRONG,
    ),
    Mutant("unmasked tail", ROW_SUMS, "if (key >= params.keys) score", "if (false) score", WRONG),
    Mutant("tail read past the end", ROW_SUMS, "row < valid_rows;", "true;", "outside every buffer: at byte .* of key"),
    Mutant(
        "reduction over mixed rows",
        ROW_SUMS,
        "x + __shfl_xor_sync(0xffffffffu, x, 2)",
        "x + __shfl_xor_sync(0xffffffffu, x, 4)",
        WRONG,
    ),
    Mutant("maximum not shared", ROW_SUMS, "return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));", "return x;", WRONG),
    Mutant("no rescaling", ROW_SUMS, "sum[half] * microsdpa::ex2_approx(maximum[half] - largest)", "sum[half]", WRONG),
    Mutant(
        "lanes disagree on a shuffle",
        ROW_SUMS,
        "float quad_sum(float x) {\n",
        "float quad_sum(float x) {\n  if (threadIdx.x % 32 == 7) x += __shfl_xor_sync(0xffffffffu, x, 1);\n",
        "divergent warp",
    ),
    Mutant(
        "misaligned row",
        ROW_SUMS,
        "row * DIM + (chunk ^ (row % 8)) * 8; }",
        "row * DIM + (chunk ^ (row % 8)) * 8 + 4; }",
        "misaligned",
    ),
    Mutant(
        "scalar: barrier after the copy removed",
        SCALAR,
        "    __syncthreads();\n\n    float score[ROWS];",
        "    float score[ROWS];",
        "nothing has written|race: this reads",
    ),
    Mutant(
        "scalar: barrier before the next copy removed",
        SCALAR,
        "    __syncthreads();  // the next copy overwrites what slower warps still read\n",
        "",
        "race: this",
    ),
    Mutant("scalar: unmasked tail", SCALAR, "lane < valid_keys && ", "", WRONG),
    Mutant(
        "scalar: causal mask off by one", SCALAR, "first_key + lane <= first_row", "first_key + lane < first_row", WRONG
    ),
    Mutant("scalar: mixed rows", SCALAR, "state[r].update(", "state[0].update(", WRONG),
    Mutant(
        "scalar: phantom keys score 0",
        SCALAR,
        "params.scale_log2 : negative_infinity()",
        "params.scale_log2 : 0.0f",
        WRONG,
    ),
    Mutant("scalar: store past the last row", SCALAR, "if (row >= params.seqlen_q) break;", "", "outside every buffer"),
    Mutant("scalar: load past the last key", TILE, "if (row < valid_rows) load", "load", "outside every buffer"),
    Mutant(
        "scalar: reduction stops early",
        SOFTMAX,
        "x += __shfl_xor_sync(FULL_WARP, x, offset);",
        "if (offset > 1) x += __shfl_xor_sync(FULL_WARP, x, offset);",
        WRONG,
    ),
    Mutant(
        "hopper: wait for a tile removed",
        HOPPER,
        "    mbarrier_wait(shared.full[stage], tile / 2 & 1);\n",
        "",
        "in flight|race|nothing has written",
    ),
    Mutant(
        "hopper: wait for the query removed",
        HOPPER,
        "  mbarrier_wait(shared.query_full, 0);\n",
        "",
        "in flight|race|nothing has written",
    ),
    Mutant(
        "hopper: wait for a free stage removed",
        HOPPER,
        "    if (tile >= 2) mbarrier_wait(shared.empty[stage], (tile / 2 - 1) & 1);\n",
        "",
        "a bulk tensor copy: (race|write)|more than the",
    ),
    Mutant(
        "hopper: phase off by one, full",
        HOPPER,
        "shared.full[stage], tile / 2 & 1)",
        "shared.full[stage], (tile / 2 + 1) & 1)",
        "in flight|race|nothing has written|deadlock",
    ),
    Mutant(
        "hopper: phase off by one, empty",
        HOPPER,
        "(tile / 2 - 1) & 1);",
        "tile / 2 & 1);",
        "a bulk tensor copy: (race|write)|more than the|deadlock",
    ),
    Mutant(
        "hopper: stale stage read",
        HOPPER,
        "shared.key[stage], 16, 1024",
        "shared.key[1 - stage], 16, 1024",
        "in flight|race|nothing has written",
    ),
    Mutant(
        "hopper: proxy fence removed",
        HOPPER,
        "    fence_proxy_async();\n    named_barrier_sync",
        "    named_barrier_sync",
        "no fence.proxy.async between",
    ),
    Mutant(
        "hopper: S read before the wait",
        HOPPER,
        "    wgmma_wait<0>();  // S is there\n",
        "",
        "accumulators|still reads|wrong answer|in flight",
    ),
    Mutant(
        "hopper: O read before the wait",
        HOPPER,
        "    wgmma_wait<0>();  // O is there, and the stage has been read\n",
        "    wgmma_wait<1>();\n",
        "in flight when its thread returns|still reads|race|bulk",
    ),
    Mutant(
        "hopper: commit removed",
        HOPPER,
        "    wgmma_commit();\n    wgmma_wait<0>();  // S",
        "    wgmma_wait<0>();  // S",
        "in flight|still reads|accumulators|wrong answer",
    ),
    Mutant(
        "hopper: wgmma fence removed",
        HOPPER,
        "    wgmma_fence_registers(o);\n    wgmma_fence();\n",
        "    wgmma_fence_registers(o);\n",
        "no wgmma.fence since",
    ),
    Mutant(
        "hopper: swizzle mismatch",
        HOPPER,
        "{ return row * TILE + (column ^ (row % 8 * 8)); }",
        "{ return row * TILE + column; }",
        WRONG,
    ),
    Mutant(
        "hopper: descriptor without swizzle",
        HOPPER,
        "shared.query, 16, 1024, Swizzle::BYTES_128",
        "shared.query, 16, 1024, Swizzle::BYTES_64",
        WRONG,
    ),
    Mutant(
        "hopper: reduction over the wrong keys",
        HOPPER,
        "advance(value, 2048 * step)",
        "advance(value, 32 * step)",
        WRONG,
    ),
    Mutant(
        "hopper: too few bytes expected",
        HOPPER,
        "shared.full[stage], 2 * TILE_BYTES",
        "shared.full[stage], TILE_BYTES",
        "in flight|race|nothing has written|on their way|more than the",
    ),
    Mutant(
        "hopper: too many bytes expected",
        HOPPER,
        "shared.full[stage], 2 * TILE_BYTES",
        "shared.full[stage], 2 * TILE_BYTES + 16",
        "deadlock; ",
    ),
    Mutant(
        "hopper: too many arrivals expected",
        HOPPER,
        "shared.empty[stage], CONSUMERS",
        "shared.empty[stage], CONSUMERS + 1",
        "deadlock; ",
    ),
    Mutant(
        "hopper: stage released before it has been read",
        HOPPER,
        "    wgmma_wait<0>();  // O is there, and the stage has been read\n"
        "    wgmma_fence_registers(o);\n    mbarrier_arrive(shared.empty[stage]);\n",
        "    mbarrier_arrive(shared.empty[stage]);\n    wgmma_wait<0>();\n    wgmma_fence_registers(o);\n",
        "a bulk tensor copy: (race|write)",
    ),
    Mutant(
        "hopper: initialisation not published",
        HOPPER,
        "    mbarrier_init_fence();\n",
        "",
        "mbarrier_init_fence is missing|initialises with no barrier",
    ),
    Mutant(
        "hopper: barrier after the initialisation removed",
        HOPPER,
        "  __syncthreads();\n",
        "",
        "initialises with no barrier|no mbarrier was initialised",
    ),
    Mutant(
        "hopper: barrier of the cluster removed",
        HOPPER,
        "  cluster_wait();\n",
        "",
        "initialises with no barrier|no mbarrier was initialised|has ended|one of them",
    ),
    Mutant(
        "hopper: sum read before it has come",
        HOPPER,
        "  mbarrier_wait_cluster(shared.received_full, 0);\n",
        "",
        "in flight|race|nothing has written|on their way",
    ),
    Mutant(
        "hopper: wait with the block's scope",
        HOPPER,
        "mbarrier_wait_cluster(shared.received_full",
        "mbarrier_wait(shared.received_full",
        "wait with cluster scope",
    ),
    Mutant(
        "hopper: sum sent to itself",
        HOPPER,
        "peer_address(shared.received + at, 0)",
        "peer_address(shared.received + at, 1)",
        "must lie in one CTA",
    ),
    Mutant(
        "hopper: wait for the grid ahead removed",
        HOPPER,
        "  grid_dependency_wait();\n",
        "",
        "before griddepcontrol.wait",
    ),
]
