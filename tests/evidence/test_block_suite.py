"""Suite block: its cells, what judges them, and what its rows stand for."""

from __future__ import annotations

import pytest
import torch

import microsdpa
from microsdpa.evidence import block, recorded, results
from microsdpa.evidence.block import WAYS, Block, Cell, Way, expected, fields_of, judged, make_block, problem_of
from microsdpa.evidence.inputs import Case
from microsdpa.jit.signature import code_signature
from microsdpa.kernels.select import select

SMALL = {
    "both": Cell("small", Case(1, 2, 40, 40, 64)),
    "rotary alone": Cell("small", Case(1, 2, 33, 33, 32, dtype="bfloat16", causal="upper_left"), norm="none"),
    "keys of a cache": Cell("small", Case(1, 4, 1, 70, 72, heads_kv=2, causal="lower_right"), rotates_key=False),
    "LayerNorm": Cell("small", Case(2, 2, 20, 30, 64), rotary=False, norm="layer"),
}
OURS, *PEERS = WAYS


@pytest.mark.parametrize("name", SMALL)
def test_outputs_are_held_against_the_oracle(name: str) -> None:
    cell = SMALL[name]
    tensors = make_block(cell, "cpu")
    right = expected(cell, tensors)
    error, wrong = judged(OURS, cell, tensors, right)
    assert not wrong
    assert error["max_abs"] < 0.1  # type: ignore[operator]
    bad = Way("bad", lambda cell, own: lambda: OURS.bind(cell, own)() + 0.5)
    assert judged(bad, cell, tensors, right)[1].startswith("off by")


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("forgotten", ["rotary", "norm"])
def test_a_step_that_is_left_out_is_wrong(name: str, forgotten: str) -> None:
    cell = SMALL[name]
    if getattr(cell, forgotten) in (False, "none"):
        return
    tensors = make_block(cell, "cpu")
    names = ("rotary", "rotary_positions") if forgotten == "rotary" else ("q_norm", "k_norm")
    rest = {name: value for name, value in tensors.arguments(cell).items() if name not in names}
    less = Way("less", lambda cell, own: lambda: microsdpa.sdpa(*own.inputs, **rest))
    assert judged(less, cell, tensors, expected(cell, tensors))[1].startswith("off by")


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("way", [way for way in PEERS if way.name != "torch.compile, cuDNN"], ids=lambda way: way.name)
def test_a_peer_computes_the_same(name: str, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(cell: Cell) -> object:
        return lambda own: block.both(cell, own)

    monkeypatch.setattr(block, "_compiled", plain)
    cell = SMALL[name]
    tensors = make_block(cell, "cpu")
    assert not judged(way, cell, tensors, expected(cell, tensors))[1]


def test_what_a_peer_compiles_is_one_graph() -> None:
    cell = SMALL["keys of a cache"]
    tensors = make_block(cell, "cpu")

    def eager(own: Block) -> tuple[torch.Tensor, torch.Tensor]:
        return block.both(cell, own)

    traced = torch.compile(eager, backend="eager", fullgraph=True, dynamic=False)
    for found, wanted in zip(traced(tensors), block.both(cell, tensors), strict=True):
        assert torch.equal(found, wanted)


def test_peers_are_compiled_for_any_number_of_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiler(function, backend="eager", **options))
    for length in range(3, 13):
        cell = Cell("small", Case(1, 1, length, length, 16), norm="none")
        block.forget_compiled()
        tensors = make_block(cell, "cpu")
        assert not judged(PEERS[0], cell, tensors, expected(cell, tensors))[1]


def test_the_cells_of_the_suite() -> None:
    cells = block.cells()
    assert len({(str(cell), cell.case) for cell in cells}) == len(cells)
    assert {cell.norm for cell in cells} == {"none", "rms", "layer"}
    assert {cell.case.head_dim for cell in cells} == {64, 72, 128, 256}
    assert not all(cell.rotates_key for cell in cells)


@pytest.mark.parametrize("cell", block.cells(), ids=lambda cell: f"{cell}, {cell.case}")
def test_a_row_knows_its_kernels(cell: Cell) -> None:
    found = select(problem_of(cell, "sm_90a")).spec
    fields = {"code_signature": code_signature(found, "sm_90a"), "case": str(cell), "requested": "auto"}
    kind = problem_of(cell, "sm_90a").prologue
    assert kind is not None
    row = results.row(cell.case, **fields, prologue_kind=vars(kind))
    stands_for = recorded.of_row(row, "sm_90a")["code_signature"]
    assert stands_for.spec == found
    assert code_signature(stands_for.spec, "sm_90a") == fields["code_signature"]


@pytest.mark.parametrize("name", SMALL)
def test_the_problem_is_the_calls(name: str) -> None:
    cell = SMALL[name]
    kind = problem_of(cell, "sm_90a").prologue
    assert kind == make_block(cell, "cpu").prologue(cell).kind()


def test_a_row_fits_the_schema() -> None:
    cell = SMALL["both"]
    fields = fields_of(PEERS[0], cell, make_block(cell, "cpu"))
    row = results.row(cell.case, **fields, mode="graph", status="unavailable", reason="a test")
    results.validate(results.make(block.SUITE, "test", [row]), "made here")
    assert row["case"] == "small, RMS norm and rotary"
