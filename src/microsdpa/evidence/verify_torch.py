"""F.scaled_dot_product_attention with microsdpa enabled, over torch's test cases, against torch's math in FP64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import microsdpa
from microsdpa import reference
from microsdpa.evidence import compare, results, survey
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.step import Progress, Step, no_progress
from microsdpa.evidence.torch_cases import Call, TorchCase, all_cases, corners, sample
from microsdpa.execution import dropout
from microsdpa.jit.signature import code_signature
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.problem import capability_of
from microsdpa.kernels.select import select
from microsdpa.runtime import launcher

OURS, TORCHS, REFUSED = "microsdpa", "torch", "refused"
EMULATED_WORK = 2**20
"""Multiplications of Q K^T that are worth the emulator's time."""
NOT_RECORDED = "Not recorded yet: `microsdpa verify --torch-cases --output benchmarks/results` on a GPU records it.\n"


@dataclass(frozen=True)
class Outcome:
    """What one call came to.

    Attributes:
        by: OURS; TORCHS, where microsdpa leaves the call to torch; REFUSED, where torch refuses it and so does the
            enabled function, in torch's words.
        failure: empty when that is right.
        errors: of an output of OURS.
        allowed: what they may be.
    """

    name: str
    by: str
    failure: str = ""
    errors: compare.Errors | None = None
    allowed: compare.Tolerance | None = None

    @property
    def use(self) -> float:
        """The largest error as a part of what is allowed."""
        if self.errors is None or self.allowed is None or not self.errors.max_abs:
            return 0.0
        return self.errors.max_abs / self.allowed.max_abs if self.allowed.max_abs else float("inf")


def check(name: str, call: Call, impl: str = "auto") -> Outcome:
    """Run a call enabled, and hold it against torch's math backend in FP64, or torch's own function where it runs.

    `impl` is that of microsdpa.sdpa. The tolerance is twice the error of plain arithmetic in the inputs' type and one
    rounding.
    """
    arguments, options = call
    if options.get("dropout_p") and impl == "auto" and arguments[0].device.type == "cpu":
        return _as_torch(name, arguments, options)  # torch's own, whose mask is its own
    state = _random_state(arguments[0].device) if options.get("dropout_p") else None
    try:
        with microsdpa.enabled(strict=True, impl=impl):
            out = F.scaled_dot_product_attention(*arguments, **options)
    except (microsdpa.UnsupportedProblem, RuntimeError, ValueError):
        return _as_torch(name, arguments, options)
    if state is None:
        expected, eager = _exact(*arguments, **options), _eager(*arguments, **options)
    else:
        expected, eager = (
            _eager(*arguments, **(options | {"rng_state": state, "function": function}))
            for function in (reference.oracle, reference.eager)
        )
    errors, allowed = compare.measure(out, expected), compare.tolerance(eager, expected, out.dtype)
    failure = "" if allowed.admits(errors) else f"output differs from FP64: {errors}, allowed {allowed}"
    if out.dtype != arguments[0].dtype:
        failure = f"expected an output of {arguments[0].dtype}, got {out.dtype}"
    return Outcome(name, OURS, failure, errors, allowed)


def _as_torch(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Outcome:
    """A call that is left to torch: the same bits, or the same refusal."""
    found: list[Any] = []
    for enabled in (False, True):
        torch.manual_seed(0)  # of a dropout
        try:
            with _without_a_broken_backend(options), microsdpa.enabled() if enabled else contextlib.nullcontext():
                found.append(F.scaled_dot_product_attention(*arguments, **options))
        except (RuntimeError, ValueError) as error:
            found.append(error)
    theirs, ours = found
    if isinstance(theirs, Exception):
        same = type(ours) is type(theirs) and str(ours) == str(theirs)
        return Outcome(name, REFUSED, "" if same else f"torch refuses with {theirs!r}; enabled, it is {ours!r}")
    same = isinstance(ours, torch.Tensor) and all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(_parts(ours), _parts(theirs), strict=True)
    )
    return Outcome(name, TORCHS, "" if same else f"torch's own function gives another result: {ours!r}")


def _without_a_broken_backend(options: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """torch's cuDNN backend refuses a dropout of everything once; asked a second time, it ends the process (2.11)."""
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(others) if options.get("dropout_p") == 1.0 else contextlib.nullcontext()


def _parts(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    return tensor.unbind() if tensor.is_nested else (tensor,)


def _written_out(mask: Any, device: torch.device) -> Any:
    """A mask as a plain tensor; those of torch.nn.attention.bias have none until asked."""
    return mask._materialize(device) if hasattr(mask, "_materialize") else mask


def _exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None, **options: Any) -> Any:
    """torch's math backend on FP64 inputs; rows that see no key are zeros there too."""
    mask = _written_out(mask, query.device)
    if mask is not None and mask.is_floating_point():
        mask = mask.double()
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query.double(), key.double(), value.double(), mask, **options)


def _eager(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    **rest: Any,
) -> Any:
    function = rest.pop("function", reference.eager)
    rest.pop("enable_gqa", None)  # grouped heads are what they are without it
    causal = "upper_left" if is_causal else None
    mask = _written_out(mask, query.device)
    return function(query, key, value, causal=causal, scale=scale, attn_mask=mask, **rest)[0]


