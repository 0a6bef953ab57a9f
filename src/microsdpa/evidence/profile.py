"""`microsdpa profile`: one call under Nsight Compute, its metrics against gates, stored with the kernel's signature."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

import microsdpa
from microsdpa.evidence import ncu, results
from microsdpa.evidence.inputs import Case, make
from microsdpa.evidence.ncu import Launch
from microsdpa.evidence.step import Step
from microsdpa.jit import compile_kernel
from microsdpa.jit.inspect import count_instructions, tensor_instructions
from microsdpa.jit.signature import code_signature, signature
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.problem import target_of
from microsdpa.kernels.select import select
from microsdpa.runtime import launcher

SECTOR_BYTES = 32
LEAST_TENSOR_ACTIVE, LEAST_OCCUPANCY, LEAST_MEMORY_EFFICIENCY, MOST_WAITING = 20.0, 25.0, 0.70, 0.25

Outcome = Literal["passed", "failed", "explained"]


@dataclass(frozen=True)
class Gate:
    """A demand on a kernel: what was found, and whether it is enough or why it need not be."""

    name: str
    found: str
    outcome: Outcome


def gates(launch: Launch, spec: KernelSpec, has_tensor_instructions: bool) -> list[Gate]:
    """The gates of one launch."""
    metrics = launch.metrics
    found = []
    if "e4m3" in " ".join(value for _, value in spec.template_args).lower():
        operations = metrics.get("fp8_tensor_operations", 0.0)
        found.append(_gate("FP8 instructions > 0", f"{operations:.3g} operations", operations > 0))
    # mma.sync shows in the first of these, wgmma in the second.
    active = max(metrics.get("tensor_active_pct", 0.0), metrics.get("warpgroup_active_pct", 0.0))
    reason = "" if has_tensor_instructions else "this kernel has no tensor instructions"
    found.append(_gate("tensor pipe > 20%", f"{active:.1f}%", active > LEAST_TENSOR_ACTIVE, reason))
    occupancy = metrics.get("occupancy_pct", 0.0)
    theoretical = metrics.get("theoretical_occupancy_pct", 0.0)
    found.append(
        _gate(
            "occupancy >= 25%",
            f"{occupancy:.1f}% of {theoretical:.1f}% theoretical",
            occupancy >= LEAST_OCCUPANCY,
            spec.low_occupancy,
        )
    )
    for name, metric in (
        ("loads", "load_bytes_per_sector"),
        ("copies", "async_copy_bytes_per_sector"),
        ("stores", "store_bytes_per_sector"),
    ):
        if bytes_per_sector := metrics.get(metric, 0.0):  # none where the bulk-copy engine moves everything
            share = bytes_per_sector / SECTOR_BYTES
            found.append(_gate(f"efficiency of {name} >= 70%", f"{share:.0%}", share >= LEAST_MEMORY_EFFICIENCY))
    copies = metrics.get("async_copies", 0.0) + metrics.get("bulk_copies", 0.0)
    waiting = stall_shares(metrics).get("long_scoreboard", 0.0)
    found.append(
        _gate(
            "copies overlap arithmetic",
            f"{copies:.0f} asynchronous copies, {waiting:.0%} of stalls wait for global memory",
            copies > 0 and waiting <= MOST_WAITING,
            "" if copies else "this kernel copies synchronously",
        )
    )
    return found


def _gate(name: str, found: str, enough: bool, reason: str = "") -> Gate:
    if enough:
        return Gate(name, found, "passed")
    return Gate(name, f"{found}: {reason}" if reason else found, "explained" if reason else "failed")


def stall_shares(metrics: dict[str, float]) -> dict[str, float]:
    """Share of the stalled warps of each reason, largest first; empty when nothing stalled."""
    stalls = {name.removeprefix("stall_"): value for name, value in metrics.items() if name.startswith("stall_")}
    total = sum(stalls.values())
    ordered = sorted(stalls.items(), key=lambda item: -item[1])
    return {name: value / total for name, value in ordered if value} if total else {}


def step(case: Case, impl: str, output: Path | None, command: str) -> Step:
    """Profile the kernels of one call; the gate is that none of their own gates fails without an explanation.

    Raises:
        ProfilerError: Nsight Compute is missing or forbidden.
        UnsupportedProblem: the kernel does not compute the case.
    """
    if reason := launcher.device_error():
        return Step("profile", "not run", f"Nsight Compute profiles on a GPU: {reason}")
    target = target_of(torch.cuda.get_device_capability())
    problem = case.problem(target)
    spec = select(problem, impl).spec
    job = json.dumps({"case": asdict(case), "impl": impl})
    launches = ncu.profile([sys.executable, "-m", "microsdpa.evidence.profiled"], target, job)
    if len(launches) != len(spec.stages):
        raise ncu.ProfilerError(f"expected {len(spec.stages)} launches of {spec.name}, ncu saw {len(launches)}")
    table = [["kernel", "metric or gate", "value", "outcome"]]
    rows = []
    for stage, launch in zip(spec.stages, launches, strict=True):
        counts = count_instructions(compile_kernel(stage, target).cubin)
        checked = gates(launch, stage, bool(tensor_instructions(counts)))
        failed = [gate for gate in checked if gate.outcome == "failed"]
        table += [
            [stage.name, name, f"{value:,.4g}", ""] for name, value in launch.metrics.items() if "stall" not in name
        ]
        table += [
            [stage.name, f"stalled: {name}", f"{share:.1%}", ""]
            for name, share in list(stall_shares(launch.metrics).items())[:6]
        ]
        table += [[stage.name, gate.name, gate.found, gate.outcome] for gate in checked]
        rows.append(
            results.row(
                case,
                version=microsdpa.__version__,
                kernel=stage.name,
                signature=signature(stage, target),
                code_signature=code_signature(stage, target),
                requested=impl,
                mode="profile",
                metrics=launch.metrics,
                gates=[asdict(gate) for gate in checked],
                launch={"grid": launch.grid, "block": launch.block},
                status="wrong" if failed else "ok",
                reason="; ".join(f"{gate.name}: {gate.found}" for gate in failed),
            )
        )
    result = results.make(f"profile_{_slug(spec.name)}", command, rows)
    bad = [row["reason"] for row in rows if row["reason"]]
    summary = f"{spec.name} on {case}: {'; '.join(bad) if bad else 'every gate passed or is explained'}"
    if output is not None:
        summary += f"; wrote {results.write(result, output)}"
    return Step("profile", "failed" if bad else "passed", summary, table, data=result)


def _slug(kernel: str) -> str:
    return kernel.lower().replace("/", "_").replace("-", "_")


def make_call(case: Case, impl: str) -> None:
    """One call between the profiler's marks, after others that compile and load the kernels."""
    query, key, value = make(case, "cuda")
    out = torch.empty_like(query)

    def call() -> None:
        microsdpa.sdpa(
            query,
            key,
            value,
            **case.options,
            out=out,
            impl=impl,
        )

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
