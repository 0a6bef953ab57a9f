"""Verification of 8-bit operands: a few of its cases in the emulator, and that it sees what is wrong."""

from __future__ import annotations

import pytest
import torch

from microsdpa import eight_bit, eight_bit_launches
from microsdpa.errors import InvalidArgument
from microsdpa.evidence import verify_eight_bit
from microsdpa.evidence.inputs import Case
from microsdpa.specs.eight_bit import OPERANDS, Operands

CASES = [case for case in verify_eight_bit.cases() if case.seqlen_q * case.seqlen_k <= 10_000]


@pytest.mark.parametrize("precision", OPERANDS)
def test_cases_pass_in_the_emulator(precision: Operands) -> None:
    for case in CASES[::3]:
        assert verify_eight_bit.check(case, precision, "cpu").failure == ""


@pytest.mark.gpu
@pytest.mark.parametrize("precision", OPERANDS)
def test_cases_pass_on_a_gpu(precision: Operands) -> None:
    for case in verify_eight_bit.cases():
        assert verify_eight_bit.check(case, precision, "cuda").failure == ""


def test_a_kernel_can_be_named_and_ptx_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_eight_bit, "cases", lambda: [Case(1, 1, 5, 9, 32)])
    found = verify_eight_bit.step("int8_fp8", kernel="ladder/13")
    assert found.summary.startswith("1 of 1 cases with 8-bit operands passed")
    found = verify_eight_bit.step("fp8", kernel="hopper/fwd_throughput_fp8")
    assert found.summary.endswith("hopper/fwd_throughput_fp8 does not compute the other 1")
    with pytest.raises(
        InvalidArgument, match="for 8-bit operands 'auto', 'emulate', or one of 'hopper/fwd_throughput_fp8', 'ladder/14"
    ):
        verify_eight_bit.step("fp8", kernel="ladder/07")
    monkeypatch.setattr(verify_eight_bit.launcher, "device_error", lambda: "no GPU")
    assert verify_eight_bit.step("fp8", ptx="sm_89").summary == "PTX needs a GPU to run on: no GPU"


def test_another_code_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    quantise = eight_bit_launches.quantize_query_key_value

    def off_by_one(*arguments: object) -> eight_bit_launches.Codes:
        codes = quantise(*arguments)  # type: ignore[arg-type]
        codes.key.view(torch.uint8)[0, 0, 0, 0] ^= 1
        return codes

    monkeypatch.setattr(verify_eight_bit, "quantize_query_key_value", off_by_one)
    found = verify_eight_bit.check(Case(1, 1, 5, 9, 32), "int8_fp8", "cpu")
    assert found.failure == "key differs from quantize()"


@pytest.mark.parametrize("precision", OPERANDS)
def test_a_wrong_scale_is_seen(precision: Operands, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = eight_bit.run_attention
    monkeypatch.setattr(
        eight_bit, "run_attention", lambda *arguments: attend(*arguments[:5], 1.3 * arguments[5], arguments[6])
    )
    found = verify_eight_bit.check(Case(1, 1, 40, 70, 32), precision, "cpu")
    assert "differs from the oracle" in found.failure
