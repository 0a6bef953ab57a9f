"""`microsdpa verify --fuzz`: random calls through every door, against FP64; one that fails is made as small as it can.

On a GPU a few processes make them, of many threads each: while one compiles, others go on. Without one the emulator
runs small calls.

A log has a line of JSON for every call that was made. A run with the same log goes on where the last one ended: a line
holds as long as the calls and all files of the package are what they were.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import microsdpa
from microsdpa.attention.explain import Explanation
from microsdpa.call.masks import Masks
from microsdpa.call.prologue import prologue_of
from microsdpa.call.scales import key_block
from microsdpa.call.tensors import is_aligned
from microsdpa.call.visibility import combined
from microsdpa.errors import MicrosdpaError
from microsdpa.evidence import compare, fuzz_varlen, results
from microsdpa.evidence.fuzz_calls import DOORS, Call, Door, draw, simpler, tensors
from microsdpa.evidence.fuzz_check import check, explained, quantized
from microsdpa.evidence.fuzz_outcome import Outcome
from microsdpa.evidence.fuzz_varlen import VarlenCall
from microsdpa.evidence.step import Progress, Step, no_progress
from microsdpa.jit.signature import code_signature
from microsdpa.kernels import emulated_target
from microsdpa.kernels.problem import ELEMENT_BYTES, VECTOR_BYTES, MaskKind
from microsdpa.runtime import launcher

SUITE = "verify_fuzz"
COMMAND = "microsdpa verify --fuzz 10000"
NOT_RECORDED = f"*Not recorded yet: `{COMMAND} --output benchmarks/results`, on a GPU, writes the result file.*\n"
MOST_SHRUNK = 3
"""Failures that are made smaller: more of them tend to have one cause."""
ATTEMPTS = 400
"""Calls that are tried on the way to a smallest one."""
PROCESSES = 4
"""That make calls on a GPU."""
SOURCES = (".py", ".cu", ".cuh", ".h", ".cc")
"""Suffixes of the package's files that a log depends on."""


@dataclass(frozen=True)
class Judged:
    """What a call came to, and what ran it.

    Attributes:
        kernel: its name; empty where the call is refused.
        fields: of a row: the kernel's identity, and what of the call its choice depended on.
    """

    outcome: Outcome
    kernel: str = ""
    fields: dict[str, Any] = field(default_factory=dict)


