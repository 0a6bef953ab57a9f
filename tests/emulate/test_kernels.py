"""Every kernel that the library can choose, in the emulator, on small ragged shapes."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch

import microsdpa
from microsdpa.emulate import run
from microsdpa.emulate.run import Schedule, scheduled
from microsdpa.evidence.inputs import Case, make
from microsdpa.evidence.probe_list import PROBES, Probe
from microsdpa.evidence.probes import distance, inputs, run_emulated
from microsdpa.evidence.verify import check
from microsdpa.kernels import FAMILIES
from microsdpa.kernels.hopper.common import WIDTHS
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.select import select

SHAPES = [(1, 2, 37, 45), (2, 1, 5, 70), (1, 1, 33, 9)]
CASES = [
    Case(b, h, sq, sk, d, dtype=dtype, causal=causal, layout=layout)  # type: ignore[arg-type]
    for (b, h, sq, sk), causal in zip(SHAPES, (None, "upper_left", "lower_right"), strict=True)
    for d in (32, 64, 128)
    for dtype in ("float16", "bfloat16")
    for layout in ("bhsd", "unaligned")
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_scalar_kernel_is_right_in_two_schedules(case: Case) -> None:
    assert check(case, "cpu", "emulate:ladder/01").failure == ""


@pytest.mark.parametrize("family", [f.name for f in FAMILIES if not f.name.startswith("ladder/")])
def test_every_production_kernel_is_right_in_two_schedules(family: str) -> None:
    """Whatever is registered; test_ladder.py has the rungs, and test_eight_bit.py what has 8-bit operands."""
    cases = (
        Case(1, 2, 37, 45, 64, causal="lower_right"),
        Case(1, 1, 70, 133, 128, dtype="bfloat16"),
    )
    computed = 0
    for case in cases:
        with contextlib.suppress(microsdpa.UnsupportedProblem):  # a kernel may be for some of these problems alone
            assert check(case, "cpu", f"emulate:{family}").failure == ""
            computed += 1
    assert computed > 0


def test_grouped_heads_and_views() -> None:
    case = Case(2, 4, 19, 35, 64, heads_kv=2, layout="bshd", causal="lower_right")
    assert check(case, "cpu", "emulate").failure == ""


def test_every_seed_gives_the_same_bits() -> None:
    tensors = make(Case(1, 2, 40, 50, 64))
    outs = []
    for seed in range(6):
        with scheduled(Schedule(seed, late=seed % 2 == 0)):
            outs.append(microsdpa.sdpa(*tensors, impl="emulate"))
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_counters_are_exact() -> None:
    """Rung 01 on one head of 32 queries and 64 keys, D = 64: two CTAs, two tiles of keys each."""
    query, key, value = make(Case(1, 1, 32, 64, 64))
    problem = Problem(1, 1, 1, 32, 64, 64, "float16", target="sm_89")
    out = torch.empty_like(query)
    reports = [
        run.attention(
            select(problem, "ladder/01").spec,
            problem,
            (query, key, value, out, None),
            schedule=Schedule(seed),
            count_banks=True,
        )
        for seed in (0, 1)
    ]
    assert reports[0] == reports[1]
    counters = reports[0].counters
    assert counters["global_write_bytes"] == 32 * 64 * 2
    ctas, tiles, threads, rows_of_a_warp = 2, 2, 128, 4
    assert counters["block_barriers"] == ctas * tiles * 2
    assert counters["shared_write_bytes"] == ctas * (16 * 64 * 2 + tiles * 2 * 32 * 64 * 2)
    scores = 8 + rows_of_a_warp * 8  # 16-byte reads of K, and of Q for every row, over D = 64
    assert counters["shared_read_bytes"] == ctas * tiles * threads * (scores * 16 + 32 * 4)
    assert counters["exp2_operations"] == ctas * tiles * threads * rows_of_a_warp * 2
    assert counters["warp_shuffles"] == ctas * tiles * threads * rows_of_a_warp * (5 + 5 + 32)
    assert counters["tensor_instructions"] == counters["async_copy_bytes"] == 0
    assert reports[0].bank_conflicts == 0
    assert {re.sub(r" <.*", "", site.place) for site in reports[0].bank_sites} == {
        "common/tile.cuh:23",
        "ladder/01_scalar.cu:37",
        "ladder/01_scalar.cu:40",
        "ladder/01_scalar.cu:54",
    }


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_instructions_do_not_depend_on_the_schedule(probe: Probe) -> None:
    words = inputs(probe)
    first = run_emulated(probe, words, Schedule(0, late=True))
    assert not (first == -1).all()
    second = run_emulated(probe, words, Schedule(1, late=False))
    assert torch.equal(first, second)
    assert distance(probe, words, first, second) == 0


@pytest.mark.parametrize("name", ["wgmma_f16_widths_rm", "wgmma_s8_widths_kk"])
def test_a_narrow_wgmma_is_the_widest_one_cut_off(name: str) -> None:
    probe = next(p for p in PROBES if p.name == name)
    out = run_emulated(probe, inputs(probe))
    *narrow, whole = out.split([width // 2 for width in WIDTHS], dim=1)
    for part in narrow:
        assert torch.equal(part, whole[:, : part.shape[1]])


def test_permute_picks_bytes() -> None:
    probe = next(p for p in PROBES if p.name == "permute")
    words = inputs(probe)
    pairs = words.contiguous().view(torch.uint8).view(-1, 8)  # bytes 0 to 3 of the low word, then those of the high one
    picked = [(0, 2, 4, 6), (1, 3, 5, 7), (7, 7, 0, 0)]
    expected = torch.cat([pairs[:, list(bytes_)] for bytes_ in picked], dim=1).contiguous().view(torch.int32)
    assert torch.equal(run_emulated(probe, words), expected)


def test_mma_is_a_matrix_product() -> None:
    """The fragments of every shape, against torch on the assembled matrices."""
    for name, dtype, per_word in (("mma_f16", torch.float16, 2), ("mma_s8", torch.int8, 4)):
        probe = next(p for p in PROBES if p.name == name)
        words = inputs(probe)
        out = run_emulated(probe, words)
        depth = 8 * per_word
        for warp in range(4):
            lanes = words[warp * 32 : warp * 32 + 32]
            elements = lanes[:, :6].contiguous().view(dtype).double()  # a[0..3], b[0..1]
            a, b = torch.zeros(16, depth).double(), torch.zeros(depth, 8).double()
            d, got = torch.zeros(16, 8).double(), torch.zeros(16, 8).double()
            numbers = torch.int32 if dtype == torch.int8 else torch.float32
            for lane in range(32):
                group, t = divmod(lane, 4)
                for i in range(4):
                    row, column = group + 8 * (i % 2), per_word * t + 4 * per_word * (i // 2)
                    a[row, column : column + per_word] = elements[lane, per_word * i : per_word * (i + 1)]
                    at = (group + 8 * (i // 2), 2 * t + i % 2)
                    d[at] = lanes[lane, 6 + i : 7 + i].view(numbers).double()[0]
                    got[at] = out[warp * 32 + lane, i : i + 1].view(numbers).double()[0]
                for i in range(2):
                    row = per_word * t + 4 * per_word * i
                    b[row : row + per_word, group] = elements[lane, per_word * (4 + i) : per_word * (5 + i)]
            torch.testing.assert_close(got, d + a @ b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["row", "col"])
def test_wmma_is_a_matrix_product(dtype: torch.dtype, layout: str) -> None:
    name = f"wmma_{'f16' if dtype == torch.float16 else 'bf16'}_{layout}"
    probe = next(p for p in PROBES if p.name == name)
    words = inputs(probe).view(-1, 512)
    out = run_emulated(probe, words.view(-1, 16)).view(-1, 256).view(torch.float32).view(-1, 16, 16)
    a, b = words[:, :256].contiguous().view(dtype).double().view(-1, 2, 16, 16).unbind(1)
    c = words[:, 256:].contiguous().view(torch.float32).double().view(-1, 16, 16).mT  # loaded column-major
    product = a @ b.mT if layout == "row" else a.mT @ b
    torch.testing.assert_close(out.double(), (product + c) / 2, rtol=1e-6, atol=1e-6)


def test_a_head_dimension_that_a_kernel_lacks_is_refused() -> None:
    with pytest.raises(microsdpa.UnsupportedProblem, match="nearest supported: head_dim 32"):
        microsdpa.sdpa(*make(Case(1, 1, 8, 8, 16)), impl="emulate:ladder/01")


def test_explain_says_that_the_emulator_runs() -> None:
    found = microsdpa.explain(*make(Case(1, 1, 8, 8, 32)), impl="emulate")
    assert found.runs == "emulate:ampere/mma"
    assert "microsdpa::ampere::mma::attention<__half, 32" in str(found)
