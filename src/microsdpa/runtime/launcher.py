"""Python side of the host launcher (launcher.cc): loads the library, registers plans for validated calls."""

from __future__ import annotations

import functools
import logging
import os
import struct
import threading
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from microsdpa import runtime
from microsdpa.errors import MicrosdpaError
from microsdpa.jit import CompiledKernel, compile_kernel, unexcused
from microsdpa.kernels import Grid, KernelSpec
from microsdpa.kernels.params import Params
from microsdpa.kernels.problem import Problem, target_of, virtual
from microsdpa.kernels.ranges import SizeRange
from microsdpa.kernels.registry import varlen_kernel
from microsdpa.kernels.spec import ONE_LENGTH_PARAMS, VARLEN_PARAMS, ChangedRows
from microsdpa.runtime.direct import direct
from microsdpa.runtime.ffi import tvm_ffi

LIBRARY = "libmicrosdpa_launcher.so"
MIN_DRIVER = 13000
"""Oldest CUDA version of a driver that loads what NVRTC 13 makes: R580."""


def _load_library() -> Any:
    # An editable install keeps compiled files apart from the sources: the package's path names both places.
    for directory in runtime.__path__:
        path = Path(directory) / LIBRARY
        if path.is_file():
            return tvm_ffi.load_module(str(path))
    raise ImportError(
        f"{LIBRARY} is not beside {__file__}: install the package (pip install .) rather than putting src/ on the path"
    )


_library = _load_library()
tvm_ffi.register_error("microsdpa.OutOfMemoryError", torch.OutOfMemoryError)
tvm_ffi.register_error("microsdpa.ExchangeError", MicrosdpaError)

Call = tuple[Any, ...]
"""Arguments of one call, in the order that the library has them.

They are query, key, value, out, lse, options (a number of OPTIONS), and scale or None. Where the options have
PROLOGUE_BIT, what Prologue.arguments gives follows. As far as they are given, attn_mask, alibi_slopes, sinks, the
window's ends (-1 for none) and softcap are next, NO_MASKS for none; the scales of 8-bit query, key and value, tensors
or None; and at last, of sequences of many lengths, query_offsets, key_offsets, lengths, page_table, max_queries,
new_key, new_value, rotary_cos, rotary_sin, q_norm, k_norm and norm_eps.
"""

NO_MASKS = None, None, None, -1, -1, None
NO_SCALES = None, None, None

launch: Callable[..., Any] = direct(_library, _library.sdpa)
"""The hot path, a function of a Call's items.

`lse` is a tensor [B, H, S_q] in FP32 to write to, True for one that is allocated, or None or False for none. Gives None
when no plan is registered for the call, the LSE where it was allocated, and else True.
"""

launch_scaled: Callable[..., Any] = direct(_library, _library.sdpa_scaled)
"""`launch` for 8-bit values without masks, a function of a Call's items without those of masks."""

launch_known: Callable[..., Any] = direct(_library, _library.sdpa_known)
"""`launch` for a mask that is known to be for an S_k, a function of that, of a bool, and then a Call's items.

It gives None for another S_k, and unless the bool says that a CUDA graph may hold the mask, where one is captured.
"""

gradients: Callable[..., Any] = direct(_library, _library.gradients)
"""The same for gradients, a function of a GradientCall's items; False when no plan is registered for the call."""

launch_dropped: Callable[..., Any] = direct(_library, _library.sdpa_dropped)
"""`launch` for a call that drops probabilities, a function of a Dropped's items and then a Call's."""

gradients_dropped: Callable[..., Any] = direct(_library, _library.gradients_dropped)
"""`gradients` for such a call, a function of a Dropped's items and then a GradientCall's."""

Dropped = tuple[int, float, "torch.Tensor | None", int, int, "torch.Tensor | None"]
"""How many of 65,536 probabilities are kept, and their factor; seed and offset as a tensor, or None for the two numbers
that follow; and the tensor that seed and offset are left in, or None. Both tensors are two int64 on the device.
"""

GradientCall = tuple[Any, ...]
"""Arguments of one call for gradients, in the order that the library has them.

They are those of a Call up to the soft cap, with the LSE as a tensor; the gradients of the output and, or None, of the
LSE, both contiguous where they are of the LSE; and the tensors to write to: gradients of query, key and value, and, or
None, of attn_mask, alibi_slopes and sinks.
"""
GRADIENT_ARGUMENTS = 21

