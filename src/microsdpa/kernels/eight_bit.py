"""Specifications of the attention kernels with 8-bit operands (kernels/ladder/ from rung 08 on)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from microsdpa.kernels.chip import chip_of
from microsdpa.kernels.problem import Problem, capability_of
from microsdpa.kernels.spec import BOOLEAN, CPP_TYPE, EIGHT_BIT_PARAMS, KernelSpec, Rejection, refused_head_dim

HEAD_DIMS = (32, 64, 128)
ALL_HEAD_DIMS = (*HEAD_DIMS, 256)
"""The last one where V is E4M3 and the GPU has wgmma."""
MIN_CAPABILITY = (8, 9)
"""E4M3 products need Ada; INT8 alone would not, but V and P of int8_fp8 do, and the modes share their kernels."""


def scalar(problem: Problem) -> KernelSpec | Rejection:
    """Rung 08: E4M3 dequantised on load, FP32 arithmetic on the CUDA cores."""
    block_m, warps = 16, 4
    spec = _spec("08_fp8_scalar", problem, {"BLOCK_M": block_m, "WARPS": warps}, 32 * warps, block_m, 0)
    return _only_plain_fp8(problem) or _rejection(problem, spec) or spec


def mma(problem: Problem) -> KernelSpec | Rejection:
    """Rung 09: Q K^T by 8-bit mma.sync, P and V in FP16."""
    return _synchronous(problem, "09_fp8_mma")


def probability(problem: Problem) -> KernelSpec | Rejection:
    """Rung 10: P V by 8-bit mma.sync too."""
    return _synchronous(problem, "10_fp8_probability")


def _synchronous(problem: Problem, rung: str) -> KernelSpec | Rejection:
    block_m, block_n = 64, 64 if problem.head_dim <= 64 else 32
    shared_bytes = (block_m + 2 * block_n) * problem.head_dim + 4 * block_n
    spec = _spec(rung, problem, {"BLOCK_M": block_m, "BLOCK_N": block_n}, 2 * block_m, block_m, shared_bytes)
    return _only_plain_fp8(problem) or _rejection(problem, spec) or spec


def cp_async(problem: Problem) -> KernelSpec | Rejection:
    """Rung 11: rung 10 with asynchronous copies, double-buffered; INT8 as well, and V and P of 16 bits."""
    block_m, block_n, stages = 64, 64 if problem.head_dim <= 64 else 32, 2
    value_bytes = 2 if problem.operands == "int8_fp16" else 1
    per_key = (1 + value_bytes) * problem.head_dim + 4
    spec = KernelSpec(
        name="ladder/11_8bit_cp_async",
        source="ladder/11_8bit_cp_async.cu",
        template="microsdpa::eight_bit_cp_async_attention",
        template_args=(
            ("T", CPP_TYPE[problem.dtype]),
            *_types(problem),
            ("HEAD_DIM", str(problem.head_dim)),
            ("TERMS", str(problem.query_terms)),
            ("BLOCK_M", str(block_m)),
            ("BLOCK_N", str(block_n)),
            ("CAUSAL", BOOLEAN[problem.causal is not None]),
        ),
        threads=2 * block_m,
        block_m=block_m,
        shared_bytes=block_m * problem.query_terms * problem.head_dim + stages * block_n * per_key,
        params=EIGHT_BIT_PARAMS,
    )
    return _rejection(problem, spec) or spec


def persistent(problem: Problem) -> KernelSpec | Rejection:
    """Rung 12: rung 11 with two warps that only copy, and no more CTAs than the chip holds at a time."""
    plain = cp_async(problem)
    if isinstance(plain, Rejection):
        return plain
    producers, ctas = 2, 1 if problem.head_dim > 64 else 2  # two at D = 128 would spill
    if problem.query_terms != 1:
        return Rejection("this rung takes a query of one code an element", "ladder/11, ada/mma_8bit or impl='auto'")
    arguments = {name: value for name, value in plain.template_args if name != "TERMS"}
    causal = arguments.pop("CAUSAL")
    spec = replace(
        plain,
        name="ladder/12_8bit_persistent",
        source="ladder/12_8bit_persistent.cu",
        template="microsdpa::eight_bit_persistent_attention",
        template_args=(*arguments.items(), ("CTAS", str(ctas)), ("CAUSAL", causal)),
        threads=plain.threads + 32 * producers,
        max_ctas=ctas * chip_of(problem.target).sms,
    )
    return _rejection(problem, spec) or spec


@dataclass(frozen=True)
class Tiles:
    """Tiles of ada/mma_8bit: keys of a tile, warps of 16 queries, groups that divide the keys, CTAs per SM."""

    block_n: int
    row_warps: int
    key_groups: int
    ctas: int


def tiles_of(problem: Problem) -> Tiles:
    """Few queries a CTA and the keys divided where the chip would be left empty."""
    block_n = 64 if problem.head_dim <= 64 else 32
    tiles = problem.batch * problem.heads * -(-problem.seqlen_q // 64)
    if tiles >= 2 * chip_of(problem.target).sms:
        return Tiles(block_n, row_warps=4, key_groups=1, ctas=2)
    if problem.head_dim > 64 or capability_of(problem.target) not in ((9, 0), (10, 0)):
        return Tiles(32, row_warps=2, key_groups=2, ctas=2)
    return Tiles(32, row_warps=2, key_groups=4, ctas=1)  # one CTA an SM of a large chip: more warps at it


def tuned(problem: Problem) -> KernelSpec | Rejection:
    """ada/mma_8bit: rung 11 with tiles for the problem, the keys divided among warps, and less arithmetic a score."""
    tiles, stages = tiles_of(problem), 2
    codes = problem.operands != "int8_fp16"
    block_m = 16 * tiles.row_warps
    per_key = (2 if codes else 3) * problem.head_dim + 4
    streaming = block_m * problem.query_terms * problem.head_dim + tiles.key_groups * stages * tiles.block_n * per_key
    merging = tiles.key_groups * block_m * (4 * (problem.head_dim + (16 if codes else 8)) + 8)
    spec = KernelSpec(
        name="ada/mma_8bit",
        source="ada/mma_8bit/kernel.cu",
        template="microsdpa::eight_bit_tuned_attention",
        template_args=(
            ("T", CPP_TYPE[problem.dtype]),
            *_types(problem),
            ("HEAD_DIM", str(problem.head_dim)),
            ("TERMS", str(problem.query_terms)),
            ("BLOCK_N", str(tiles.block_n)),
            ("ROW_WARPS", str(tiles.row_warps)),
            ("KEY_GROUPS", str(tiles.key_groups)),
            ("STAGES", str(stages)),
            ("CTAS", str(tiles.ctas)),
            ("CAUSAL", BOOLEAN[problem.causal is not None]),
        ),
        threads=32 * tiles.row_warps * tiles.key_groups,
        block_m=block_m,
        shared_bytes=max(streaming, merging),
        params=EIGHT_BIT_PARAMS,
    )
    return _rejection(problem, spec) or spec


def _types(problem: Problem) -> tuple[tuple[str, str], ...]:
    value = CPP_TYPE[problem.dtype] if problem.operands == "int8_fp16" else "microsdpa::E4m3"
    return ("FORMAT", "microsdpa::E4m3" if problem.operands == "fp8" else "microsdpa::Int8"), ("VALUE", value)


def _spec(
    rung: str, problem: Problem, tiles: dict[str, int], threads: int, block_m: int, shared_bytes: int
) -> KernelSpec:
    return KernelSpec(
        name=f"ladder/{rung}",
        source=f"ladder/{rung}.cu",
        template=f"microsdpa::{rung[3:]}_attention",
        template_args=(
            ("T", CPP_TYPE[problem.dtype]),
            ("HEAD_DIM", str(problem.head_dim)),
            *((name, str(value)) for name, value in tiles.items()),
            ("CAUSAL", BOOLEAN[problem.causal is not None]),
        ),
        threads=threads,
        block_m=block_m,
        shared_bytes=shared_bytes,
        params=EIGHT_BIT_PARAMS,
    )


def _only_plain_fp8(problem: Problem) -> Rejection | None:
    if problem.operands != "fp8" or problem.query_terms != 1:
        return Rejection(
            "this rung takes Q, K and V of one E4M3 code an element", "E4M3 tensors with scales, or impl='auto'"
        )
    return None


def _rejection(problem: Problem, spec: KernelSpec) -> Rejection | None:
    if capability_of(problem.target) < MIN_CAPABILITY:
        return Rejection(
            f"{problem.target} has no 8-bit floating-point products (sm_89 and newer have)",
            "float16 or bfloat16 tensors without precision=",
        )
    if problem.head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        return refused_head_dim(problem.head_dim, HEAD_DIMS, f"one of {known} with 8-bit operands")
    return None
