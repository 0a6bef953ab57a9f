"""Random calls: that they are what they say, that a wrong kernel is found and made small, and what is recorded."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import microsdpa
from microsdpa import reference
from microsdpa.emulate import run
from microsdpa.evidence import fuzz, fuzz_check, fuzz_varlen, render, results
from microsdpa.evidence.fuzz_calls import DOORS, Call, draw, simpler, tensors, valid
from microsdpa.evidence.fuzz_varlen import VarlenCall
from microsdpa.execution import backward
from microsdpa.jit.source import KERNELS_DIR

MASKED = Call(
    door="backward",
    heads_kv=2,
    group=2,
    seqlen_q=9,
    seqlen_k=20,
    head_dim=32,
    causal="lower_right",
    mask="float32",
    mask_dims=(False, True, True, True),
    mask_shown=0.5,
    window=(12, 5),
    softcap=5.0,
    alibi="head",
    sinks="inputs",
    graded="qkvmas",
)


def test_a_seed_gives_the_same_calls_and_every_door() -> None:
    calls = draw(400, 7, emulated=False)
    assert calls == draw(400, 7, emulated=False)
    assert calls != draw(400, 8, emulated=False)
    assert {call.door for call in calls} == set(DOORS)
    plain = [call for call in calls if isinstance(call, Call)]
    for name in (
        "documents",
        "blocks",
        "mask",
        "causal",
        "alibi",
        "sinks",
        "operands",
        "granularity",
        "dtype",
        "layouts",
        "impl",
        "scale",
    ):
        assert len({getattr(call, name) for call in plain}) > 1, name
    assert all(call == valid(call) for call in plain)
    assert all(call == fuzz_varlen.valid(call) for call in calls if isinstance(call, VarlenCall))
    assert all(call.work <= 2**22 for call in draw(50, 7, emulated=True))
    long = [call for call in draw(400, 7, emulated=True) if isinstance(call, Call) and call.seqlen_k > 500]
    assert 4 < len(long) < 60
    assert any(call.value_dim for call in long)


@pytest.mark.parametrize("call", draw(12, 1, emulated=True), ids=str)
def test_a_line_of_python_makes_the_call_again(call: Call) -> None:
    assert eval(str(call), {"Call": Call, "VarlenCall": VarlenCall}) == call


NOT_DRAWN = {
    ("sdpa", "dropout_p"): "its random numbers are torch's; the operator takes the state that a reference needs",
    ("scaled_dot_product_attention", "dropout_p"): "its random numbers are torch's",
    ("scaled_dot_product_attention", "impl"): "an argument of enabled(), which the emulator is asked for by",
    ("plan", "out"): "the door that is given an output is sdpa's",
    ("plan", "precision"): "the door of quantizing calls is sdpa's",
    **{("plan", f"{name}_scale"): "the door of 8-bit values is sdpa's" for name in "qkv"},
}
"""Options that no call draws, and why."""
TORCH_OPTIONS = "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"


def test_every_option_of_every_door_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function is given each of its options with something other than the default, by some of the calls."""
    seen: dict[str, set[str]] = {}

    def record(function: str, defaults: dict[str, Any]) -> Any:
        names = list(defaults)

        def recorder(*arguments: Any, **options: Any) -> Any:
            given = dict(zip(names, arguments, strict=False)) | options
            for option, value in given.items():
                if value is not None and (isinstance(value, torch.Tensor) or value != defaults[option]):
                    seen.setdefault(function, set()).add(option)
            raise RuntimeError("this much is enough")

        return recorder

    functions: dict[str, dict[str, Any]] = {}
    for function in (microsdpa.sdpa, microsdpa.plan, microsdpa.sdpa_varlen):
        parameters = inspect.signature(function).parameters
        options = {name: one.default for name, one in parameters.items() if one.kind != one.VAR_KEYWORD}
        functions[function.__name__] = options
        monkeypatch.setattr(microsdpa, function.__name__, record(function.__name__, functions[function.__name__]))
    schema = torch.ops.microsdpa.attention.default._schema.arguments
    functions["operator"] = {one.name: one.default_value for one in schema}
    monkeypatch.setattr(torch.ops.microsdpa, "attention", record("operator", functions["operator"]))
    of_torch = {"query": None, "key": None, "value": None} | dict.fromkeys(TORCH_OPTIONS, None)
    functions["scaled_dot_product_attention"] = of_torch | {"is_causal": False, "enable_gqa": False}
    name = "scaled_dot_product_attention"
    monkeypatch.setattr(fuzz_check.F, name, record(name, functions[name]))
    monkeypatch.setattr(microsdpa, "enabled", lambda **_: contextlib.nullcontext())
    for seed in range(20):
        for call in draw(20, seed, emulated=True):
            assert "this much" in fuzz_check.check(call, "cpu").failure, call
    for function_name, options in functions.items():
        missing = {option for option in options if option not in seen[function_name]}
        assert missing == {option for of, option in NOT_DRAWN if of == function_name and option in options}


