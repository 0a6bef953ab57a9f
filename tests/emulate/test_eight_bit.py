"""Attention with 8-bit operands in the emulator: against the oracle on dequantized values, and on the originals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import microsdpa
from microsdpa import Quantized, reference
from microsdpa.emulate import run
from microsdpa.emulate.run import Schedule, scheduled
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, make
from microsdpa.execution.quantized import QuantizedInputs, run_attention
from microsdpa.kernels import EIGHT_BIT_FAMILIES, KernelSpec, emulated_target
from microsdpa.kernels.ada.mma_8bit import spec as mma_8bit
from microsdpa.kernels.chip import chip_of
from microsdpa.kernels.ladder import eight_bit_spec
from microsdpa.kernels.problem import OPERANDS, PRECISIONS, Operands, Problem
from microsdpa.kernels.quantize.spec import SCHEMES
from microsdpa.kernels.select import select

RUNGS = sorted(f.short_name for f in EIGHT_BIT_FAMILIES if f.name.startswith(("ladder/", "ada/")))
CASES = [
    Case(1, 2, 37, 45, 64),
    Case(1, 1, 70, 133, 32, causal="upper_left"),
    Case(1, 4, 70, 150, 64, heads_kv=2, causal="lower_right", layout="bshd"),
    Case(1, 1, 133, 70, 128, dtype="bfloat16", causal="lower_right"),
]
MANY_HEADS = [
    Case(2, 4, 5, 70, 32, heads_kv=2, causal="upper_left"),
    Case(1, 6, 9, 130, 64, heads_kv=2, causal="lower_right"),
    Case(2, 2, 20, 40, 128),
]
"""ada/mma_8bit takes larger tiles where they fill the chip, here one of two SMs; a CTA of rung 12 takes several."""
DECODING = [
    Case(2, 4, 1, 70, 32, heads_kv=2, causal="lower_right"),
    Case(1, 6, 5, 133, 64, heads_kv=2, causal="lower_right", layout="bshd"),
    Case(1, 7, 3, 40, 64, heads_kv=1, causal="upper_left", seed=1),
    Case(1, 8, 15, 97, 128, dtype="bfloat16", heads_kv=1),
    Case(1, 6, 9, 4, 32, heads_kv=2, causal="lower_right"),
]
"""Heads that share a key head in one tile: 2, 15, 21 and 120 rows of it, and rows that see no key."""
DECODED: tuple[tuple[str, ...], ...] = (
    PRECISIONS,
    ("fp8_fast", "int8_fp8"),
    ("fp8_fast", "fp8"),
    ("fp8_fast", "int8_fp16"),
    ("fp8_fast", "int8_fp8"),
)
"""Precisions of DECODING: all where the kernels are those of MANY_HEADS, else one besides "fp8_fast", in turn."""
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def test_every_family_is_tested() -> None:
    """Here, and those on wgmma in test_hopper_fp8.py, test_hopper_int8.py and test_hopper_latency_8bit.py."""
    on_wgmma = "hopper/latency_8bit", "hopper/throughput_8bit", "hopper/throughput_8bit_qk"
    assert {f.short_name for f in EIGHT_BIT_FAMILIES} == {*RUNGS, *on_wgmma}


def quantized_of(tensors: Tensors, block: int = 16, rows: int = 0) -> tuple[Quantized, Quantized, Quantized]:
    """Scales are a head's of Q, or those of blocks of `rows`, K's of every `block` keys, and V's of the channels."""
    query, key, value = tensors
    return (
        microsdpa.quantize(query, "e4m3", "block", block=rows) if rows else microsdpa.quantize(query, "e4m3", "head"),
        microsdpa.quantize(key, "e4m3", "block", block=block),
        microsdpa.quantize(value, "e4m3", "channel"),
    )


def problem_of(case: Case) -> Problem:
    """Of E4M3 values on the GPU that the emulator takes for ada/mma_8bit."""
    return replace(case.problem(emulated_target("ada/mma_8bit")), operands="fp8")


def attend(q: Quantized, k: Quantized, v: Quantized, impl: str, **options: object) -> Tensors:
    return microsdpa.sdpa(  # type: ignore[return-value, call-overload]
        *(x.values for x in (q, k, v)),
        q_scale=q.scale,
        k_scale=k.scale,
        v_scale=v.scale,
        enable_gqa=True,
        return_lse=True,
        impl=f"emulate:{impl}",
        **options,
    )