expect_node = _library.expect_node
"""expect_node(options, attn_mask | None, number): what this thread's next call of a node (nodes.py) asks for."""

expect_no_node = _library.expect_no_node
"""expect_no_node(): take that back, after a call that did not come to the operator's kernel."""

register_kind: Callable[..., bool] = _library.register_kind
"""register_kind(number, *call): number the calls that differ from a Call in batch size, lengths and strides alone.

False where there is more to look at in each of them. forget_plans() forgets the numbers.
"""

_register_and_launch: Callable[..., Any] = direct(_library, _library.register_and_launch)
_register_sized: Callable[..., Any] = direct(_library, _library.register_sized)

launch_or_kind: Callable[..., Any] = direct(_library, _library.sdpa_or_kind)
"""`launch`, and for a call without a plan the number that register_kind() gave it, an int, or None."""

allow_node: Callable[..., bool] = _library.allow_node
"""allow_node(number, *call): let the node's operator of this number (nodes.py) run the plan of a Call.

False when no plan is registered for the call.
"""

set_node_constants = _library.set_node_constants
"""set_node_constants(device, state, scalar, own, unplanned): what nodes have on a device.

These are addresses of two uint64 and an int64, kept for ever, and handles of the sparse tensors of nodes.py, or 0. The
launcher takes these.
"""

register_own_gradients = _library.register_own_gradients
"""register_own_gradients(key): the kernel of gradients behind cuDNN's node, for a dispatch key of torch's."""


def register_nodes(backend: str, cudnn: str | None, flash: str | None, plain: int, causal: int) -> bool:
    """Register the kernels of nodes.py for a dispatch key of torch's; False where torch is built without CUDA.

    `plain` and `causal` are the codes of the options of calls that expect_node() is not told of.

    Raises:
        RuntimeError: torch refuses them.
    """
    return bool(_library.register_nodes(backend, cudnn, flash, plain, causal))


def prepared_call(call: Call) -> Callable[..., Any]:
    """`launch` for the plan of these arguments alone: a function of (query, key, value, out, lse, *tensors).

    The tensors are those of masks, and then scales, as far as they are given: attn_mask, alibi_slopes, sinks. Window,
    soft cap and scale are the call's. It gives None for tensors that differ from the call's in more than addresses.

    Raises:
        RuntimeError: no plan is registered for the arguments.
    """
    return direct(_library, found(_library.prepared_call(*call)))


CALL_ARGUMENTS = 13
"""Those of a Call up to the soft cap."""

primary_context: Callable[[int], int] = functools.cache(_library.primary_context)
"""primary_context(device): the address of the context that torch uses on a device."""

play: Callable[[int, int, bytes], None] = _library.play
"""play(context, stream, operations): put packed operations (exchange.h) without launches on their streams, once.

`stream` is the handle of the one that they name as the caller's. It raises a MicrosdpaError where the driver refuses
one, when the others have been played.
"""


def prepared_exchange(
    context: int, operations: bytes, tensors: Sequence[torch.Tensor | None], calls: Sequence[Call]
) -> Callable[..., bool] | None:
    """A function of query, key, value, out and an LSE or None that plays operations on the current stream and others.

    `tensors` are those that the operations were made for. Operations and launches follow the addresses of others, for
    which the function gives False where they differ from these in more. A call of `calls`, up to its soft cap, has
    views of them. None where one of them has no plan.

    The function raises what a launch does, or a MicrosdpaError where the driver refuses an operation. Those that are
    no launches have been played then.
    """
    flat = [argument for call in calls for argument in call]
    exchange = _library.prepared_exchange(context, operations, len(calls), *tensors, *flat)
    if exchange is None:
        return None
    played, fail = direct(_library, exchange), _library.rethrow_exchange_failure

    def replay(*tensors: torch.Tensor | None) -> bool:
        found = played(*tensors)
        if found is False:
            fail()
        return found is True

    return replay


def found(result: Any) -> Any:
    """What a launch gave after its plan was registered.

    Raises:
        RuntimeError: nothing: no plan was found.
    """
    if result is None:
        raise RuntimeError("the plan that was just registered is not found: please report this as a bug")
    return result