VARLEN = VarlenCall(
    queries=(2, 0, 5), keys=(30, 4, 0), heads_kv=2, group=2, packed=True, storage="paged", page=3, hint=True, out=True
)


@pytest.mark.parametrize(
    "call",
    [
        VARLEN,
        dataclasses.replace(VARLEN, append=True, rotary=16, interleaved=True, narrow=True),
        dataclasses.replace(VARLEN, append=True, cache="int8", scale_of="tokens"),
        VarlenCall(queries=(3, 3), keys=(9, 40), cache="e4m3", scale_of="sequences", append=True, causal=True),
    ],
    ids=["pages", "appended and rotated", "INT8", "E4M3"],
)
def test_calls_of_many_lengths_are_judged(call: VarlenCall, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call passes; one whose output, or whose cache, is written wrong does not."""
    call = fuzz_varlen.valid(call)
    outcome = fuzz_check.check(call, "cpu")
    assert (outcome.kind, outcome.failure) == ("passed", "")
    spec, problem = fuzz_varlen.chosen(call, "cpu")
    assert spec.name == "ampere/varlen"
    assert problem.heads == call.heads
    launch = fuzz_varlen.run

    def wrong_cache(call: VarlenCall, given: dict[str, Any], device: str) -> Any:
        found = launch(call, given, device)
        given["value"].view(torch.uint8)[-1, 0] ^= 64
        return found

    def wrong_output(*arguments: Any) -> Any:
        out, lse = launch(*arguments)
        return out * 1.5, lse

    for wrong, kind in ((wrong_output, "output"), (wrong_cache, "cache")):
        monkeypatch.setattr(fuzz_varlen, "run", wrong)
        assert fuzz_check.check(call, "cpu").kind == kind


def test_steps_to_simpler_calls_of_many_lengths_end() -> None:
    call, steps = fuzz_varlen.valid(dataclasses.replace(VARLEN, append=True, rotary=32, cache="int8", window=(3, 4))), 0
    while following := next(simpler(call), None):
        assert isinstance(following, VarlenCall)
        assert following == fuzz_varlen.valid(following)
        call, steps = following, steps + 1
    assert call == VarlenCall(keys=(0,))
    assert steps < 60


CHANGED = Call(heads_kv=2, group=2, seqlen_q=9, seqlen_k=20, rotary=32, norms="layer", biased=True, norm_eps=1e-3)


@pytest.mark.parametrize("positions", ["counted", "first", "of rows", "of all", "apart", "queries alone"])
def test_norms_and_rotary_embedding_are_judged(positions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call passes; one that is told of another epsilon does not."""
    call = valid(dataclasses.replace(CHANGED, causal="lower_right", rotary_positions=positions))
    outcome = fuzz_check.check(call, "cpu")
    assert (outcome.kind, outcome.failure) == ("passed", "")
    if positions == "counted":
        assert fuzz_check.check(valid(dataclasses.replace(call, door="backward")), "cpu").kind == "passed"
    changed = reference.changed_rows
    monkeypatch.setattr(
        reference, "changed_rows", lambda rows, norm, eps, *rest, **more: changed(rows, norm, 9.0, *rest, **more)
    )
    assert fuzz_check.check(call, "cpu").kind == "output"


def test_the_line_runs() -> None:
    line = dataclasses.replace(MASKED, door="sdpa", graded="q").line("cpu")
    ended = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "\n", "")


def test_steps_to_simpler_calls_end() -> None:
    call, steps = MASKED, 0
    while following := next(simpler(call), None):
        assert following == valid(following)
        call, steps = following, steps + 1
    assert call == Call(head_dim=32)
    assert steps < 40


