"""The public calls, sdpa() and explain(). The hot path is the first lines of sdpa(); the rest runs once per shape."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch

from microsdpa import arguments, torch_cpu
from microsdpa.errors import InvalidArgument, UnsupportedProblem
from microsdpa.jit import is_compiled
from microsdpa.jit.signature import signature
from microsdpa.problem import ELEMENT_BYTES, VECTOR_BYTES, Causal, Problem
from microsdpa.runtime import launcher
from microsdpa.select import select
from microsdpa.specs import FAMILIES, KernelSpec, emulated_target

_launch = launcher.launch
_allocate_lse = launcher.allocate_lse


def _option_codes() -> dict[tuple[object, ...], int]:
    """A number for every valid combination of (is_causal, causal, enable_gqa, impl), the plans' key for them."""
    impls = {"auto": 0}
    for index, family in enumerate(FAMILIES, start=1):
        impls |= {family.name: index, family.short_name: index}
    alignments: dict[tuple[bool, str | None], int] = {
        (False, None): 0,
        (True, None): 1,
        (True, "upper_left"): 1,
        (False, "upper_left"): 1,
        (False, "lower_right"): 2,
    }
    return {
        (*causal, gqa, impl): causal_code | gqa << 2 | impl_code << 3
        for (causal, causal_code), gqa, (impl, impl_code) in product(alignments.items(), (False, True), impls.items())
    }


OPTIONS = _option_codes()


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool = False,
    causal: Causal | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Scaled dot-product attention: softmax(scale * Q K^T + mask) V, exact, forward only.

    Arithmetic and softmax are FP32; inputs and output are FP16 or BF16. Rows that see no key give zeros (LSE -inf).
    Calls are asynchronous on the current stream of the tensors' device and may be captured in a CUDA graph.

    Args:
        query: [B, H, S_q, D], float16 or bfloat16, any strides with a unit stride along D.
        key: [B, H_kv, S_k, D], like query.
        value: [B, H_kv, S_k, D], like query.
        is_causal: query i sees keys j <= i, aligned to the upper left, as in torch.
        causal: the alignment by name: "upper_left", the same as is_causal=True, or "lower_right", where query i sees
            keys j <= i + S_k - S_q, as in the FlashAttention libraries. torch.nn.attention.bias has the same names.
        scale: factor of Q K^T; 1/sqrt(D) when None.
        enable_gqa: let H be a multiple of H_kv; query head h reads key head h // (H / H_kv).
        return_lse: also return the natural logarithm of the softmax's denominator, [B, H, S_q] in FP32.
        out: [B, H, S_q, D] tensor to write to; it must not overlap an input. Else an output is allocated in the
            memory order of query.
        impl: "auto", or the name of one kernel, such as "ladder/01_scalar", which is then never replaced by another.
            "emulate", or "emulate:" and a kernel's name, runs the kernel on CPU tensors in the emulator, slowly and
            with every access checked.

    Returns:
        The output, or (output, LSE) with return_lse.

    Raises:
        InvalidArgument: an argument that no call could accept.
        UnsupportedProblem: a call that no kernel computes: its reason and the nearest supported problem are named.
        CompileError: the kernel does not compile on this machine.
    """
    try:
        options = OPTIONS[is_causal, causal, enable_gqa, impl]
        if not torch.is_grad_enabled() or not (
            query.requires_grad or key.requires_grad or value.requires_grad or (out is not None and out.requires_grad)
        ):
            lse = _allocate_lse(query) if return_lse else None
            result = _launch(query, key, value, out, lse, options, scale)
            if result is not None:
                if out is not None:
                    result = out
                return result if lse is None else (result, lse)
    except (AttributeError, BufferError, KeyError, RuntimeError, TypeError, ValueError):
        pass  # the checks below say which argument is wrong; a launch that failed for another reason fails there again
    return _first_call(query, key, value, is_causal, causal, scale, enable_gqa, return_lse, out, impl)


def _first_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    causal: Causal | None,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    out: torch.Tensor | None,
    impl: str,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Validate a call that has no plan, make the plan, and launch; also all calls that no kernel is needed for."""
    alignment, scale = validate_call(query, key, value, is_causal, causal, scale, enable_gqa, out, impl)
    if is_empty(query, key):
        result = torch.zeros_like(query) if out is None else out.zero_()
        lse = torch.full(query.shape[:3], -torch.inf, dtype=torch.float32, device=query.device)
        return (result, lse) if return_lse else result

    if emulated(impl):
        result, emulated_lse = _emulate(query, key, value, alignment, scale, return_lse, out, impl)
        return result if emulated_lse is None else (result, emulated_lse)
    if query.device.type == "cpu":
        _check_cpu_impl(impl)
        result, cpu_lse = torch_cpu.attend(query, key, value, alignment, scale, return_lse)
        result = result if out is None else out.copy_(result)
        return result if cpu_lse is None else (result, cpu_lse)

    options = OPTIONS[is_causal, causal, enable_gqa, impl]
    register(query, key, value, out, alignment, impl, options)
    gpu_lse = _allocate_lse(query) if return_lse else None
    result = launcher.prepared_call(query, key, value, out, options, scale)(query, key, value, out, gpu_lse)
    result = result if out is None else out
    return result if gpu_lse is None else (result, gpu_lse)


