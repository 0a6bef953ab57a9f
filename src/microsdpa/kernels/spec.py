"""KernelSpec: one compile-time configuration of one kernel, the unit that is compiled, cached and measured."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from microsdpa.kernels.problem import ELEMENT_BYTES, MaskKind, Problem, PrologueKind

Grid = tuple[int, int, int]

EIGHT_BIT_PARAMS = "microsdpa::EightBitParams"
"""First parameter of the kernels with 8-bit operands."""
VARLEN_PARAMS = "microsdpa::VarlenParams"
"""That of kernels for sequences of many lengths."""
ONE_LENGTH_PARAMS = "microsdpa::OneLengthParams"
"""That of the same kernels where all sequences have one length."""
SCALED_PARAMS = "microsdpa::hopper::latency::Scaled<microsdpa::AttentionParams>"
SCALED_MASKED_PARAMS = "microsdpa::hopper::latency::Scaled<microsdpa::MaskedParams>"
"""Those of kernels for 16 bits with policies for 8-bit operands, without masks and with them."""
EIGHT_BIT_MASKED = "microsdpa::hopper::EightBitMasked"
"""That of kernels with 8-bit operands and masks."""
CPP_TYPE = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float", "bool": "bool", None: "void"}
CPP_TYPE |= {"int32": "microsdpa::KeyRange", "uint8": "bool"}
SUMMED_BOOL = "microsdpa::SummedBool"
"""Elements of a table of blocks, for kernels that read what lies behind its booleans (call/summary.py)."""
"""Types as templates name them; no tensor is `void`."""
BOOLEAN = {True: "true", False: "false"}
DROPOUT_TYPE = {True: "microsdpa::Dropout", False: "microsdpa::NoDropout"}
MAX_GRID_X = 2**31 - 1
MAX_GRID_YZ = 65_535
MOST_PARTS = 64
"""CTAs that share the keys of a tile, at most."""
SMALL = 2**30 // MOST_PARTS
"""Rows of all heads below which no launch is too large: it has a CTA for every part of each of them, at most."""
MAX_NUMBER = 2**31 - 2**13
"""Rows, heads and positions up to here have room for a tile of each behind them in the kernels' 32-bit numbers."""


def dropped_params(params: str, dropout: bool) -> str:
    """The C++ type of a kernel's first parameter, with what dropout adds to it."""
    return f"microsdpa::Dropped<{params}>" if dropout else params


def prologue_type(prologue: PrologueKind | None) -> str:
    """The C++ type that says what a kernel does to Q and K before the products."""
    if prologue is None:
        return "microsdpa::NoPrologue"
    norm = {None: "microsdpa::Norm::NONE", "rms": "microsdpa::Norm::RMS", "layer": "microsdpa::Norm::LAYER"}
    position = {None: "void", "int32": "int", "int64": "long long"}
    arguments = (
        str(prologue.rotary),
        BOOLEAN[prologue.interleaved],
        CPP_TYPE[prologue.angles or "float32"],
        position[prologue.query_positions],
        position[prologue.key_positions],
        BOOLEAN[prologue.rotates_key],
        norm[prologue.query_norm],
        norm[prologue.key_norm],
        CPP_TYPE[prologue.weights or "float32"],
        BOOLEAN[prologue.biased],
    )
    return f"microsdpa::Prologue<{', '.join(arguments)}>"


def prologued_params(params: str, prologue: PrologueKind | None) -> str:
    """The C++ type of a kernel's first parameter, with what norms and rotary embedding add to it."""
    return params if prologue is None else "microsdpa::Prologued"


def masks_type(mask: MaskKind | None, summed: bool = False) -> str:
    """The C++ type that says which masks a kernel is compiled for.

    `summed`: it reads what lies behind the booleans of a table of blocks.
    """
    if mask is None:
        return "microsdpa::NoMasks"
    flags = ", ".join(BOOLEAN[flag] for flag in (mask.left, mask.softcap, mask.alibi))
    tensor = SUMMED_BOOL if summed and mask.tensor == "uint8" else CPP_TYPE[mask.tensor]
    return f"microsdpa::Masks<{tensor}, {flags}, {CPP_TYPE[mask.sinks]}>"


@dataclass(frozen=True)
class Rejection:
    """Why a kernel does not compute a problem, or should not, and the nearest thing that it would compute.

    Attributes:
        head_dim: the head dimension to which `nearest` would change the problem; 0 where that is not what it changes.
    """

    reason: str
    nearest: str
    head_dim: int = 0


