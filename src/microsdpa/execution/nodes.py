"""Attention whose gradient is a node of torch's own: its forward pass is microsdpa's.

torch's operators for its cuDNN and flash attention record such nodes. Each of the two has a kernel in the launcher
(runtime/torch_nodes.h), for a backend that no tensor is on. A call names this backend, below the one of autograd that
records the node: torch's own calls, whose tensors are on a GPU, never reach the kernel. So no Python runs in it.

The backward pass is torch's, or this library's where that is the faster one. Then the node is cuDNN's too, and has a
sparse tensor where torch has a random state. torch has no kernels of the backward operator for sparse tensors; those
that are registered here get such calls alone. One is the launcher's. Calls that it has no plan for come to the other
one, by a sparse tensor of another layout.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from typing import Any

import torch
from torch._C import (
    _get_cudnn_sdp_enabled,
    _get_deterministic_algorithms,
)
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from microsdpa.call.call import NO_TENSORS, Call, Inputs, MaskTensors
from microsdpa.call.masks import NONE, UNBOUNDED, Masks
from microsdpa.call.options import PLAIN_CODE, Options
from microsdpa.call.tensors import is_aligned
from microsdpa.execution import forward
from microsdpa.execution import gradients as kernels
from microsdpa.kernels import policy
from microsdpa.kernels.problem import VECTOR_BYTES, Causal
from microsdpa.kernels.spec import MAX_GRID_YZ
from microsdpa.runtime import launcher

CUDNN = "_scaled_dot_product_cudnn_attention"
FLASH = "_scaled_dot_product_flash_attention"
OWN = "gradients of this library, behind cuDNN's node"
"""In the place of an operator: it is cuDNN's, and its backward pass this library's."""
_NUMBERS = {CUDNN: 1, FLASH: 2, OWN: 3}
"""Node of runtime/launch.h."""
OWN_MASKS = torch.bool, torch.int32
"""Types of masks that such a node has: booleans, and the ends of the keys that a query sees."""
BACKEND = "PrivateUse3"
SPARSE, SPARSE_ROWS = "SparseCUDA", "SparseCsrCUDA"
"""Dispatch keys of calls that have a sparse tensor on a GPU: one of coordinates, and one of compressed rows."""
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that nothing but this library looks at."""
_OUTPUTS = (
    "(Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor {}, "
    "Tensor {}, Tensor debug_attn_mask)"
)
SCHEMAS = {
    CUDNN: "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., "
    "bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> "
    + _OUTPUTS.format("philox_seed", "philox_offset"),
    FLASH: "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, bool "
    "return_debug_mask=False, *, float? scale=None) -> " + _OUTPUTS.format("rng_state", "unused"),
}
"""The operators as they were when this was written: another torch may have others, whose nodes want other outputs."""
BACKWARD = f"{CUDNN}_backward"
BACKWARD_SCHEMA = (
    f"aten::{BACKWARD}(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor "
    "philox_seed, Tensor philox_offset, Tensor attn_bias, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt "
    "max_k, float dropout_p, bool is_causal, *, float? scale=None) -> (Tensor, Tensor, Tensor)"
)

DATA_CENTER = ((8, 0), (9, 0), (10, 0), (10, 3))
LARGEST_SMALL_HEAD = 192
"""Head dimension up to which torch's flash backward pass runs on GPUs of other compute capabilities too."""

_DEFAULTS = PLAIN_CODE, Options(is_causal=True).code
"""Options that the kernels take without and with a causal mask, where nothing more is said."""

_MAX_REMEMBERED = 4096
Choice = tuple[str, bool]
"""The name of an operator, empty for none; and whether the kernel has to be told of the call's options and mask."""
_NONE: Choice = ("", False)
_remembered: dict[tuple[object, ...], Choice] = {}


_usual: tuple[str, Any, Any] | None = None
"""The operator that attend() has used last, what calls it, and the keys: recorded() tries no other one."""


def recorded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, code: int, scale: float | None
) -> torch.Tensor | None:
    """The output of a call without masks that attend() has allowed a node for; None where there is more to look at.

    `code` is that of the call's options, `causal` whether it has a causal mask. No forward-mode gradient is active, and
    no tracer, transform or tensor type of its own looks on.
    """
    if _usual is None or _get_deterministic_algorithms() or not (scale is None or scale > 0.0):
        return None
    operator, call, keys = _usual
    if operator is CUDNN and not _get_cudnn_sdp_enabled():
        return None
    if operator is OWN and _top_saved_tensors_default_hooks(True) is not None:
        return None
    told = code != _DEFAULTS[causal]
    if told:
        launcher.expect_node(code, None, _NUMBERS[operator])
    try:
        # No tuple of arguments is made for both: it takes longer than the branch.
        if scale is not None:
            given = (0.0, causal) if operator is FLASH else (None, True, 0.0, causal)
            found = call(keys, query, key, value, *given, scale=scale)
        elif operator is FLASH:
            found = call(keys, query, key, value, 0.0, causal)
        else:
            found = call(keys, query, key, value, None, True, 0.0, causal)
    except RuntimeError:
        if told:
            launcher.expect_no_node()
        return None
    return found[0]  # type: ignore[no-any-return]