def probability_bound(tensors: list[torch.Tensor], causal: str | None) -> torch.Tensor:
    """What rounding P to E4M3 can move each output by.

    A probability p of largest 256 moves by at most p / 16, or by 2^-10 where it is subnormal: relative to l >= 1, half
    a step of 2^-9 / 256. Later maxima make both smaller.
    """
    query, key, value = tensors
    magnitude, _ = reference.oracle(query, key, value.abs(), causal=causal)
    everything = value.abs().sum(dim=2, keepdim=True).repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return magnitude * 2**-4 + everything * 2**-18


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rung_against_the_dequantized_values(rung: str, case: Case) -> None:
    tensors = make(case)
    q, k, v = quantized_of(tensors)
    plain = [x.dequantize() for x in (q, k, v)]
    expected, expected_lse = reference.oracle(*plain, causal=case.causal)
    out = torch.empty_like(tensors[0])
    result, lse = attend(q, k, v, rung, causal=case.causal, out=out)[:2]
    assert result is out
    errors = compare.measure(out, expected)
    rounding = compare.UNIT_ROUNDOFF[out.dtype] * expected.abs()
    if rung in ("ladder/08", "ladder/09"):
        assert errors.max_abs <= 5e-3 + float(rounding.max())
        assert errors.rel_l1 <= 5e-4 + compare.UNIT_ROUNDOFF[out.dtype]
    else:
        bound = probability_bound(plain, case.causal) + rounding + 1e-4
        assert ((out.double() - expected).abs() <= bound).all()
        assert errors.rel_l1 <= 0.026
    assert compare.measure(lse, expected_lse).max_abs <= 1e-5
    with scheduled(Schedule(seed=3, late=False)):
        again, lse_again = attend(q, k, v, rung, causal=case.causal, out=torch.full_like(out, torch.nan))[:2]
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


@pytest.fixture
def two_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (mma_8bit, eight_bit_spec):
        monkeypatch.setattr(module, "chip_of", lambda target: replace(chip_of(target), sms=2))


@pytest.mark.usefixtures("two_sms")
@pytest.mark.parametrize("case", MANY_HEADS, ids=str)
def test_tiles_for_many_heads(case: Case) -> None:
    for rung in ("ada/mma_8bit", "ladder/12"):
        test_every_rung_against_the_dequantized_values(rung, case)
    for precision in PRECISIONS:
        test_every_precision_against_the_original_tensors(precision, case)


