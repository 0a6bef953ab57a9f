"""Python side of the host launcher (launcher.cc): loads the library, registers plans for validated calls."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from microsdpa import runtime
from microsdpa.call.masks import NONE, Masks
from microsdpa.jit import CompiledKernel, compile_kernel
from microsdpa.kernels import Grid, KernelSpec
from microsdpa.kernels.problem import Problem, target_of, virtual
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

launch = _library.sdpa
"""launch(query, key, value, out, lse, options, scale | None): the hot path.

`lse` is a tensor [B, H, S_q] in FP32 to write to, True for one that is allocated, or None or False for none. Gives None
when no plan is registered for the call, the LSE where it was allocated, and else True.
"""

launch_masked = _library.sdpa_masked
"""launch with further arguments (attn_mask | None, alibi_slopes | None, sinks | None, left, right, softcap | None).

left and right are the window's ends, -1 for none.
"""

launch_eight_bit = _library.sdpa_eight_bit
"""launch of a call with 8-bit operands, with further arguments (query_scale, key_scale, value_scale).

They are tensors, or None where there are no codes.
"""

expect_node = _library.expect_node
"""expect_node(options, attn_mask | None): what this thread's next call of a node's operator (nodes.py) asks for."""

expect_no_node = _library.expect_no_node
"""expect_no_node(): take that back, after a call that did not come to the operator's kernel."""

set_node_constants = _library.set_node_constants
"""set_node_constants(device, state, scalar): addresses of two uint64 and an int64 on a device, kept for ever."""


def register_nodes(backend: str, cudnn: str | None, flash: str | None, plain: int, causal: int) -> bool:
    """Register the kernels of nodes.py for a dispatch key of torch's; False where torch is built without CUDA.

    `plain` and `causal` are the codes of the options of calls that expect_node() is not told of.

    Raises:
        RuntimeError: torch refuses them.
    """
    return bool(_library.register_nodes(backend, cudnn, flash, plain, causal))


def prepared_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    options: int,
    scale: float | None,
) -> Callable[..., Any]:
    """`launch` for the plan of these arguments alone: a function of (query, key, value, out, lse).

    It gives None for tensors that differ from these in more than their addresses.

    Raises:
        RuntimeError: no plan is registered for the arguments.
    """
    call: Callable[..., Any] = found(_library.prepared_call(query, key, value, out, options, scale))
    return call


def prepared_masked_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    options: int,
    scale: float | None,
    masks: Masks,
) -> Callable[..., Any]:
    """prepared_call with masks: a function of (query, key, value, out, lse, attn_mask, alibi_slopes, sinks).

    The last three may be None; the window and the soft cap are those of `masks`.
    """
    arrays = masks.attn_mask, masks.alibi_slopes, masks.sinks
    call: Callable[..., Any] = found(
        _library.prepared_masked_call(query, key, value, out, options, scale, *arrays, *masks.ends, masks.softcap)
    )
    return call


def prepared_eight_bit_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    options: int,
    scale: float | None,
) -> Callable[..., Any]:
    """prepared_call for a call that quantises."""
    call: Callable[..., Any] = found(_library.prepared_eight_bit_call(query, key, value, out, options, scale))
    return call


def found(result: Any) -> Any:
    """What a launch gave after its plan was registered.

    Raises:
        RuntimeError: nothing: no plan was found.
    """
    if result is None:
        raise RuntimeError("the plan that was just registered is not found: please report this as a bug")
    return result


def masked_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | bool,
    options: int,
    scale: float | None,
    masks: Masks,
) -> Any:
    """`launch_masked` for a call whose plan is registered.

    Raises:
        RuntimeError: no plan is registered for the arguments.
    """
    arrays = masks.attn_mask, masks.alibi_slopes, masks.sinks
    return found(launch_masked(query, key, value, out, lse, options, scale, *arrays, *masks.ends, masks.softcap))


def forget_plans() -> None:
    """Forget every registered plan; calls that were prepared keep theirs."""
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


def target_of_device(device: torch.device | int | None = None) -> str:
    """What kernels are chosen and compiled for on a CUDA device."""
    index = None if device is None else torch.device(device).index
    return _ptx_of or _own_target(torch.cuda.current_device() if index is None else index)


@functools.lru_cache
def _own_target(index: int) -> str:
    return target_of(torch.cuda.get_device_capability(index))


_kernels: dict[tuple[KernelSpec, str], CompiledKernel] = {}


def _compiled(spec: KernelSpec, target: str) -> CompiledKernel:
    """A kernel for a target of target_of_device().

    It is looked up once for a process, with the signature that its sources then have: a new length costs no more.
    """
    wanted = spec, virtual(target) if _ptx_of else target
    kernel = _kernels.get(wanted)
    if kernel is None:
        kernel = _kernels[wanted] = compile_kernel(*wanted)
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


