"""Checks of the tensors of a call, and of its options: each names the argument, what was expected, came and helps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from difflib import get_close_matches

import torch

from microsdpa.errors import InvalidArgument, UnsupportedProblem
from microsdpa.kernels import EIGHT_BIT_FAMILIES, FAMILIES, ONE_LENGTH, VARLEN_FAMILIES, family_named
from microsdpa.kernels.problem import LARGEST_FACTOR, SMALLEST_FACTOR, VECTOR_BYTES, Causal, DType

DTYPES: dict[torch.dtype, DType] = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
MAX_SEQLEN = 2**30
TENSOR_MAP_STRIDE_LIMIT = 2**40
"""Bytes that every stride of a tensor map is below."""


def kernel_of(impl: str) -> tuple[str, bool]:
    """What `impl` names: "auto" or a kernel, and whether it is to run in the emulator."""
    place, _, kernel = impl.partition(":")
    return (kernel or "auto", True) if place == "emulate" else (impl, False)


def check_impl(impl: object, eight_bit: bool = False, varlen: bool = False) -> str:
    """`impl` when it names the automatic choice or a kernel for such a call, on a GPU or in the emulator."""
    kernel = kernel_of(impl)[0] if isinstance(impl, str) else ""
    family = family_named(kernel)
    fits = family is not None and (family.eight_bit, family.varlen) == (eight_bit, varlen)
    fits |= kernel == ONE_LENGTH.name and not eight_bit
    if not isinstance(impl, str) or (kernel != "auto" and not fits):
        families = EIGHT_BIT_FAMILIES if eight_bit else VARLEN_FAMILIES if varlen else (*FAMILIES, ONE_LENGTH)
        known = ", ".join(repr(family.name) for family in families)
        operands = "for 8-bit operands " if eight_bit else "for sequences of many lengths " if varlen else ""
        raise InvalidArgument(
            "impl",
            expected=f"{operands}'auto', 'emulate', or one of {known}, which may follow 'emulate:'",
            got=repr(impl),
            hint=_near(kernel, [family.name for family in families]),
        )
    return impl


def _near(kernel: str, known: Sequence[str]) -> str:
    """What to do about the name of a kernel that there is not."""
    near = get_close_matches(kernel, [*known, "auto", "emulate"], n=3, cutoff=0.5)
    meant = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return f"{meant}use impl='auto' to let microsdpa choose"


def check_causal(is_causal: object, causal: object) -> Causal | None:
    """The causal alignment that `is_causal` and `causal` ask for together."""
    if not isinstance(is_causal, bool):
        raise InvalidArgument("is_causal", expected="a bool", got=repr(is_causal), hint="pass True or False")
    if causal not in (None, "upper_left", "lower_right"):
        raise InvalidArgument(
            "causal",
            expected="None, 'upper_left' or 'lower_right'",
            got=repr(causal),
            hint="upper_left is torch's is_causal, lower_right is FlashAttention's",
        )
    if is_causal and causal == "lower_right":
        raise InvalidArgument(
            "causal",
            expected="'upper_left' or None beside is_causal=True, which aligns upper left as torch does",
            got=repr(causal),
            hint="pass causal='lower_right' alone",
        )
    return "upper_left" if is_causal else causal


def check_scale(scale: object) -> float | None:
    """The softmax scale as a float, or None for 1/sqrt(D)."""
    if scale is None:
        return None
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise InvalidArgument(
            "scale",
            expected="a float or None",
            got=type(scale).__name__,
            hint="pass a Python number, or None for 1/sqrt(D)",
        )
    if not abs(scale) <= LARGEST_FACTOR:  # NaN is not, either
        finite = abs(scale) < math.inf  # an integer may be too long for math.isfinite
        raise InvalidArgument(
            "scale",
            expected="a number of at most 2**127 in magnitude" if finite else "a finite number",
            got=repr(scale),
            hint="pass None for the default, 1/sqrt(D)",
        )
    return float(scale)


def is_positive_factor(number: float) -> bool:
    """Whether float32 holds a positive factor of scores or quantized values."""
    return SMALLEST_FACTOR <= number <= LARGEST_FACTOR


def check_not_nested(**tensors: object) -> None:
    """Refuse nested tensors, which have no strides and partly no shape to look at; what is no tensor passes."""
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.is_nested:
            raise InvalidArgument(
                name,
                expected="a dense tensor",
                got="a nested one",
                hint="pad it with torch.nested.to_padded_tensor and hide the padding by attn_mask",
            )


def check_tensors(query: object, key: object, value: object, enable_gqa: object, one_head_dim: bool = True) -> None:
    """Types, dtypes, devices, shapes and strides of the inputs; `one_head_dim`: value has that of query and key."""
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(
                name,
                expected="a torch.Tensor",
                got=type(tensor).__name__,
                hint="convert it with torch.as_tensor",
            )
    assert isinstance(query, torch.Tensor)
    assert isinstance(key, torch.Tensor)
    assert isinstance(value, torch.Tensor)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dtype not in DTYPES:
            quantized = tensor.dtype in (torch.float8_e4m3fn, torch.int8)
            raise InvalidArgument(
                name,
                expected="torch.float16 or torch.bfloat16",
                got=str(tensor.dtype),
                hint="pass q_scale, k_scale and v_scale with 8-bit values"
                if quantized
                else "convert it, for example with .to(torch.bfloat16)",
            )
        if tensor.dtype != query.dtype:
            raise InvalidArgument(
                name,
                expected=f"{query.dtype}, as query is",
                got=str(tensor.dtype),
                hint="use one dtype for all",
            )
    check_layouts(query, key, value, enable_gqa, one_head_dim)


def check_layouts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: object, one_head_dim: bool = True
) -> None:
    """Devices, shapes and strides of the inputs, whatever their dtypes; see check_tensors()."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _check_tensor(name, tensor)
        if tensor.device != query.device:
            raise InvalidArgument(
                name,
                expected=f"a tensor on {query.device}, as query is",
                got=str(tensor.device),
                hint="move it there",
            )
    if not isinstance(enable_gqa, bool):
        raise InvalidArgument("enable_gqa", expected="a bool", got=repr(enable_gqa), hint="pass True or False")
    _check_shapes(query, key, value, enable_gqa, one_head_dim)


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided:
        raise InvalidArgument(name, expected="a dense tensor", got=str(tensor.layout), hint="call .to_dense()")
    if tensor.dim() != 4:
        raise InvalidArgument(
            name,
            expected="4 dimensions, [B, H, S, D]",
            got=f"{tensor.dim()} dimensions, {list(tensor.shape)}",
            hint="reshape it, or add dimensions with unsqueeze",
        )
    if tensor.stride(3) != 1 and tensor.shape[3] > 1:
        raise InvalidArgument(
            name,
            expected="a stride of 1 along D, the last dimension",
            got=f"strides {tensor.stride()}",
            hint="call .contiguous(), or transpose so that D is last in memory",
        )


