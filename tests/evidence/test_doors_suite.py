"""Suite doors without a GPU: its list, how it judges, and that an end in the middle loses no row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from microsdpa.evidence import door_eight_bit, door_models, door_pages, doors, recorded, results, signatures
from microsdpa.evidence.inputs import Case, Masking, make
from microsdpa.jit.signature import code_signature
from microsdpa.kernels import emulated_target


def test_every_door_has_a_way_of_ours_and_one_of_torchs_or_a_reason() -> None:
    found = [*doors.doors(), *door_eight_bit.doors(), *door_pages.doors(), *door_models.doors()]
    cells = [(d.name, d.text, d.case, d.direction) for d in found]
    assert len(set(cells)) == len(cells)
    assert all(not d.ours.absent or "not installed" in d.ours.absent for d in found)
    names = {d.name for d in found}
    assert {"sdpa", "plan", "enable()", "flash backend", "torch.compile", "torch.ops.microsdpa.attention"} <= names
    assert {"transformers", "diffusers", "enable(), forward and backward", "sdpa of 8-bit values"} <= names
    assert {"sdpa(document_ids)", "sdpa(block_mask)", "sdpa_varlen", "sdpa(window), forward and backward"} <= names


SPARSE = Case(1, 2, 192, 192, 16, masks=("blocks 50%",))


@pytest.mark.parametrize(
    ("case", "bind"),
    [
        (Case(1, 2, 20, 20, 16, masks=("documents",)), doors._of_documents),
        (Case(1, 2, 20, 24, 16, masks=("documents",)), doors._of_pairs),
        (SPARSE, doors._of_flex_blocks),
        (SPARSE, lambda case, tensors: doors._with_masks(doors._sdpa, case)(tensors)),
    ],
)
def test_documents_and_blocks_are_those_of_the_case(case: Case, bind: Any) -> None:
    tensors = make(case)
    for call in (bind(case, tensors), doors._as_tensor(case)(tensors)):
        error, wrong = doors.against_oracle(case, tensors, call())
        assert wrong == "", error


def test_packed_sequences_are_those_of_the_case() -> None:
    case = Case(2, 2, 20, 20, 16)
    tensors = make(case)
    error, wrong = doors._packed_output(case, tensors, doors._varlen(tensors)())
    assert wrong == "", error
    assert doors.packed(tensors)[3].tolist() == [0, 20, 40]


@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("bind", [door_pages.varlen, door_pages.with_kvcache])
def test_a_cache_in_pages_has_the_dense_keys(bind: Any, appends: bool) -> None:
    case = Case(2, 4, 1, 64, 16, heads_kv=2, dtype="bfloat16")
    tensors = make(case)
    call = bind(tensors, appends=appends)
    for _ in range(2):  # what is appended is written again
        error, wrong = doors.against_oracle(case, tensors, call().transpose(1, 2))
        assert wrong == "", error
    table = door_pages.Paged.of(tensors).page_table
    assert sorted(table.flatten().tolist()) == list(range(8)) != table.flatten().tolist()


def test_the_rows_of_a_cache_in_pages_name_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microsdpa.runtime.launcher.target_of_device", lambda: "sm_90a")
    for door in door_pages.doors():
        fields = doors.fields_of(door, doors.OURS, make(door.case))
        assert (fields["kernel"], fields["varlen"], len(fields["lengths"])) == ("ampere/varlen", 16, 8)


SMALL_EIGHT_BIT = [
    *door_eight_bit.doors(
        Case(1, 2, 150, 150, 64), Case(2, 4, 1, 70, 32, heads_kv=2, dtype="bfloat16", causal="lower_right")
    )
]


def test_every_mask_argument_has_a_door_beside_eight_bits() -> None:
    found = [*door_eight_bit.doors()]
    values = [door.case.masks[0] for door in found if door.name == "sdpa of 8-bit values"]
    assert values == list(door_eight_bit.MASKINGS)
    assert {"e4m3 cache, a scale of each head", "int8 cache, a scale of each token"} <= {door.text for door in found}
    cached = {door.case.masks for door in found if door.text.startswith("e4m3 cache")}
    assert cached == {(), *((masking,) for masking in door_eight_bit.CACHE_MASKINGS)}
    assert {door.name for door in found} >= {f"sdpa(precision={one})" for one in door_eight_bit.QUANTIZING}


@pytest.mark.parametrize("door", SMALL_EIGHT_BIT, ids=lambda door: f"{door.name} {door.text} {door.case.masks}")
def test_calls_with_eight_bits_run_and_rows_name_their_kernel(
    door: doors.Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = make(door.case)
    outcome = doors._checked(door, door.ours, tensors)
    assert not isinstance(outcome, str), outcome
    assert float(outcome[1]["rel_l1"]) > 0  # type: ignore[arg-type]
    theirs = doors._checked(door, door.torchs, tensors)
    assert isinstance(theirs, str) == bool(door.torchs.absent)
    target = emulated_target("auto")
    monkeypatch.setattr("microsdpa.runtime.launcher.target_of_device", lambda: target)
    row = results.row(door.case, **doors.fields_of(door, doors.OURS, tensors), mode="host")
    if "cache" not in door.text:
        wide = row.get("precision") == "int8_fp16"
        assert row["kernel"] == f"hopper/{'throughput_8bit_qk' if wide else 'latency_8bit'}"
        (spec, *others) = [kernel.spec for kernel in recorded.of_row(row, "sm_90a").values()]
        assert code_signature(spec, target) == row["code_signature"]
        assert len(others) == ("precision" in door.name)
        assert all(code_signature(other, target) == row["quantiser_signature"] for other in others)
    else:
        assert row["kernel"] == "ampere/varlen"
        assert not signatures.is_stale(row, target)
        assert row["cache_kind"]["dtype"] in door.text
        assert row["cache_kind"]["each_token"] == ("token" in door.text)


def test_a_wrong_output_beside_masks_is_told() -> None:
    door = SMALL_EIGHT_BIT[0]
    tensors = make(door.case)
    call, _ = doors._checked(door, door.ours, tensors)  # type: ignore[misc]
    assert door.ours.check is not None
    assert door.ours.check(tensors, call())[1] == ""
    for wrong in (call() * 1.1, call().roll(1, dims=2)):
        assert "differs from the oracle" in door.ours.check(tensors, wrong)[1]


@pytest.mark.parametrize(("name", "masking"), [("window", "window"), ("document_ids", "documents")])
def test_gradients_of_sdpas_own_masks_are_judged(name: str, masking: Masking) -> None:
    case = Case(1, 2, 20, 20, 16, masks=(masking,))
    tensors = tuple(t.requires_grad_() for t in make(case))
    for bind in (doors._both_passes_of(name, case), doors._both_passes_of_mask(case)):
        assert doors.gradients(case, tensors, bind(tensors)())[1] == ""  # type: ignore[arg-type]


def test_gradients_are_judged_and_a_wrong_one_is_told() -> None:
    case = Case(2, 4, 20, 20, 16, heads_kv=2, causal="upper_left")
    tensors = tuple(t.requires_grad_() for t in make(case))
    found = doors._both_passes(case, tensors)()  # type: ignore[arg-type]
    error, wrong = doors.gradients(case, tensors, found)  # type: ignore[arg-type]
    assert wrong == ""
    assert error["max_abs"] is not None
    _, wrong = doors.gradients(case, tensors, (found[0], found[1] * 1.1, found[2]))  # type: ignore[arg-type]
    assert "gradient of key" in wrong


def test_a_mask_tensor_of_torchs_says_what_the_argument_does() -> None:
    for masking in ("window", "alibi"):
        case = Case(1, 2, 20, 20, 16, masks=(masking,))  # type: ignore[arg-type]
        tensors = make(case)
        error, wrong = doors.against_oracle(case, tensors, doors._as_tensor(case)(tensors)())
        assert wrong == "", (masking, error)


def test_an_option_is_timed_in_turn_with_the_plain_call(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [door for door in [*doors.doors(), *door_eight_bit.doors()] if door.is_option]
    names = {door.name for door in options}
    assert {"sdpa(return_lse=)", "sdpa(precision=fp8)", "sdpa of 8-bit values", "sdpa(left padding)"} <= names
    assert not {"sdpa", "sdpa_varlen", "enable()", "sdpa(window), forward and backward"} & names
    monkeypatch.setattr(doors, "make", lambda case, device: make(Case(1, 1, 4, 4, 16)))
    monkeypatch.setattr(doors, "fields_of", lambda door, impl, tensors: FIELDS | {"impl": impl})
    monkeypatch.setattr(doors, "_checked", lambda door, side, tensors: (lambda: None, {}))
    monkeypatch.setattr(doors.timing, "prepare", lambda mode, calls: None)
    monkeypatch.setattr(doors.timing, "interleave", lambda runners, seed, around: {n: [4.0, 5.0] for n in runners})
    lse, plain = (next(d for d in doors.doors() if d.name == name) for name in ("sdpa(return_lse=)", "sdpa"))
    assert [(row["impl"], row.get("plain_us")) for row in doors._measure(lse, ["host"])] == [
        ("microsdpa", 4.0),
        ("torch", None),
    ]
    assert all("plain_us" not in row for row in doors._measure(plain, ["host"]))


FIELDS = {"version": "1", "kernel": None, "signature": None, "op": "sdpa", "inputs": "float16"}


def test_rows_are_kept_after_every_door(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = doors.doors()[:3]
    row: dict[str, Any] = {"door": "stand-in"}
    measured: list[doors.Door] = []

    def measure(door: doors.Door, modes: object) -> list[results.Row]:
        measured.append(door)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return [row]

    monkeypatch.setattr(doors, "_measure", measure)
    kept: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        doors.run(chosen, ["host"], keep=lambda rows: kept.append(len(rows)))
    assert kept == [1, 2]


def test_a_side_that_fails_is_a_reason_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def fail(tensors: object) -> Any:
        raise ValueError("no such thing\nat all")

    door = doors.Door("stand-in", doors.Side(fail), doors.PLAIN, Case(1, 2, 8, 8, 16))
    assert doors._checked(door, door.ours, make(door.case)) == "ValueError: no such thing"
    outcome = doors._checked(door, door.torchs, make(door.case))
    assert not isinstance(outcome, str)
    assert outcome[1]["max_abs"] is not None


@pytest.mark.parametrize("first", [True, False])
def test_turns_of_a_loop_are_its_parts_and_only_the_first_time_there_are_no_plans(
    monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(door_models.launcher, "forget_plans", lambda: seen.append("forget"))
    loop = SimpleNamespace(begin=lambda: seen.append("begin"), advance=seen.append)
    loops = (door_models._FirstLoop if first else door_models._LaterLoop)(loop)
    assert seen == (["begin", "forget"] if first else ["begin"])
    seen.clear()
    samples = [loops.turn()[0] for _ in range(loops.turns)]
    assert sum(seen) == door_models.STEPS  # type: ignore[call-overload]
    assert len(seen) == loops.turns
    assert all(0 < sample < 1e6 for sample in samples)


def test_the_long_loop_ends_with_the_logits_of_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(door_models, "STEPS", 5)
    import transformers

    sizes = door_models.SIZES | dict(door_models.ONE_LAYER.sizes) | {"hidden_size": 64, "intermediate_size": 64}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    with torch.no_grad():
        grown, at_once = (bind(model)() for bind in (door_models._Loop, door_models._last_of_prefill))
        unmet = door_models._UnmetLoop(model)
        assert torch.equal(unmet(), at_once)
        assert unmet.cache.get_seq_length() == 0
        unmet.advance(2)
        torch.testing.assert_close(unmet.advance(3), grown)
    assert grown.shape == at_once.shape
    assert float((grown - at_once).abs().max()) < 1e-4
    assert float(at_once.abs().max()) > 1e-2
