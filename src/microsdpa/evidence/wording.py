"""How results are put into words: where they are from, what a row is called, which figure is quoted."""

from __future__ import annotations

from collections import defaultdict

from microsdpa.evidence import results
from microsdpa.evidence.environment import is_commit


def provenance(result: results.Result) -> str:
    """One line: where, when and with what a result was taken."""
    e = result["environment"]
    gpu = f"{e['gpu']}, driver {e['driver']}, CUDA {e['cuda']}" if e["gpu"] else "no GPU"
    software = f"torch {e['torch']}, commit {_short(result['commit'])}, {result['created'][:10]}"
    earlier: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in result["rows"]:
        if recorded := row.get("recorded"):
            earlier[_short(recorded["commit"]), recorded["created"][:10]].add(case_name(row))
    for (commit, day), cells in earlier.items():
        software += f"; {len(cells)} cell{'s' * (len(cells) > 1)}: commit {commit}, {day}"
    return f"*{gpu}, {software}: `{result['command']}`*\n"


def _short(commit: str) -> str:
    return commit[:10] if is_commit(commit) else "not recorded"


def quoted_us(row: results.Row) -> float:
    """The figure that the protocol quotes: the best sample of the host mode, the median of every other."""
    return float(row["min_us"] if row["mode"] == "host" else row["median_us"])


def us_with_interval(row: results.Row) -> str:
    """The same as text, a median with its 95% interval; empty for a row without a time."""
    if row["median_us"] is None:
        return ""
    if row["mode"] == "host":
        return f"{quoted_us(row):.2f}"
    low, high = row["interval_us"]
    return f"{quoted_us(row):.2f} [{low:.2f}, {high:.2f}]"


def case_name(row: results.Row) -> str:
    """Shape, type of the inputs, and mask, behind the door and its case: what a row of a table is called."""
    s = row["shape"]
    door = ", ".join(filter(None, (row.get("door"), row.get("case"))))
    heads = str(s["h"]) if s["h"] == s["h_kv"] else f"{s['h']}:{s['h_kv']}"
    alignment = "" if s["s_q"] == s["s_k"] else f" {row['mask']}"
    mask = "" if row["mask"] == "none" else f", causal{alignment}"
    masks = "".join(f", {name}" for name in row.get("masks", []))
    kind = "" if row.get("kind", "normal") == "normal" else f", {row['kind']}"
    kind += f", pages of {row['page']}" if row.get("page") else ""
    return (f"{door}: " if door else "") + (
        f"({s['b']}, {heads}, {s['s_q']}, {s['s_k']}, {s['d']}), {row.get('inputs', row['dtype'])}{mask}{masks}{kind}"
    )