class Log:
    """What calls came to, a line of JSON each, in a file that several processes and later runs add to.

    Args:
        path: the file, which need not exist; None keeps nothing.
        calls: all calls of the run, by whose numbers the lines go.
    """

    def __init__(self, path: Path | None, calls: Sequence[Call | VarlenCall]) -> None:
        self._path, self._lock = path, threading.Lock()
        self._run = "" if path is None else _digest(calls)
        self.found: dict[int, Judged] = {}
        if path is None or not path.is_file():
            return
        text = path.read_text(encoding="utf-8")
        if text and not text.endswith("\n"):  # a run was ended while it wrote
            path.write_text(text := text[: text.rfind("\n") + 1], encoding="utf-8")
        for line in map(json.loads, text.splitlines()):
            if line["run"] == self._run:
                number, errors = line["call"], line["errors"]
                made = None if errors is None else compare.Errors(**errors | {"worst": tuple(errors["worst"])})
                outcome = Outcome(calls[number], line["kind"], line["failure"], made, line["allowed"])
                self.found[number] = Judged(outcome, line["kernel"], line["fields"])

    def __getstate__(self) -> dict[str, Any]:
        """For a process that adds to it."""
        return {"_path": self._path, "_run": self._run, "found": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In that process."""
        vars(self).update(state, _lock=threading.Lock())

    def keep(self, number: int, judged: Judged) -> None:
        """Add what a call came to."""
        if self._path is None:
            return
        outcome = judged.outcome
        line = {"run": self._run, "call": number, "kind": outcome.kind, "failure": outcome.failure}
        line |= {"errors": outcome.errors and dataclasses.asdict(outcome.errors), "allowed": outcome.allowed}
        text = json.dumps(line | {"kernel": judged.kernel, "fields": judged.fields}) + "\n"
        with self._lock, self._path.open("ab", buffering=0) as file:
            file.write(text.encode())


def _digest(calls: Sequence[Call | VarlenCall]) -> str:
    """Of calls, and of all files of the package that decide what they come to."""
    found = hashlib.sha256(repr(calls).encode())
    package = Path(microsdpa.__file__).parent
    for path in sorted(path for path in package.rglob("*") if path.suffix in SOURCES):
        found.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:16]


def judge(calls: Iterable[tuple[int, Call | VarlenCall]], device: str, log: Log) -> list[tuple[int, Judged]]:
    """Make these numbered calls, in this process."""
    judged = []
    for number, call in calls:
        one = _judge_one(call, device)
        log.keep(number, one)
        judged.append((number, one))
    return judged


def _judge_one(call: Call | VarlenCall, device: str) -> Judged:
    outcome = check(call, device)
    if isinstance(call, VarlenCall):
        return _judge_varlen(call, outcome, device)
    try:
        explanation = explained(call, device)
    except MicrosdpaError:  # check() has reported it
        return Judged(outcome)
    kernel = explanation.spec.name if explanation.spec else ""
    return Judged(outcome, kernel, _identity(call, explanation, device))


def _judge_varlen(call: VarlenCall, outcome: Outcome, device: str) -> Judged:
    try:
        spec, problem = fuzz_varlen.chosen(call, device)
    except MicrosdpaError:  # check() has reported it
        return Judged(outcome)
    signed = {"kernel": spec.name, "code_signature": code_signature(spec, problem.target), "target": problem.target}
    lengths = {"s_q": call.case().seqlen_q, "s_k": problem.seqlen_k}
    sizes = {"b": problem.batch, "h": problem.heads, "h_kv": problem.heads_kv, "d": problem.head_dim} | lengths
    fields: dict[str, Any] = {"shape": sizes, "varlen": problem.varlen, "rounded_queries": problem.seqlen_q}
    fields |= {"packed_queries": True} if problem.packed_queries else {}
    kinds = {"mask_kind": problem.mask, "cache_kind": problem.cache}
    fields |= {name: dataclasses.asdict(kind) for name, kind in kinds.items() if kind is not None}
    if call.invariant:
        fields["batch_invariant"] = True
    return Judged(outcome, spec.name, signed | fields | {"alignment": problem.alignment})


def _judged(calls: list[Call | VarlenCall], device: str, log: Log) -> Iterator[tuple[int, Judged]]:
    """Make the calls that the log lacks. On a GPU those of one form are made by one thread, as they share kernels.

    Few processes, since a GPU lets them take turns; several, since a process has one lock for all its Python.
    """
    yield from log.found.items()
    left = [(number, call) for number, call in enumerate(calls) if number not in log.found]
    if device == "cpu":
        for one in left:
            yield from judge([one], device, log)
        return
    forms: dict[object, list[tuple[int, Call | VarlenCall]]] = {}
    for one in left:
        forms.setdefault(one[1].form, []).append(one)
    longest_first = sorted(forms.values(), key=len, reverse=True)
    processes = min(PROCESSES, len(forms))
    if not processes:
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        shares = [pool.submit(_judge_together, longest_first[i::processes], device, log) for i in range(processes)]
        for share in as_completed(shares):
            yield from share.result()


def _judge_together(
    forms: list[list[tuple[int, Call | VarlenCall]]], device: str, log: Log
) -> list[tuple[int, Judged]]:
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // PROCESSES)) as pool:
        return [one for judged in pool.map(lambda form: judge(form, device, log), forms) for one in judged]


def shrink(outcome: Outcome, device: str, attempts: int = ATTEMPTS) -> Outcome:
    """The smallest call found that fails in the same way."""
    going = True
    while going:
        going = False
        for call in simpler(outcome.call):
            if not attempts:
                return outcome
            attempts -= 1
            found = check(call, device)
            if found.kind == outcome.kind:
                outcome, going = found, True
                break
    return outcome


def step(
    count: int,
    seed: int = 0,
    progress: Progress = no_progress,
    output: Path | None = None,
    command: str = COMMAND,
    doors: tuple[Door, ...] = DOORS,
    log: Path | None = None,
) -> Step:
    """`count` random calls, on the GPU or in the emulator; each must be right, and give the same bits twice.

    Args:
        count: of the calls.
        seed: of what is drawn.
        progress: makes a bar.
        output: the results directory.
        command: for the result file.
        doors: those that calls go through.
        log: file that keeps what calls came to, and from which a run goes on.
    """
    reason = launcher.device_error()
    device = "cpu" if reason else "cuda"
    calls = draw(count, seed, bool(reason), doors)
    advance = progress("fuzz", count)
    found: dict[int, Judged] = {}
    for number, one in _judged(calls, device, Log(log, calls)):
        found[number] = one
        advance(one.outcome.call.door)
    judged = [found[number] for number in range(len(calls))]
    outcomes = [one.outcome for one in judged]
    failed = [outcome for outcome in outcomes if outcome.failure]
    smallest = []
    for outcome in failed[:MOST_SHRUNK]:
        smallest.append(shrink(outcome, device))
    rows = _rows(judged)
    where = "in the emulator" if reason else "on the GPU"
    refused = sum(outcome.kind == "refused" for outcome in outcomes)
    passed = count - len(failed) - refused
    summary = f"{passed} of {count} random calls of seed {seed} passed {where}"
    if refused:
        summary += f", {refused} refused by the kernel that they name"
    counts = Counter(outcome.call.door for outcome in outcomes)
    table = [["door", "calls", "failed", "largest error / tolerance"]]
    for door, calls_of_door in sorted(counts.items()):
        members = [outcome for outcome in outcomes if outcome.call.door == door]
        bad = sum(bool(outcome.failure) for outcome in members)
        table.append([door, str(calls_of_door), str(bad), f"{max(outcome.use for outcome in members):.2f}"])
    sections = []
    if smallest:
        lines = [["failure", "python -c"], *([one.failure, one.call.line(device)] for one in smallest)]
        sections.append((f"The smallest calls that fail like the first {len(smallest)}", lines))
        summary += f"; {len(failed)} failed, the first like: {smallest[0].call.line(device)}"
    result = results.make(SUITE if doors == DOORS else f"{SUITE}_{doors[0]}", command, rows)
    if output is not None:
        summary += f"; wrote {results.write(result, output)}"
    return Step("verify", "failed" if failed else "passed", summary, table, sections, data=result)


def _rows(judged: list[Judged]) -> list[results.Row]:
    """A row for the calls of a door that one kernel ran, with the one that fails, or has the largest error."""
    groups: dict[tuple[str, str], list[Judged]] = {}
    for one in judged:
        if one.outcome.kind != "refused":
            groups.setdefault((one.outcome.call.door, one.kernel), []).append(one)
    return [_row(members) for _, members in sorted(groups.items())]


def _row(members: list[Judged]) -> results.Row:
    failed = [one for one in members if one.outcome.failure]
    one = failed[0] if failed else max(members, key=lambda one: one.outcome.use)
    worst, call, error = one.outcome, one.outcome.call, None
    if worst.errors is not None:
        tolerance = compare.Tolerance(worst.allowed, float("inf"), float("inf"))
        error = compare.as_record(worst.errors, tolerance) | {"tolerance": {"max_abs": worst.allowed}}
    fields: dict[str, Any] = {"impl": "microsdpa", "version": microsdpa.__version__, "mode": "verify"}
    fields |= {"door": call.door, "case": str(call), "requested": call.impl, "error": error}
    fields |= {"cases": len(members), "passed": len(members) - len(failed)}
    fields |= {"status": "wrong" if failed else "ok", "reason": worst.failure}
    return results.row(call.case(), **(fields | one.fields))


def _identity(call: Call, explanation: Explanation, device: str) -> dict[str, Any]:
    """Which kernel ran, and what of the call its choice depended on."""
    spec = explanation.spec
    if spec is None:
        return {}
    target = launcher.target_of_device() if device == "cuda" else emulated_target(call.impl)
    fields: dict[str, Any] = {"kernel": spec.name, "code_signature": code_signature(spec, target), "target": target}
    kind = _mask_kind(call, device)
    if kind is not None:
        fields["mask_kind"] = dataclasses.asdict(kind)
    if call.door == "precision":
        return fields | {"precision": call.operands, "inputs": call.dtype}
    if call.door == "quantized":
        query, key, _ = quantized(call, tensors(call, "cpu"))
        operands = "fp8" if query.format == "e4m3" else "int8_fp8"
        block = key_block(key.values, key.scale)
        return fields | {"operands": operands, "inputs": "float16", "key_block": block}
    made = tensors(call, device)
    given = [made.query, made.key, made.value, *([made.out] if call.door == "out" else [])]
    aligned = VECTOR_BYTES if all(map(is_aligned, given)) else ELEMENT_BYTES[call.dtype]
    if call.dropout_p:
        fields["dropout_p"] = call.dropout_p
    if call.value_dim:
        fields["value_dim"] = call.value_dim
    if call.continued:
        fields["continued"] = True
    if made.prologue:
        rotary, positions, q_norm, k_norm = (
            made.prologue.get(name) for name in ("rotary", "rotary_positions", "q_norm", "k_norm")
        )
        prologue = prologue_of(rotary, call.rotary_interleaved, positions, q_norm, k_norm, call.norm_eps)
        assert prologue is not None
        fields["prologue_kind"] = dataclasses.asdict(prologue.kind())
    return fields | {"alignment": aligned}


def _mask_kind(call: Call, device: str) -> MaskKind | None:
    """What decides about the scores of a call, as kernels have it."""
    made = tensors(call, device)
    masks = dict(made.masks)
    documents, blocks = masks.pop("document_ids", None), masks.pop("block_mask", None)
    if documents is not None or blocks is not None:
        inputs = made.query, made.key, made.value
        masks["attn_mask"] = combined(inputs, masks.get("attn_mask"), documents, blocks)
    return Masks(window=call.window, softcap=call.softcap, **masks).kind_in_memory


def markdown(result: results.Result, is_stale: Callable[[results.Row, str], bool]) -> str:
    """One line for the calls of a door that one kernel ran."""
    lines = [["door", "kernel", "calls within the tolerance", "largest error / tolerance"]]
    lines.append(["---"] * 2 + ["---:"] * 2)
    for row in result["rows"]:
        stale = " (stale)" if row.get("code_signature") and is_stale(row, row["target"]) else ""
        error = row["error"]
        use = error["max_abs"] / error["tolerance"]["max_abs"] if error and error["max_abs"] else 0.0
        lines.append([row["door"], f"{row['kernel']}{stale}", f"{row['passed']} of {row['cases']}", f"{use:.2f}"])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
