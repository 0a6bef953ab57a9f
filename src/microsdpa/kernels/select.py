"""Selection: from a problem to the kernel that computes it, with the reason of every rejection."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from microsdpa.errors import UnsupportedProblem
from microsdpa.kernels import Family, KernelSpec, Rejection, oversized, policy
from microsdpa.kernels.problem import VECTOR_BYTES, Problem
from microsdpa.kernels.prologue.spec import rows
from microsdpa.kernels.registry import family_named
from microsdpa.kernels.spec import with_heads_as_queries


@dataclass(frozen=True)
class Selection:
    """The chosen specification, and why every family tried before it was rejected."""

    spec: KernelSpec
    rejections: tuple[tuple[str, Rejection], ...]

    @property
    def reasons(self) -> tuple[tuple[str, str], ...]:
        """(kernel, why it was rejected)."""
        return tuple((name, rejection.reason) for name, rejection in self.rejections)

    @property
    def wishes(self) -> tuple[tuple[str, str], ...]:
        """(kernel, the nearest problem that it would compute)."""
        return tuple((name, rejection.nearest) for name, rejection in self.rejections)


def _refuse_operands(problem: Problem, family: Family) -> Rejection | None:
    """Why a family cannot apply the problem's mask, dropout, norms, rotary embedding or output; None when it can."""
    if problem.mask is not None and problem.mask.tensor in ("int32", "uint8") and family.masks and not family.ranges:
        return Rejection(f"it does not know {problem.mask}", "an attn_mask of booleans")
    if problem.dropout and not family.dropout:
        return Rejection("it drops no probabilities", "dropout_p=0.0")
    if problem.value_dim and not family.value_dims:
        other = f"it has one head dimension for Q, K and V, not {problem.head_dim} and {problem.value_dim}"
        return Rejection(other, f"a value padded to {problem.head_dim} columns")
    if problem.continued and not family.continues:
        return Rejection("it does not go on from an output of other keys", "continue_from=None")
    if problem.prologue is not None and not family.prologue:
        return Rejection(f"it takes Q and K as they are, without {problem.prologue}", "rotary, q_norm and k_norm None")
    if problem.mask is None or family.masks:
        return None
    return Rejection(f"it knows the causal mask only, not {problem.mask}", f"a call without {problem.mask}")


def _refuse_layout(problem: Problem, spec: KernelSpec) -> Rejection | None:
    """Why the tensor maps of `spec` cannot describe the problem's tensors; None when they can."""
    if problem.alignment >= VECTOR_BYTES and problem.bulk:
        return None
    if not any(stage.tensor_maps for stage in spec.stages):
        return None
    if problem.alignment < VECTOR_BYTES:
        return Rejection(
            "a row of a tensor does not start on 16 bytes, as bulk copies need",
            "tensors whose address and outer strides are multiples of 16 bytes, such as .contiguous() gives",
        )
    return Rejection(
        "a stride of a tensor is 2**40 bytes or more, which bulk copies cannot address",
        "tensors whose strides are smaller, such as .contiguous() gives",
    )


def _without_prologue(problem: Problem) -> Problem:
    return replace(problem, prologue=None)


def _kernel_ahead(problem: Problem, impl: str) -> KernelSpec | None:
    """The kernel that changes Q and K ahead of attention; None where attention's own launch does, or no kernel can.

    A kernel that is named does it itself if it can.
    """
    if problem.prologue is None:
        return None
    if impl == "auto":
        in_launch = not problem.value_dim and policy.changes_in_launch(problem)
    else:
        family = family_named(impl)
        in_launch = family is not None and family.prologue and isinstance(family.specify(problem), KernelSpec)
    found = None if in_launch else rows(problem)
    return found if isinstance(found, KernelSpec) else None


@functools.lru_cache(maxsize=1024)
def behind(ahead: KernelSpec, spec: KernelSpec) -> KernelSpec:
    """`spec` with a kernel ahead of all its own: the same object for the same two."""
    return replace(spec, preparation=behind(ahead, spec.preparation) if spec.preparation else ahead)


def chosen(problem: Problem, impl: str = "auto") -> KernelSpec | None:
    """What select() chooses, without its reasons and in a fifth of the time; None where it raises."""
    if problem.prologue is not None and (ahead := _kernel_ahead(problem, impl)):
        found = chosen(_without_prologue(problem), impl)
        return None if found is None or oversized(problem, ahead) else behind(ahead, found)
    if impl == "auto" and policy.takes_heads_as_queries(problem):
        found = chosen(problem.heads_as_queries)
        if found is not None:
            return with_heads_as_queries(found)
    if impl == "auto" and (shared := policy.with_shared_tiles(problem)):
        return shared
    # Every family has the operands that every call has.
    further = problem.dropout or problem.value_dim or problem.continued
    plain = problem.mask is None and problem.prologue is None and not further
    # A new size waits for this: what no kernel changes is asked once.
    laid_out = problem.alignment >= VECTOR_BYTES and problem.bulk
    for family in policy.in_turn(problem) if impl == "auto" else policy.candidates(problem, impl):
        if not plain and _refuse_operands(problem, family):
            continue
        result = family.specify(problem)
        if not isinstance(result, KernelSpec) or oversized(problem, result):
            continue
        if laid_out or not _refuse_layout(problem, result):
            return result
    return None


def select(problem: Problem, impl: str = "auto") -> Selection:
    """Choose the kernel for `problem` among those that `impl` admits.

    Pure: the answer depends on the arguments alone.

    Raises:
        UnsupportedProblem: every kernel rejected the problem; the reasons are in the message.
    """
    ahead = _kernel_ahead(problem, impl)
    if ahead and not oversized(problem, ahead):
        found = select(_without_prologue(problem), impl)
        return replace(found, spec=behind(ahead, found.spec))
    if impl == "auto" and policy.takes_heads_as_queries(problem) and chosen(as_queries := problem.heads_as_queries):
        found = select(as_queries)
        return replace(found, spec=with_heads_as_queries(found.spec))
    if impl == "auto" and (shared := policy.with_shared_tiles(problem)):
        reason = policy.other_than_shared_tiles(problem)
        return Selection(shared, tuple((family.name, reason) for family in policy.candidates(problem, impl)))
    rejections: list[tuple[str, Rejection]] = []
    for family in policy.candidates(problem, impl):
        result = _refuse_operands(problem, family) or family.specify(problem)
        if isinstance(result, KernelSpec):
            refusal = _refuse_layout(problem, result) or oversized(problem, result)
            refusal = refusal or (policy.skip_reason(family, problem) if impl == "auto" else None)
            if refusal is None:
                return Selection(result, tuple(rejections))
            result = refusal
        rejections.append((family.name, result))
    reasons = "; ".join(f"{name}: {rejection.reason}" for name, rejection in rejections)
    nearest = _nearest(problem, impl, [rejection for _, rejection in rejections])
    raise UnsupportedProblem(reasons or f"no kernel is called {impl!r}", nearest=nearest)


def _nearest(problem: Problem, impl: str, rejections: list[Rejection]) -> str:
    """The least change that would have the problem computed.

    It is the nearest head dimension that one of the kernels computes, or else what the last and most general one wants.
    """
    if not rejections:
        return "impl='auto'"
    dims = {rejection.head_dim for rejection in rejections} - {0}
    for head_dim in sorted(dims, key=lambda d: (abs(d - problem.head_dim), -d)):
        if chosen(replace(problem, head_dim=head_dim), impl) is not None:
            return f"head_dim {head_dim}"
    return rejections[-1].nearest