def forget_plans() -> None:
    """Forget every registered plan, and kinds of calls; calls that were prepared keep their plan."""
    _library.clear_plans()


def driver_version() -> int:
    """CUDA version of the driver, as 1000 * major + 10 * minor; 0 when the machine has none."""
    return int(_library.driver_version())


def set_programmatic(enabled: bool) -> bool:
    """Let kernels that support it begin before the kernel ahead of them has ended (programmatic dependent launch).

    It holds for all launches of the process from now on; captured graphs keep what they were captured with. At first it
    is on, unless the environment has MICROSDPA_PDL=0. Gives what held before.
    """
    return bool(_library.set_programmatic(enabled))


set_programmatic(os.environ.get("MICROSDPA_PDL", "1") != "0")


_ptx_of: str | None = None


def use_ptx_of(target: str | None) -> None:
    """Run the PTX of another target's kernels, such as "sm_89", which the driver compiles for the device at hand.

    For checking kernels of GPUs that are not there. It holds for calls of the process that have no plan yet; None goes
    back to the device's own kernels.

    Raises:
        ValueError: PTX of `target` runs on no other GPU.
    """
    global _ptx_of
    if target is not None:
        virtual(target)
    _ptx_of = target
    _loaded_specs.clear()
    _library.clear_kinds()


def target_of_device(device: torch.device | int | None = None) -> str:
    """What kernels are chosen and compiled for on a CUDA device."""
    index = None if device is None else torch.device(device).index
    return _ptx_of or _own_target(torch.cuda.current_device() if index is None else index)


@functools.lru_cache
def _own_target(index: int) -> str:
    return target_of(torch.cuda.get_device_capability(index))


_log = logging.getLogger("microsdpa")
_kernels: dict[tuple[KernelSpec, str], CompiledKernel] = {}


def _compiled(spec: KernelSpec, target: str) -> CompiledKernel:
    """A kernel for a target of target_of_device().

    It is looked up once for a process, with the signature that its sources then have: a new length costs no more.
    """
    wanted = spec, virtual(target) if _ptx_of else target
    kernel = _kernels.get(wanted)
    if kernel is None:
        kernel = _kernels[wanted] = compile_kernel(*wanted, strict=False)
        if fault := unexcused(kernel):
            _log.warning("%s: results are right, and other versions of NVRTC or its headers may do without", fault)
    return kernel


def device_error() -> str | None:
    """Why this machine cannot launch a kernel, or None when it can."""
    version = driver_version()
    if version == 0:
        return "no CUDA driver was found (libcuda.so.1)"
    if version < MIN_DRIVER:
        return (
            f"the driver supports CUDA {version // 1000}.{version % 1000 // 10}; kernels are compiled by NVRTC 13, "
            "which needs driver R580 (CUDA 13.0) or newer"
        )
    if not torch.cuda.is_available():
        return "torch sees no CUDA device (a CPU build of torch, or no GPU)"
    return None


_loaded: dict[tuple[str, int], tuple[int, int]] = {}
_lock = threading.Lock()


