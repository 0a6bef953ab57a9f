"""Specifications of the ladder: teaching kernels, one idea a rung (kernels/ladder/)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from microsdpa.kernels.chip import chip_of
from microsdpa.kernels.problem import ELEMENT_BYTES, VECTOR_BYTES, Problem, capability_of
from microsdpa.kernels.spec import BOOLEAN, CPP_TYPE, KernelSpec, Rejection, refused_head_dim

HEAD_DIMS = (32, 64, 128)


def scalar(problem: Problem) -> KernelSpec | Rejection:
    """Rung 01: FP32 arithmetic on the CUDA cores, 16 queries a CTA, one key a lane."""
    block_m, warps = 16, 4
    spec = KernelSpec(
        name="ladder/01_scalar",
        source="ladder/01_scalar.cu",
        template="microsdpa::ladder::rung_01::attention",
        template_args=_template_args(problem, BLOCK_M=block_m, WARPS=warps),
        threads=32 * warps,
        block_m=block_m,
    )
    return _rejection(problem, spec) or spec


def wmma(problem: Problem) -> KernelSpec | Rejection:
    """Rung 02: tensor cores through C++ wmma, 16 queries a warp."""
    return _through_wmma(problem, "02_wmma", stages=1)


def cp_async(problem: Problem) -> KernelSpec | Rejection:
    """Rung 03: rung 02 with two places for K and V, one of which is being filled while the other is used."""
    return _through_wmma(problem, "03_cp_async", stages=2)


def _through_wmma(problem: Problem, rung: str, stages: int) -> KernelSpec | Rejection:
    block_m, block_n = 64, 32 if problem.head_dim > 64 else 64
    warps = block_m // 16
    pitch = _row_bytes(problem) + 16
    scratch = 16 * 4 * (max(problem.head_dim, block_n) + 4) + 16 * 2 * (block_n + 8)
    spec = KernelSpec(
        name=f"ladder/{rung}",
        source=f"ladder/{rung}.cu",
        template=f"microsdpa::ladder::rung_{rung[:2]}::attention",
        template_args=_template_args(problem, BLOCK_M=block_m, BLOCK_N=block_n),
        threads=32 * warps,
        block_m=block_m,
        shared_bytes=(block_m + 2 * stages * block_n) * pitch + warps * scratch,
    )
    return _rejection(problem, spec) or spec


def mma_sync(problem: Problem) -> KernelSpec | Rejection:
    """Rung 04: mma.sync on swizzled shared memory, S and P in registers."""
    return _through_mma_sync(problem, "04_mma_sync")


def warp_roles(problem: Problem) -> KernelSpec | Rejection:
    """Rung 05: rung 04 with two warps that only copy, beside four that only compute."""
    return _through_mma_sync(problem, "05_warp_roles", producers=2)


def persistent(problem: Problem) -> KernelSpec | Rejection:
    """Rung 06: rung 05 with no more CTAs than the chip holds at a time, each of which takes tile after tile."""
    return _through_mma_sync(problem, "06_persistent", producers=2, stays=True)


def _through_mma_sync(
    problem: Problem, rung: str, producers: int = 0, *, stays: bool = False
) -> KernelSpec | Rejection:
    block_m, block_n, stages = 64, 32 if problem.head_dim > 64 else 64, 2
    warps = block_m // 16 + producers
    shared_bytes = (block_m + 2 * stages * block_n) * _row_bytes(problem)
    ctas_of_sm = {"CTAS": 1 if problem.head_dim > 64 else 2} if stays else {}  # two at D = 128 would spill
    spec = KernelSpec(
        name=f"ladder/{rung}",
        source=f"ladder/{rung}.cu",
        template=f"microsdpa::ladder::rung_{rung[:2]}::attention",
        template_args=_template_args(problem, BLOCK_M=block_m, BLOCK_N=block_n, **ctas_of_sm),
        threads=32 * warps,
        block_m=block_m,
        shared_bytes=shared_bytes,
    )
    max_ctas = ctas_of_sm.get("CTAS", 0) * chip_of(problem.target).sms
    return _rejection(problem, spec) or replace(spec, max_ctas=max_ctas)


@dataclass(frozen=True)
class Tiles:
    """Tiles of rung 07: keys of a tile, warps and their rows, groups that divide the keys, places of K and V."""

    block_n: int
    row_tiles: int
    row_warps: int
    key_groups: int
    stages: int
    ctas: int

    @property
    def block_m(self) -> int:
        """Queries of a CTA."""
        return 16 * self.row_tiles * self.row_warps

    def shared_bytes(self, head_dim: int) -> int:
        """Dynamic shared memory: the tiles, or what the groups merge, whichever is larger."""
        streaming = 2 * head_dim * (self.block_m + 2 * self.key_groups * self.stages * self.block_n)
        merging = self.key_groups * self.block_m * (4 * (head_dim + 8) + 8)
        return max(streaming, -(-merging // 128) * 128)


def tuned(problem: Problem) -> KernelSpec | Rejection:
    """Rung 07: rung 04 with tiles chosen for the problem, and the keys divided among groups of warps."""
    tiles = tuned_tiles(problem)
    spec = KernelSpec(
        name="ladder/07_tuned",
        source="ladder/07_tuned.cu",
        template="microsdpa::ladder::rung_07::attention",
        template_args=_template_args(
            problem,
            BLOCK_N=tiles.block_n,
            ROW_TILES=tiles.row_tiles,
            ROW_WARPS=tiles.row_warps,
            KEY_GROUPS=tiles.key_groups,
            STAGES=tiles.stages,
            CTAS=tiles.ctas,
        ),
        threads=32 * tiles.row_warps * tiles.key_groups,
        block_m=tiles.block_m,
        shared_bytes=tiles.shared_bytes(problem.head_dim),
    )
    return _rejection(problem, spec) or spec


def tuned_tiles(problem: Problem) -> Tiles:
    """Tiles of rung 07 for a problem: few queries a CTA and the keys divided where the chip would be left empty."""
    sms = chip_of(problem.target).sms
    heads = problem.batch * problem.heads
    small_shared = capability_of(problem.target) not in ((8, 0), (9, 0), (10, 0))
    # Where two CTAs fit an SM and tiles are few, some SMs get twice the work of others: smaller tiles are more even.
    enough = 2 * sms if small_shared and problem.head_dim <= 64 else sms
    if heads * -(-problem.seqlen_q // 64) >= enough:
        return Tiles(
            block_n=32 if problem.head_dim > 64 else 64, row_tiles=1, row_warps=4, key_groups=1, stages=2, ctas=2
        )
    if problem.head_dim > 64:
        return Tiles(block_n=32, row_tiles=1, row_warps=2, key_groups=2 if small_shared else 4, stages=2, ctas=1)
    if small_shared:
        return Tiles(block_n=32, row_tiles=1, row_warps=2, key_groups=2, stages=2, ctas=2)
    return Tiles(block_n=64, row_tiles=1, row_warps=2, key_groups=4, stages=2, ctas=1)


def _row_bytes(problem: Problem) -> int:
    return problem.head_dim * ELEMENT_BYTES[problem.dtype]


def _template_args(problem: Problem, **tiles: int) -> tuple[tuple[str, str], ...]:
    """What every rung's template has first and last, with the rung's own tiles between."""
    return (
        ("T", CPP_TYPE[problem.dtype]),
        ("HEAD_DIM", str(problem.head_dim)),
        *((name, str(value)) for name, value in tiles.items()),
        ("CAUSAL", BOOLEAN[problem.causal is not None]),
        ("LOAD_BYTES", str(16 if problem.alignment >= VECTOR_BYTES else ELEMENT_BYTES[problem.dtype])),
    )


def _rejection(problem: Problem, spec: KernelSpec) -> Rejection | None:
    """Why the ladder does not compute a problem, for which `spec` would be the kernel."""
    if capability_of(problem.target) < (8, 0):
        return Rejection(f"{problem.target} is older than sm_80", "a GPU of compute capability 8.0 or newer")
    return None if problem.head_dim in HEAD_DIMS else refused_head_dim(problem.head_dim, HEAD_DIMS)
