"""Drop-in use on a GPU: plain F.scaled_dot_product_attention, torch's flash backend, gradients, compiled functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention

import microsdpa
from microsdpa import reference
from microsdpa.evidence import compare
from microsdpa.evidence.cases import MASKINGS
from microsdpa.evidence.inputs import Case, make, make_masks
from microsdpa.execution import backward, nodes
from microsdpa.integrations import flash_backend

pytestmark = pytest.mark.gpu

SQUARE = Case(2, 4, 130, 130, 64)


def assert_close(out: torch.Tensor, case: Case, **options: Any) -> None:
    """`out` is the attention of a case, within twice the error of plain arithmetic in its type; all on the CPU."""
    tensors = make(case)
    expected, plain = (f(*tensors, **options)[0] for f in (reference.oracle, reference.eager))
    errors, allowed = compare.measure(out.detach().cpu(), expected), compare.tolerance(plain, expected, out.dtype)
    assert allowed.admits(errors), f"{errors}, allowed {allowed}"


def gradients(function: Any, tensors: Any, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    return torch.autograd.grad(function(*leaves), leaves, weight.to(tensors[0].device))


def assert_gradients(found: tuple[torch.Tensor, ...], case: Case, weight: torch.Tensor, **options: Any) -> None:
    """Gradients against those of FP64, within four times the error of plain arithmetic's: the backward rounds P and dS,
    and torch's own tests allow a flash backward as much."""
    tensors = make(case)
    exact = gradients(lambda *a: reference.oracle(*a, **options)[0], [t.double() for t in tensors], weight.double())
    plain = gradients(lambda *a: reference.eager(*a, **options)[0], tensors, weight)
    for name, got, want, rough in zip(("query", "key", "value"), found, exact, plain, strict=True):
        unit = compare.UNIT_ROUNDOFF[got.dtype] * float(want.abs().max())
        allowed = 4 * float((rough.double() - want).abs().max()) + unit
        assert float((got.cpu().double() - want).abs().max()) <= allowed, name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 128, 256])
@pytest.mark.parametrize("form", ["none", "causal", "bool", "float", "float32", "padding"])
def test_the_enabled_function_gives_the_answer_of_fp64(dtype: str, head_dim: int, form: str) -> None:
    case = Case(2, 4, 70, 133, head_dim, heads_kv=2, dtype=dtype)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    mask = {
        "bool": torch.rand(70, 133, generator=generator) < 0.7,
        "float": torch.randn(2, 1, 70, 133, generator=generator).to(make(case)[0].dtype),
        "float32": torch.randn(4, 1, 133, generator=generator),
        "padding": torch.arange(133).expand(2, 1, 1, 133) < 80,
    }.get(form)
    tensors = make(case, "cuda")
    given = None if mask is None else mask.cuda()
    with microsdpa.enabled(strict=True):
        first, second = (
            F.scaled_dot_product_attention(*tensors, given, 0.0, form == "causal", scale=0.3, enable_gqa=True)
            for _ in range(2)
        )
    assert torch.equal(first, second)
    assert_close(first, case, causal="upper_left" if form == "causal" else None, scale=0.3, attn_mask=mask)