def test_plain_operations_are_the_oracle() -> None:
    made = tensors(MASKED, "cpu")
    of = {"query": made.query, "key": made.key, "value": made.value, **made.masks}
    out = fuzz_check.plain(MASKED, {name: tensor.double() for name, tensor in of.items()})
    options: dict[str, Any] = {"causal": "lower_right", "window": MASKED.window, "softcap": MASKED.softcap}
    expected, _ = reference.oracle(**of, **options)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("documents", ["none", "in order", "apart", "of queries and keys"])
@pytest.mark.parametrize("blocks", ["none", "table", "mask_mod"])
def test_documents_and_blocks_are_in_what_is_said_of_them(documents: Any, blocks: Any) -> None:
    call = valid(
        Call(door="plan", batch=2, seqlen_q=90, seqlen_k=90, documents=documents, blocks=blocks, mask="ranges")
    )
    made = tensors(call, "cpu")
    assert made.masks.keys() == {
        "attn_mask",
        *(["document_ids"] if documents != "none" else []),
        *(["block_mask"] if blocks != "none" else []),
    }
    expected, _ = reference.oracle(made.query, made.key, made.value, **made.masks)
    of = {name: getattr(made, name).double() for name in ("query", "key", "value")}
    shown = {} if made.shown is None else {"shown": made.shown}
    found = fuzz_check.plain(call, {**of, "attn_mask": made.masks["attn_mask"], **shown})
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    outcome = fuzz_check.check(call, "cpu")
    assert (outcome.kind, outcome.failure) == ("passed", "")
    assert fuzz_check.check(dataclasses.replace(call, door="backward"), "cpu").kind == "passed"
    assert valid(dataclasses.replace(call, door="operator")).documents == "none"


