"""What each precision costs and gives, from a suite that times all of them on the same inputs."""

from __future__ import annotations

from collections.abc import Callable

from microsdpa.evidence import results
from microsdpa.evidence.wording import case_name, provenance, quoted_us
from microsdpa.kernels.problem import PRECISIONS


def lines(result: results.Result, mode: str, is_stale: Callable[[results.Row, str], bool]) -> list[list[str]]:
    """A header, then a line a precision, a column a case: time of 16 bits over that with quantizing, and relative L1.

    Where a precision was not timed, the cell is empty; where all of them lack it, so is its line.
    """
    target = result["environment"].get("target") or ""
    cases: dict[str, dict[str, results.Row]] = {}
    for row in result["rows"]:
        usual = row["mode"] == mode and row["status"] == "ok" and row.get("kind", "normal") == "normal"
        if usual and row["impl"] == "microsdpa" and row.get("variant", "") in ("", *PRECISIONS):
            cases.setdefault(case_name(row), {})[row.get("variant", "")] = row
    cases = {name: rows for name, rows in cases.items() if "" in rows and len(rows) > 1}

    def cell(rows: dict[str, results.Row], precision: str) -> str:
        if precision not in rows:
            return ""
        row = rows[precision]
        stale = any(is_stale(one, target) for one in (row, rows[""]))
        ratio = quoted_us(rows[""]) / quoted_us(row)
        return f"{ratio:.2f}x, {row['error']['rel_l1']:.4f}{' (stale)' if stale else ''}"

    found = [["16 bits over this, relative L1", *cases]]
    for precision in PRECISIONS:
        cells = [cell(rows, precision) for rows in cases.values()]
        if any(cells):
            found.append([f'`precision="{precision}"`', *cells])
    return found


def markdown(result: results.Result, mode: str, is_stale: Callable[[results.Row, str], bool]) -> str:
    """The lines as a table, with where they are from."""
    header, *rest = lines(result, mode, is_stale)
    ruled = [header, ["---"] + ["---:"] * (len(header) - 1), *rest]
    return "".join(f"| {' | '.join(line)} |\n" for line in ruled) + f"\n{provenance(result)}"