def validate_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    causal: Causal | None,
    scale: float | None,
    enable_gqa: bool,
    out: torch.Tensor | None,
    impl: str,
) -> tuple[Causal | None, float | None]:
    """Check all arguments; gives the causal alignment and the scale."""
    alignment = _validate(query, key, value, is_causal, causal, scale, enable_gqa, impl)
    arguments.check_grad(query, key, value)
    if out is not None:
        inputs = (query, key, value)
        meets = isinstance(out, torch.Tensor) and any(arguments.memory_ranges_meet(out, t) for t in inputs)
        arguments.check_out(out, query, meets)
    return alignment, arguments.check_scale(scale)


def is_empty(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether there is nothing to compute."""
    return query.numel() == 0 or key.shape[2] == 0


def _check_cpu_impl(impl: str) -> None:
    """Refuse to replace a kernel that was asked for by name."""
    if impl != "auto":
        raise UnsupportedProblem(
            f"impl {impl!r} runs on CUDA tensors and query is on the CPU",
            nearest=f"CUDA tensors; on the CPU impl='auto', which is torch's own, or impl='emulate:{impl}'",
        )


def register(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor | None,
    alignment: Causal | None,
    impl: str,
    options: int,
) -> None:
    """Compile the kernel for validated CUDA tensors and register the plan of the call."""
    problem = _problem(query, key, value, out, alignment)
    launcher.prepare(problem, select(problem, impl).spec, query, key, value, out, options)


def emulated(impl: str) -> bool:
    """Whether `impl` asks for the emulator."""
    return impl.split(":")[0] == "emulate"


def _emulate(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: Causal | None,
    scale: float | None,
    return_lse: bool,
    out: torch.Tensor | None,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a kernel in the emulator."""
    from microsdpa.emulate import run  # not imported with the package: few programs need it

    kernel = impl.partition(":")[2] or "auto"
    problem = _emulated_problem(query, key, value, out, causal, kernel)
    spec = select(problem, kernel).spec
    out = torch.empty_like(query) if out is None else out
    lse = torch.empty(query.shape[:3], dtype=torch.float32) if return_lse else None
    run.attention(spec, problem, query, key, value, out, lse, scale)
    return out, lse


def _emulated_problem(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor | None,
    causal: Causal | None,
    kernel: str,
) -> Problem:
    if query.device.type != "cpu":
        raise UnsupportedProblem(
            f"impl 'emulate' runs on CPU tensors and query is on {query.device}", nearest="query.cpu(), or impl='auto'"
        )
    tensors = [tensor for tensor in (query, key, value, out) if tensor is not None]
    alignment = VECTOR_BYTES if all(map(arguments.is_aligned, tensors)) else 0
    return _problem_of(query, key, value, out, causal, alignment, emulated_target(kernel))


def _validate(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    causal: Causal | None,
    scale: float | None,
    enable_gqa: bool,
    impl: str,
) -> Causal | None:
    """Check what the call and its explanation share; gives the causal alignment."""
    arguments.check_impl(impl)
    alignment = arguments.check_causal(is_causal, causal)
    arguments.check_scale(scale)
    arguments.check_tensors(query, key, value, enable_gqa)
    if query.device.type not in ("cpu", "cuda"):
        raise InvalidArgument(
            "query",
            expected="a tensor on a CUDA device or the CPU",
            got=str(query.device),
            hint="move it to CUDA",
        )
    return alignment


def _problem(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor | None,
    causal: Causal | None,
) -> Problem:
    """The problem that validated CUDA tensors pose.

    Raises:
        UnsupportedProblem: the machine's driver or GPU cannot run a kernel.
    """
    if reason := launcher.device_error():
        raise UnsupportedProblem(reason, nearest="CPU tensors with impl='auto'")
    alignment = launcher.alignment(query, key, value, out)
    target = launcher.target_of_device(query.device)
    return _problem_of(query, key, value, out, causal, alignment, target)


def _problem_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor | None,
    causal: Causal | None,
    alignment: int,
    target: str,
) -> Problem:
    dtype = arguments.DTYPES[query.dtype]
    return Problem(
        batch=query.shape[0],
        heads=query.shape[1],
        heads_kv=key.shape[1],
        seqlen_q=query.shape[2],
        seqlen_k=key.shape[2],
        head_dim=query.shape[3],
        dtype=dtype,
        causal=causal,
        alignment=alignment or ELEMENT_BYTES[dtype],
        bulk=all(arguments.is_bulk_addressable(t) for t in (query, key, value, out) if t is not None),
        target=target,
    )