def _check_shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool, one_head_dim: bool
) -> None:
    batch, heads, seqlen_q, head_dim = query.shape
    heads_kv, seqlen_k = key.shape[1], key.shape[2]
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape[0] != batch:
            raise InvalidArgument(
                name,
                expected=f"batch size B = {batch}, as query has",
                got=f"shape {list(tensor.shape)}",
                hint="expand it along dimension 0",
            )
        if tensor.shape[3] != head_dim and (name == "key" or one_head_dim):
            both = "query, key and value" if one_head_dim else "query and key"
            raise InvalidArgument(
                name,
                expected=f"head dimension D = {head_dim}, as query has",
                got=f"shape {list(tensor.shape)}",
                hint=f"{both} must have one head dimension",
            )
    if value.shape[1] != heads_kv or value.shape[2] != seqlen_k:
        raise InvalidArgument(
            "value",
            expected=f"H_kv = {heads_kv} and S_k = {seqlen_k}, as key has",
            got=f"shape {list(value.shape)}",
            hint="key and value must have the same heads and lengths",
        )
    if heads_kv != heads and not enable_gqa:
        raise InvalidArgument(
            "key",
            expected=f"{heads} heads, as query has",
            got=f"{heads_kv} heads",
            hint="pass enable_gqa=True to share key heads among query heads",
        )
    if heads and (heads_kv == 0 or heads % heads_kv):
        raise InvalidArgument(
            "key",
            expected=f"a number of heads that divides query's {heads}",
            got=f"{heads_kv} heads",
            hint="each key head serves heads / heads_kv query heads",
        )
    if head_dim == 0:
        raise InvalidArgument("query", expected="a head dimension D >= 1", got="D = 0", hint="pass real heads")
    if value.shape[3] == 0:
        raise InvalidArgument("value", expected="a head dimension D_v >= 1", got="D_v = 0", hint="pass real heads")
    if max(seqlen_q, seqlen_k) > MAX_SEQLEN:
        raise UnsupportedProblem(
            f"sequence length {max(seqlen_q, seqlen_k)} is over {MAX_SEQLEN}", nearest="shorter sequences"
        )


def require_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd would expect a gradient of one of them."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def check_grad(tensors: dict[str, torch.Tensor]) -> None:
    """Refuse inputs whose gradient autograd would expect."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            raise UnsupportedProblem(
                f"{name} requires grad and microsdpa computes the forward pass only",
                nearest=f"calling it under torch.no_grad() or with {name}.detach()",
            )


def output_shape(query: torch.Tensor, value: torch.Tensor) -> tuple[int, ...]:
    """[B, H, S_q, D_v] of a call: query's shape, with the columns of value; of packed tensors alike."""
    return *query.shape[:-1], value.shape[-1]