def refused_head_dim(head_dim: int, known: Iterable[int], listed: str = "") -> Rejection:
    """The rejection of a head dimension that is not among `known`, which `listed` says in words.

    Of two that are as near it names the larger one, to which zeros pad a tensor.
    """
    dims = sorted(known)
    nearest = min(dims, key=lambda d: (abs(d - head_dim), -d))
    listed = listed or " or ".join(filter(None, (", ".join(map(str, dims[:-1])), str(dims[-1]))))
    return Rejection(f"head_dim {head_dim} is not {listed}", f"head_dim {nearest}", nearest)


MappedTensor = Literal["query", "key", "value", "out", "attn_mask", "grad_out", "grad_query", "grad_key", "grad_value"]
"""What a tensor map describes."""


@dataclass(frozen=True)
class TensorMap:
    """A bulk-copy descriptor (CUtensorMap) that the kernel gets for one tensor, after its parameters.

    The tensor is seen as [D, S, H, B], innermost first; a box is `columns` elements of `rows` rows of one head. Or it
    is seen as [D, H, S, B], and a box has so many `heads` of each of its rows. Elements outside the tensor read as
    zeros and are not written.

    Attributes:
        tensor: "query", "key", "value", "out", "attn_mask", "grad_out", "grad_key" or "grad_value".
        rows: rows of a box.
        columns: elements of a row of the box; columns * element size is at most `swizzle` bytes when there is one.
        swizzle: bytes of the shared-memory pattern: 0 (none), 32, 64 or 128.
        heads: neighbouring heads of a box that has several; 0 where it has one.
    """

    tensor: MappedTensor
    rows: int
    columns: int
    swizzle: int = 128
    heads: int = 0

    def __repr__(self) -> str:
        """Its fields, as signatures of kernels have them: without `heads` where there are none."""
        fields = {"tensor": self.tensor, "rows": self.rows, "columns": self.columns, "swizzle": self.swizzle}
        fields |= {"heads": self.heads} if self.heads else {}
        return f"TensorMap({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


