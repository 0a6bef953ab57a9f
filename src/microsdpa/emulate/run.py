"""Running kernels on the CPU: the grid on several cores, errors with their place in the source, and counters."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from microsdpa.call.dropout import kept_of
from microsdpa.call.masks import NONE, Masks
from microsdpa.call.prologue import Prologue
from microsdpa.emulate import abi, build
from microsdpa.emulate.sequences import sequence_params
from microsdpa.errors import MicrosdpaError
from microsdpa.jit.source import KERNELS_DIR
from microsdpa.kernels import KernelSpec, TensorMap
from microsdpa.kernels.params import (
    DropoutParams,
    DroppedParams,
    MaskedParams,
    Params,
    ProloguedParams,
    PrologueParams,
)
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.spec import ONE_LENGTH_PARAMS, VARLEN_PARAMS, ChangedRows

_PLACE = re.compile(r"\{0x([0-9a-f]+)\}")


class EmulationError(MicrosdpaError, RuntimeError):
    """The emulator found a kernel doing what a GPU does not promise to get right.

    Attributes:
        kernel: its name.
        problem: what it did, with block, warp, lane and source line.
    """

    def __init__(self, kernel: str, problem: str) -> None:
        self.kernel, self.problem = kernel, problem
        super().__init__(f"{kernel}: {problem}")


@dataclass(frozen=True)
class Schedule:
    """One of the orders in which a GPU may run a kernel.

    Attributes:
        seed: of the order of threads between synchronisation points.
        late: whether asynchronous copies arrive as late as their completion mechanism allows, or as early.
        backwards: whether clusters run from the last one to the first; not for kernels that wait for earlier ones.
    """

    seed: int = 0
    late: bool = True
    backwards: bool = False


_schedule: ContextVar[Schedule] = ContextVar("schedule", default=Schedule())  # noqa: B039 (frozen)


@contextmanager
def scheduled(schedule: Schedule) -> Iterator[None]:
    """Run the block's launches in this order."""
    token = _schedule.set(schedule)
    try:
        yield
    finally:
        _schedule.reset(token)


@dataclass(frozen=True)
class BankSite:
    """Shared-memory accesses of one line: warp-wide requests, the passes they take and the fewest possible."""

    place: str
    requests: int
    wavefronts: int
    ideal: int

    @property
    def conflicts(self) -> int:
        """Passes lost to bank conflicts."""
        return self.wavefronts - self.ideal


@dataclass(frozen=True)
class Report:
    """Counters of one launch; the bank sites are empty unless they were asked for."""

    counters: dict[str, int]
    bank_sites: tuple[BankSite, ...] = field(default=())

    @property
    def bank_conflicts(self) -> int:
        """Passes lost to bank conflicts, over all sites."""
        return self.counters["bank_wavefronts"] - self.counters["bank_ideal"]


@dataclass(frozen=True)
class Shape:
    """Of a launch.

    Attributes:
        threads: of a CTA.
        shared_bytes: dynamic shared memory of a CTA.
        cluster: CTAs along x of a cluster.
        programmatic: whether the kernel waits itself for the one ahead of it.
        tensor_maps: for each bulk-copy descriptor that the kernel takes after its parameter, the name of the buffer, a
            [B, H, S, D] tensor, and the box.
    """

    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int = 0
    cluster: int = 1
    programmatic: bool = False
    tensor_maps: tuple[tuple[str, TensorMap], ...] = ()

    @staticmethod
    def of(spec: KernelSpec, grid: tuple[int, int, int], mask: str = "attn_mask") -> Shape:
        """That of a kernel whose buffers have the names of its tensor maps, and that of the mask `mask`."""
        maps = tuple((mask if box.tensor == "attn_mask" else box.tensor, box) for box in spec.tensor_maps)
        return Shape(grid, spec.threads, spec.shared_bytes, spec.cluster, spec.programmatic, maps)


