"""Specifications of the rungs with 8-bit operands, 08 to 12."""

from __future__ import annotations

from dataclasses import replace

from microsdpa.kernels.chip import chip_of
from microsdpa.kernels.eight_bit import operand_types, refused
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.spec import BOOLEAN, CPP_TYPE, EIGHT_BIT_PARAMS, KernelSpec, Rejection


def scalar(problem: Problem) -> KernelSpec | Rejection:
    """Rung 08: E4M3 dequantized on load, FP32 arithmetic on the CUDA cores."""
    block_m, warps = 16, 4
    spec = _spec("08_fp8_scalar", problem, {"BLOCK_M": block_m, "WARPS": warps}, 32 * warps, block_m, 0)
    return _only_plain_fp8(problem) or refused(problem) or spec


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
    return _only_plain_fp8(problem) or refused(problem) or spec


def cp_async(problem: Problem) -> KernelSpec | Rejection:
    """Rung 11: rung 10 with asynchronous copies, double-buffered; INT8 as well, and V and P of 16 bits."""
    block_m, block_n, stages = 64, 64 if problem.head_dim <= 64 else 32, 2
    value_bytes = 2 if problem.operands == "int8_fp16" else 1
    per_key = (1 + value_bytes) * problem.head_dim + 4
    spec = KernelSpec(
        name="ladder/11_8bit_cp_async",
        source="ladder/11_8bit_cp_async.cu",
        template="microsdpa::ladder::rung_11::attention",
        template_args=(
            ("T", CPP_TYPE[problem.dtype]),
            *operand_types(problem),
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
    return refused(problem) or spec


def persistent(problem: Problem) -> KernelSpec | Rejection:
    """Rung 12: rung 11 with two warps that only copy, and no more CTAs than the chip holds at a time."""
    plain = cp_async(problem)
    if isinstance(plain, Rejection):
        return plain
    producers, ctas = 2, 1 if problem.head_dim > 64 else 2  # two at D = 128 would spill
    if problem.query_terms != 1:
        return Rejection("this rung takes a query of one term an element", "ladder/11, ada/mma_8bit or impl='auto'")
    arguments = {name: value for name, value in plain.template_args if name != "TERMS"}
    causal = arguments.pop("CAUSAL")
    spec = replace(
        plain,
        name="ladder/12_8bit_persistent",
        source="ladder/12_8bit_persistent.cu",
        template="microsdpa::ladder::rung_12::attention",
        template_args=(*arguments.items(), ("CTAS", str(ctas)), ("CAUSAL", causal)),
        threads=plain.threads + 32 * producers,
        max_ctas=ctas * chip_of(problem.target).sms,
        local_memory="a compiler of CUDA 13.0 keeps 12 bytes there at D = 64",
    )
    return refused(problem) or spec


def _spec(
    rung: str, problem: Problem, tiles: dict[str, int], threads: int, block_m: int, shared_bytes: int
) -> KernelSpec:
    return KernelSpec(
        name=f"ladder/{rung}",
        source=f"ladder/{rung}.cu",
        template=f"microsdpa::ladder::rung_{rung[:2]}::attention",
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
            "this rung takes Q, K and V of one E4M3 term an element", "E4M3 tensors with scales, or impl='auto'"
        )
    return None