def _random_state(device: torch.device) -> torch.Tensor:
    """Seed torch's generators, and give the seed and offset that the next call takes."""
    torch.manual_seed(0)
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index]
        return torch.tensor([generator.initial_seed(), generator.get_offset()])
    state = dropout.draw(device)
    torch.manual_seed(0)
    return state


def _row(case: TorchCase, outcomes: list[tuple[TorchCase, Outcome]], spec: KernelSpec, target: str) -> results.Row:
    """One row for the cases of a family that one kernel ran; `case` is the one with the largest error."""
    failed = [outcome for _, outcome in outcomes if outcome.failure]
    worst = next(outcome for other, outcome in outcomes if other == case)
    problem = case.problem(target)
    shape = Case(case.batch, case.heads, case.seqlen_q, case.seqlen_k, case.head_dim, case.heads_kv, case.dtype)
    assert worst.errors is not None
    assert worst.allowed is not None
    return results.row(
        shape,
        version=microsdpa.__version__,
        kernel=spec.name,
        code_signature=code_signature(spec, target),
        target=target,
        requested="auto",
        op="F.scaled_dot_product_attention",
        mask=problem.causal or "none",
        **({"mask_kind": vars(problem.mask)} if problem.mask else {}),
        alignment=problem.alignment,
        mode="verify",
        label=case.family,
        case=str(case),
        cases=len(outcomes),
        passed=len(outcomes) - len(failed),
        error=compare.as_record(worst.errors, worst.allowed),
        status="wrong" if failed else "ok",
        reason=f"{failed[0].name}: {failed[0].failure}" if failed else "",
    )


def step(
    progress: Progress = no_progress,
    count: int | None = None,
    seed: int = 0,
    output: Path | None = None,
    command: str = "microsdpa verify --torch-cases",
) -> Step:
    """torch's cases, or `count` of them at random, and every corner; on the GPU, else in the emulator.

    The emulator gets small problems only, sixteen of them unless `count` says otherwise.
    """
    reason = launcher.device_error()
    device, impl = ("cpu", "emulate") if reason else ("cuda", "auto")
    if reason:
        cases = sample(count or 16, seed, EMULATED_WORK)
        target = "sm_89"
    else:
        cases = list(all_cases()) if count is None else sample(count, seed)
        target = launcher.target_of_device()
        if capability_of(target) < (8, 0):
            return Step("verify", "not run", f"kernels need sm_80 or newer, and this is {target}")
        survey.compile_ahead(case.problem(target) for case in cases)
    advance = progress("verify", len(cases) + len(corners(device)))
    outcomes: list[Outcome] = []
    groups: dict[tuple[str, str], list[tuple[TorchCase, Outcome]]] = {}
    for case in cases:
        outcome = check(str(case), case.call(device), impl)
        if outcome.by != OURS and not outcome.failure:
            outcome = Outcome(outcome.name, outcome.by, "microsdpa computes this case, and left it to torch")
        outcomes.append(outcome)
        if outcome.by == OURS:
            groups.setdefault((case.family, select(case.problem(target)).spec.name), []).append((case, outcome))
        advance(str(case))
    edges = []
    for name, make in corners(device).items():
        edges.append(check(name, make(), impl))
        advance(name)
    rows = []
    for members in groups.values():
        worst = max(members, key=lambda member: member[1].use)[0]
        rows.append(_row(worst, members, select(worst.problem(target)).spec, target))
    failed = [outcome for outcome in (*outcomes, *edges) if outcome.failure]
    table = [["cases", "kernel", "passed", "largest error / tolerance"]]
    table += [
        [family, kernel, f"{sum(not o.failure for _, o in members)} of {len(members)}", f"{_use(members):.2f}"]
        for (family, kernel), members in groups.items()
    ]
    table += [[f"corner: {o.name}", o.by, o.failure or "passed", f"{o.use:.2f}"] for o in edges]
    where = "in the emulator" if reason else "on the GPU"
    summary = (
        f"{len(outcomes) + len(edges) - len(failed)} of {len(outcomes) + len(edges)} calls of torch's tests passed "
        f"{where}, {len(cases)} of {len(all_cases())} cases and {len(edges)} corners"
    )
    if failed:
        summary += f"; first failure: {failed[0].name}: {failed[0].failure}"
    result = results.make("verify_torch", command, rows)
    if output is not None:
        summary += f"; wrote {results.write(result, output)}"
    return Step("verify", "failed" if failed else "passed", summary, table, data=result)


def _use(members: list[tuple[TorchCase, Outcome]]) -> float:
    return max(outcome.use for _, outcome in members)


def markdown(result: results.Result, is_stale: Callable[[results.Row, str], bool]) -> str:
    """One line for the cases of a family that one kernel ran."""
    lines = [["torch's tests", "kernel", "calls within the tolerance", "largest error / tolerance"]]
    lines.append(["---"] * 2 + ["---:"] * 2)
    for row in result["rows"]:
        stale = " (stale)" if is_stale(row, row["target"]) else ""
        error = row["error"]
        use = error["max_abs"] / error["tolerance"]["max_abs"] if error["max_abs"] else 0.0
        lines.append([row["label"], row["kernel"] + stale, f"{row['passed']} of {row['cases']}", f"{use:.2f}"])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
