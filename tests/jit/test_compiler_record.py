"""The record of what the compiler makes of kernels: whatever could change an entry asks the compiler again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from compiled import figures

import compiler_record
from compiler_record import is_sampled, key_of, recorded
from microsdpa.jit import nvrtc, signature
from microsdpa.kernels import KernelSpec


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests ask for is in no record, and is not said to be missing there."""
    monkeypatch.setattr(compiler_record, "_directory", lambda: tmp_path)
    monkeypatch.setattr(compiler_record, "RECORDING", False)


def test_whatever_decides_about_the_code_is_in_the_key(spec: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key_of("fits", spec, "sm_89"), key_of("counted", spec, "sm_89"), key_of("fits", spec, "sm_80")]
    keys += [key_of("fits", dataclasses.replace(spec, **one), "sm_89") for one in ({"flags": ("-O1",)}, {"split": 2})]
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "version", lambda: "13.99")
        keys.append(key_of("fits", spec, "sm_89"))
    with monkeypatch.context() as patch:
        patch.setattr(compiler_record, "toolkit_headers", lambda *_: (("cuda_fp16.h", "other"),))
        keys.append(key_of("fits", spec, "sm_89"))
    with monkeypatch.context() as patch:
        expand = signature.expand
        patch.setattr(signature, "expand", lambda source: expand(source).replace("0.0f", "1.0f"))
        keys.append(key_of("fits", spec, "sm_89"))
    assert len(set(keys)) == 8
    assert key_of("fits", spec, "sm_89") == keys[0]


def test_what_is_not_in_the_record_is_compiled_and_said(spec: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_record, "entries", dict)
    kernel = figures(spec, "sm_89", counted=True)
    assert kernel.resources.registers > 16
    assert kernel.instructions["LDL"] == 0
    assert not kernel.tensor_instructions
    assert compiler_record.summary().endswith("does not have them: 1 kernels")


@pytest.mark.parametrize("sampled", [False, True])
def test_an_entry_that_the_compiler_contradicts_fails_where_it_is_compiled_again(
    sampled: bool, spec: KernelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = key_of("fits", spec, "sm_89")
    wrong = {"resources": [1, 0, 0, 0, 0], "C75": False}
    monkeypatch.setattr(compiler_record, "entries", lambda: {key: wrong})
    monkeypatch.setattr(compiler_record, "is_sampled", lambda *_: sampled)
    if not sampled:
        assert figures(spec, "sm_89").resources.registers == 1
        return
    with pytest.raises(AssertionError, match="and the compiler gives"):
        figures(spec, "sm_89")


def test_an_entry_with_spills_that_have_no_reason_fails(spec: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    spilled = {"resources": [255, 0, 8, 4, 4], "C75": False}
    monkeypatch.setattr(compiler_record, "entries", lambda: {key_of("fits", spec, "sm_89"): spilled})
    monkeypatch.setattr(compiler_record, "is_sampled", lambda *_: False)
    with pytest.raises(AssertionError, match="spill_store_bytes=4"):
        figures(spec, "sm_89")
    excused = dataclasses.replace(spec, local_memory="a test")
    assert figures(excused, "sm_89").resources.stack_bytes == 8


def test_every_commit_compiles_some_entries_again_and_each_entry_has_its_commit() -> None:
    keys = list(compiler_record.entries())
    assert len(keys) > 400
    for commit in "abc":
        share = sum(is_sampled(key, commit) for key in keys) / len(keys)
        assert 0.2 / compiler_record.ONE_OF < share < 3 / compiler_record.ONE_OF
    for key in keys[:50]:
        assert any(is_sampled(key, str(commit)) for commit in range(1000))


def test_an_opcode_that_nobody_counted_is_no_zero(spec: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    key = key_of("counted", spec, "sm_89")
    found = {"resources": [40, 0, 0, 0, 0], "C75": False, "instructions": {"LDSM": 3}}
    monkeypatch.setattr(compiler_record, "entries", lambda: {key: found})
    monkeypatch.setattr(compiler_record, "is_sampled", lambda *_: False)
    counts = figures(spec, "sm_89", counted=True).instructions
    assert (counts["LDSM"], counts["STL"]) == (3, 0)
    with pytest.raises(KeyError):
        counts["FFMA"]


def test_values_are_those_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_record, "entries", dict)
    assert recorded("a key", lambda: [("a", 1)]) == [["a", 1]]
