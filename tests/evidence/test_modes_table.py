"""The table of what each precision gains and loses."""

from __future__ import annotations

from typing import Any

from microsdpa.evidence import modes_table, results
from microsdpa.evidence.inputs import Case


def row(case: Case, variant: str, us: float, rel_l1: float, **fields: Any) -> results.Row:
    shared: dict[str, Any] = {"impl": "microsdpa", "variant": variant, "mode": "graph", "status": "ok", "reason": ""}
    shared |= {"op": "sdpa", "dtype": variant or case.dtype, "inputs": case.dtype, "kind": case.kind, "label": ""}
    return results.row(case, **(shared | {"median_us": us, "error": {"rel_l1": rel_l1}} | fields))


def test_each_precision_is_held_against_16_bits() -> None:
    case, other = Case(1, 8, 512, 512, 64), Case(4, 16, 4096, 4096, 128)
    rows = [
        row(case, "", 10.0, 0.0001),
        row(case, "fp8_fast", 20.0, 0.05),
        row(other, "", 30.0, 0.0001),
        row(other, "fp8_fast", 20.0, 0.051),
        row(other, "int8_fp8", 40.0, 0.034),
        row(other, "int8_fp8", 1.0, 0.034, mode="cold"),
        row(other, "fp8", 1.0, 0.034, status="unavailable"),
        row(other, "out=", 1.0, 0.0001),
        row(Case(1, 1, 1, 1, 64), "", 1.0, 0.0001),
    ]
    result = results.make("fp8", "microsdpa bench --suite fp8", rows)
    header, *found = modes_table.lines(result, "graph", lambda row, _: row["variant"] == "int8_fp8")
    assert len(header) == 3
    assert found == [
        ['`precision="fp8_fast"`', "0.50x, 0.0500", "1.50x, 0.0510"],
        ['`precision="int8_fp8"`', "", "0.75x, 0.0340 (stale)"],
    ]
    assert "1.50x" in modes_table.markdown(result, "graph", lambda *_: False)
