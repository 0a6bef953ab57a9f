"""How much faster than the best peer: of a case, and over a whole suite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from microsdpa.evidence import results, statistics
from microsdpa.evidence.signatures import is_stale
from microsdpa.evidence.wording import case_name, quoted_us
from microsdpa.evidence.worker import ALONE

SIXTEEN_BIT = ("float16", "bfloat16")
SUMMARIZED = {
    "mission": "the headline shape and the smallest shapes",
    "small": "small calls",
    "real": "shapes of models",
    "decode": "decoding, one query a head or a few",
    "prefill": "16k tokens, D = 64 to 256",
    "masked": "masks, windows, documents, blocks, head dimensions",
    "wild": "32 random shapes, new ones with each commit",
    "prefill_fp8": "16k tokens, 8-bit values",
    "block": "norms, rotary embedding and attention",
    "serving": "packed prompts and paged caches",
    "backward": "gradients alone, and with the forward",
}
"""Suites of the summary, and what they have."""
TWO_FIGURES = 0.995
"""What is rounded to 1.00."""


@dataclass(frozen=True)
class Ratio:
    """The row of the best peer, and ours."""

    peer: results.Row
    ours: results.Row

    @property
    def value(self) -> float:
        """Time of the peer over ours."""
        return quoted_us(self.peer) / quoted_us(self.ours)

    @property
    def text(self) -> str:
        """The value, and whether the intervals of the medians overlap."""
        tie = statistics.compare(self.ours["samples_us"], self.peer["samples_us"]) == "tie"
        return f"{self.value:.2f}x{' (tie)' if tie else ''}"


def sixteen_bits(rows: Iterable[results.Row]) -> Ratio | None:
    """Of the rows of a case: 8 bits against 16 would be no comparison of implementations."""
    timed = [row for row in rows if row["status"] == "ok" and not row.get("precision")]
    ours = [row for row in timed if row["impl"] == "microsdpa" and row.get("variant", "") != ALONE]
    peers = [row for row in timed if row["impl"] != "microsdpa" and ours and row["dtype"] == ours[0]["dtype"]]
    return _ratio(peers, ours[:1])


def eight_bits(rows: Iterable[results.Row]) -> list[Ratio]:
    """The fastest 8-bit peer over the fastest precision of ours: on 8-bit values, and quantizing in the call."""
    timed = [row for row in rows if row["status"] == "ok" and row["dtype"] not in SIXTEEN_BIT]
    found = []
    for op in dict.fromkeys(row["op"] for row in timed):
        same = [row for row in timed if row["op"] == op]
        found.append(_ratio([r for r in same if r["impl"] != "microsdpa"], [r for r in same if r.get("precision")]))
    return [ratio for ratio in found if ratio is not None]


def on_e4m3(rows: Iterable[results.Row]) -> Ratio | None:
    """Of the rows of a case with E4M3 values that were there before the call."""
    timed = [row for row in rows if row["status"] == "ok" and row["dtype"] == "e4m3"]
    ours = [row for row in timed if row["impl"] == "microsdpa"]
    return _ratio([row for row in timed if row["impl"] != "microsdpa"], ours)


def _ratio(peers: list[results.Row], ours: list[results.Row]) -> Ratio | None:
    return Ratio(min(peers, key=quoted_us), min(ours, key=quoted_us)) if peers and ours else None


def summary(directory: Path) -> str:
    """A line a suite: how many calls it compares, the geometric mean of the ratios, and the call with the lowest."""
    lines = [["calls", "suite", "compared", "best peer / microsdpa", "below 1.00", "lowest"]]
    lines.append(["---"] * 2 + ["---:"] * 3 + ["---"])
    for suite, what in SUMMARIZED.items():
        path = directory / f"{suite}.json"
        if path.is_file():
            lines.append([what, f"`{suite}`", *_summarized(results.read(path))])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _summarized(result: results.Result) -> list[str]:
    """Calls compared, their geometric mean, those below 1, and the lowest one; in CUDA graphs, cold where all are."""
    mode = "graph" if any(row["mode"] == "graph" for row in result["rows"]) else "cold"
    rows = [row for row in result["rows"] if row["mode"] == mode and row["op"] != "empty"]
    cases: dict[str, list[results.Row]] = {}
    for row in rows:
        cases.setdefault(case_name(row), []).append(row)
    found: dict[str, Ratio] = {}
    for name, members in cases.items():
        ratio = (on_e4m3 if result["suite"].endswith("fp8") else sixteen_bits)(members)
        if ratio is not None:
            found[name] = ratio
    if not found:
        return ["0", "", "", ""]
    mean = math.exp(sum(math.log(ratio.value) for ratio in found.values()) / len(found))
    lowest = min(found, key=lambda name: found[name].value)
    below = sum(ratio.value < TWO_FIGURES for ratio in found.values())
    target = result["environment"].get("target") or ""
    stale = any(row.get("code_signature") and is_stale(row, target) for row in rows)
    worst = f"{lowest}: {found[lowest].text}, {found[lowest].peer['impl']}"
    return [str(len(found)), f"{mean:.2f}x{' (some stale)' if stale else ''}", str(below), worst]