def launch(
    library: build.Library,
    make_params: Callable[[dict[str, int]], ctypes.Structure],
    buffers: dict[str, tuple[torch.Tensor, bool]],
    shape: Shape,
    *,
    schedule: Schedule | None = None,
    count_banks: bool = False,
    workers: int | None = None,
) -> Report:
    """Run a loaded kernel over a grid.

    `buffers` names the tensors whose memory the kernel may touch, and whether it may write there; any other access to
    global memory is an error. The kernel works on copies that lie far apart, so that an access past the end of one is
    never inside another; `make_params` gets their addresses and gives the kernel's parameter.

    Raises:
        EmulationError: the kernel did something illegal or racy.
    """
    schedule = schedule or _schedule.get()
    copies = _Copies({name: tensor for name, (tensor, _) in buffers.items()})
    grid, cluster = shape.grid, shape.cluster
    if grid[0] % cluster:
        raise ValueError(f"grid: expected a multiple of the cluster's {cluster} CTAs along x, got {grid[0]}")
    if len(buffers) > abi.MAX_BUFFERS:
        raise ValueError(f"buffers: expected at most {abi.MAX_BUFFERS}, got {len(buffers)}")
    views = [_view(map_, buffers[name][0], copies.addresses[name]) for name, map_ in shape.tensor_maps]
    params = _packed(make_params(copies.addresses), views)
    request = abi.Launch(
        entry=library.entry,
        anchor=library.anchor,
        image=library.image,
        params=params.data_ptr(),
        params_bytes=params.numel(),
        grid=grid,
        threads=shape.threads,
        dynamic_shared_bytes=shape.shared_bytes,
        buffer_count=len(buffers),
        workers=min(workers or os.cpu_count() or 1, math.prod(grid) // cluster),
        late=schedule.late,
        count_banks=count_banks,
        cluster=cluster,
        programmatic=shape.programmatic,
        backwards=schedule.backwards,
        seed=schedule.seed,
        guard_count=len(library.guards),
        guards=library.guards,
    )
    for slot, (name, (tensor, writable)) in zip(request.buffers, buffers.items(), strict=False):
        slot.name, slot.address, slot.bytes = name.encode(), copies.addresses[name], _extent(tensor)
        slot.writable = writable
    outcome = abi.Outcome()
    build.runtime().microsdpa_emulate(ctypes.byref(request), ctypes.byref(outcome))
    if outcome.failed:
        message = outcome.message.decode(errors="replace")
        places = resolve(library, [int(place, 16) for place in _PLACE.findall(message)])
        raise EmulationError(library.name, _PLACE.sub(lambda m: places[int(m[1], 16)], message))
    written = {name: tensor for name, (tensor, writable) in buffers.items() if writable}
    for name, tensor in written.items():
        copies.copy_back(name, tensor, [other for other in written.values() if other is not tensor])
    sites = list(outcome.sites[: outcome.site_count])
    names = resolve(library, [site.place for site in sites])
    return Report(
        counters={name: getattr(outcome.counters, name) for name in abi.COUNTERS},
        bank_sites=_merge([BankSite(names[s.place], s.requests, s.wavefronts, s.ideal) for s in sites]),
    )


def _view(box: TensorMap, tensor: torch.Tensor, address: int) -> abi.TensorView:
    """What the emulator's bulk copies take for a CUtensorMap."""
    size = tensor.element_size()
    dims = (3, 1, 2, 0) if box.heads else (3, 2, 1, 0)
    return abi.TensorView(
        address=address,
        sizes=tuple(tensor.shape[dim] for dim in dims),
        strides=tuple(tensor.stride(dim) * size for dim in dims[1:]),
        box_columns=box.columns,
        box_rows=box.rows,
        swizzle=box.swizzle,
        element_bytes=size,
        magic=abi.TensorView.MAGIC,
        box_heads=box.heads,
    )


def _packed(params: ctypes.Structure, views: Sequence[abi.TensorView]) -> torch.Tensor:
    """The kernel's parameters, and behind them the views, in aligned memory."""
    alignment = abi.VIEW_ALIGNMENT
    first = -(-ctypes.sizeof(params) // alignment) * alignment
    memory = torch.zeros(
        first + len(views) * ctypes.sizeof(abi.TensorView) + alignment, dtype=torch.uint8, device="cpu"
    )
    memory = memory[-memory.data_ptr() % alignment :]
    for offset, part in ((0, params), *((first + i * ctypes.sizeof(view), view) for i, view in enumerate(views))):
        ctypes.memmove(memory.data_ptr() + offset, ctypes.addressof(part), ctypes.sizeof(part))
    return memory


class _Copies:
    """Copies of tensors with their strides and alignment, far apart in one allocation."""

    GAP, ALIGNMENT = 2**20, 256

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        room = 2 * self.GAP + self.ALIGNMENT
        self._memory = torch.empty(sum(_extent(t) + room for t in tensors.values()), dtype=torch.uint8, device="cpu")
        self._views: dict[str, torch.Tensor] = {}
        start = self._memory.data_ptr() + self.GAP
        for name, tensor in tensors.items():
            start += -start % self.ALIGNMENT + tensor.data_ptr() % self.ALIGNMENT
            first = start - self._memory.data_ptr()
            view = self._memory[first : first + _extent(tensor)]
            self._views[name] = view
            _copy(view, _flat(tensor), tensor)
            start += _extent(tensor) + self.GAP
        self.addresses = {name: view.data_ptr() for name, view in self._views.items()}

    def copy_back(self, name: str, tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
        """Bring what the kernel wrote back into the tensor.

        Gaps between its rows are brought back too, unless there are rows of `others`, which are written too.
        """
        shared = any(_meet(tensor, other) for other in others)
        _copy(_flat(tensor), self._views[name], tensor, elements=shared)


SPARSE = 2**30
"""Bytes from which on the gaps between a tensor's rows are not copied: untouched memory costs nothing."""


def _meet(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one tensor begins ahead of the other's last element, and ends behind its first."""
    ranges = [(t.data_ptr(), t.data_ptr() + _extent(t)) for t in (tensor, other)]
    return ranges[0][0] < ranges[1][1] and ranges[1][0] < ranges[0][1]


def _copy(to: torch.Tensor, source: torch.Tensor, tensor: torch.Tensor, elements: bool = False) -> None:
    """Copy all memory of a tensor, given as bytes, or on demand or where that is much, its elements."""
    if elements or to.numel() >= SPARSE:
        words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        to, source = (
            memory.view(words).as_strided(
                tensor.shape, tensor.stride(), memory.storage_offset() // tensor.element_size()
            )
            for memory in (to, source)
        )
    to.copy_(source)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All memory from a tensor's first element to its last, gaps between rows included, as bytes.

    A copy of bool elements would make 1 of every byte that is not 0, which a GPU reads as it is.
    """
    elements = tensor.as_strided((_extent(tensor) // tensor.element_size(),), (1,), tensor.storage_offset())
    return elements.view(torch.uint8)


def _merge(sites: list[BankSite]) -> tuple[BankSite, ...]:
    """Sites of one line in one: an unrolled or inlined access has many places in the machine code."""
    merged: dict[str, list[int]] = {}
    for site in sites:
        sums = merged.setdefault(site.place, [0, 0, 0])
        for i, value in enumerate((site.requests, site.wavefronts, site.ideal)):
            sums[i] += value
    return tuple(BankSite(place, *sums) for place, sums in sorted(merged.items()))


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to past the last one."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def resolve(library: build.Library, places: list[int]) -> dict[int, str]:
    """Source lines of places in a kernel library, each with the lines of its callers."""
    if not places:
        return {}
    calls = {place: _calls(place) for place in places}
    command = [
        "addr2line",
        "-a",
        "-i",
        "-e",
        str(library.path),
        *sorted({hex(at) for of in calls.values() for at in of}),
    ]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {place: f"{library.name}+{place:#x}" for place in places}
    lines: dict[int, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if line.startswith("0x"):
            current = lines.setdefault(int(line, 16), [])
        else:
            # addr2line completes the relative names of #line directives with the build directory.
            short = re.sub(
                r"^.*?((?:(?:common|ptx|ladder|include|quantize|prologue)|(?:hopper|ampere|ada)/\w+)/(?=[^/]*$)|(?=[^/]*$))",
                r"\1",
                line.split(" (")[0],
            )
            if short not in current and not short.startswith("entry:"):
                current.append(short)
    found = {place: dict.fromkeys(line for at in of for line in lines.get(at, ["?"])) for place, of in calls.items()}
    return {place: " < ".join(list(of)[:3]) for place, of in found.items()}


def _calls(place: int) -> list[int]:
    """Offsets in the library that a place is made of: the access, then the calls that led there."""
    mask = 2**abi.PLACE_BITS - 1
    later = (place >> abi.PLACE_BITS * call & mask for call in range(1, abi.PLACE_CALLS))
    return [place & mask, *(at for at in later if at)]


def _broadcast(mask: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A mask for every score, or int32 ranges or the uint8 of a table of blocks for every row."""
    return (
        mask.expand(*shape[:3], mask.shape[3])
        if mask.dtype == torch.uint8
        else (mask.expand(*shape[:3], 2) if mask.dtype == torch.int32 else mask.expand(shape))
    )


def _heads_as_queries(tensor: torch.Tensor | None, problem: Problem) -> torch.Tensor | None:
    """A tensor of one query a head, whose query heads of a key head are the queries of one head."""
    if tensor is None:
        return None
    group, (batch, head, _, column) = problem.heads // problem.heads_kv, tensor.stride()
    sizes = problem.batch, problem.heads_kv, group, tensor.shape[3]
    return tensor.as_strided(sizes, (batch, group * head, head, column))


_PROLOGUED = "microsdpa::Prologued"


@dataclass(frozen=True)
class _Changed:
    """What norms and rotary embedding add to a launch."""

    tensors: dict[str, torch.Tensor]
    numbers: tuple[int, int, float]

    @classmethod
    def of(cls, prologue: Prologue, shift: int) -> _Changed:
        """That of a call."""
        *tensors, query_first, key_first, eps = prologue.arguments(shift)
        named = zip(PrologueParams.TENSORS, tensors, strict=True)
        return cls({name: one for name, one in named if one is not None}, (query_first, key_first, eps))

    def params(self, addresses: dict[str, int]) -> PrologueParams:
        """The kernel's part, with the addresses of copies."""
        query_first, key_first, eps = self.numbers
        found = PrologueParams(query_first=query_first, key_first=key_first, eps=eps, positions=1)
        for name, tensor in self.tensors.items():
            setattr(found, name, addresses[name])
            if tensor.dim() == 2:
                setattr(found, f"{name}_stride", tensor.stride(0) if tensor.shape[0] > 1 else 0)
        if "cos" in self.tensors:
            found.positions = self.tensors["cos"].shape[0]
        return found


SCRATCH_BYTE = 0xFF
"""What scratch memory is filled with."""


class Operands(NamedTuple):
    """What a call reads and writes.

    Attributes:
        lse: the tensor for the LSE; None where none is wanted.
        prologue: norms and rotary embedding, and the position of the first query less that of the first key.
    """

    query: torch.Tensor | None
    key: torch.Tensor | None
    value: torch.Tensor | None
    out: torch.Tensor | None
    lse: torch.Tensor | None = None
    prologue: tuple[Prologue, int] | None = None


def attention(
    spec: KernelSpec,
    problem: Problem,
    operands: Operands | tuple[torch.Tensor | None, ...],
    scale: float | None = None,
    *,
    schedule: Schedule | None = None,
    masks: Masks = NONE,
    count_banks: bool = False,
    root: Path = KERNELS_DIR,
) -> Report:
    """Run the kernels of `spec` on CPU tensors, which must have been validated for `problem`.

    `operands` are query, key, value and out, and then the tensor for the LSE, or None for none.
    `root` is the tree that the kernels' sources are taken from. The report is of all kernels together.
    """
    factor = problem.head_dim**-0.5 if scale is None else scale
    if not isinstance(operands, Operands):
        query, key, value, out, lse = operands
        operands = Operands(query, key, value, out, lse)
    *dense, lse, prologue = operands
    seen = problem  # by the kernel
    if spec.heads_as_queries:
        seen = problem.heads_as_queries
        query, key, value, out = dense
        dense = [_heads_as_queries(query, problem), key, value, _heads_as_queries(out, problem)]
    tensors = {name: t for name, t in zip(("query", "key", "value", "out"), dense, strict=True) if t is not None}
    buffers = {name: (tensor, name == "out") for name, tensor in tensors.items()}
    if lse is not None:
        buffers["lse"] = (lse, True)
    ahead = spec.stages[0].changed_rows
    # Of Q, of K, and of the kernels' own scratch memory: from the start of that of the call.
    places = (ChangedRows.AS_IT_IS, ChangedRows.AS_IT_IS, 0) if ahead is None else ahead.places(problem)
    # All bits set are NaN in every type: what is read before it is written shows in the output.
    scratch_bytes = places[-1] + max(stage.workspace_bytes(problem) for stage in spec.stages)
    scratch = torch.full((scratch_bytes,), SCRATCH_BYTE, dtype=torch.uint8, device="cpu")
    own = scratch[places[-1] :]
    of_sequences = spec.params in (VARLEN_PARAMS, ONE_LENGTH_PARAMS)
    counters = torch.zeros(abi.ARRIVALS if of_sequences else 1, dtype=torch.int32, device="cpu")
    if spec.counts:
        own = counters
    if own.numel():
        buffers["workspace"] = (own, True)
    if of_sequences:
        buffers["arrivals"] = (counters, True)

    slopes, sinks = masks.alibi_slopes, masks.sinks
    shape = (seen.batch, seen.heads, seen.seqlen_q, seen.seqlen_k)
    mask_operands = {
        "mask": None if masks.attn_mask is None else _broadcast(masks.attn_mask, shape),
        "slopes": None if slopes is None else slopes.expand(shape[:2]),
        "sinks": sinks,
    }
    present = {name: tensor for name, tensor in mask_operands.items() if tensor is not None}
    buffers |= {name: (tensor, False) for name, tensor in present.items()}
    if masks.dropping is not None:
        buffers["drawn"] = (masks.dropping[1], False)
    changed = _Changed.of(*prologue) if prologue is not None else None
    given = dict(tensors)
    of_prologue = {name: (tensor, False) for name, tensor in changed.tensors.items()} if changed is not None else {}
    first = buffers | of_prologue
    if ahead is None:
        buffers = first
    else:
        # The first kernel writes Q to where others have the output, and K to where they have scratch memory.
        first = {name: buffer for name, buffer in first.items() if name in ("query", "key", *of_prologue)}
        for name, written, at in zip(("query", "key"), ("out", "workspace"), places, strict=False):
            if at != ChangedRows.AS_IT_IS:
                rows = scratch[at : at + tensors[name].numel() * tensors[name].element_size()]
                tensors[name] = rows.view(tensors[name].dtype).view(tensors[name].shape)
                buffers[name], first[written] = (tensors[name], False), (tensors[name], True)
    position, lowest, diagonal = masks.bounds(seen.causal, seen.seqlen_q, seen.seqlen_k)

    apart = {*present, "drawn", *(changed.tensors if changed is not None else ())}

    def params(addresses: dict[str, int], kind: str, operands: dict[str, torch.Tensor]) -> ctypes.Structure:
        """Parameters of the C++ type `kind`: the call's, for kernels that take them the masks', and the prologue's."""
        if kind == _PROLOGUED:
            assert changed is not None
            return ProloguedParams(params(addresses, "microsdpa::MaskedParams", operands), changed.params(addresses))
        if kind in (VARLEN_PARAMS, ONE_LENGTH_PARAMS):
            own = {name: tensor.stride() for name, tensor in (operands | present).items()}
            return sequence_params(spec, problem, addresses, own, masks, factor)
        filled = Params.of(seen, diagonal, factor)
        for name in addresses.keys() - apart:
            setattr(filled, name, addresses[name])
        for name, tensor in operands.items():
            setattr(filled, f"{name}_strides", (ctypes.c_int64 * 3)(*tensor.stride()[:3]))
        if kind == "microsdpa::AttentionParams":
            return filled
        everything = MaskedParams(
            call=filled,
            **{name: addresses[name] for name in present if name in addresses},
            position=position,
            lowest=lowest,
            softcap_log2=(masks.softcap or 0.0) * math.log2(math.e),
        )
        if "mask" in present:
            mask = present["mask"]
            # The stride of a dimension of size one says nothing about memory.
            strides = (stride if size > 1 else 0 for size, stride in zip(mask.shape, mask.stride(), strict=True))
            *outer, everything.mask_column_stride = strides
            everything.mask_strides = (ctypes.c_int64 * 3)(*outer)
        if "slopes" in present:
            everything.slope_batch_stride, everything.slope_head_stride = present["slopes"].stride()
        if "sinks" in present:
            (everything.sink_head_stride,) = present["sinks"].stride()
        if masks.dropping is None:
            return everything
        kept, factor_of_kept = kept_of(masks.dropping[0])
        return DroppedParams(everything, DropoutParams(drawn=addresses["drawn"], kept=kept, scale=factor_of_kept))

    reports = [
        launch(
            build.load(stage, root),
            functools.partial(params, kind=stage.params, operands=tensors if stage.changed_rows is None else given),
            buffers if stage.changed_rows is None else first,
            Shape.of(stage, stage.grid(problem), "mask"),
            schedule=schedule,
            count_banks=count_banks,
        )
        for stage in spec.stages
    ]
    if counters.any():
        raise EmulationError(spec.name, f"left {int(counters)} in its counter, which is zero between launches")
    return Report(
        counters={name: sum(report.counters[name] for report in reports) for name in abi.COUNTERS},
        bank_sites=_merge([site for report in reports for site in report.bank_sites]),
    )


def one_kernel(
    spec: KernelSpec,
    grid: tuple[int, int, int],
    fill: Callable[[dict[str, int]], ctypes.Structure],
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    *,
    schedule: Schedule | None = None,
    count_banks: bool = False,
    root: Path | None = None,
) -> Report:
    """Run one kernel on CPU tensors; `fill` makes its parameter of the tensors' addresses, by name.

    The tensors that its bulk copies read are among `inputs`, under the names that its specification has for them.
    `root` is the tree that its source is taken from, if it is not the library's.
    """
    buffers = {name: (tensor, False) for name, tensor in inputs.items()}
    buffers |= {name: (tensor, True) for name, tensor in outputs.items()}
    return launch(
        build.load(spec, root or KERNELS_DIR, spec.params),
        fill,
        buffers,
        Shape.of(spec, grid),
        schedule=schedule,
        count_banks=count_banks,
    )
