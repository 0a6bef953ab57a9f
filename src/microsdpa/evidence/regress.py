"""Regressions: two result files compared row by row, with the statistics of the protocol."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal

from microsdpa.errors import InvalidArgument
from microsdpa.evidence import results, statistics
from microsdpa.evidence.step import Step
from microsdpa.evidence.wording import case_name

Outcome = Literal["slower", "faster", "tie", "within threshold", "lost", "gained", "not measured"]
KEY = ("impl", "variant", "op", "dtype", "mask", "mode", "kind", "inputs")
DEFAULTS = {"variant": "", "kind": "normal"}
FAILING = ("slower", "lost")


@dataclass(frozen=True)
class Change:
    """One row of both files.

    Attributes:
        ratio: new median over old, with its 95% interval; None where either has no time.
        outcome: "slower" or "faster" only when the whole interval is beyond the threshold.
    """

    impl: str
    mode: str
    case: str
    old_us: float | None
    new_us: float | None
    ratio: statistics.Interval | None
    outcome: Outcome


def compare(old: results.Result, new: results.Result, threshold: float) -> list[Change]:
    """Every row of either result, in the order of `new`, then what is only in `old`.

    Raises:
        InvalidArgument: the results are of other suites or GPUs, or the threshold is no fraction.
    """
    if not 0 <= threshold < 1:
        raise InvalidArgument("threshold", expected="a fraction in [0, 1)", got=str(threshold), hint="0.05 is 5%")
    for name, left, right in (
        ("suite", old["suite"], new["suite"]),
        ("gpu", old["environment"]["gpu"], new["environment"]["gpu"]),
    ):
        if left != right:
            raise InvalidArgument(
                "results", expected=f"two files of one {name}", got=f"{left} and {right}", hint="compare like with like"
            )
    before = {_key(row): row for row in old["rows"] if row["mode"] != "verify"}
    after = {_key(row): row for row in new["rows"] if row["mode"] != "verify"}
    keys = [*after, *(key for key in before if key not in after)]
    return [_change(before.get(key), after.get(key), threshold) for key in keys]


def _key(row: results.Row) -> tuple[object, ...]:
    shape = tuple(sorted(row["shape"].items()))
    defaults = DEFAULTS | {"inputs": row["dtype"]}
    return (*(row.get(name, defaults.get(name)) for name in KEY), shape, *row.get("masks", ()))


def _change(old: results.Row | None, new: results.Row | None, threshold: float) -> Change:
    row = new or old
    assert row is not None
    was = old is not None and old["status"] == "ok"
    is_now = new is not None and new["status"] == "ok"
    ratio = None
    outcome: Outcome = "not measured"
    if was and is_now:
        assert old is not None
        assert new is not None
        ratio = statistics.ratio(new["samples_us"], old["samples_us"])
        outcome = _verdict(ratio, statistics.compare(new["samples_us"], old["samples_us"]), threshold)
    elif was and new is not None:
        outcome = "lost"
    elif is_now and old is not None:
        outcome = "gained"
    return Change(
        impl=" ".join(filter(None, (row["impl"], row.get("variant", "")))),
        mode=row["mode"],
        case=case_name(row),
        old_us=old["median_us"] if old else None,
        new_us=new["median_us"] if new else None,
        ratio=ratio,
        outcome=outcome,
    )


def _verdict(ratio: statistics.Interval, verdict: statistics.Verdict, threshold: float) -> Outcome:
    if verdict == "tie":
        return "tie"
    if ratio.low > 1 + threshold:
        return "slower"
    if ratio.high < 1 / (1 + threshold):
        return "faster"
    return "within threshold"


def step(old: results.Result, new: results.Result, threshold: float) -> Step:
    """The gate: no row of microsdpa is confirmed slower by more than `threshold`, and none is lost."""
    changes = compare(old, new, threshold)
    ours = [change for change in changes if change.impl.startswith("microsdpa")]
    bad = [change for change in ours if change.outcome in FAILING]
    table = [["case", "mode", "implementation", "old us", "new us", "new / old [95%]", "outcome"]]
    for change in sorted(changes, key=lambda c: (not c.impl.startswith("microsdpa"), c.outcome not in FAILING)):
        numbers = ["" if value is None else f"{value:.2f}" for value in (change.old_us, change.new_us)]
        found = change.ratio
        ratio = "" if found is None else f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"
        table.append([change.case, change.mode, change.impl, *numbers, ratio, change.outcome])
    summary = (
        f"{sum(c.ratio is not None for c in ours)} rows of microsdpa compared, {len(bad)} lost or confirmed slower by "
        f"more than {threshold:.0%}; {_peers_drift(changes)}"
    )
    return Step("regress", "failed" if bad else "passed", summary, table, data=[asdict(change) for change in changes])


def _peers_drift(changes: list[Change]) -> str:
    """How much the peers' times changed: what the machine, not this project, changed."""
    ratios = [c.ratio.value for c in changes if c.ratio is not None and not c.impl.startswith("microsdpa")]
    if not ratios:
        return "no peer is in both files"
    return f"peers took {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f} times as long (geometric mean)"
