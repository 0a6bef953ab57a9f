"""Specifications of several launches: one after another, with the same parameters and the same scratch memory."""

from __future__ import annotations

from pathlib import Path

import torch
from harness import tree

from microsdpa.emulate import run
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.problem import Problem

ROWS, DIM = 3, 32
PROBLEM = Problem(1, 1, 1, ROWS, ROWS, DIM, "float16", target="sm_89")


def attend(directory: Path, written_rows: int) -> tuple[torch.Tensor, torch.Tensor, run.Report]:
    """Query, output and report of the two launches."""
    first, second = (
        KernelSpec(
            name="test/two_launches",
            source="test/two_launches.cu",
            template="test::two_launches",
            template_args=(("SECOND", second), ("DIM", str(DIM)), ("ROWS", str(written_rows))),
            threads=32,
            block_m=1,
            workspace_row_bytes=4 * DIM,
        )
        for second in ("false", "true")
    )
    spec = KernelSpec(**{**vars(first), "then": second})
    query, key, value = (torch.randn(1, 1, ROWS, DIM).half() for _ in range(3))
    out = torch.empty_like(query)
    report = run.attention(spec, PROBLEM, (query, key, value, out, None), None, root=tree(directory))
    return query, out, report


def test_the_second_launch_reads_what_the_first_wrote(tmp_path: Path) -> None:
    query, out, report = attend(tmp_path, ROWS)
    assert torch.equal(out, 2 * query)
    assert report.counters["global_write_bytes"] == ROWS * DIM * (4 + 2)


def test_scratch_memory_that_nothing_wrote_is_nan(tmp_path: Path) -> None:
    _, out, _ = attend(tmp_path, ROWS - 1)
    assert not out[:, :, : ROWS - 1].isnan().any()
    assert out[:, :, ROWS - 1].isnan().all()