@pytest.mark.parametrize("door", [door for door in DOORS if door != "varlen"])
def test_every_door_is_judged(door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call passes, and one whose output is half as large again does not."""
    call = valid(dataclasses.replace(MASKED, door=door, mask="none"))
    outcome = fuzz_check.check(call, "cpu")
    assert (outcome.kind, outcome.failure) == ("passed", "")
    assert 0.0 < outcome.use <= 1.0

    launch = run.launch

    def wrong(library: Any, make_params: Any, buffers: dict[str, Any], *rest: Any, **options: Any) -> Any:
        report = launch(library, make_params, buffers, *rest, **options)
        if "out" in buffers:
            buffers["out"][0].mul_(1.5)
        return report

    monkeypatch.setattr(run, "launch", wrong)
    assert fuzz_check.check(call, "cpu").kind == "output"


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = backward.gradients

    def wrong(*arguments: Any) -> list[torch.Tensor]:
        found = gradients(*arguments)
        found[3] = found[3] * 2
        return found

    monkeypatch.setattr(backward, "gradients", wrong)
    assert fuzz_check.check(MASKED, "cpu").kind == "gradient of attn_mask"


def test_an_error_is_a_failure_and_a_refusal_of_a_named_kernel_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    named = Call(impl="ampere/mma", head_dim=36)
    with pytest.raises(microsdpa.UnsupportedProblem):
        fuzz_check.explained(named, "cpu")
    assert fuzz_check.check(named, "cpu").kind == "refused"

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(run, "attention", fail)
    outcome = fuzz_check.check(Call(), "cpu")
    assert (outcome.kind, outcome.failure) == ("ZeroDivisionError", "it raises ZeroDivisionError: by zero")


def _mutant(directory: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """The kernels with one text replaced wherever it stands; the emulator runs these from now on."""
    root = directory / "cuda"
    shutil.copytree(KERNELS_DIR, root)
    places = [path for path in root.rglob("*.cu*") if old in path.read_text()]
    assert places, f"no kernel reads {old!r}"
    for path in places:
        path.write_text(path.read_text().replace(old, new))
    monkeypatch.setattr(run, "attention", functools.partial(run.attention, root=root))


def test_a_wrong_kernel_is_found_and_made_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window's first tile rounded up: only windows whose left end is inside a tile show it."""
    _mutant(tmp_path, monkeypatch, "masks.lowest);", "masks.lowest + BLOCK_N - 1);")
    step = fuzz.step(4, 24, output=tmp_path)  # the second call shows it
    assert step.status == "failed"
    failure, line = step.sections[0][1][1]
    assert "off by" in failure
    assert line in step.summary
    call = eval(line.partition("check(")[2].rpartition(", 'cpu'")[0], {"Call": Call})
    assert fuzz_check.check(call, "cpu").failure == failure
    assert call.window is not None
    assert (call.door, call.batch, call.heads, call.seqlen_q, call.mask) == ("sdpa", 1, 1, 1, "none")
    assert (call.softcap, call.alibi, call.sinks, call.outliers, call.layouts) == (
        None,
        "none",
        "none",
        False,
        Call.layouts,
    )
    assert call.seqlen_k < 80
    result = results.read(tmp_path / "cpu" / f"{fuzz.SUITE}.json")
    wrong = [row for row in result["rows"] if row["status"] == "wrong"]
    assert wrong
    assert all(row["passed"] < row["cases"] for row in wrong)


def test_a_run_is_recorded_and_rendered(tmp_path: Path) -> None:
    step = fuzz.step(12, 6, output=tmp_path, command="microsdpa verify --fuzz 12")
    assert step.status == "passed"
    assert "12 of 12 random calls of seed 6 passed in the emulator" in step.summary
    result = results.read(tmp_path / "cpu" / f"{fuzz.SUITE}.json")
    assert sum(row["cases"] for row in result["rows"]) == 12
    text = render.rendered(
        f"<!-- microsdpa:table gpu=cpu suite={fuzz.SUITE} -->\n<!-- microsdpa:end -->\n", tmp_path, "page"
    )
    assert text.count("\n| ") == len(result["rows"]) + 2
    assert "stale" not in text


@pytest.mark.parametrize(
    "call",
    [
        Call(door="quantized", head_dim=256, scale=3.0, operands="int8_fp16", granularity="head", seed=420552744),
        Call(door="quantized", head_dim=256, scale=-0.2, operands="int8_fp8", seed=2),
        Call(door="precision", head_dim=64, scale=0.5, operands="int8_fp8", seed=4),
    ],
    ids=str,
)
def test_the_bound_of_8_bits_has_the_factor_once(call: Call) -> None:
    wide = dataclasses.replace(call, seqlen_q=20, seqlen_k=130, impl="hopper/throughput_8bit")
    assert fuzz.check(wide, "cpu").failure == ""


@pytest.mark.parametrize("impl", ["hopper/throughput_8bit", "hopper/latency_8bit"])
def test_large_scores_are_judged_by_what_wgmma_sums(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At this scale, two keys swap their places in what E4M3 products lose, and the output moves by a value."""
    large = Call(door="precision", seqlen_q=48, seqlen_k=70, head_dim=128, scale=20.0, seed=88, impl=impl)
    assert fuzz.check(large, "cpu").failure == ""
    monkeypatch.setattr(fuzz_check, "lost_of_scores", lambda *_: None)
    assert "the output is off" in fuzz.check(large, "cpu").failure


@pytest.mark.parametrize(
    "call",
    [
        Call(door="quantized", seqlen_q=6, seqlen_k=9, mask="inputs", documents="of queries and keys", seed=1),
        Call(door="precision", group=2, seqlen_q=17, seqlen_k=30, mask="ranges", softcap=5.0, sinks="float32", seed=2),
        Call(door="precision", operands="fp8_fast", scale=3.0, seqlen_q=9, seqlen_k=30, mask="ranges", seed=3),
        Call(door="precision", operands="int8_fp16", seqlen_q=9, seqlen_k=150, window=(40, 3), softcap=4.0, seed=4),
        Call(door="precision", operands="int8_fp16", seqlen_q=70, seqlen_k=90, alibi="head", sinks="inputs", seed=5),
        Call(door="precision", operands="fp8_fast", seqlen_q=5, seqlen_k=20, mask="ranges", softcap=5.0, seed=4),
    ],
    ids=str,
)
def test_masks_beside_8_bit_operands_are_judged(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    assert valid(call) == call
    outcome = fuzz.check(call, "cpu")
    assert (outcome.kind, outcome.failure) == ("passed", "")
    unmasked, hiding = reference.oracle, ("attn_mask", "document_ids", "window", "alibi_slopes")

    def without(*rows: Any, **given: Any) -> Any:
        return unmasked(*rows, **{name: option for name, option in given.items() if name not in hiding})

    monkeypatch.setattr(reference, "oracle", without)
    assert fuzz.check(call, "cpu").kind in ("output", "LSE")


@pytest.mark.parametrize(("mask_dims", "dtype"), [((True, False, False, False), "float16"), ((True,) * 4, "bfloat16")])
def test_a_gradient_of_a_mask_under_dropout_sums_rounded_rows(mask_dims: Any, dtype: Any) -> None:
    made = Call(door="backward", dtype=dtype, batch=2, group=2, seqlen_q=33, seqlen_k=24, head_dim=128, scale=0.0)
    masked = dataclasses.replace(made, mask="inputs", mask_dims=mask_dims, mask_shown=0.5, window=(0, -1), softcap=0.5)
    assert fuzz.check(dataclasses.replace(masked, graded="m", dropout_p=0.7, seed=5), "cpu").failure == ""


_MASKED = {"mask_dims": (False, True, True, True), "mask_shown": 0.9, "window": (0, -1), "dropout_p": 0.1}
_ROTATED = {"rotary": 16, "rotary_interleaved": True, "rotary_positions": "first", "sinks": "float32"}
_ROWS = {"mask": "float32", "mask_dims": (False, True, True, False), "window": (-1, 0), "scale": -0.2}


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (
            (1, 1, 1, 1, 1, 40),
            {"layouts": ("bhsd", "every other row", "bhsd", "bhsd"), "graded": "k", "seed": 2040690143},
        ),
        (
            (2, 1, 3, 10, 8, 64),
            {"causal": "lower_right", "mask": "inputs", "graded": "m", "seed": 2041304753} | _MASKED,
        ),
        ((1, 1, 1, 8, 192, 64), {"causal": "upper_left", "graded": "qm", "seed": 1594037631} | _ROTATED | _ROWS),
    ],
    ids=["one key", "dropout", "rotary"],
)
def test_a_gradient_may_have_the_errors_of_what_a_kernel_rounds(sizes: Any, options: Any) -> None:
    """Sums cancel in these calls, and plain operations of the same type happen to be exact."""
    dtype = "bfloat16" if "dropout_p" in options else "float16"
    call = Call("backward", dtype, *sizes, **options, outliers="dropout_p" not in options)  # type: ignore[arg-type]
    assert fuzz.check(call, "cpu").failure == ""


def test_outputs_of_rotated_rows_are_compared_with_those_of_the_rows_as_rounded() -> None:
    """Roundings of eager's sums undo half of what the rounding of these rows does to an exact sum."""
    options = {"causal": "upper_left", "scale": 3.0, "alibi": "batch", "sinks": "inputs", "graded": "q"}
    rotated = {
        "rotary": 64,
        "rotary_positions": "apart",
        "seed": 1268232544,
        "layouts": ("bhsd", "bhsd", "sbhd", "bhsd"),
    }
    call = Call("backward", "bfloat16", 2, 1, 1, 5, 11, **options, **rotated, impl="hopper/latency")  # type: ignore[arg-type]
    outcome = fuzz.check(call, "cpu")
    assert outcome.failure == ""
    assert outcome.errors is not None
    assert outcome.errors.max_abs < 0.01


def test_a_model_of_a_backward_errs_about_as_kernels_do(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    real = fuzz_check._modelled_errors

    def kept(*arguments: Any) -> list[float]:
        found.append(real(*arguments))
        return found[-1]

    monkeypatch.setattr(fuzz_check, "_modelled_errors", kept)
    call = Call(door="backward", seqlen_q=40, seqlen_k=70, group=2, scale=0.1, sinks="float32", graded="qkvs", seed=3)
    assert fuzz.check(call, "cpu").failure == ""
    assert all(2.0**-16 < error < 2.0**-6 for error in found[0]), found


def test_a_run_goes_on_where_its_log_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, made = tmp_path / "log", []
    real = fuzz.check

    def counted(call: Any, device: str) -> fuzz.Outcome:
        made.append(call)
        return real(call, device)

    monkeypatch.setattr(fuzz, "check", counted)
    whole = fuzz.step(6, 3, log=log)
    lines = log.read_text().splitlines(keepends=True)
    assert (len(made), len(lines)) == (6, 6)
    log.write_text("".join(lines[:3]) + lines[3][:20])  # ended while it wrote the fourth line
    made.clear()
    again = fuzz.step(6, 3, log=log)
    assert made == draw(6, 3, emulated=True)[3:]
    assert (again.summary, again.table) == (whole.summary, whole.table)
    assert again.data is not None
    assert whole.data is not None
    assert again.data["rows"] == whole.data["rows"]
    made.clear()
    fuzz.step(6, 4, log=log)
    assert len(made) == 6, "other calls"