_masked: dict[tuple[object, ...], str] = {}
"""Shapes of query and mask, and codes of options, of calls under a mask for which attend() has had a node; and the
operator."""


def recorded_masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    code: int,
    scale: float | None,
) -> torch.Tensor | None:
    """recorded() for a call with an attn_mask, of booleans or numbers, and no other mask."""
    operator = _masked.get((query.shape, mask.shape, code))
    if operator is None or mask.requires_grad or _get_deterministic_algorithms():
        return None
    if not (scale is None or scale > 0.0) or (operator is CUDNN and not _get_cudnn_sdp_enabled()):
        return None
    if operator is OWN and _top_saved_tensors_default_hooks(True) is not None:
        return None
    call, keys = calls()[operator]
    bias = mask if operator is OWN else as_bias(mask, query, key)
    launcher.expect_node(code, mask, _NUMBERS[operator])
    try:
        return call(keys, query, key, value, bias, True, 0.0, False, scale=scale)[0]  # type: ignore[no-any-return]
    except RuntimeError:
        launcher.expect_no_node()
        return None


def attend(inputs: Inputs, masks: MaskTensors, options: Options) -> torch.Tensor | None:
    """The output of a call whose gradient has a node of torch's; None where it has none.

    The tensors are on a GPU, and no tracer or transform looks on.

    Raises:
        MicrosdpaError: as sdpa.
    """
    global _usual
    operator, told = operator_for(inputs, masks, options)
    if not operator or (operator is OWN and _top_saved_tensors_default_hooks(True) is not None):
        return None  # whoever looks at what is saved may not know sparse tensors
    call = _call_told if told else _call
    try:
        out = call(operator, inputs, masks, options)
    except RuntimeError:
        out = None  # such as out of memory: it is raised below, in better words
    if out is None:
        if not _allow(operator, inputs, masks, options):
            forward.first_call(Call(inputs, masks, options=options, return_lse=True))
            _allow(operator, inputs, masks, options)
        out = launcher.found(call(operator, inputs, masks, options))
    if masks.attn_mask is not None:
        if len(_masked) >= _MAX_REMEMBERED:
            _masked.clear()
        _masked[inputs[0].shape, masks.attn_mask.shape, options.code] = operator
    elif _usual is None or _usual[0] is not operator:
        _usual = operator, *calls()[operator]
    return out


def _allow(operator: str, inputs: Inputs, masks: MaskTensors, options: Options) -> bool:
    """Let an operator run the plan of a call, which has no mask but an attn_mask; False when there is no plan."""
    call = *inputs, torch.empty_like(inputs[0]), None, options.code, options.scale
    mask = () if masks.attn_mask is None else (masks.attn_mask,)
    return bool(launcher.allow_node(_NUMBERS[operator], *call, *mask))


def _call_told(operator: str, inputs: Inputs, masks: MaskTensors, options: Options) -> torch.Tensor | None:
    """_call() whose kernel is told of the options and the mask; nothing of it is left for a later call."""
    launcher.expect_node(options.code, masks.attn_mask, _NUMBERS[operator])
    try:
        return _call(operator, inputs, masks, options)
    finally:
        launcher.expect_no_node()


def _call(operator: str, inputs: Inputs, masks: MaskTensors, options: Options) -> torch.Tensor | None:
    """The output, or None for a call that has no plan which the operator is allowed."""
    query, key, value = inputs
    causal = options.is_causal or options.causal is not None
    call, keys = calls()[operator]
    if operator == FLASH:
        return call(keys, query, key, value, 0.0, causal, scale=options.scale)[0]  # type: ignore[no-any-return]
    mask = masks.attn_mask
    bias = mask if mask is None or operator is OWN else as_bias(mask, query, key)
    return call(keys, query, key, value, bias, True, 0.0, causal, scale=options.scale)[0]  # type: ignore[no-any-return]