@dataclass(frozen=True)
class TileLists:
    """Scratch memory with lists of the tiles of keys that a mask leaves to query tiles, and each row's visible keys.

    Attributes:
        block_m: queries of a tile.
        block_n: keys of a tile.
    """

    block_m: int
    block_n: int

    WORDS = 4
    """Of a row of a tile, 4 bytes each."""
    MARKED = 2
    """Tiles of keys that one CTA looks at, where the mask is read ahead of the lists."""

    def lists(self, problem: Problem) -> int:
        """One for each query tile of each mask."""
        return self._masks(problem) * -(-problem.seqlen_q // self.block_m)

    def bytes(self, problem: Problem) -> int:
        """TileList's extent (hopper/throughput/tile_list.cuh)."""
        tiles, lists = -(-problem.seqlen_k // self.block_n), self.lists(problem)
        numbers = -(-(lists * (1 + tiles)) // self.WORDS) * self.WORDS
        per_query = problem.mask is not None and problem.mask.per_query
        rows = lists * self.block_m if per_query else self._masks(problem)
        return 4 * (numbers + rows * tiles * self.WORDS)

    @staticmethod
    def _masks(problem: Problem) -> int:
        """Masks that batch entries and heads do not share."""
        kind = problem.mask or MaskKind()
        return (problem.batch if kind.per_batch else 1) * (problem.heads if kind.per_head else 1)


@dataclass(frozen=True)
class ChangedRows:
    """Scratch memory with the rows of Q and K that a kernel ahead of attention leaves, dense.

    Attributes:
        query_heads: heads of a tile of Q; 0 where Q is taken as it is.
        key_heads: the same of K.
        rows: rows of a tile, of all its heads.
    """

    query_heads: int
    key_heads: int
    rows: int

    ALIGNMENT = 256
    """Bytes."""
    AS_IT_IS = -1

    def tiles(self, problem: Problem) -> int:
        """Those of a batch entry."""
        counted = (
            (self.query_heads, problem.heads, problem.seqlen_q),
            (self.key_heads, problem.heads_kv, problem.seqlen_k),
        )
        return sum(heads // own * -(-length // (self.rows // own)) for own, heads, length in counted if own)

    def places(self, problem: Problem) -> tuple[int, int, int]:
        """Bytes from the start to the rows of Q and those of K, AS_IT_IS for none, and to the end."""
        at = 0
        found = []
        for own, heads, length in (
            (self.query_heads, problem.heads, problem.seqlen_q),
            (self.key_heads, problem.heads_kv, problem.seqlen_k),
        ):
            found.append(at if own else self.AS_IT_IS)
            size = problem.batch * heads * length * problem.head_dim * ELEMENT_BYTES[problem.dtype] if own else 0
            at += -(-size // self.ALIGNMENT) * self.ALIGNMENT
        return found[0], found[1], at


@dataclass(frozen=True)
class KernelSpec:
    """A kernel template and the arguments that make it one kernel.

    Attributes:
        name: family name, such as "ladder/01_scalar".
        source: path of the .cu file below microsdpa/kernels.
        template: qualified name of the __global__ function template.
        template_args: (parameter name, C++ spelling) in the template's order.
        threads: threads per CTA.
        block_m: query rows that a CTA computes.
        shared_bytes: dynamic shared memory, in bytes (static shared memory is the compiler's to report).
        local_memory: why this kernel may spill or use local memory; empty means that it may not.
        low_occupancy: why this kernel may keep less than a quarter of an SM's warps busy; empty means that it may not.
        cluster: CTAs along x that form a thread block cluster (sm_90 and newer); 1 for none.
        split: CTAs that share a query tile, each with a part of the keys.
        grid_order: how the launch numbers its CTAs: "x", all along x (parts, query tiles, heads, batch), "xyz",
            parts and heads along x, query tiles along y and batch along z, which spares the kernel its divisions, or
            "lists", one for each list of `tile_lists`, or "tiles", as many along x and the tiles of keys along y, or
            "rows", the tiles of `changed_rows` along x and batch along z, or "clusters", parts along x, key heads along
            y and batch along z, or "resident", `max_ctas` whatever the sizes.
        pack: query heads of one key head whose rows are tiled together.
        heads_as_queries: the launcher gives the query heads of a key head to the kernel as the queries of one head, in
            calls of one query that sees all keys: Problem.heads_as_queries says what the kernel computes then.
        max_ctas: CTAs of a persistent kernel's launch at most; 0 for one a tile.
        tensor_maps: descriptors that follow AttentionParams as the kernel's parameters, in this order.
        programmatic: launched so that it may begin before the kernel ahead of it in the stream has ended
            (programmatic dependent launch). The kernel waits itself before it touches global memory, and at least one
            of its threads waits in every launch: the next kernel relies on this one to end after the one ahead of it.
        workspace_row_bytes: scratch memory for each of the batch * heads * seqlen_q rows, allocated for each call.
        workspace_fixed_bytes: scratch memory that no sizes decide about. In calls of one length, of a kernel for many,
            the launcher leaves it out where CTAs share no keys.
        tile_lists: scratch memory beside those rows'; the kernel that writes it has a CTA for each list.
        counts: in the place of scratch memory there is a counter, which is zero between launches.
        changed_rows: scratch memory that this kernel writes Q and K to, ahead of all others of the call. They read them
            there, and the scratch memory of their own lies behind.
        preparation: kernel launched before this one with the same parameters.
        next_kernel: kernel launched after this one with the same parameters.
        params: C++ type of the kernel's first parameter.
    """

    name: str
    source: str
    template: str
    template_args: tuple[tuple[str, str], ...]
    threads: int
    block_m: int
    shared_bytes: int = 0
    local_memory: str = ""
    low_occupancy: str = ""
    cluster: int = 1
    split: int = 1
    grid_order: Literal["x", "xyz", "lists", "tiles", "rows", "clusters", "resident"] = "x"
    pack: int = 1
    heads_as_queries: bool = False
    max_ctas: int = 0
    tensor_maps: tuple[TensorMap, ...] = ()
    programmatic: bool = False
    workspace_row_bytes: int = 0
    workspace_fixed_bytes: int = 0
    tile_lists: TileLists | None = None
    counts: bool = False
    changed_rows: ChangedRows | None = None
    preparation: KernelSpec | None = None
    next_kernel: KernelSpec | None = None
    params: str = "microsdpa::AttentionParams"
    flags: tuple[str, ...] = field(default=("-std=c++17", "-lineinfo"))

    @property
    def expression(self) -> str:
        """The C++ name of the instantiated kernel, as NVRTC's name expressions want it."""
        return f"{self.template}<{', '.join(value for _, value in self.template_args)}>"

    @functools.cached_property
    def stages(self) -> tuple[KernelSpec, ...]:
        """The kernels of one call in the order of their launch: this one, and those before and after it."""
        before = self.preparation.stages if self.preparation else ()
        return (*before, self, *(self.next_kernel.stages if self.next_kernel else ()))

    def grid(self, problem: Problem) -> Grid:
        """CTAs along x, which alone goes past 65,535: parts times query tiles times heads times batch."""
        x, y, z = self.work(problem)
        return min(x, self.max_ctas) if self.max_ctas else x, y, z

    def work(self, problem: Problem) -> Grid:
        """The grid that has a CTA for every piece of work."""
        if self.heads_as_queries:
            problem = problem.heads_as_queries
        if self.changed_rows is not None:
            return self.changed_rows.tiles(problem), 1, problem.batch
        if self.grid_order == "resident":
            return self.max_ctas, 1, 1
        if self.grid_order == "clusters":
            return self.split, problem.heads // self.pack, problem.batch
        tiles = -(-problem.seqlen_q * self.pack // self.block_m)
        if self.grid_order in ("lists", "tiles") and self.tile_lists is not None:
            keys = self.tile_lists.block_n * self.tile_lists.MARKED if self.grid_order == "tiles" else problem.seqlen_k
            return self.tile_lists.lists(problem), -(-problem.seqlen_k // keys), 1
        if self.grid_order == "xyz":
            return self.split * problem.heads // self.pack, tiles, problem.batch
        return self.split * tiles * problem.batch * problem.heads // self.pack, 1, 1

    def workspace_bytes(self, problem: Problem) -> int:
        """Scratch memory of one call, without `changed_rows`."""
        lists = self.tile_lists.bytes(problem) if self.tile_lists else 0
        rows = self.workspace_row_bytes * problem.batch * problem.heads * problem.seqlen_q
        return rows + self.workspace_fixed_bytes + lists


@functools.lru_cache(maxsize=1024)
def with_heads_as_queries(spec: KernelSpec) -> KernelSpec:
    """`spec` for calls whose heads are taken as queries: the same object for the same specification."""
    before, after = (kernel and with_heads_as_queries(kernel) for kernel in (spec.preparation, spec.next_kernel))
    return replace(spec, heads_as_queries=True, preparation=before, next_kernel=after)


def oversized(problem: Problem, spec: KernelSpec) -> Rejection | None:
    """Why the launch of `spec` would be too large for the GPU, or for the kernel's 32-bit numbers; None when it is not.

    Tensors may have any number of elements: kernels address them in 64 bits.
    """
    batch, rows = problem.batch, problem.seqlen_q + problem.seqlen_k
    if batch * problem.heads * rows < SMALL and batch <= MAX_GRID_YZ and rows <= MAX_GRID_YZ:
        return None  # most problems: a new size waits for this
    x, y, z = spec.work(problem)
    # A persistent kernel counts all tiles, and goes on by its CTAs until it has passed the last one.
    most = MAX_GRID_X - spec.max_ctas
    if x > most:
        return Rejection(f"{x} tiles exceed the {most} CTAs of one launch", "a smaller batch")
    if y > MAX_GRID_YZ or z > MAX_GRID_YZ:
        return Rejection(
            f"{y} query tiles of {z} batch entries exceed the {MAX_GRID_YZ} CTAs along y or z",
            "a smaller batch or shorter sequences",
        )
    if (heads := problem.batch * problem.heads) > MAX_NUMBER:
        return _uncountable(heads, "heads of all batch entries", "a smaller batch")
    if (rows := problem.seqlen_q * spec.pack) > MAX_NUMBER:
        return _uncountable(rows, "rows of the query heads of a key head", "fewer query heads of a key head")
    if (both := problem.seqlen_q + problem.seqlen_k) > MAX_NUMBER:
        return _uncountable(both, "queries and keys", "shorter sequences")
    found = oversized(problem, spec.preparation) if spec.preparation else None
    return oversized(problem, spec.next_kernel) if found is None and spec.next_kernel else found


def _uncountable(number: int, what: str, nearest: str) -> Rejection:
    return Rejection(f"{number} {what} exceed the {MAX_NUMBER} that a kernel counts", nearest)
