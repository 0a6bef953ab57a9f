"""Specification of the kernel that changes Q and K ahead of attention (kernels/prologue/rows.cu)."""

from __future__ import annotations

import functools

from microsdpa.kernels.problem import VECTOR_BYTES, DType, Problem, PrologueKind, capability_of
from microsdpa.kernels.spec import BOOLEAN, CPP_TYPE, ChangedRows, KernelSpec, Rejection, prologue_type

WARPS = 8
"""Of a CTA."""
MAX_HEAD_DIM = 256
NARROW = 32
"""Columns up to which four lanes have a row; else eight."""
MOST_HEADS = 4
"""Of a position that a warp has at once."""


def rows_at_once(head_dim: int) -> int:
    """Rows of Q or K that a warp changes at once: AT_ONCE of kernels/common/prologue.cuh."""
    return 8 if head_dim <= NARROW else 4


def rows(problem: Problem) -> KernelSpec | Rejection:
    """The kernel that leaves Q and K of a problem in scratch memory, changed; attention is then one without."""
    prologue = problem.prologue
    assert prologue is not None
    if capability_of(problem.target) < (8, 0):
        return Rejection(f"{problem.target} is older than sm_80", "a GPU of compute capability 8.0 or newer")
    if problem.head_dim % 8 or problem.head_dim > MAX_HEAD_DIM:
        return Rejection(
            f"norms and rotary embedding work on chunks of 8 columns up to {MAX_HEAD_DIM}, "
            f"and head_dim is {problem.head_dim}",
            f"a head_dim that is a multiple of 8 up to {MAX_HEAD_DIM}",
        )
    heads = [
        _heads_at_once(count) if changes else 0
        for count, changes in ((problem.heads, prologue.changes_query), (problem.heads_kv, prologue.changes_key))
    ]
    vectors = problem.alignment >= VECTOR_BYTES
    return _specification(prologue, problem.head_dim, problem.dtype, (heads[0], heads[1]), vectors, problem.target)


def _heads_at_once(heads: int) -> int:
    return next(count for count in (MOST_HEADS, 2, 1) if heads % count == 0)


@functools.lru_cache(maxsize=1024)
def _specification(
    prologue: PrologueKind, head_dim: int, dtype: DType, heads: tuple[int, int], vectors: bool, target: str
) -> KernelSpec:
    programmatic = capability_of(target) >= (9, 0)
    at_once = WARPS * rows_at_once(head_dim)
    arguments = {
        "T": CPP_TYPE[dtype],
        "HEAD_DIM": head_dim,
        "QUERY_HEADS": heads[0],
        "KEY_HEADS": heads[1],
        "LOAD_BYTES": VECTOR_BYTES if vectors else 2,
        "PROGRAMMATIC": BOOLEAN[programmatic],
        "PROLOGUE": prologue_type(prologue),
    }
    return KernelSpec(
        name="prologue/rows",
        source="prologue/rows.cu",
        template="microsdpa::prologue::change_rows",
        template_args=tuple((name, str(value)) for name, value in arguments.items()),
        threads=32 * WARPS,
        block_m=at_once,
        grid_order="rows",
        programmatic=programmatic,
        changed_rows=ChangedRows(heads[0], heads[1], at_once),
        params="microsdpa::Prologued",
    )