_OPERANDS = ("query", "key", "value", "out")


def prepare(
    problem: Problem,
    spec: KernelSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    options: int,
    masks: Masks = NONE,
) -> None:
    """Compile and load the kernels of `spec`, and register the plan that `launch` finds for these validated arguments.

    Raises:
        CompileError: the kernel does not compile.
        RuntimeError: the driver refuses to load it.
    """
    kernels = []
    for stage in spec.stages:
        function, context = load_kernel(_compiled(stage, problem.target), query.device.index)
        fields = [stage.threads, stage.shared_bytes, stage.cluster, int(stage.programmatic)]
        for m in stage.tensor_maps:
            fields += [_OPERANDS.index(m.tensor), m.rows, m.columns, m.swizzle]
        kernels.append(tvm_ffi.Shape([function, *stage.grid(problem), *fields]))
    workspace_bytes = max(stage.workspace_bytes(problem) for stage in spec.stages)
    position, lowest, diagonal = masks.bounds(problem.causal, problem.seqlen_q, problem.seqlen_k)
    call = query, key, value, out, options
    if problem.mask is None:
        _library.register_plan(*call, context, kernels, workspace_bytes, diagonal)
    else:
        arrays = masks.attn_mask, masks.alibi_slopes, masks.sinks
        wanted = *arrays, *masks.ends, masks.softcap
        _library.register_masked_plan(*call, context, kernels, workspace_bytes, diagonal, *wanted, position, lowest)


@dataclass(frozen=True)
class Mapped:
    """What a tensor map of a kernel with 8-bit operands describes: a [B, H, S, D] array in a tensor of the call.

    Attributes:
        offset: bytes from the tensor's start.
        strides: in elements.
    """

    tensor: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element_bytes: int

    @property
    def fields(self) -> tuple[int, ...]:
        """What the library is told of the array."""
        return *self.shape, *self.strides, self.element_bytes


@dataclass(frozen=True)
class FilledKernel:
    """A kernel of a call with 8-bit operands.

    Attributes:
        params: its parameter, without addresses.
        pointers: (bytes from the parameter's start, tensor, bytes from the tensor's start): where addresses belong. Of
            a tensor that a call does not have, it is null.
        tensor_maps: what those of its specification describe.
        only_with_lse: whether only calls with an LSE launch it.
    """

    spec: KernelSpec
    grid: Grid
    params: bytes
    pointers: tuple[tuple[int, str, int], ...]
    tensor_maps: tuple[Mapped, ...] = ()
    only_with_lse: bool = False


_EIGHT_BIT_OPERANDS = (*_OPERANDS, "lse", "workspace", "query_scale", "key_scale", "value_scale")


def prepare_eight_bit(call: Sequence[Any], kernels: Sequence[FilledKernel], target: str, workspace_bytes: int) -> None:
    """Compile and load kernels, and register the plan that `launch_eight_bit` finds for the arguments `call`.

    `call` is (query, key, value, out, options, scale, query_scale, key_scale, value_scale).

    Raises:
        CompileError: a kernel does not compile.
        RuntimeError: the driver refuses to load one.
    """
    fields, context = [], 0
    for kernel in kernels:
        spec = kernel.spec
        function, context = load_kernel(_compiled(spec, target), call[0].device.index)
        launch = [function, *kernel.grid, spec.threads, spec.shared_bytes, spec.cluster, int(spec.programmatic)]
        launch.append(int(kernel.only_with_lse))
        for box, m in zip(spec.tensor_maps, kernel.tensor_maps, strict=True):
            launch += [_EIGHT_BIT_OPERANDS.index(m.tensor), m.offset, *m.fields, box.rows, box.columns, box.swizzle]
        fields.append(tvm_ffi.Shape(launch))
    pointers = [
        [number for at, name, offset in kernel.pointers for number in (at, _EIGHT_BIT_OPERANDS.index(name), offset)]
        for kernel in kernels
    ]
    params = [kernel.params for kernel in kernels]
    shapes = [tvm_ffi.Shape(numbers) for numbers in pointers]
    _library.register_eight_bit_plan(*call, context, fields, params, shapes, workspace_bytes)


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
    fields = [function, *grid, spec.threads, spec.shared_bytes, spec.cluster, int(spec.programmatic)]
    for box, (address, m) in zip(spec.tensor_maps, arrays, strict=True):
        fields += [0, address + m.offset, *m.fields, box.rows, box.columns, box.swizzle]
    stream = torch.cuda.current_stream(device).cuda_stream
    _library.launch_one(stream, context, tvm_ffi.Shape(fields), params)