def operator_for(inputs: Inputs, masks: MaskTensors, options: Options) -> Choice:
    """Which of torch's operators has the fastest backward pass that computes a call's gradient."""
    query, key, value = inputs
    if (query.data_ptr() | key.data_ptr() | value.data_ptr()) % VECTOR_BYTES:
        return _NONE
    strides = query.stride(), key.stride(), value.stride()
    known: tuple[object, ...] = query.shape, key.shape, *strides, query.dtype, query.get_device(), options
    known = *known, torch.are_deterministic_algorithms_enabled(), _get_cudnn_sdp_enabled()
    if masks is not NO_TENSORS:
        mask = masks.attn_mask
        of_mask = None if mask is None else (mask.dtype, mask.requires_grad, mask.shape, mask.stride())
        known = *known, of_mask, masks.alibi_slopes is None and masks.sinks is None
    try:
        found = _remembered.get(known)
        code = 0 if found else options.code
    except (KeyError, TypeError):
        return _NONE  # an option is not valid: it is named where options are checked
    if found is None:
        if len(_remembered) >= _MAX_REMEMBERED:
            _remembered.clear()
        name = _operator_for(inputs, masks, options)
        name = name if name and _set_up(query.device) else ""
        told = bool(name) and (masks.attn_mask is not None or code != _DEFAULTS[options.is_causal])
        found = _remembered[known] = name, told
    return found


def _operator_for(inputs: Inputs, masks: MaskTensors, options: Options) -> str:
    query, key, value = inputs
    plain = options.window in (None, (UNBOUNDED, UNBOUNDED)) and options.softcap is None
    plain &= masks.alibi_slopes is None and masks.sinks is None
    scaled = options.scale is None or (isinstance(options.scale, (int, float)) and options.scale > 0.0)
    sound = query.dim() == key.dim() == value.dim() == 4 and query.numel() > 0 and key.numel() > 0
    counted = query.dim() == 4 and max(query.shape[:2]) <= MAX_GRID_YZ
    if not (plain and scaled and sound and counted and all(map(is_aligned, inputs))):
        return ""
    if torch.are_deterministic_algorithms_enabled():
        return ""  # this library's own kernels give the same bits each time
    causal: Causal | None = "upper_left" if options.is_causal else options.causal
    mask = masks.attn_mask
    if mask is None or mask.dtype in OWN_MASKS:
        problem = kernels.problem_of(inputs, causal, Masks(mask).kind_in_memory)
        if OWN in calls() and options.code in _CAUSAL and policy.beats_torch_backward(problem):
            return OWN
        if mask is None and policy.is_worth_a_node(problem):
            return ""
    cudnn, flash = (name in calls() for name in (CUDNN, FLASH))
    cudnn &= _cudnn_computes(inputs, masks.attn_mask, causal)
    flash &= _flash_computes(inputs, masks.attn_mask, causal)
    # Up to Ada, the flash backward is the faster one.
    if cudnn and not (flash and torch.cuda.get_device_capability(query.device) < (9, 0)):
        return CUDNN
    return FLASH if flash else ""


def _cudnn_computes(inputs: Inputs, mask: torch.Tensor | None, causal: str | None) -> bool:
    """Whether cuDNN's backward pass has the gradient: of a mask, or of a causal mask that is aligned upper left."""
    query, key, value = inputs
    if causal is not None and (mask is not None or (causal == "lower_right" and query.shape[2] != key.shape[2])):
        return False
    if mask is not None and (mask.dtype not in (torch.bool, query.dtype) or mask.requires_grad):
        return False
    shared = query.shape[1] != key.shape[1]
    return can_use_cudnn_attention(SDPAParams(query, key, value, None, 0.0, causal is not None, shared))


def _flash_computes(inputs: Inputs, mask: torch.Tensor | None, causal: str | None) -> bool:
    """Whether the flash backward pass has the gradient: its causal mask is aligned lower right.

    It scales the -inf of what is hidden, so that every query has to see a key. Large heads do not fit consumer GPUs.
    """
    query, key, _ = inputs
    if query.shape[3] > LARGEST_SMALL_HEAD and torch.cuda.get_device_capability(query.device) not in DATA_CENTER:
        return False
    aligned = causal != "upper_left" or query.shape[2] == key.shape[2]
    reaches = causal is None or query.shape[2] <= key.shape[2]
    return mask is None and aligned and reaches and query.shape[3] % 8 == 0


