"""Suite serving: its cells, what judges them, and what its rows stand for."""

from __future__ import annotations

import pytest

from microsdpa.evidence import recorded, results, serving
from microsdpa.evidence.serving import WAYS, Cell, Way, expected, fields_of, judged, layers, problem_of
from microsdpa.jit.signature import code_signature

SMALL = {
    "equal": Cell((40, 40), 4, 2, 128),
    "mixed": Cell((5, 40, 17), 4, 2, 32, text="3 of 5 to 40"),
    "prompts": Cell((5, 20, 7), 4, 2, 32, None, 0),
    "V of fewer columns": Cell((5, 20, 7), 4, 2, 96, None, 0, value_dim=64),
    "new tokens": Cell((48, 48), 4, 2, 32, 8),
    "E4M3": Cell((40, 40), 4, 2, 32, cache="e4m3"),
    "INT8, mixed": Cell((5, 40, 17), 4, 2, 32, cache="int8"),
}
OURS = [way for way in WAYS if way.name == serving.OURS]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("way", OURS, ids=lambda way: way.variant or "pages")
def test_outputs_are_held_against_the_oracle(name: str, way: Way) -> None:
    cell = SMALL[name]
    if way.absent(cell) and (way.packed or way.variant == serving.INVARIANT):
        assert cell.queries != 1 or cell.cache != "bfloat16"
        return
    if way.absent(cell) and way.variant in serving.APPENDS:
        assert cell.queries != 1 or cell.cache != "bfloat16" or not cell.equal
        return
    if way.absent(cell):
        assert way.dense
        assert not cell.equal or cell.cache != "bfloat16"
        return
    layer = layers(cell, "cpu", 2)[0]
    right = expected(cell, serving.changed(layer, cell, way.change) if cell.page else layer, way.dense)
    error, wrong = judged(way, cell, layer, right)
    assert not wrong
    assert error["max_abs"] < 0.1  # type: ignore[operator]
    bad = Way("bad", lambda layer, cell: lambda: way.bind(layer, cell)() + 0.5, "", way.decode, dense=way.dense)
    assert judged(bad, cell, layer, right)[1].startswith("off by")


def test_new_keys_are_held_against_the_changed_ones() -> None:
    cell = SMALL["equal"]
    layer = layers(cell, "cpu", 2)[0]
    (way,) = (way for way in OURS if way.change.changes_query)
    assert judged(way, cell, layer, expected(cell, layer, False))[1].startswith("off by")


def test_layers_share_everything_but_their_caches() -> None:
    one, other, *_ = layers(SMALL["mixed"], "cpu", 3)
    assert one.sequences is other.sequences
    assert one.query is other.query
    assert one.key.data_ptr() != other.key.data_ptr()
    table = one.sequences.page_table
    assert table is not None
    used = table[table >= 0]
    assert len(used.unique()) == len(used) == one.key.shape[0]


def test_layers_that_append_share_lengths_and_angles(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, object]] = []
    monkeypatch.setattr(serving.microsdpa, "sdpa_varlen", lambda *_, **options: given.append(options))
    (way,) = (way for way in OURS if way.change.changes_query)
    for layer in layers(SMALL["equal"], "cpu", 2):
        way.bind(layer, SMALL["equal"])()
    one, other = given
    for name in ("lengths", "page_table", "rotary_cos", "rotary_sin"):
        assert one[name] is other[name]
    assert one["new_key"] is not other["new_key"]


def test_the_cells_of_the_suite() -> None:
    cells = serving.cells()
    assert len(set(cells)) == len(cells)
    assert {cell.heads_kv for cell in cells} == {1, 8, 12, 16, 32}
    assert any(cell.queries is None for cell in cells)
    assert sum(serving.prompts(16384, 9)) == 16384
    assert all(length > 0 for cell in cells for length in cell.lengths)


@pytest.mark.parametrize("cell", serving.cells()[::7], ids=str)
def test_a_row_knows_its_kernel(cell: Cell) -> None:
    for way in OURS:
        if way.absent(cell):
            continue
        fields = fields_of(way, cell, "sm_90a")
        row = results.row(cell.case, **fields, mode="cold", median_us=1.0)
        found = recorded.of_row(row, "sm_90a")["code_signature"]
        assert code_signature(found.spec, "sm_90a") == fields["code_signature"]
        if not way.dense:
            assert recorded.problem_of(row, "sm_90a") == problem_of(cell, "sm_90a", way.packed)
            assert found.spec.name in ("ampere/varlen", "hopper/varlen")


def test_the_problem_is_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    from microsdpa.call.call import Call, scales_of
    from microsdpa.call.options import Options
    from microsdpa.call.validate import check
    from microsdpa.execution import choice

    monkeypatch.setattr(choice, "emulated_target", lambda _: "sm_90a")
    for cell in SMALL.values():
        layer = layers(cell, "cpu", 2)[0]
        options = Options(causal="lower_right", enable_gqa=True, impl="emulate")
        scales = scales_of(None, layer.scales.get("k_scale"), layer.scales.get("v_scale"))
        call = Call(layer[:3], scales=scales, options=options, sequences=layer.sequences)
        posed, expected = choice.problem_of(check(call)), problem_of(cell, "sm_90a")
        assert (posed.seqlen_q, posed.varlen, posed.batch) == (expected.seqlen_q, expected.varlen, expected.batch)
        assert (posed.cache, posed.value_dim) == (expected.cache, expected.value_dim)
        assert posed.packed_queries == expected.packed_queries


def test_packed_queries_of_few_sequences_have_kernels_of_their_own() -> None:
    (way,) = (way for way in OURS if way.packed)
    fields = fields_of(way, Cell((512,) * 8), "sm_90a")
    assert fields["packed_queries"] is True
    assert fields["kernel"] == "ampere/varlen"
    assert fields["signature"] != fields_of(OURS[0], Cell((512,) * 8), "sm_90a")["signature"]
    assert (
        fields_of(way, Cell((512,)), "sm_90a")["signature"] == fields_of(OURS[0], Cell((512,)), "sm_90a")["signature"]
    )


def test_every_row_fits_the_schema() -> None:
    rows = [
        results.row(cell.case, **fields_of(way, cell, "sm_90a"), mode="cold", status="unavailable", reason="a test")
        for cell in (*SMALL.values(), *serving.cells())
        for way in WAYS
    ]
    results.validate(results.make(serving.SUITE, "test", rows), "made here")
    assert sum(rows[0]["lengths"]) == 80


def test_bits_that_depend_on_no_batch_have_rows_of_their_own() -> None:
    (way,) = (way for way in OURS if way.variant == serving.INVARIANT)
    timed = [cell for cell in serving.cells() if not way.absent(cell)]
    assert {len(cell.lengths) for cell in timed} == {1, 8, 32, 64, 100, 200, 256}
    assert {cell.page for cell in timed} == {16}
    assert fields_of(way, timed[0], "sm_90a")["batch_invariant"] is True
    assert fields_of(way, timed[0], "sm_90a")["kernel"] == "ampere/varlen"
