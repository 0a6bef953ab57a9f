"""What became of the models of the sweep: rows of its result file, and the text of its page."""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import dataclass, field

import torch

import microsdpa
from microsdpa.evidence import results
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.tiny import Candidate

SUITE = "models"
NOT_RECORDED = "*Not recorded yet: `microsdpa models --output benchmarks/results` writes the result file.*\n"
REASON_LENGTH = 100


@dataclass
class Outcome:
    """What became of one scenario."""

    name: str
    error: float | None = None
    allowed: float | None = None
    reason: str = ""

    @property
    def wrong(self) -> bool:
        """Whether the outputs differ."""
        return self.error is not None and self.allowed is not None and not self.error <= self.allowed


@dataclass
class Found:
    """What became of one model."""

    candidate: Candidate
    outcome: str
    reason: str = ""
    model: str = ""
    scenarios: list[Outcome] = field(default_factory=list)
    calls: int = 0
    shape: tuple[int, ...] = (1, 1, 1, 1, 1, 1)
    ours_us: list[float] = field(default_factory=list)
    stock_us: list[float] = field(default_factory=list)


def row_of(found: Found, dtype: torch.dtype) -> results.Row:
    """The row of a model that ran in `dtype`."""
    batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim = (max(1, size) for size in found.shape)
    name = str(dtype).removeprefix("torch.")
    compared = [outcome for outcome in found.scenarios if outcome.error is not None]
    worst = max(compared, key=lambda o: (o.error or 0.0) / max(o.allowed or 0.0, 1e-30), default=None)
    error = None
    if worst is not None and _finite(worst.error) is not None and _finite(worst.allowed) is not None:
        nothing = {"rmse": None, "rel_l1": None, "cosine": None}
        error = {"max_abs": worst.error, **nothing, "tolerance": {"max_abs": worst.allowed, **nothing}}
    ok = found.outcome == "agrees"
    timed = bool(found.ours_us) and ok
    return results.row(
        Case(batch, heads, seqlen_q, seqlen_k, head_dim, heads_kv),
        dtype=name,
        version=microsdpa.__version__,
        op="model",
        mode="eager" if timed else "verify",
        case=str(found.candidate),
        label=found.candidate.family,
        model=found.model,
        outcome=found.outcome,
        calls=found.calls,
        scenarios={
            o.name: {"error": _finite(o.error), "allowed": _finite(o.allowed), "reason": o.reason}
            for o in found.scenarios
        },
        worst="" if worst is None else worst.name,
        error=error,
        median_us=statistics.median(found.ours_us) if timed else None,
        min_us=min(found.ours_us) if timed else None,
        samples_us=found.ours_us if timed else [],
        stock_us=statistics.median(found.stock_us) if timed and found.stock_us else None,
        status="ok" if ok else "wrong" if found.outcome == "differs" else "unavailable",
        reason=found.reason if not ok else "",
        note=found.reason if ok else "",
    )


def _finite(number: float | None) -> float | None:
    """A number that JSON has, or None."""
    return number if number is not None and math.isfinite(number) else None


def share_of_allowed(row: results.Row) -> str:
    """The largest error of a row over what is allowed; empty where nothing was compared."""
    error = row["error"]
    if error is None or not error["tolerance"]["max_abs"]:
        return ""
    return f"{error['max_abs'] / error['tolerance']['max_abs']:.2f}"


def markdown(result: results.Result) -> str:
    """A line for each family and outcome, and the names of the models; then why the others are not among them."""
    lines = [["models", "outcome", "number", "largest error / allowed", "types"], ["---"] * 2 + ["---:"] * 2 + ["---"]]
    groups: dict[tuple[str, str], list[results.Row]] = {}
    for row in result["rows"]:
        groups.setdefault((row["label"], row["outcome"]), []).append(row)
    for (family, outcome), rows in groups.items():
        use = max((share_of_allowed(row) for row in rows), default="")
        names = ", ".join(row["case"].partition(": ")[2] for row in rows)
        lines.append([family, outcome, str(len(rows)), use, names])
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    timed = [row["stock_us"] / row["median_us"] for row in result["rows"] if row.get("stock_us")]
    if timed:
        middle = statistics.median(timed)
        text += f'\nTime of a forward pass with "sdpa" over that with microsdpa: {middle:.2f} in the median.\n'
    reasons: dict[str, list[str]] = {}
    for row in result["rows"]:
        if row["outcome"] in ("differs", "refused", "not made"):
            kinds = reasons.setdefault(_short(row["reason"]), [])
            kind = row["case"].partition(": ")[2]
            kinds += [kind] if kind not in kinds else []
    listed = [f"\n- {reason}: {', '.join(kinds)}" for reason, kinds in reasons.items()]
    return text + "".join(listed) + "\n"


def _short(reason: str) -> str:
    """A reason without what is a model's own in it, so that models share it."""
    reason = re.sub(r"^[\w ]+: (refused|not run): ", "", reason.removeprefix("not run: "))
    reason = re.sub(r"modeling_\w+ has", "the model has", reason.partition("; nearest")[0])
    reason = re.sub(r"^(\w+Error: )\w+ (does not support)", r"\1the model \2", reason)
    return reason if len(reason) <= REASON_LENGTH else f"{reason[:REASON_LENGTH]}..."