def alignment(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> int:
    """16 when 16-byte accesses reach every row of the CUDA tensors, else 0; -1 when `out` overlaps an input."""
    return int(_library.alignment(query, key, value, out))


def load_kernel(kernel: CompiledKernel, device: int) -> tuple[int, int]:
    """(function, context) of a kernel on a device; loaded once per process."""
    with _lock:
        handles = _loaded.get((kernel.signature, device))
        if handles is None:
            function, context = _library.load_kernel(
                device, kernel.cubin, kernel.symbol, kernel.spec.shared_bytes, kernel.spec.cluster
            )
            handles = _loaded[kernel.signature, device] = int(function), int(context)
        return handles


_OPERANDS = (
    *("query", "key", "value", "out", "attn_mask", "alibi_slopes", "sinks"),
    *("query_scale", "key_scale", "value_scale", "grad_out"),
    *("cos", "sin", "query_positions", "key_positions", "query_weight", "query_bias", "key_weight", "key_bias"),
    *("lse", "workspace", "counters", "counter", "grad_lse"),
    *("grad_query", "grad_key", "grad_value", "grad_mask", "grad_slopes", "grad_sinks"),
    *("drawn", "seed", "offset", "state"),
)
"""Names of what addresses in a parameter are of, in the library's order (tensor_key.h)."""
SCALE, SCALE_LOG2, SOFTCAP_LOG2, KEPT, KEPT_SCALE = range(5)
"""Numbers of a call that a parameter holds in 4 bytes.

They are the softmax's scale, the same and the soft cap times log2(e), and the first two of Dropped.
"""
NO_LENGTHS = 1, 0
"""First and last length of K of a plan that is for no other sizes than its own."""
NO_VARLEN = 0, 0, 0, 1, 0, 0, 0, 0
NO_CHANGED_ROWS = ChangedRows.AS_IT_IS, ChangedRows.AS_IT_IS, 0


class Mapped(NamedTuple):
    """What a tensor map describes: a [B, H, S, D] array in a tensor of the call.

    Attributes:
        offset: bytes from the tensor's start.
        strides: in elements.
    """

    tensor: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element_bytes: int


class PlannedKernel(NamedTuple):
    """A kernel of a plan.

    Attributes:
        params: its parameter, without addresses; empty where it is that of kernels with 16-bit operands, of which the
            library fills all.
        pointers: (bytes from the parameter's start, tensor, bytes from the tensor's start): where addresses belong. Of
            a tensor that a call does not have, it is null.
        numbers: (bytes from the parameter's start, SCALE or SCALE_LOG2): where numbers of a call belong.
        tensor_maps: what those of its specification describe; the operands themselves where `params` is empty.
        only_with_lse: whether only calls with an LSE launch it.
    """

    spec: KernelSpec
    grid: Grid
    params: bytes = b""
    pointers: tuple[tuple[int, str, int], ...] = ()
    numbers: tuple[tuple[int, int], ...] = ()
    tensor_maps: tuple[Mapped, ...] = ()
    only_with_lse: bool = False


def _packed(integers: list[int]) -> bytes:
    return struct.pack(f"{len(integers)}q", *integers)


def _launch_integers(function: int, spec: KernelSpec, grid: Grid) -> list[int]:
    flags = int(spec.programmatic), int(spec.heads_as_queries)
    of_sequences = spec.params in (VARLEN_PARAMS, ONE_LENGTH_PARAMS)
    rows = spec.block_m if of_sequences else 0
    keys = int(dict(spec.template_args).get("BLOCK_N", 0)) if of_sequences else 0
    return [function, *grid, spec.threads, spec.shared_bytes, spec.cluster, *flags, rows, keys]


_WHOLE = (0,) * 10


def _map_integers(spec: KernelSpec, maps: Sequence[Mapped], places: Sequence[tuple[int, int]]) -> list[int]:
    """Of a specification's tensor maps; `places` are the operand of each and the bytes from its start to the array."""
    found = [len(spec.tensor_maps)]
    for i, (box, (operand, offset)) in enumerate(zip(spec.tensor_maps, places, strict=True)):
        found += (operand, box.rows, box.columns, box.swizzle, box.heads)
        found += (offset, maps[i].element_bytes, *maps[i].shape, *maps[i].strides) if maps else _WHOLE
    return found


def register(
    call: Call,
    kernels: Sequence[PlannedKernel],
    target: str,
    workspace_bytes: int = 0,
    varlen: tuple[int, int, int, int, int, int, int, int] = NO_VARLEN,
) -> None:
    """Compile and load kernels, and register the plan that `launch` finds for these validated arguments.

    For those of a GradientCall it is `gradients` that finds it.

    `varlen` is VarlenLaunch of plan.h.

    Raises:
        CompileError: a kernel does not compile.
        RuntimeError: the driver refuses to load one.
    """
    integers, context = [0, workspace_bytes, *NO_LENGTHS, *varlen, *NO_CHANGED_ROWS, len(kernels)], 0
    for kernel in kernels:
        spec, maps = kernel.spec, kernel.tensor_maps
        function, context = load_kernel(_compiled(spec, target), call[0].device.index)
        integers += _launch_integers(function, spec, kernel.grid)
        integers += (kernel.only_with_lse, len(kernel.params), len(kernel.pointers))
        for at, name, offset in kernel.pointers:
            integers += (at, _OPERANDS.index(name), offset)
        integers.append(len(kernel.numbers))
        for place in kernel.numbers:
            integers += place
        if varlen != NO_VARLEN:  # the library encodes their tensor maps in every call
            integers.append(0)
            continue
        if maps:
            places = [(_OPERANDS.index(m.tensor), m.offset) for m in maps]
        else:
            places = [(_OPERANDS.index(box.tensor), 0) for box in spec.tensor_maps]
        integers += _map_integers(spec, maps, places)
    integers[0] = context
    of_gradients = len(call) == GRADIENT_ARGUMENTS
    enter = _library.register_gradients if of_gradients else _library.register_plan
    enter(_packed(integers), b"".join([kernel.params for kernel in kernels]), *call)


class _Stage(NamedTuple):
    """A kernel that is loaded: its specification, and its integers before and behind the grid (see register())."""

    spec: KernelSpec
    function: bytes
    rest: bytes
    has_scratch: bool


class _Loaded(NamedTuple):
    """The kernels of `spec.stages`, loaded. A new size waits for this: what sizes do not change is packed once.

    `head` and `rest` are the integers before and behind the lengths of K, up to the grid of the first kernel, of a call
    without scratch memory; `rest` is None where sizes decide about it. `sizings` are Sizing of plan.h of each kernel.
    """

    spec: KernelSpec
    context: int
    stages: list[_Stage]
    head: bytes
    rest: bytes | None
    sizings: bytes


_loaded_specs: dict[tuple[int, int], _Loaded] = {}
"""By the id of a specification and a device."""

_PAIR, _TRIPLE = struct.Struct("2q"), struct.Struct("3q")
_FIXED, _ORDERS = 0, {"x": 1, "xyz": 2, "clusters": 3}
"""Sizing::Order of plan.h: a grid that sizes do not decide about alone, and others by KernelSpec.grid_order."""


def _sizing(spec: KernelSpec) -> list[int]:
    order = _FIXED if spec.changed_rows is not None else _ORDERS.get(spec.grid_order, _FIXED)
    return [order, spec.split, spec.pack, spec.block_m, spec.max_ctas, spec.workspace_row_bytes]


def _loaded_stages(spec: KernelSpec, target: str, device: int) -> _Loaded:
    """Specifications are long to hash and are made once for a kind of problem: they are known by their id."""
    found = _loaded_specs.get((id(spec), device))
    if found is None:
        stages, context = [], 0
        for stage in spec.stages:
            function, context = load_kernel(_compiled(stage, target), device)
            places = [(_OPERANDS.index(box.tensor), 0) for box in stage.tensor_maps]
            launch_rest = _launch_integers(function, stage, (0, 0, 0))[4:]
            counters = [(Params.workspace.offset, _OPERANDS.index("counter"), 0)] if stage.counts else []
            # Whether only calls with an LSE launch it; bytes of a parameter, addresses and numbers of its own.
            own = [0, 0, len(counters), *chain.from_iterable(counters), 0]
            packed = _packed([*launch_rest, *own, *_map_integers(stage, (), places)])
            of_sizes = stage.workspace_row_bytes > 0 or stage.tile_lists is not None
            has_scratch = of_sizes or stage.workspace_fixed_bytes > 0
            stages.append(_Stage(stage, _packed([function]), packed, has_scratch))
        sized = stages[0].spec.changed_rows is not None or any(stage.has_scratch for stage in stages)
        rest = None if sized else _behind_lengths(NO_CHANGED_ROWS, len(stages)) + stages[0].function
        sizings = b"".join([_packed(_sizing(stage.spec)) for stage in stages])
        found = _loaded_specs[id(spec), device] = _Loaded(spec, context, stages, _packed([context, 0]), rest, sizings)
    return found


def _behind_lengths(changed: tuple[int, int, int], stages: int) -> bytes:
    return _packed([*NO_VARLEN, *changed, stages])


def prepare(problem: Problem, spec: KernelSpec, call: Call, others: SizeRange | None = None) -> None:
    """register() for the kernels of `spec`, which have 16-bit operands.

    `others` are sizes for which the kernels are the chosen ones: a call that differs in these, and in strides, gets a
    plan without coming here.

    Raises:
        CompileError: a kernel does not compile.
        RuntimeError: the driver refuses to load one.
    """
    _library.register_plan(_numbers_of(problem, spec, call, others), b"", *call)


def prepare_and_launch(problem: Problem, spec: KernelSpec, call: Call, others: SizeRange | None = None) -> Any:
    """prepare(), and then `launch`, in one foreign call.

    Raises:
        CompileError: a kernel does not compile.
        RuntimeError: the driver refuses to load one, or to launch it.
    """
    found = _loaded_stages(spec, problem.target, call[0].device.index)
    if others is not None or found.rest is None or len(found.stages) > 1:
        return _register_and_launch(_numbers_of(problem, spec, call, others), b"", *call)
    (stage,) = found.stages
    return _register_sized(found.head, *NO_LENGTHS, found.rest, *stage.spec.grid(problem), stage.rest, *call)


def _numbers_of(problem: Problem, spec: KernelSpec, call: Call, others: SizeRange | None) -> bytes:
    """What register_plan reads of the kernels of `spec`, which are compiled and loaded."""
    _, context, stages, head, rest, sizings = _loaded_stages(spec, problem.target, call[0].device.index)
    if rest is None:
        ahead = stages[0].spec.changed_rows
        changed = NO_CHANGED_ROWS if ahead is None else ahead.places(problem)
        scratch = max([stage.spec.workspace_bytes(problem) if stage.has_scratch else 0 for stage in stages])
        head = _packed([context, changed[-1] + scratch])
        rest = _behind_lengths(changed, len(stages)) + stages[0].function
    found = head + (_PAIR.pack(*NO_LENGTHS) if others is None else _PAIR.pack(others.first, others.last)) + rest
    for stage in stages:
        function = b"" if stage is stages[0] else stage.function
        found += function + _TRIPLE.pack(*stage.spec.grid(problem)) + stage.rest
    if others is None:
        return found
    return found + _TRIPLE.pack(others.first_batch, others.last_batch, others.queries_follow) + sizings


def prepare_varlen(problem: Problem, specs: Sequence[KernelSpec], call: Call) -> None:
    """register() for the kernels of a call with sequences of many lengths, whose parameters varlen.h fills.

    The last one is that of attention.

    Raises:
        CompileError: the kernel does not compile.
        RuntimeError: the driver refuses to load it.
    """
    spec = specs[-1]
    scratch = varlen_kernel(spec).workspace_bytes(spec)
    kernels = [PlannedKernel(one, (1, 1, 1), bytes(8)) for one in specs]
    register(
        call, kernels, problem.target, varlen=(spec.block_m, spec.max_ctas, scratch, spec.cluster, *boxes_of(spec))
    )


def boxes_of(spec: KernelSpec) -> tuple[int, int, int, int]:
    """Rows and columns of the boxes of K and V, columns of further, narrow ones, and queries of those of Q.

    Zeros stand for none.
    """
    keys = [box for box in spec.tensor_maps if box.tensor == "key"]
    queries = [box.rows for box in spec.tensor_maps if box.tensor == "query"]
    rows, columns = (keys[0].rows, keys[0].columns) if keys else (0, 0)
    return rows, columns, keys[1].columns if len(keys) > 1 else 0, queries[0] if queries else 0


def launch_one(
    spec: KernelSpec,
    target: str,
    grid: Grid,
    params: bytes,
    device: int,
    arrays: Sequence[tuple[int, Mapped]] = (),
) -> None:
    """Launch one kernel, compiled and loaded before if need be, with a parameter that the caller has filled.

    `arrays` are what its tensor maps describe, with the addresses of the tensors that they lie in.

    It runs on torch's current stream of the device; the tensors that it uses may be given back at once.

    Raises:
        CompileError: the kernel does not compile.
        RuntimeError: the driver refuses to load or to launch it.
    """
    function, context = load_kernel(_compiled(spec, target), device)
    integers = [context, *_launch_integers(function, spec, grid)]
    places = [(0, address + mapped.offset) for address, mapped in arrays]
    integers += _map_integers(spec, [mapped for _, mapped in arrays], places)
    stream = torch.cuda.current_stream(device).cuda_stream
    _library.launch_one(stream, _packed(integers), params)
