"""Verification of 8-bit operands: a few of its cases in the emulator, and that it sees what is wrong."""

from __future__ import annotations

import pytest
import torch

from microsdpa.attention.quantize import encode
from microsdpa.errors import InvalidArgument
from microsdpa.evidence import verify_eight_bit, verify_quantizers
from microsdpa.evidence.inputs import Case
from microsdpa.execution import quantized
from microsdpa.kernels.problem import PRECISIONS, Precision
from microsdpa.runtime import launcher

CASES = [case for case in verify_eight_bit.cases() if case.seqlen_q * case.seqlen_k <= 10_000]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_cases_pass_in_the_emulator(precision: Precision) -> None:
    for case in (c for c in CASES[::3] if c.head_dim <= 128):  # more is for GPUs with wgmma
        assert verify_eight_bit.check(case, precision, "cpu").failure == ""


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_cases_pass_on_a_gpu(precision: Precision) -> None:
    target = launcher.target_of_device(torch.device("cuda"))
    for case in verify_eight_bit.cases():
        if not verify_eight_bit.computed_by("auto", case, precision, target):
            continue
        assert verify_eight_bit.check(case, precision, "cuda").failure == ""


def test_a_kernel_can_be_named_and_ptx_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_eight_bit, "cases", lambda: [Case(1, 1, 5, 9, 32)])
    found = verify_eight_bit.step("int8_fp8", kernel="ladder/11")
    assert found.summary.startswith("1 of 1 cases with 8-bit operands passed")
    found = verify_eight_bit.step("fp8", kernel="hopper/throughput_8bit")
    assert found.summary.endswith("hopper/throughput_8bit does not compute the other 1")
    with pytest.raises(
        InvalidArgument,
        match="for 8-bit operands 'auto', 'emulate', or one of 'hopper/latency_8bit', 'hopper/throughput_8bit'",
    ):
        verify_eight_bit.step("fp8", kernel="ladder/07")
    monkeypatch.setattr(verify_eight_bit.launcher, "device_error", lambda: "no GPU")
    assert verify_eight_bit.step("fp8", ptx="sm_89").summary == "PTX needs a GPU to run on: no GPU"


def test_what_will_run_is_known_ahead() -> None:
    names = {spec.name for spec in verify_quantizers.kernels("sm_90a")}
    assert names >= {"ladder/08_fp8_scalar", "ladder/12_8bit_persistent", "quantize/fused", "quantize/restore_lse"}
    assert names >= {"probe/fp8_gemm", "probe/fp8_scores"}


def test_parts_pass_in_the_emulator_and_what_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = verify_quantizers.parts("cpu")
    names = [name for name, _ in parts]
    assert len(names) == len(set(names))
    assert {name.split()[0].split("_")[0].rstrip(",") for name in names} >= {"quantize", "FP8", "all", "ladder/12"}
    quick = [(name, check) for name, check in parts if "ladder" not in name or ("ladder/12" in name and "d32" in name)]
    monkeypatch.setattr(verify_eight_bit, "cases", lambda: [Case(1, 1, 5, 9, 32)])
    step = verify_eight_bit.step("int8_fp8", parts=lambda device: quick)
    assert step.status == "passed", step.sections
    assert step.summary.endswith(f"; {len(quick)} of {len(quick)} quantizers, products and rungs on quantized values")

    monkeypatch.setattr(verify_quantizers, "MOST_RAW", 1e-5)
    scores = verify_quantizers.fp8_products.scores
    monkeypatch.setattr(verify_quantizers.fp8_products, "scores", lambda *a: 1.01 * scores(*a))
    monkeypatch.setattr(verify_quantizers, "encode", lambda y, format: encode(y + 9, format))
    found = {
        name: check()
        for name, check in verify_quantizers.parts("cpu")
        if "Q K^T" in name or "all quantized values" in name
    }
    assert all(found.values())
    assert found["FP8 Q K^T 4 x 8 x 64 scaled by 1"].endswith("1e-05 allowed")
    wrong = verify_eight_bit.step("int8_fp8", parts=lambda device: [("one", lambda: "off"), ("two", lambda: "")])
    assert wrong.status == "failed"
    assert wrong.sections[0][1][1:] == [["one", "off"], ["two", "passed"]]


@pytest.mark.gpu
@pytest.mark.parametrize("part", verify_quantizers.parts("cuda"), ids=lambda part: part[0])
def test_parts_pass_on_a_gpu(part: verify_quantizers.Part) -> None:
    assert part[1]() == ""


def test_another_quantized_value_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    quantize = quantized.quantize_query_key_value

    def off_by_one(*arguments: object) -> quantized.QuantizedInputs:
        made = quantize(*arguments)  # type: ignore[arg-type]
        made.key.view(torch.uint8)[0, 0, 0, 0] ^= 1
        return made

    monkeypatch.setattr(verify_eight_bit, "quantize_query_key_value", off_by_one)
    found = verify_eight_bit.check(Case(1, 1, 5, 9, 32), "int8_fp8", "cpu")
    assert found.failure == "key differs from quantize()"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_wrong_scale_is_seen(precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = quantized.run_attention
    monkeypatch.setattr(
        quantized, "run_attention", lambda *arguments: attend(*arguments[:5], 1.3 * arguments[5], arguments[6])
    )
    found = verify_eight_bit.check(Case(1, 1, 40, 70, 32), precision, "cpu")
    assert "differs from the oracle" in found.failure