def new_output(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Memory for the output, in the order of query's: torch.empty_like(query) where value has its head dimension."""
    if value.shape[-1] == query.shape[-1]:
        return torch.empty_like(query)
    shape = output_shape(query, value)
    strides = allocated_strides(shape, query.stride())
    return torch.empty_strided(shape, strides, dtype=query.dtype, device=query.device)


def check_out(
    out: object,
    query: torch.Tensor,
    dtype: torch.dtype,
    inputs: tuple[torch.Tensor, ...],
    columns: int = 0,
    name: str = "out",
) -> None:
    """Type, shape, dtype, device and strides of `out`, whose memory may not meet an input's.

    `columns` is its head dimension; 0 for that of query. `name` is the argument that it comes by.
    """
    check_not_nested(**{name: out})
    if not isinstance(out, torch.Tensor):
        raise InvalidArgument(
            name,
            expected="a torch.Tensor or None",
            got=type(out).__name__,
            hint="pass torch.empty_like(query)",
        )
    whose = "query has" if columns in (0, query.shape[-1]) else "query and value have"
    for what, want, got in (
        ("shape", [*query.shape[:-1], columns or query.shape[-1]], list(out.shape)),
        ("dtype", dtype, out.dtype),
        ("device", query.device, out.device),
    ):
        if want != got:
            raise InvalidArgument(
                name,
                expected=f"{what} {want}, as {whose}",
                got=str(got),
                hint="pass torch.empty_like(query)",
            )
    if out.stride(-1) != 1 and out.shape[-1] > 1:
        raise InvalidArgument(
            name,
            expected="a stride of 1 along D",
            got=f"strides {out.stride()}",
            hint="pass torch.empty_like(query)",
        )
    if out.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument(
            name,
            expected="a tensor that requires no grad",
            got="requires_grad=True",
            hint="pass out.detach()",
        )
    if overlaps_itself(out):
        raise InvalidArgument(
            name,
            expected="a tensor whose elements have memory of their own",
            got=f"shape {list(out.shape)} with strides {out.stride()}",
            hint="pass torch.empty_like(query)",
        )
    if any(memory_ranges_meet(out, tensor) for tensor in inputs):
        raise InvalidArgument(
            name,
            expected="memory that no input uses",
            got="a tensor that overlaps query, key or value",
            hint="pass torch.empty_like(query)",
        )


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor may share memory."""
    reach = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si > 1):
        if stride < reach:
            return True
        reach = stride * (size - 1) + reach
    return False


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether every row of a tensor starts on 16 bytes."""
    return tensor.data_ptr() % VECTOR_BYTES == 0 and _steps_are_aligned(tensor, tensor.stride())


def allocation_is_aligned(tensor: torch.Tensor) -> bool:
    """Whether every row of torch.empty_like(tensor) starts on 16 bytes."""
    return _steps_are_aligned(tensor, allocated_strides(tensor.shape, tensor.stride()))


def _steps_are_aligned(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    steps = [stride for stride, size in zip(strides[:-1], tensor.shape[:-1], strict=True) if size > 1]
    return all(step * tensor.element_size() % VECTOR_BYTES == 0 for step in steps)


def allocated_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides that torch.empty_like gives a tensor of this description: dense, in the order of its memory.

    A tensor on the meta device would say the same, but torch imports sympy for it, which takes seconds.
    """
    order = list(reversed(range(len(shape))))  # dimensions from the innermost to the outermost
    for last in range(1, len(order)):
        moving = last
        for other in reversed(range(last)):
            inner, outer = order[other], order[moving]
            if not strides[inner] or not strides[outer]:
                continue  # a dimension of stride 0 has no place in memory
            if (strides[inner], shape[inner]) <= (strides[outer], shape[outer]):
                break
            order[other], order[moving] = outer, inner
            moving = other
    found, step = [0] * len(order), 1
    for dimension in order:
        found[dimension] = step
        step *= shape[dimension]
    return tuple(found)


def is_bulk_addressable(tensor: torch.Tensor) -> bool:
    """Whether a tensor map can describe the tensor's strides, their alignment aside."""
    if max(tensor.stride()) * tensor.element_size() < TENSOR_MAP_STRIDE_LIMIT:
        return True
    steps = [stride for stride, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if size > 1]
    return all(step * tensor.element_size() < TENSOR_MAP_STRIDE_LIMIT for step in steps)


def memory_ranges_meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the address ranges of two tensors of one device meet."""

    def span(tensor: torch.Tensor) -> tuple[int, int]:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()

    if a.device != b.device or a.numel() == 0 or b.numel() == 0:
        return False
    (a_first, a_end), (b_first, b_end) = span(a), span(b)
    return a_first < b_end and b_first < a_end