@pytest.mark.parametrize(("case", "precisions"), zip(DECODING, DECODED, strict=True), ids=str)
def test_heads_of_a_key_head_are_packed(case: Case, precisions: tuple[str, ...]) -> None:
    found = select(problem_of(case), "ada/mma_8bit").spec
    pack = case.heads // case.kv_heads
    assert (found.pack, dict(found.template_args)["PACK"]) == (pack, str(pack))
    rows = case.seqlen_q * pack
    tiles = -(-rows // found.block_m)
    assert found.block_m == (16 if rows <= 16 else 32)
    assert found.grid(problem_of(case)) == (tiles * case.batch * case.kv_heads, 1, 1)
    test_every_rung_against_the_dequantized_values("ada/mma_8bit", case)
    for precision in precisions:
        test_every_precision_against_the_original_tensors(precision, case)


def test_packed_rows_have_the_scales_of_their_queries_and_heads() -> None:
    case = DECODING[1]
    query, key, value = make(case)
    sizes = torch.arange(1, 31).reshape(1, 6, 5, 1) / 15  # no two rows have the same scale
    q, k, v = quantized_of((query * sizes, key, value), rows=1)
    assert q.scale.shape == (1, 6, 5)
    for scale in (None, -0.3):
        expected, expected_lse = reference.oracle(*(x.dequantize() for x in (q, k, v)), scale=scale)
        out, lse = attend(q, k, v, "ada/mma_8bit", scale=scale)[:2]
        assert compare.measure(out, expected).rel_l1 <= 0.026
        assert compare.measure(lse, expected_lse).max_abs <= 1e-5


def test_eight_warps_share_the_keys_of_a_few_rows_on_a_large_chip() -> None:
    case = Case(1, 6, 2, 300, 64, heads_kv=2, causal="lower_right")
    problem = replace(problem_of(case), target="sm_90a")
    spec, tensors = select(problem, "ada/mma_8bit").spec, make(case)
    assert (spec.threads, spec.block_m, spec.pack) == (256, 16, 3)
    q, k, v = quantized_of(tensors, rows=1)
    made = QuantizedInputs(q.values, k.values, v.values, q.scale, k.scale, v.scale)
    expected, expected_lse = reference.oracle(*(x.dequantize() for x in (q, k, v)), causal=case.causal)
    out, lse = torch.full_like(tensors[0], torch.nan), torch.full(tensors[0].shape[:3], torch.nan)
    run_attention(spec, problem, made, out, lse, 64**-0.5, emulated=True)
    assert compare.measure(out, expected).rel_l1 <= 0.026
    assert compare.measure(lse, expected_lse).max_abs <= 1e-5


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize("target", ["sm_89", "sm_90a", "sm_120a"])
def test_tiles_of_few_rows_fit_every_chip(target: str, operands: Operands, head_dim: int) -> None:
    chip = chip_of(target)
    for batch in (1, 64):
        problem = Problem(
            *(batch, 8, 2, 1, 4096, head_dim, "float16"),
            target=target,
            operands=operands,
            query_terms=SCHEMES[operands].query_terms,
        )
        tiles = mma_8bit.tiles_of(problem)
        assert mma_8bit.shared_bytes(problem, tiles) <= chip.shared_per_cta
        assert tiles.row_warps == 1
        assert tiles.key_groups >= (2 if operands == "int8_fp16" else 4)
    assert dict(select(replace(problem, heads_kv=8), "ada/mma_8bit").spec.template_args).get("PACK") is None


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_precision_against_the_original_tensors(precision: str, case: Case) -> None:
    tensors = make(case)
    expected, expected_lse = reference.oracle(*tensors, causal=case.causal)
    out, lse = microsdpa.sdpa(
        *tensors,
        precision=precision,  # type: ignore[arg-type]
        causal=case.causal,
        enable_gqa=True,
        return_lse=True,
        impl="emulate",
    )
    assert out.dtype == tensors[0].dtype
    errors = compare.measure(out, expected)
    assert errors.rel_l1 <= {"fp8": 0.05, "fp8_fast": 0.057, "int8_fp8": 0.04, "int8_fp16": 0.012}[precision]
    assert compare.measure(lse, expected_lse).max_abs <= 0.1


SCALES: dict[str, Callable[[torch.Tensor], Quantized]] = {
    "tensor": lambda x: microsdpa.quantize(x, "int8", "tensor"),
    "head": lambda x: microsdpa.quantize(x, "int8", "head"),
    "block": lambda x: microsdpa.quantize(x, "int8", "block", block=32),
    "row": lambda x: microsdpa.quantize(x, "int8", "block", block=1),
}


@pytest.mark.parametrize("granularity", SCALES)
def test_scales_of_every_shape(granularity: str) -> None:
    query, key, value = make(Case(2, 4, 40, 100, 64, heads_kv=2))
    make_quantized = SCALES[granularity]
    q, k = make_quantized(query * torch.arange(1, 41)[:, None] / 20), make_quantized(key)
    for v in (microsdpa.quantize(value, "e4m3", "tensor"), microsdpa.quantize(value, "e4m3", "head")):
        expected, _ = reference.oracle(*(x.dequantize() for x in (q, k, v)))
        assert compare.measure(attend(q, k, v, "auto")[0], expected).rel_l1 <= 0.026


def test_scales_that_are_numbers_or_of_the_key_heads() -> None:
    query, key, value = make(Case(1, 4, 40, 70, 64, heads_kv=2))
    q, k = microsdpa.quantize(query, "int8"), microsdpa.quantize(key, "int8")
    expected, _ = reference.oracle(q.dequantize(), k.dequantize(), value)
    for q_scale in (float(q.scale), q.scale.expand(1, 2)):
        out = microsdpa.sdpa(
            q.values, k.values, value, q_scale=q_scale, k_scale=float(k.scale), enable_gqa=True, impl="emulate"
        )
        assert isinstance(out, torch.Tensor)
        assert compare.measure(out, expected).max_abs <= 5e-3


@pytest.mark.parametrize("kind", ["peaked", "flat", "sink", "rising"])
def test_probabilities_do_not_saturate(kind: str) -> None:
    """Rows that see one key, all keys alike, one key above many small ones, and ever larger scores."""
    g = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, s, 64, generator=g).half() for s in (32, 400, 400))
    if kind == "peaked":
        query, key = query * 8, key * 8
    elif kind == "flat":
        query = query * 0
    else:
        query = query.abs()
        key = key * 0.1
        if kind == "sink":
            key[:, :, 0] = 1.0
        else:
            key += torch.linspace(0, 1.5, 400)[:, None].half()
    value = value + 1  # a saturated or lost probability shows as a factor
    q, k, v = quantized_of((query, key, value), block=1)
    plain = [x.dequantize() for x in (q, k, v)]
    expected, expected_lse = reference.oracle(*plain)
    for rung in ("ladder/10", "ladder/11", "ada/mma_8bit", "ladder/12"):
        out, lse = attend(q, k, v, rung)[:2]
        bound = probability_bound(plain, None) + 2**-11 * expected.abs() + 1e-4
        assert ((out.double() - expected).abs() <= bound).all()
        assert compare.measure(out, expected).rel_l1 <= 0.026
        assert compare.measure(lse, expected_lse).max_abs <= 1e-4


