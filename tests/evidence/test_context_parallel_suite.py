"""The suite of several GPUs: rows of all ranks, and the table of what each way takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from microsdpa.evidence import context_parallel, render, results, statistics
from microsdpa.evidence.inputs import Case

CASE, LONG = Case(1, 32, 8192, 8192, 128, heads_kv=8), Case(1, 16, 131072, 131072, 128)


def row(case: Case, impl: str, variant: str, us: float = 0.0, **fields: Any) -> results.Row:
    shared: dict[str, Any] = {"impl": impl, "variant": variant, "mode": "eager", "inputs": "bfloat16", "case": "2 GPUs"}
    return results.row(case, **(shared | (statistics.summary([us] * 3) if us else {}) | fields))


ROWS = [
    row(CASE, "microsdpa", "one GPU", 812.0),
    row(CASE, "microsdpa", "auto", 406.0),
    row(CASE, "microsdpa", "ring", 900.0),
    row(CASE, "torch cuDNN", "context_parallel", 1502.9),
    row(CASE, "torch FLASH", "context_parallel", 1459.2),
    row(LONG, "microsdpa", "one GPU", 102053.8),
    row(LONG, "microsdpa", "auto", 53002.9),
    row(LONG, "torch cuDNN", "context_parallel", status="wrong", reason="rank 1: off by 3"),
    row(LONG, "another", "", status="unavailable", reason="rank 0: none"),
]


def test_a_line_a_case_with_what_is_gained() -> None:
    header, *found = context_parallel.lines(results.make("context_parallel", "microsdpa bench", ROWS))
    assert header[1:] == [
        *("one GPU", "auto", "ring", "torch cuDNN", "torch FLASH"),
        *("one GPU / auto", "best peer / auto"),
    ]
    assert [line[0] for line in found] == [
        "2 GPUs: (1, 32:8, 8192, 8192, 128), bfloat16",
        "2 GPUs: (1, 16, 131072, 131072, 128), bfloat16",
    ]
    assert found[0][1:] == ["0.812", "0.406", "0.9", "1.5", "1.46", "2.00x", "3.59x"]
    assert found[1][1:] == ["102", "53", "", "wrong", "", "1.93x", ""]


def test_a_case_without_the_way_that_is_chosen_has_no_ratios() -> None:
    rows = [row(CASE, "microsdpa", "auto", status="wrong", reason="off"), ROWS[0], ROWS[3]]
    _, line = context_parallel.lines(results.make("context_parallel", "microsdpa bench", rows))
    assert line[1:] == ["0.812", "1.5", "", ""]


def test_a_page_shows_the_table(tmp_path: Path) -> None:
    result = results.make("context_parallel", "microsdpa bench --suite context_parallel", ROWS)
    gpu = results.write(result, tmp_path).parent.name
    page = f"<!-- microsdpa:table gpu={gpu} suite=context_parallel -->\nold\n<!-- microsdpa:end -->\n"
    shown = render.rendered(page, tmp_path, "several-gpus.md")
    assert "old" not in shown
    assert context_parallel.markdown(result) in shown
    assert render.rendered(shown, tmp_path, "several-gpus.md") == shown


@pytest.mark.parametrize("failed", [0, 1])
def test_a_row_has_the_slowest_rank(failed: int) -> None:
    fields = {"impl": "microsdpa", "variant": "auto", "mode": "eager", "inputs": "bfloat16", "case": "2 GPUs"}
    found = context_parallel.row_of_ranks(CASE, fields, [([1.0, 4.0], "ok", ""), ([3.0, 2.0], "ok", "")])
    assert found["samples_us"] == [3.0, 4.0]
    assert (found["metrics"]["rank_0_us"], found["metrics"]["gpus"]) == (2.5, 2.0)
    of_ranks: list[tuple[list[float], str, str]] = [([1.0], "ok", "")] * 2
    of_ranks[failed] = [], "wrong", "off"
    assert context_parallel.row_of_ranks(CASE, fields, of_ranks)["reason"] == f"rank {failed}: off"
