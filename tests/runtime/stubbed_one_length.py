"""Calls of one length by a kernel for sequences of many; test_launcher.py runs this file in a process of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fake_cuda import KDL_FLOAT, install_allocator, integer, last, set_integer, tensor
from stub_harness import PRIMARY, _clean, library, maps_of_last

from microsdpa.call.masks import NONE
from microsdpa.call.options import OPTIONS
from microsdpa.emulate.abi import OneLengthParams, VarlenParams
from microsdpa.emulate.sequences import sequence_params
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.hopper.varlen.spec import for_one_length, shares_of
from microsdpa.kernels.problem import MaskKind, Problem
from microsdpa.kernels.ranges import SizeRange
from microsdpa.runtime import launcher

__all__ = ["_clean"]

ADDRESSES = {"query": 2**32, "key": 2**33, "value": 3 * 2**33, "out": 2**35}
SLOPES, SINKS = 2**36, 2**37
BETWEEN = 8
"""Elements between the heads of K."""


@pytest.fixture(autouse=True)
def _functions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launcher, "_loaded_specs", {})
    monkeypatch.setattr(launcher, "_compiled", lambda spec, _: spec)
    monkeypatch.setattr(launcher, "load_kernel", lambda *_: (0x3000, PRIMARY))
    install_allocator()
    set_integer("stub_raw_bytes", ctypes.sizeof(OneLengthParams))
    yield
    set_integer("stub_raw_bytes", 0)
    set_integer("stub_tensor_maps", 0)


def _strides(problem: Problem) -> dict[str, tuple[int, int, int, int]]:
    def dense(heads: int, rows: int, between: int = 0) -> tuple[int, int, int, int]:
        of_head = rows * problem.head_dim + between
        return heads * of_head, of_head, problem.head_dim, 1

    query = dense(problem.heads, problem.seqlen_q)
    key = dense(problem.heads_kv, problem.seqlen_k, BETWEEN)
    return {"query": query, "key": key, "value": dense(problem.heads_kv, problem.seqlen_k), "out": query}


def _call(problem: Problem, masks: tuple[Any, ...] = (), lse: bool = False) -> list[Any]:
    shapes = dict.fromkeys(ADDRESSES, (problem.batch, problem.heads_kv, problem.seqlen_k, problem.head_dim))
    shapes |= dict.fromkeys(("query", "out"), (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim))
    tensors = [
        tensor(shapes[name], at, code=KDL_FLOAT, strides=_strides(problem)[name]) for name, at in ADDRESSES.items()
    ]
    options = OPTIONS[False, problem.causal, True, "auto", None]
    return [*tensors, True if lse else None, options, None, *masks]


def _specification(problem: Problem) -> KernelSpec:
    found = for_one_length(problem)
    assert isinstance(found, KernelSpec)
    return found


def _check(problem: Problem, spec: KernelSpec) -> VarlenParams:
    """The latest launch has the parameter that Python makes for the emulator, and the grid of the specification."""
    raw = bytes(last().raw)
    found = VarlenParams.from_buffer_copy(raw[: ctypes.sizeof(VarlenParams)])
    expected: Any = sequence_params(spec, problem, dict(ADDRESSES), _strides(problem), NONE, problem.head_dim**-0.5)
    assert isinstance(expected, OneLengthParams) == (spec.cluster == 1)
    if isinstance(expected, OneLengthParams):
        shares = OneLengthParams.from_buffer_copy(raw[: ctypes.sizeof(OneLengthParams)])
        for name, _ in OneLengthParams._fields_[1:]:
            assert getattr(shares, name) == getattr(expected, name), name
        expected = expected.call
    for name in ("lse", "workspace", "arrivals", "slopes", "sinks", "softcap_log2"):  # there is no soft cap
        setattr(expected, name, getattr(found, name))
    for name, _ in VarlenParams._fields_:
        got, wanted = getattr(found, name), getattr(expected, name)
        got, wanted = (list(x) if name.endswith("strides") else x for x in (got, wanted))
        assert got == (pytest.approx(wanted, rel=1e-6) if isinstance(wanted, float) else wanted), name
    assert tuple(last().grid) == spec.grid(problem)
    assert (last().threads, last().cluster[0]) == (spec.threads, spec.cluster if spec.cluster > 1 else 0)
    assert found.arrivals != 0
    return found


PROBLEMS = {
    "keys that CTAs may share": Problem(4, 32, 8, 32, 4096, 128, "float16", "lower_right", target="sm_90a"),
    "many tiles": Problem(64, 64, 8, 96, 300, 64, "float16", target="sm_90a"),
    "clusters": Problem(3, 16, 4, 12, 2048, 64, "float16", "lower_right", target="sm_90a"),
    "columns that are filled up": Problem(20, 12, 4, 30, 500, 72, "float16", target="sm_90a"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_parameter_is_that_of_sequences(name: str) -> None:
    problem = PROBLEMS[name]
    spec = _specification(problem)
    set_integer("stub_tensor_maps", len(spec.tensor_maps))
    launcher.prepare(problem, spec, _call(problem, lse=True))
    found = launcher.launch(*_call(problem, lse=True))
    params = _check(problem, spec)
    assert tuple(found.shape) == (problem.batch, problem.heads, problem.seqlen_q)
    assert params.lse
    assert (params.part_heads > 0) == (name in ("keys that CTAs may share", "columns that are filled up"))
    assert bool(params.workspace) == (name == "keys that CTAs may share")
    for box, made in zip(spec.tensor_maps, maps_of_last(len(spec.tensor_maps)), strict=True):
        assert made.address == ADDRESSES[box.tensor]
        of_query = (problem.heads, problem.seqlen_q, problem.batch)
        of_keys = (problem.seqlen_k, problem.heads_kv, problem.batch)
        assert made.sizes[1:] == (of_query if box.tensor == "query" else of_keys)


@pytest.mark.parametrize("name", ["many tiles", "keys that CTAs may share"])
def test_scratch_memory_is_that_of_ctas_that_share_keys(name: str) -> None:
    problem = PROBLEMS[name]
    spec = _specification(problem)
    shares = shares_of(spec, problem)
    assert (shares.parts > 1 or shares.each > 0) == (name != "many tiles")
    set_integer("stub_tensor_maps", len(spec.tensor_maps))
    launcher.prepare(problem, spec, _call(problem))
    set_integer("stub_last_bytes", -1)
    assert launcher.launch(*_call(problem)) is True
    assert spec.workspace_bytes(problem) == spec.workspace_fixed_bytes > 0
    assert integer("stub_last_bytes") == (-1 if name == "many tiles" else spec.workspace_fixed_bytes)


def test_masks_are_filled_in() -> None:
    kind = MaskKind(left=True, softcap=True, alibi=True, sinks="float16")
    problem = replace(PROBLEMS["keys that CTAs may share"], mask=kind)
    spec = _specification(problem)
    set_integer("stub_tensor_maps", len(spec.tensor_maps))
    slopes = tensor((4, 32), SLOPES, bits=32, code=KDL_FLOAT, strides=(32, 1))
    sinks = tensor((32,), SINKS, code=KDL_FLOAT, strides=(3,))
    given = _call(problem, (None, slopes, sinks, 77, -1, 5.0))
    launcher.prepare(problem, spec, given)
    assert launcher.launch(*given) is True
    found = VarlenParams.from_buffer_copy(bytes(last().raw)[: ctypes.sizeof(VarlenParams)])
    assert (found.slopes, found.sinks, found.left, found.right) == (SLOPES, SINKS, 77, 0)
    assert (found.slope_batch_stride, found.slope_head_stride, found.sink_head_stride) == (32, 1, 3)
    assert found.softcap_log2 == pytest.approx(5.0 * 1.4426950408889634, rel=1e-6)


@pytest.mark.parametrize("name", ["keys that CTAs may share", "clusters"])
def test_other_sizes_have_plans_of_their_own_grid_and_parameter(name: str) -> None:
    problem = PROBLEMS[name]
    spec = _specification(problem)
    set_integer("stub_tensor_maps", len(spec.tensor_maps))
    others = SizeRange(1, 64, 2, 5000, False)
    launcher.prepare(problem, spec, _call(problem), others)
    for batch, length in ((2, 100), (64, 5000), (7, 2500)):
        at = replace(problem, batch=batch, seqlen_k=length)
        set_integer("stub_last_bytes", -1)
        assert launcher.launch(*_call(at)) is True
        _check(at, spec)
        shares = shares_of(spec, at)
        scratch = spec.workspace_fixed_bytes if spec.cluster == 1 and (shares.parts > 1 or shares.each > 0) else -1
        assert integer("stub_last_bytes") == scratch
    assert library.plan_count() == 4