def test_a_masked_call_is_captured_and_reads_its_mask_anew() -> None:
    case = Case(2, 4, 70, 133, 64)
    tensors, mask = make(case, "cuda"), torch.ones(70, 133, dtype=torch.bool, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with microsdpa.enabled(strict=True), torch.cuda.graph(graph):
        out = F.scaled_dot_product_attention(*tensors, mask)
    for seed in range(3):
        fresh = torch.rand(70, 133, generator=torch.Generator().manual_seed(seed)) < 0.5
        mask.copy_(fresh)
        graph.replay()
        assert_close(out, case, attn_mask=fresh)


FLASH_CASES = [
    SQUARE,
    Case(2, 4, 130, 130, 64, causal="upper_left", dtype="bfloat16"),
    Case(1, 3, 70, 190, 128, causal="lower_right"),
    Case(1, 3, 70, 190, 128, dtype="bfloat16", layout="bshd"),
    Case(2, 2, 33, 33, 72, causal="lower_right"),
    Case(1, 2, 100, 100, 256, scale=0.1),
]


CUDNN_CASES = [
    Case(2, 4, 130, 130, 64, heads_kv=2, dtype="bfloat16"),
    Case(1, 2, 100, 170, 128, causal="upper_left"),
    Case(2, 4, 70, 133, 64, masks=("padding",)),
    Case(2, 4, 70, 133, 64, masks=("bool",), dtype="bfloat16"),
    Case(2, 4, 70, 133, 128, masks=("additive",)),
]


@pytest.mark.parametrize("case", [*FLASH_CASES, *CUDNN_CASES], ids=str)
def test_a_fused_backward_of_torch_gives_the_gradient(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper cuDNN's, or the flash backward where cuDNN has none: a node of torch's, and in a graph its operator."""
    monkeypatch.delattr(backward, "_through_math")
    weight = torch.randn(case.batch, case.heads, case.seqlen_q, case.head_dim).to(make(case)[0].dtype)
    options: dict[str, Any] = {"causal": case.causal, "scale": case.scale}
    found = gradients(
        lambda *a: microsdpa.sdpa(*a, enable_gqa=True, **options, **make_masks(case, "cuda")),
        make(case, "cuda"),
        weight,
    )
    assert_gradients(found, case, weight, **options, **make_masks(case))
    if "additive" in case.masks:
        return  # in a graph nobody knows that such a mask wants no gradient
    monkeypatch.setattr(nodes, "attend", lambda *_: None)
    again = gradients(
        lambda *a: microsdpa.sdpa(*a, enable_gqa=True, **options, **make_masks(case, "cuda")),
        make(case, "cuda"),
        weight,
    )
    assert_gradients(again, case, weight, **options, **make_masks(case))


@pytest.mark.parametrize("case", FLASH_CASES, ids=str)
def test_torchs_flash_backward_gives_the_gradient(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(backward, "_through_math")
    monkeypatch.setattr(nodes, "_cudnn_computes", lambda *_: False)
    monkeypatch.setattr(nodes, "_remembered", {})
    weight = torch.randn(case.batch, case.heads, case.seqlen_q, case.head_dim).to(make(case)[0].dtype)
    options: dict[str, Any] = {"causal": case.causal, "scale": case.scale}
    found = gradients(lambda *a: microsdpa.sdpa(*a, **options), make(case, "cuda"), weight)
    assert_gradients(found, case, weight, **options)


OWN_CASES = [
    Case(1, 2, 100, 70, 64, causal="lower_right"),
    Case(1, 2, 70, 70, 36),
    Case(1, 2, 70, 70, 64, layout="unaligned"),
    Case(1, 2, 70, 70, 64, causal="upper_left", scale=-0.2),
    Case(1, 2, 70, 70, 64, causal="upper_left", scale=0.0),
    *(
        Case(2, 4, 50, 90, 64, causal=causal, masks=masks)
        for causal, masks in MASKINGS
        if causal is not None or not set(masks) <= {"bool", "padding", "additive"}
    ),
]


@pytest.mark.parametrize("case", OWN_CASES, ids=str)
def test_other_gradients_are_computed_by_own_kernels(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(backward, "_through_math")
    monkeypatch.delattr(backward, "_through_flash")
    monkeypatch.delattr(backward, "_through_cudnn")
    before = nodes.attend

    def attend(*call: Any) -> None:
        assert before(*call) is None  # type: ignore[arg-type]

    monkeypatch.setattr(nodes, "attend", attend)
    weight = torch.randn(case.batch, case.heads, case.seqlen_q, case.head_dim).to(make(case)[0].dtype)
    options: dict[str, Any] = {"causal": case.causal, "scale": case.scale}
    found = gradients(
        lambda *a: microsdpa.sdpa(*a, enable_gqa=True, **options, **make_masks(case, "cuda")),
        make(case, "cuda"),
        weight,
    )
    assert_gradients(found, case, weight, **options, **make_masks(case))


@pytest.fixture
def flash_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """torch's flash backend is microsdpa's; the list grows by one with every call that reaches it."""
    calls: list[int] = []
    ours = flash_backend.flash_forward

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return ours(*args, **options)

    monkeypatch.setattr(flash_backend, "flash_forward", counted)
    microsdpa.register()
    attention.activate_flash_attention_impl(flash_backend.IMPL)
    try:
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            yield calls
    finally:
        attention.restore_flash_attention_impl()
    F.scaled_dot_product_attention(*make(SQUARE, "cuda"))
    assert attention.current_flash_attention_impl() is None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 100, 128, 256])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_flash_backend_runs_it(flash_calls: list[int], dtype: str, head_dim: int, is_causal: bool) -> None:
    case = Case(2, 4, 130, 130, head_dim, dtype=dtype)  # type: ignore[arg-type]
    weight = torch.randn(2, 4, 130, head_dim).to(make(case)[0].dtype)
    tensors = make(case, "cuda")
    out = F.scaled_dot_product_attention(*tensors, is_causal=is_causal)
    causal = "upper_left" if is_causal else None
    assert_close(out, case, causal=causal)
    found = gradients(lambda *a: F.scaled_dot_product_attention(*a, is_causal=is_causal), tensors, weight)
    assert_gradients(found, case, weight, causal=causal)
    assert len(flash_calls) == 2


def test_the_flash_backend_is_torchs_again_afterwards(flash_calls: list[int]) -> None:
    tensors = make(SQUARE, "cuda")
    assert_close(F.scaled_dot_product_attention(*tensors), SQUARE)
    attention.restore_flash_attention_impl()
    assert_close(F.scaled_dot_product_attention(*tensors), SQUARE)
    assert len(flash_calls) == 1
    attention.activate_flash_attention_impl(flash_backend.IMPL)
    # Both passes have one mask: the output is linear in V.
    value = tensors[2].detach().requires_grad_()
    weight = torch.randn_like(value)
    dropped = F.scaled_dot_product_attention(*tensors[:2], value, dropout_p=0.5)
    assert len(flash_calls) == 2
    dropped.backward(weight)
    assert value.grad is not None
    of_output, of_gradient = (dropped.double() * weight).sum(), (value.double() * value.grad).sum()
    torch.testing.assert_close(of_output, of_gradient, atol=1.0, rtol=1e-3)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_functions_compute_what_plain_ones_do(backend: str, dynamic: bool) -> None:
    if backend == "inductor":
        pytest.importorskip("triton", reason="torch.compile's own backend needs triton")

    def model(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        plain = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return F.scaled_dot_product_attention(plain, key, value, mask)

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=backend)
    with microsdpa.enabled(strict=True):
        for seqlen in (33, 70, 128) if dynamic else (70,):
            tensors = make(Case(1, 2, seqlen, seqlen, 64), "cuda")
            mask = torch.rand(seqlen, seqlen, device="cuda") < 0.7
            results = []
            for function in (model, compiled):
                leaves = [t.detach().requires_grad_() for t in tensors]
                out = function(*leaves, mask)
                results.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
            assert torch.equal(results[0][0], results[1][0])
            for got, want in zip(results[1][1:], results[0][1:], strict=True):  # the flash backward adds in any order
                torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


def test_the_operator_passes_opcheck() -> None:
    case = Case(2, 4, 20, 33, 16, heads_kv=2, causal="lower_right", masks=("additive", "alibi", "sinks"))
    tensors, masks = make(case, "cuda"), make_masks(case, "cuda")
    arguments = (
        *(t.requires_grad_() for t in tensors),
        *(masks[n] for n in ("attn_mask", "alibi_slopes", "sinks")),
        *(case.causal, None, True, [-1, -1], None, "auto"),
    )
    torch.library.opcheck(torch.ops.microsdpa.attention, arguments)