def test_rows_without_keys_and_empty_calls() -> None:
    query, key, value = make(Case(1, 1, 70, 3, 32))
    out, lse = microsdpa.sdpa(
        query, key, value, precision="int8_fp8", causal="lower_right", return_lse=True, impl="emulate"
    )
    assert (out[:, :, :67] == 0).all()
    assert (lse[:, :, :67] == -torch.inf).all()
    assert out[:, :, 67:].isfinite().all()
    none = microsdpa.sdpa(query, key[:, :, :0], value[:, :, :0], precision="fp8", impl="emulate")
    assert isinstance(none, torch.Tensor)
    assert (none == 0).all()


@pytest.mark.parametrize("scale", [0.0, -0.3, 100.0])
def test_odd_softmax_scales(scale: float) -> None:
    q, k, v = quantized_of(make(Case(1, 1, 40, 70, 32)))
    plain = [x.dequantize() for x in (q, k, v)]
    expected, _ = reference.oracle(*plain, scale=scale)
    for rung in RUNGS:
        assert compare.measure(attend(q, k, v, rung, scale=scale)[0], expected).rel_l1 <= 0.026


def test_errors_do_not_grow_with_length() -> None:
    """Relative error at 512 and at 8192 keys: the sum of a tile of keys is added to the output in FP32."""
    found = {}
    for seqlen in (512, 8192):
        tensors = make(Case(1, 1, 16, seqlen, 64))
        expected, _ = reference.oracle(*tensors)
        for precision in PRECISIONS:
            out = microsdpa.sdpa(*tensors, precision=precision, impl="emulate")
            assert isinstance(out, torch.Tensor)
            found[precision, seqlen] = compare.measure(out, expected).rel_l1
    for precision in PRECISIONS:
        assert found[precision, 8192] <= 1.15 * found[precision, 512], found


IN_TURN: tuple[tuple[Operands, Operands], ...] = (("fp8", "int8_fp16"), ("int8_fp8", "int8_fp16"))
"""E4M3 and INT8 lie alike in shared memory, values in FP16 do not."""
WIDTHS = (32, 64, 128)
CALLS = [("ladder/11", 1, 64), ("ada/mma_8bit", 1, 64), ("ada/mma_8bit", 4, 64), ("ada/mma_8bit", 4, 4)]


@pytest.mark.parametrize(
    ("rung", "heads", "seqlen", "operands", "head_dim"),
    [
        (*call, operands, head_dim)
        for i, call in enumerate(CALLS)
        for j, head_dim in enumerate(WIDTHS)
        for operands in IN_TURN[(i + j) % 2]
    ],
)
@pytest.mark.usefixtures("two_sms")
def test_no_bank_conflicts_and_every_product_on_tensor_cores(
    rung: str, heads: int, seqlen: int, operands: Operands, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: dict[str, run.Report] = {}
    one_kernel = run.one_kernel

    def counted(spec: KernelSpec, *arguments: object) -> run.Report:
        reports[spec.name] = one_kernel(spec, *arguments, count_banks=True)  # type: ignore[arg-type]
        return reports[spec.name]

    monkeypatch.setattr(run, "one_kernel", counted)
    tensors = make(Case(1, heads, seqlen, 128, head_dim, heads_kv=1))
    microsdpa.sdpa(*tensors, precision=operands, enable_gqa=True, impl=f"emulate:{rung}")
    found = next(report for name, report in reports.items() if name.startswith(rung))
    assert found.bank_conflicts == 0, [site for site in found.bank_sites if site.conflicts]
    products = SCHEMES[operands].query_terms + 1  # Q K^T for each code of a query, and P V
    assert found.counters["tensor_flops"] == products * 2 * heads * seqlen * 128 * head_dim
