"""Benchmarks: every implementation on every case of a suite, compared with the oracle before it is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from microsdpa.errors import UnsupportedProblem
from microsdpa.evidence import energy, environment, graphs, results, roofline, statistics, timing
from microsdpa.evidence.devices import DEVICES
from microsdpa.evidence.expectation import Expectation
from microsdpa.evidence.inputs import Case, make
from microsdpa.evidence.peers import Call, Implementation, Tensors

EMPTY_KERNEL = "empty kernel"
MAX_REASON = 240
LAYOUT_NAMES = {"bshd": "[B, S, H, D] memory", "unaligned": "unaligned rows"}
LEAST_SHARE_OF_FLOOR = 0.95
"""A call that took less than this share of its floor did not do the work."""
LEAST_SHARE_OF_EMPTY = 0.5
"""Overlapped launches can be cheaper than separate ones, but no kernel is half of an empty one."""


@dataclass
class _Ready:
    """An implementation whose output is right for the case at hand."""

    implementation: Implementation
    fields: dict[str, object]
    error: dict[str, object]


@dataclass
class CaseBench:
    """The measurement of one case by all implementations, in this process, on the current CUDA device.

    Attributes:
        seed: of the random order of turns.
        device: where the tensors live.
        judge: where outputs are compared with the oracle, if not there; "cpu" keeps its kernels out of the process.
        energy: whether the energy of calls in graphs is measured too, and their time at the power that they draw.
        excluded: reason by implementation, for those that must not be tried again.
        announce: told which implementation is about to run, so that a death of the process can be laid at its door.
        rows: what was found, so far.
    """

    case: Case
    seed: int = 0
    device: str = "cuda"
    judge: str = ""
    energy: bool = False
    excluded: dict[str, str] = field(default_factory=dict)
    announce: Callable[[str], None] = lambda name: None
    rows: list[results.Row] = field(default_factory=list)

    def run(self, implementations: Iterable[Implementation], modes: Sequence[str]) -> list[results.Row]:
        """Rows of every implementation and mode; a refusal, a failure or a wrong answer is a row too."""
        self.input_sets = [make(self.case, self.device)]
        self.tensors = self.input_sets[0]
        self.expectation = self._expectation(self.tensors)
        ready = {}
        for implementation in implementations:
            checked = self._check(implementation, modes)
            if checked is not None:
                ready[title(implementation)] = checked
        for mode in modes:
            self._time(mode, ready)
        return self.rows

    def rehearse(self, implementations: Iterable[Implementation]) -> None:
        """Call every implementation once, so that what it compiles is there; whatever it raises, `run` will report."""
        self.tensors = make(self.case, self.device)
        for implementation in implementations:
            if self._absence(implementation):
                continue
            self.announce(title(implementation))
            try:
                with torch.no_grad(), implementation.context():
                    implementation.bind(self.case, self.tensors, torch.empty_like(self.tensors[0]))()
            except Exception as failure:
                _status_of(implementation, failure)

    def _absence(self, implementation: Implementation) -> str:
        """Why an implementation takes no part; empty when it does."""
        refusal = "" if implementation.takes_masks or not self.case.masks else "it takes no masks"
        return (
            self.excluded.get(title(implementation))
            or implementation.absence
            or refusal
            or implementation.refuses(self.case)
        )

    def _expectation(self, tensors: Tensors) -> Expectation:
        query, key, value = (tensor.to(self.judge or self.device) for tensor in tensors)
        return Expectation(self.case, (query, key, value))

    def _check(self, implementation: Implementation, modes: Sequence[str]) -> _Ready | None:
        """The implementation with its error, or None after rows that say why it is not timed."""
        fields: dict[str, object] = {
            "impl": implementation.name,
            "version": implementation.version,
            "variant": implementation.variant,
            "op": implementation.op,
            "dtype": implementation.arithmetic or self.case.dtype,
        }
        modes = _modes_of(implementation, modes)
        if reason := self._absence(implementation):
            self._refuse(modes, fields, "unavailable", reason)
            return None
        self.announce(title(implementation))
        try:
            fields |= implementation.identity(self.case, self.tensors)
            with torch.no_grad(), implementation.context():
                plain = implementation.stands_for(self.case, self.tensors)
                expectation = self.expectation if plain is None else self._expectation(plain)
                judge = expectation.output.device
                out = torch.full_like(self.tensors[0].to(judge), torch.nan).to(self.device)
                call = implementation.bind(self.case, self.tensors, out)  # it owns memory: alive until compared
                output = implementation.decode(call())
                arithmetic = implementation.rounding or implementation.arithmetic
                error, wrong = expectation.check(output.to(judge), arithmetic)
        except Exception as failure:  # a peer's own
            self._refuse(modes, fields, _status_of(implementation, failure), _reason_of(failure))
            return None
        if wrong:
            self._refuse(modes, fields | {"error": error}, "wrong", wrong)
            return None
        return _Ready(implementation, fields, error)

    def _time(self, mode: str, ready: dict[str, _Ready]) -> None:
        runners: dict[str, timing.Runner] = {}
        taking_part = {name: one for name, one in ready.items() if mode in _modes_of(one.implementation, [mode])}
        for name, one in taking_part.items():
            self.announce(name)
            try:
                with torch.no_grad(), one.implementation.context():
                    runners[name] = _prepare(mode, self._calls(one.implementation, mode))
                if self._sustains(mode):
                    cast("timing.GraphRunner", runners[name]).sustain()
            except Exception as failure:
                self._refuse([mode], one.fields, _status_of(one.implementation, failure), _reason_of(failure))
        if mode in timing.ON_DEVICE:
            runners[EMPTY_KERNEL] = timing.prepare("graph", [graphs.empty_kernel()])

        def around(name: str, turn: Callable[[], list[float]]) -> list[float]:
            if name == EMPTY_KERNEL:
                return turn()
            self.announce(name)
            with torch.no_grad(), taking_part[name].implementation.context():
                return turn()

        measured = timing.interleave(runners, self.seed, around)
        state = _state_under_load(runners)
        joules = self._energies(mode, runners, measured, around)
        for name, samples in measured.items():
            if name == EMPTY_KERNEL:
                empty: dict[str, object] = {"impl": EMPTY_KERNEL, "op": "empty", "version": "", "kernel": None}
                self._record(mode, empty, samples, state)
                continue
            one = taking_part[name]
            if reason := self._impossible(one.implementation, runners[name], samples, measured.get(EMPTY_KERNEL)):
                self._refuse([mode], one.fields, "wrong", reason)
            else:
                fields = one.fields | {"error": one.error, "nodes": _nodes_per_call(runners[name])}
                if self._sustains(mode):
                    fields["settled_ms"] = timing.SETTLING_US / 1e3
                self._record(mode, fields, samples, state | joules[name])

    def _sustains(self, mode: str) -> bool:
        """Whether the calls of a mode are timed at the power that they draw."""
        return self.energy and mode == "graph"

    def _energies(
        self,
        mode: str,
        runners: dict[str, timing.Runner],
        measured: dict[str, list[float]],
        around: Callable[[str, Callable[[], list[float]]], list[float]],
    ) -> dict[str, dict[str, object]]:
        """Field energy_mj of those whose time is near that of the fastest, in mode "graph" alone."""
        found: dict[str, dict[str, object]] = {name: {} for name in runners}
        medians = {name: statistics.median(samples).value for name, samples in measured.items()}
        medians.pop(EMPTY_KERNEL, None)
        if not self._sustains(mode) or not medians:
            return found
        slowest = energy.MOST_TIMES_THE_FASTEST * min(medians.values())
        for name, median in medians.items():
            runner = runners[name]
            if energy.LEAST_US <= median <= slowest and isinstance(runner, timing.GraphRunner):
                power: list[float] = []

                def turn(runner: timing.GraphRunner = runner, power: list[float] = power) -> list[float]:
                    power += filter(None, [energy.watts(energy.replays(runner.graph.replay))])
                    return power

                around(name, turn)
                found[name] = {"energy_mj": energy.of_call(power[0], median)} if power else {}
        return found

    def _calls(self, implementation: Implementation, mode: str) -> list[Call]:
        sets = 1
        if mode == "cold":
            cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
            sets = timing.cold_sets(roofline.tensor_bytes(self.case, implementation.arithmetic), cache)
        while len(self.input_sets) < sets:
            self.input_sets.append(make(self.case, self.device, salt=len(self.input_sets)))
        return [
            implementation.bind(self.case, tensors, torch.empty_like(tensors[0])) for tensors in self.input_sets[:sets]
        ]

    def _impossible(
        self, implementation: Implementation, runner: timing.Runner, samples: list[float], empty: list[float] | None
    ) -> str:
        """Why a device time cannot be that of the work; empty when it can."""
        if not isinstance(runner, timing.GraphRunner):
            return ""
        if runner.graph.nodes == 0:
            return "the graph captured nothing: its kernels run on a stream of their own"
        found = statistics.median(samples).value
        bounds = [(LEAST_SHARE_OF_EMPTY * statistics.median(empty).value, "half of an empty kernel")] if empty else []
        device = DEVICES.get(environment.gpu_slug(environment.gpu_name()))
        limit = roofline.floor(self.case, device, implementation.arithmetic) if device else None
        if limit is not None:
            bounds.append((LEAST_SHARE_OF_FLOOR * limit.warm_us, f"the roofline floor of {limit.warm_us:.3f} us"))
        return "; ".join(
            f"{found:.3f} us a call in a graph is below {what}: the graph does not hold the work"
            for bound, what in bounds
            if found < bound
        )

    def _record(self, mode: str, fields: dict[str, object], samples: list[float], state: dict[str, object]) -> None:
        found = statistics.summary(samples)
        on_device = mode in timing.ON_DEVICE and fields["op"] != "empty"
        tflops = roofline.flops(self.case) / statistics.median(samples).value / 1e6 if on_device else None
        self.rows.append(self._row(mode, fields, **found, tflops=tflops, **state))

    def _refuse(self, modes: Sequence[str], fields: dict[str, object], status: str, reason: str) -> None:
        self.rows += [self._row(mode, fields, status=status, reason=reason) for mode in modes]

    def _row(self, mode: str, fields: dict[str, object], **measured: object) -> results.Row:
        common: dict[str, object] = {"mode": mode, "inputs": self.case.dtype, "kind": self.case.kind}
        if self.case.layout != "bhsd":
            common["case"] = LAYOUT_NAMES[self.case.layout]
        return results.row(self.case, **(common | {"order_seed": self.seed} | fields | measured))


def title(implementation: Implementation) -> str:
    """Name and variant."""
    return " ".join(filter(None, (implementation.name, implementation.variant)))


def _modes_of(implementation: Implementation, modes: Sequence[str]) -> list[str]:
    """Those of `modes` that an implementation is measured in."""
    where = {mode: "device" if mode in timing.ON_DEVICE else "host" for mode in modes}
    return [mode for mode in modes if implementation.where in ("", where[mode])]


def _prepare(mode: str, calls: Sequence[Call]) -> timing.Runner:
    with graphs.programmatic_launches(mode != "graph_nopdl"):
        return timing.prepare(mode, calls)


def _nodes_per_call(runner: timing.Runner) -> float | None:
    return runner.graph.nodes / runner.calls if isinstance(runner, timing.GraphRunner) else None


def _state_under_load(runners: dict[str, timing.Runner]) -> dict[str, object]:
    """Clocks and power while the first graph runs; nothing in the modes that have none."""
    runner = next((r for r in runners.values() if isinstance(r, timing.GraphRunner)), None)
    return {} if runner is None else environment.gpu_state(runner.keep_busy, runner.settling_seconds)


def _reason_of(failure: Exception) -> str:
    """Type, first and last line: what was asked for tends to stand in the first, and why not in the last."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    text = " ... ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))
    return f"{type(failure).__name__}: {text}"[:MAX_REASON]


def _status_of(implementation: Implementation, failure: Exception) -> str:
    """A peer that fails is not there; this library may refuse a problem, but any other failure is a defect.

    Raises:
        SystemExit: the failure has broken the device's context, so nothing more can be measured in this process.
    """
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        raise SystemExit(f"{implementation.name}: {_reason_of(failure)}") from failure
    refused = implementation.name != "microsdpa" or isinstance(failure, UnsupportedProblem)
    return "unavailable" if refused else "wrong"
