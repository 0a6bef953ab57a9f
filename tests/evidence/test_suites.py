"""Suites: which there are, and what their data files say."""

from __future__ import annotations

import itertools

import pytest

import microsdpa_cli
from microsdpa.errors import InvalidArgument
from microsdpa.evidence import door_eight_bit, door_models, door_pages, doors, environment, suites, timing
from microsdpa.evidence.inputs import BLOCK_SHARES, Case
from microsdpa.evidence.peers import choose, ours

MISSION = Case(1, 8, 512, 512, 64)


def test_suites_are_data() -> None:
    assert suites.names() == [
        "ampere",
        "backward",
        "block",
        "context_parallel",
        "decode",
        "doors",
        "fp8",
        "ladder",
        "masked",
        "mission",
        "prefill",
        "prefill_fp8",
        "real",
        "schedule",
        "serving",
        "small",
        "start",
        "steps",
        "wild",
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
        assert choose(suites.load(name).peers, bool(suites.load(name).eight_bit)) or suites.load(name).peers == "none"
    assert suites.load("mission").peers == "all"
    assert {peer.name for peer in choose(prefill.peers, False)} >= {"torch CUDNN", "torch MATH", "flash-attn 4"}
    with pytest.raises(InvalidArgument, match="expected one of ampere, backward"):
        suites.load("nope")


def test_suite_masked_has_what_models_mask() -> None:
    cases = suites.load("masked").cases
    of_documents = {c.seqlen_k for c in cases if c.masks == ("documents",) and c.causal and c.head_dim == 128}
    assert of_documents == {1024 * 2**i for i in range(6)}
    shares = {(c.seqlen_k, name) for c in cases for name in c.masks if name in BLOCK_SHARES}
    assert shares >= {(4096, name) for name in BLOCK_SHARES}
    assert {c.head_dim for c in cases if not c.masks} >= {32, 40, 72, 80, 96, 112, 160, 192}
    assert {c.seqlen_k for c in cases if "window 1024" in c.masks} == {1024, 2048, 4096, 8192, 32768}


def test_suite_wild_is_of_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for commit in ("0123456789abcdef", "0123456789abcdef-dirty", "fedcba9876543210", "unknown"):
        monkeypatch.setattr(environment, "commit", lambda commit=commit: commit)
        drawn.append(suites.load("wild").cases)
    assert drawn[0] == drawn[1]
    assert len({*map(tuple, drawn)}) == 3
    for case in itertools.chain(*drawn):
        assert 1 <= case.batch <= 16
        assert 3 <= case.heads <= 32
        assert case.heads % case.kv_heads == 0
        assert 16 <= min(case.seqlen_q, case.seqlen_k) <= max(case.seqlen_q, case.seqlen_k) <= 3000
        assert case.head_dim % 8 == 0
    kinds = {(c.layout, c.causal, c.kv_heads < c.heads) for c in itertools.chain(*drawn)}
    assert len(kinds) == 8
    assert all(len(cases) == 32 for cases in drawn)


def test_some_cells_of_a_suite() -> None:
    masked = suites.load("masked")
    documents = suites.chosen(masked, suites.Some(cells="documents,Qwen"))
    assert {c.masks for c in documents.cases} == {("documents",), ("text",)}
    parts = [suites.chosen(masked, suites.Some(part=f"{i}/3")).cases for i in (1, 2, 3)]
    assert sorted(map(str, itertools.chain(*parts))) == sorted(map(str, masked.cases))
    for some, message in (("documnets", "texts in names"), ("", "such as 1/3, got 4/3")):
        with pytest.raises(InvalidArgument, match=message):
            suites.chosen(masked, suites.Some(cells=some, part="4/3" if not some else ""))


def test_doors_are_measured_in_parts() -> None:
    ways = [*doors.doors(), *door_eight_bit.doors(), *door_pages.doors(), *door_models.doors()]
    parts = [suites.some_of(ways, suites.Some(part=f"{i}/2"), lambda door: door.name) for i in (1, 2)]
    assert sorted(map(id, itertools.chain(*parts))) == sorted(map(id, ways))
    models = suites.some_of(ways, suites.Some(cells="transformers"), lambda door: door.name)
    assert {door.name for door in models} == {"transformers"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "nope"], "expected one of ampere, backward"),
        (["--suite", "start", "--modes", "graph"], "none for suite start"),
        (["--suite", "masked", "--cells", "documnets"], "texts in names of the suite's cases"),
        (["--suite", "masked", "--part", "5/4"], "such as 1/3"),
        (["--suite", "doors", "--seconds", "9"], "none for suite doors, got 9"),
        (["--suite", "context_parallel", "--seconds", "9"], "none for suite context_parallel, got 9"),
        (["--peers", "torch-fast"], "some of torch, torch-flash"),
    ],
)
def test_bench_names_what_it_knows(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["microsdpa", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        microsdpa_cli.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
