"""Suites: which there are, and what their data files say."""

from __future__ import annotations

import subprocess
import sys

import pytest

from microsdpa.errors import InvalidArgument
from microsdpa.evidence import suites, timing
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.peers import choose, ours

MISSION = Case(1, 8, 512, 512, 64)


def test_suites_are_data() -> None:
    assert suites.names() == [
        "ampere",
        "decode",
        "doors",
        "fp8",
        "ladder",
        "masked",
        "mission",
        "prefill",
        "prefill_fp8",
        "real",
        "small",
        "start",
    ]
    prefill = suites.load("prefill")
    assert len(prefill.cases) == 3 * 2 * 6
    for case in prefill.cases:
        assert case.batch * case.seqlen_q == 16384
        assert case.heads * case.head_dim == 2048
    assert all(1 <= c.batch <= 4 and 8 <= c.heads <= 32 and c.seqlen_k <= 1024 for c in suites.load("small").cases)
    assert set(suites.load("real").labels) == set(suites.load("real").cases)
    assert suites.load("fp8").eight_bit == set(suites.load("fp8").cases)
    assert suites.load("mission").eight_bit == {MISSION}
    assert not suites.load("small").eight_bit
    assert suites.load("prefill_fp8").cases == prefill.cases
    assert suites.load("prefill_fp8").eight_bit == set(prefill.cases)
    assert set(suites.load("prefill_fp8").variants) < {one.variant for one in ours("auto")}
    ampere = suites.load("ampere").cases
    assert set(ampere) > {c for c in prefill.cases if c.head_dim in (64, 128)}
    assert {Case(1, 2, 64, 64, 64), Case(1, 4, 128, 128, 64), MISSION} <= set(ampere)
    for name in suites.names():
        assert set(suites.load(name).modes) <= {*timing.MODES, timing.START}
        assert suites.load(name).processes in ("case", "head_dim", "suite")
        assert choose(suites.load(name).peers, suites.load(name).eight_bit)
    assert suites.load("mission").peers == "all"
    assert {peer.name for peer in choose(prefill.peers, False)} >= {"torch CUDNN", "torch MATH", "flash-attn 4"}
    with pytest.raises(InvalidArgument, match="expected one of ampere, decode"):
        suites.load("nope")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "nope"], "expected one of ampere, decode"),
        (["--suite", "start", "--modes", "graph"], "none for suite start"),
        (["--peers", "torch-fast"], "some of torch, torch-flash"),
    ],
)
def test_bench_names_what_it_knows(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "microsdpa", "bench", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert message in result.stderr