@dataclass(frozen=True)
class Explanation:
    """What sdpa would run for a call, and why.

    Attributes:
        runs: the kernel's name, or "torch" for torch's own attention.
        reason: why.
        spec: the kernel's configuration; None for torch.
        signature: the compiled kernel's identity; None for torch and in the emulator.
        compiled: whether the kernel is in memory or in the cache; None where there is no signature.
        rejected: (kernel, reason) of every candidate tried before.
    """

    runs: str
    reason: str
    spec: KernelSpec | None = None
    signature: str | None = None
    compiled: bool | None = None
    rejected: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """A few lines for a person."""
        lines = [f"runs       {self.runs}", f"because    {self.reason}"]
        if self.spec:
            lines.append(f"kernel     {self.spec.expression}")
        if self.signature:
            lines.append(f"signature  {self.signature} ({'compiled' if self.compiled else 'not compiled yet'})")
        lines += [f"rejected   {name}: {reason}" for name, reason in self.rejected]
        return "\n".join(lines)


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool = False,
    causal: Causal | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    impl: str = "auto",
) -> Explanation:
    """What sdpa would run for these arguments, without running or compiling it.

    Arguments and errors are those of sdpa.
    """
    alignment = _validate(query, key, value, is_causal, causal, scale, enable_gqa, impl)
    return explanation(query, key, value, None, alignment, impl)


def explanation(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor | None,
    alignment: Causal | None,
    impl: str,
) -> Explanation:
    """What runs for validated arguments."""
    if is_empty(query, key):
        return Explanation(
            "torch", "there is nothing to compute: the output is empty, or zeros where there are no keys"
        )
    if emulated(impl):
        kernel = impl.partition(":")[2] or "auto"
        problem = _emulated_problem(query, key, value, out, alignment, kernel)
        spec = select(problem, kernel).spec
        return Explanation(f"emulate:{spec.name}", "impl asks for the emulator, on the CPU", spec)
    if query.device.type == "cpu":
        _check_cpu_impl(impl)
        return Explanation("torch", "the tensors are on the CPU, where impl='auto' uses torch's own attention")
    problem = _problem(query, key, value, out, alignment)
    selection = select(problem, impl)
    return Explanation(
        runs=selection.spec.name,
        reason="impl names it" if impl != "auto" else "it is the first kernel that computes this problem",
        spec=selection.spec,
        signature=signature(selection.spec, problem.target),
        compiled=all(is_compiled(stage, problem.target) for stage in selection.spec.stages),
        rejected=tuple((name, rejection.reason) for name, rejection in selection.rejections),
    )