def as_bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask as cuDNN's backward pass takes it: numbers in query's type, [B, H, S_q, S_k], the last stride 1."""
    bias = mask
    if mask.dtype == torch.bool:
        bias = torch.where(mask, *_seen_and_hidden(query.dtype, mask.device))
    bias = bias.expand(*query.shape[:3], key.shape[2])
    return bias if bias.stride(3) == 1 else bias.contiguous()


@functools.lru_cache
def _seen_and_hidden(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """0 and -inf."""
    with torch.inference_mode(False):
        return torch.zeros((), dtype=dtype, device=device), torch.full((), -torch.inf, dtype=dtype, device=device)


def of_seen_rows(lse: torch.Tensor) -> torch.Tensor:
    """An LSE [B, H, S_q] for a backward pass under a mask: +inf for a row that sees no key, which has -inf.

    The weights of such a row, exp(score - LSE), are then zeros.
    """
    return lse.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=torch.inf)


@functools.lru_cache
def nothing(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random state and mask of the dropout that there is not; nothing writes to them."""
    with torch.inference_mode(False):
        scalar = torch.zeros((), dtype=torch.int64, device=device)
        return torch.zeros(2, dtype=torch.uint64, device=device), scalar, torch.empty(0, device=device)


@functools.lru_cache
def _set_up(device: torch.device) -> bool:
    """Register the kernels, and what they give for a device; False where torch is built without CUDA."""
    cudnn, flash = (name if name in calls() else None for name in (CUDNN, FLASH))
    if not launcher.register_nodes(BACKEND, cudnn, flash, *_DEFAULTS):
        return False
    state, scalar, _ = nothing(device)  # kept for ever
    with torch.inference_mode(False):
        own = [0, 0]
        if OWN in calls():
            launcher.register_own_gradients(SPARSE)
            register_backward(SPARSE_ROWS)
            own = [_handle(tensor) for tensor in sparse(device)]
        launcher.set_node_constants(device.index, state.data_ptr(), scalar.data_ptr(), *own)
    return True


def sparse(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse tensors without elements: they stand for a random state where the gradient is this library's."""
    index, values = torch.zeros(1, 0, dtype=torch.int64, device=device), torch.zeros(0, device=device)
    rows = torch.zeros(2, dtype=torch.int64, device=device)
    with warnings.catch_warnings():  # that such tensors are new to torch, and that their numbers are not checked
        warnings.simplefilter("ignore")
        return (
            torch.sparse_coo_tensor(index, values, (1,), check_invariants=False),
            torch.sparse_csr_tensor(rows, index[0], values, (1, 1), check_invariants=False),
        )


def _handle(tensor: torch.Tensor) -> int:
    """A handle of torch's C interface, which whoever gets it owns."""
    (capsule,) = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors([tensor])
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(pointer(capsule, None))


@functools.cache
def register_backward(key: str) -> torch.library.Library:
    """Register own_gradients() for a dispatch key, as long as the library is kept."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl(BACKWARD, own_gradients, key)  # type: ignore[no-untyped-call]
    return library


_ALIGNMENTS: tuple[Causal | None, ...] = None, "upper_left", "lower_right"
_CAUSAL = {Options(causal=causal, enable_gqa=shared).code: causal for causal in _ALIGNMENTS for shared in (False, True)}
"""The causal mask of a call without other options, by the code of these."""


def own_gradients(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *rest: Any,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """BACKWARD of a call whose gradient is this library's, and which has no plan for it: it has one behind this.

    `rest` has its mask for a bias, and the code of its options for a number of queries.

    Raises:
        UnsupportedProblem: there are too many rows or heads for a launch.
    """
    result, mask, code = (out, lse.squeeze(3)), rest[2], rest[5]
    masks = NONE if mask is None else Masks(mask)
    of = kernels.described((grad_out, None), (query, key, value), result, _CAUSAL[code], scale, masks, ())
    return tuple(kernels.compute(of))


@functools.cache
def calls() -> dict[str, tuple[Any, Any]]:
    """Of OWN, and each operator that this torch has as it was: what calls it, and the keys of autograd and BACKEND."""
    key = torch._C.DispatchKey.__members__
    keys = torch._C.DispatchKeySet(key[BACKEND]) | torch._C.DispatchKeySet(key[f"Autograd{BACKEND}"])
    found: dict[str, tuple[Any, Any]] = {}
    for name in (CUDNN, FLASH):
        operator = getattr(getattr(torch.ops.aten, name, None), "default", None)
        if operator is not None and str(operator._schema) == f"aten::{name}{SCHEMAS[name]}":
            found[name] = operator._handle.redispatch_boxed, keys
    backward = getattr(getattr(torch.ops.aten, BACKWARD, None), "default", None)
    handles = hasattr(getattr(torch._C, "_aoti", None), "unsafe_alloc_void_ptrs_from_tensors")
    if CUDNN in found and handles and str(getattr(backward, "_schema", "")) == BACKWARD_SCHEMA:
        found[OWN] = found[CUDNN]
    return found
