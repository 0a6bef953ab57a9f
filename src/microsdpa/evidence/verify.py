"""Verification: every case through one implementation, against the FP64 oracle."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

import microsdpa
from microsdpa import reference
from microsdpa.emulate.run import Schedule, scheduled
from microsdpa.evidence import compare, results
from microsdpa.evidence.inputs import Case, make, make_masks, masks_of
from microsdpa.jit.signature import code_signature
from microsdpa.kernels.problem import ELEMENT_BYTES, VECTOR_BYTES, Problem
from microsdpa.runtime import launcher


@dataclass(frozen=True)
class CaseResult:
    """Outcome of one case: `failure` is empty when it passed."""

    case: Case
    errors: compare.Errors
    tolerance: compare.Tolerance
    failure: str

    @property
    def passed(self) -> bool:
        """Whether the case passed."""
        return not self.failure


def check(case: Case, device: str, impl: str) -> CaseResult:
    """Run one case twice, once into a poisoned output; compare output and LSE with the oracle, and the runs bitwise.

    The references are computed on the CPU: they depend on nothing that is being tested, and a checker of device code
    (compute-sanitizer) sees little but the kernel.
    """
    tensors = make(case)
    masks = make_masks(case)
    expected, expected_lse = reference.oracle(*tensors, causal=case.causal, scale=case.scale, **masks)
    eager, eager_lse = reference.eager(*tensors, causal=case.causal, scale=case.scale, **masks)
    allowed = compare.tolerance(eager, expected, eager.dtype)
    allowed_lse = compare.tolerance(eager_lse, expected_lse, torch.float32)
    query, key, value = make(case, device)
    masks = make_masks(case, device)

    def run(out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        result = microsdpa.sdpa(
            query,
            key,
            value,
            **case.options,
            return_lse=True,
            out=out,
            impl=impl,
            **masks,
        )
        assert isinstance(result, tuple)
        return result[0].cpu(), result[1].cpu()

    # The emulator also gets another order of threads, and early instead of late copies: neither may change a bit.
    out, lse = run(None)
    with scheduled(Schedule(seed=1, late=False)):
        again, lse_again = run(torch.full_like(query, torch.nan))
    errors, lse_errors = compare.measure(out, expected), compare.measure(lse, expected_lse)
    failure = ""
    if not allowed.admits(errors):
        failure = f"output differs from the oracle: {errors}, allowed {allowed}"
    elif not allowed_lse.admits(lse_errors):
        failure = f"LSE differs from the oracle: {lse_errors}, allowed {allowed_lse}"
    elif not torch.equal(out, again) or not torch.equal(lse, lse_again):
        failure = "a second run, into a poisoned output, gave other bits"
    return CaseResult(case, errors, allowed, failure)


def problem_of(case: Case, target: str) -> Problem:
    """The problem that the case poses, with its masks and the alignment of its tensors."""
    return dataclasses.replace(case.problem(target), mask=masks_of(case).kind_in_memory, alignment=_alignment(case))


def _alignment(case: Case) -> int:
    return ELEMENT_BYTES[case.dtype] if case.layout == "unaligned" else VECTOR_BYTES


def as_row(result: CaseResult, impl: str, device: str) -> results.Row:
    """The row of a result file."""
    case = result.case
    identity: dict[str, object] = {"impl": "torch", "version": torch.__version__}
    query, key, value = make(case, device)
    masks = make_masks(case, device)
    options: dict[str, object] = {"scale": case.scale, "enable_gqa": case.kv_heads != case.heads, "impl": impl}
    found = microsdpa.explain(query, key, value, causal=case.causal, **options, **masks)  # type: ignore[arg-type]
    kind = masks_of(case, device).kind_in_memory
    if found.spec is not None:
        target = launcher.target_of_device() if device == "cuda" else None
        identity = {
            "impl": "microsdpa",
            "version": microsdpa.__version__,
            "kernel": found.spec.name,
            "signature": found.signature,
            "code_signature": code_signature(found.spec, target) if target else None,
            "target": target,
            "requested": impl,
            **({"mask_kind": dataclasses.asdict(kind)} if kind else {}),
            "alignment": _alignment(case),
        }
    return results.row(
        case,
        mode="verify",
        error=compare.as_record(result.errors, result.tolerance),
        status="ok" if result.passed else "wrong",
        reason=result.failure,
        case=str(case),
        **identity,
    )
