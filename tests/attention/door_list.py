"""Every public way to call attention, as a door that is opened twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from door_harness import (
    BATCH,
    CASTS,
    HEAD_DIM,
    HEADS,
    HEADS_KV,
    KERNEL,
    NOTHING,
    OUTPUT,
    SEQLEN_K,
    SEQLEN_Q,
    Door,
    Opening,
    Setting,
)
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask

import microsdpa
from microsdpa import BlockTable, flash_attn
from microsdpa.attention import plan as plans
from microsdpa.attention.explain import Explanation
from microsdpa.call import validate
from microsdpa.call.scales import check_scales
from microsdpa.integrations import flash_backend
from microsdpa.kernels.problem import PRECISIONS


def tensors(dtype: torch.dtype = torch.float16, heads_kv: int = HEADS) -> tuple[torch.Tensor, ...]:
    """query, key and value in the memory order [B, S, H, D], as models have them."""
    shapes = (SEQLEN_Q, HEADS), (SEQLEN_K, heads_kv), (SEQLEN_K, heads_kv)
    return tuple(torch.zeros(BATCH, rows, heads, HEAD_DIM).to(dtype).transpose(1, 2) for rows, heads in shapes)


def graded() -> tuple[torch.Tensor, ...]:
    return tuple(tensor.requires_grad_() for tensor in tensors())


def bits() -> torch.Tensor:
    return torch.ones(SEQLEN_Q, SEQLEN_K, dtype=torch.bool)


def numbers() -> torch.Tensor:
    return torch.zeros(BATCH, 1, SEQLEN_Q, SEQLEN_K, dtype=torch.float16)


def ranges() -> torch.Tensor:
    return torch.tensor([0, SEQLEN_K], dtype=torch.int32).expand(SEQLEN_Q, 2)


def documents(*lengths: int, of: int = 1) -> tuple[torch.Tensor, ...]:
    return tuple(torch.arange(length) % of for length in lengths)


def blocks() -> BlockTable:
    return BlockTable(torch.ones(1, 1, dtype=torch.bool), 64, SEQLEN_Q, SEQLEN_K)


def flex_blocks() -> Any:
    return create_block_mask(lambda b, h, i, j: j >= 0, None, None, SEQLEN_Q, SEQLEN_K, device="cpu")


def sdpa(name: str, heads_kv: int = HEADS, dtype: torch.dtype = torch.float16, **options: Any) -> Door:
    """A call of sdpa; the values of `options` that can be called are made anew for the test."""

    def start(_: Setting) -> Callable[[], Any]:
        given = tensors(dtype, heads_kv)
        made = {key: value() if callable(value) else value for key, value in options.items()}
        return lambda: microsdpa.sdpa(*given, **made)

    wanted = options.get("return_lse", False)
    return Door(f"sdpa {name}", start, NOTHING if "out" in options else OUTPUT, wanted, wanted, dtype)


def quantized(name: str, of: tuple[torch.dtype, ...], dtype: torch.dtype, **options: Any) -> Door:
    """A call of sdpa with 8-bit values and scales that are tensors."""

    def start(_: Setting) -> Callable[[], Any]:
        query, key, value = (tensor.to(kind) for tensor, kind in zip(tensors(), of, strict=True))
        scales = [torch.ones(BATCH, HEADS), torch.ones(BATCH, HEADS), torch.ones(())]
        q_scale, k_scale = scales[:2]
        v_scale = None if of[2] in (torch.float16, torch.bfloat16) else scales[2]
        check_scales(query, key, value, (q_scale, k_scale, v_scale))  # as the first call on a GPU does
        made = {key: value() if callable(value) else value for key, value in options.items()}
        made |= {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return lambda: microsdpa.sdpa(query, key, value, **made)

    wanted = options.get("return_lse", False)
    operators = NOTHING if "out" in options else OUTPUT
    return Door(f"sdpa of quantized values, {name}", start, operators, wanted, wanted, dtype)


def slopes() -> torch.Tensor:
    return torch.ones(HEADS)


def angles() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(SEQLEN_K, HEAD_DIM // 2), torch.zeros(SEQLEN_K, HEAD_DIM // 2)


def weights() -> torch.Tensor:
    return torch.ones(HEAD_DIM)


def small_sinks() -> torch.Tensor:
    """They take no share of the softmax that FP32 shows."""
    return torch.full((HEADS,), -100.0).requires_grad_()


def output(dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(BATCH, HEADS, SEQLEN_Q, HEAD_DIM, dtype=dtype)


E4M3, INT8, HALF, BRAIN = torch.float8_e4m3fn, torch.int8, torch.float16, torch.bfloat16

SDPA = [
    sdpa("with rotary embedding", rotary=angles),
    sdpa("with norms and rotary embedding", rotary=angles, q_norm=weights, k_norm=weights, causal="lower_right"),
    sdpa("with a LayerNorm and a window", q_norm=lambda: (weights(), None), window=(4, 0), return_lse=True),
    sdpa("plain"),
    sdpa("of bfloat16", dtype=BRAIN),
    sdpa("return_lse", return_lse=True),
    sdpa("out", out=output),
    sdpa("out, return_lse", out=output, return_lse=True),
    sdpa("scale", scale=0.3),
    sdpa("is_causal", is_causal=True),
    sdpa("causal lower_right", causal="lower_right"),
    sdpa("causal upper_left", causal="upper_left"),
    sdpa("enable_gqa", heads_kv=HEADS_KV, enable_gqa=True),
    sdpa("impl", impl=KERNEL),
    sdpa("impl of sequences", heads_kv=HEADS_KV, enable_gqa=True, causal="lower_right", impl="hopper/varlen"),
    sdpa("attn_mask of bool", attn_mask=bits),
    sdpa("attn_mask of numbers", attn_mask=numbers),
    sdpa("attn_mask, causal, return_lse", attn_mask=bits, causal="lower_right", return_lse=True),
    sdpa("attn_mask, out", attn_mask=bits, out=output),
    sdpa("attn_mask of ranges", attn_mask=ranges),
    sdpa("document_ids", document_ids=lambda: documents(SEQLEN_Q, SEQLEN_K)),
    sdpa(
        "document_ids that lie apart, causal", document_ids=lambda: documents(SEQLEN_Q, SEQLEN_K, of=3), is_causal=True
    ),
    sdpa("block_mask", block_mask=blocks),
    sdpa("block_mask of flex_attention", block_mask=flex_blocks),
    sdpa("window", window=(4, 0)),
    sdpa("softcap", softcap=20.0),
    sdpa("alibi_slopes", alibi_slopes=slopes),
    sdpa("sinks", sinks=slopes),
    sdpa("all masks", attn_mask=bits, window=(4, 4), softcap=2.0, alibi_slopes=slopes, sinks=slopes),
    *(sdpa(f"precision {operands}", precision=operands) for operands in PRECISIONS),
    sdpa("precision of bfloat16", dtype=BRAIN, precision="fp8"),
    sdpa("precision, return_lse", precision="fp8", return_lse=True),
    sdpa("precision, out", precision="fp8", out=output),
    sdpa("precision, enable_gqa", heads_kv=HEADS_KV, precision="fp8", enable_gqa=True),
    quantized("fp8", (E4M3,) * 3, HALF),
    quantized("fp8, out of bfloat16", (E4M3,) * 3, BRAIN, out=lambda: output(BRAIN)),
    quantized("fp8, return_lse", (E4M3,) * 3, HALF, return_lse=True),
    quantized("fp8, document_ids", (E4M3,) * 3, HALF, document_ids=lambda: documents(SEQLEN_Q, SEQLEN_K)),
    quantized("fp8, block_mask", (E4M3,) * 3, HALF, block_mask=blocks),
    quantized("int8_fp8", (INT8, INT8, E4M3), HALF),
    quantized("int8_fp16", (INT8, INT8, HALF), HALF),
    quantized("int8_fp16, value of bfloat16", (INT8, INT8, BRAIN), BRAIN),
]


def operator(*masks: Callable[[], torch.Tensor]) -> Opening:
    def start(_: Setting) -> Callable[[], Any]:
        given = (*tensors(), *(mask() for mask in masks))
        return lambda: torch.ops.microsdpa.attention(*given)

    return start


def operator_in_full(_: Setting) -> Callable[[], Any]:
    given = (*tensors(heads_kv=HEADS_KV), None, None, None, "lower_right", 0.3, True, [4, -1], 2.0, "auto")
    return lambda: torch.ops.microsdpa.attention(*given)


def operator_without_grad(setting: Setting) -> Callable[[], Any]:
    setting.enter_context(torch.inference_mode())
    given = tensors()
    return lambda: torch.ops.microsdpa.attention(*given)


def operator_of_the_output(_: Setting) -> Callable[[], Any]:
    given = tensors()
    return lambda: torch.ops.microsdpa.attention_output(*given)


def differentiable(function: Callable[..., Any], **options: Any) -> Opening:
    def start(_: Setting) -> Callable[[], Any]:
        given = graded()
        made = {key: value() if callable(value) else value for key, value in options.items()}
        return lambda: function(*given, **made)

    return start


WITH_GRADIENT = [
    Door("sdpa, requires grad", differentiable(microsdpa.sdpa), lse=True),
    Door("sdpa, return_lse, requires grad", differentiable(microsdpa.sdpa, return_lse=True), lse=True, gives_lse=True),
    Door("sdpa with a mask, requires grad", differentiable(microsdpa.sdpa, attn_mask=numbers), lse=True),
    Door("sdpa with a window, requires grad", differentiable(microsdpa.sdpa, window=(4, 0)), lse=True),
    Door("sdpa with sinks, requires grad", differentiable(microsdpa.sdpa, sinks=small_sinks), lse=True),
    Door("operator, requires grad", differentiable(torch.ops.microsdpa.attention), lse=True, gives_lse=True),
]


def overload(name: str) -> Opening:
    """What a graph of torch.compile calls: every argument by its name."""

    def start(_: Setting) -> Callable[[], Any]:
        given, function = tensors(), getattr(torch.ops.microsdpa, name).default
        named = {argument.name: argument.default_value for argument in function._schema.arguments[len(given) :]}
        return lambda: function(*given, **named)

    return start


OPERATORS = [
    Door("operator", operator(), lse=True, gives_lse=True),
    Door("operator's overload", overload("attention"), lse=True, gives_lse=True),
    Door("overload of the operator of the output", overload("attention_output")),
    Door("operator with a mask", operator(bits), lse=True, gives_lse=True),
    Door("operator with every option", operator_in_full, lse=True, gives_lse=True),
    Door("operator of the output", operator_of_the_output),
    Door("operator in inference mode", operator_without_grad, lse=True, gives_lse=True),
]


def enabled(
    *masks: Callable[[], torch.Tensor],
    impl: str = KERNEL,
    autocast: bool = False,
    make: Callable[[], Any] = tensors,
    **options: Any,
) -> Opening:
    """torch's function, with microsdpa enabled."""

    def start(setting: Setting) -> Callable[[], Any]:
        setting.enter_context(microsdpa.enabled(strict=True, impl=impl))
        given = (*make(), *(mask() for mask in masks))
        if autocast:
            setting.enter_context(torch.autocast("cpu", torch.float16))
        return lambda: F.scaled_dot_product_attention(*given, **options)

    return start


DROPIN = [
    Door("enable(), plain", enabled(impl="auto")),
    Door("enable(), is_causal", enabled(impl="auto", is_causal=True)),
    Door("enable(), enable_gqa", enabled(impl="auto", make=lambda: tensors(heads_kv=HEADS_KV), enable_gqa=True)),
    Door("enable(impl)", enabled()),
    Door("enable(), attn_mask of bool", enabled(bits)),
    Door("enable(), attn_mask of numbers", enabled(numbers)),
    Door("enable(), a CausalBias", enabled(lambda: causal_lower_right(SEQLEN_Q, SEQLEN_K))),
    Door("enable(), autocast", enabled(autocast=True)),
    Door("enable(), autocast, attn_mask", enabled(bits, autocast=True)),
    Door("enable(), autocast of float32", enabled(autocast=True, make=lambda: tensors(torch.float32)), CASTS),
    Door("enable(), requires grad", enabled(make=graded), lse=True),
    Door("enable(), attn_mask, requires grad", enabled(bits, make=graded), lse=True),
]


def flash(is_causal: bool, heads_kv: int = HEADS) -> Opening:
    def start(_: Setting) -> Callable[[], Any]:
        kernel, given = flash_backend._kernel(), tensors(heads_kv=heads_kv)
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
        return lambda: kernel(keys, *given, 0.0, is_causal, False, scale=None)[:2]

    return start


def compiled(function: Callable[..., Any], backend: str, make: Callable[[], Any] = tensors, **options: Any) -> Opening:
    """A function that torch.compile has traced on the first call."""

    def start(setting: Setting) -> Callable[[], Any]:
        torch.compiler.reset()
        setting.callback(torch.compiler.reset)
        given = make()
        traced = torch.compile(lambda *t: function(*t, **options), backend=backend, fullgraph=True)
        return lambda: traced(*given)

    return start


def compiled_dropin(backend: str) -> Opening:
    def start(setting: Setting) -> Callable[[], Any]:
        setting.enter_context(microsdpa.enabled(strict=True, impl=KERNEL))
        # Tracing asks whether the kernel runs on a CPU; without a graph, the launch is tried first.
        patch = setting.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(validate, "runs_on_cpu", lambda impl: True)
        return compiled(lambda *t: F.scaled_dot_product_attention(*t), backend)(setting)

    return start


COMPILED = [
    door
    for backend in ("eager", "aot_eager")
    for door in (
        Door(f"torch.compile({backend}) of sdpa", compiled(microsdpa.sdpa, backend)),
        Door(
            f"torch.compile({backend}) of sdpa, return_lse",
            compiled(microsdpa.sdpa, backend, return_lse=True),
            lse=True,
            gives_lse=True,
        ),
        Door(f"torch.compile({backend}) of sdpa, window", compiled(microsdpa.sdpa, backend, window=(4, 0))),
        Door(f"torch.compile({backend}) of sdpa, requires grad", compiled(microsdpa.sdpa, backend, graded), lse=True),
        Door(f"torch.compile({backend}) of enable()", compiled_dropin(backend)),
    )
]


def transformers(mask: bool, heads_first: bool = False) -> Opening:
    """The function that a model calls; `heads_first` is a query that is dense as [B, H, S, D]."""

    def start(_: Setting) -> Callable[[], Any]:
        library = pytest.importorskip("transformers", reason="transformers is not installed")
        from microsdpa.integrations.transformers import NAME, register

        register(strict=True, impl=KERNEL)
        attention, module = library.AttentionInterface()[NAME], torch.nn.Module()
        given = tensors(heads_kv=HEADS_KV)
        # A causal module that passes no mask has as many queries as keys.
        given = given if mask else (given[0], *(tensor[:, :, :SEQLEN_Q] for tensor in given[1:]))
        given = (given[0].contiguous(), *given[1:]) if heads_first else given
        attn_mask = bits().expand(BATCH, 1, SEQLEN_Q, SEQLEN_K) if mask else None
        return lambda: attention(module, *given, attn_mask, scaling=0.3)[0].transpose(1, 2)

    return start


def diffusers(mask: bool) -> Opening:
    def start(setting: Setting) -> Callable[[], Any]:
        dispatch = pytest.importorskip("diffusers.models.attention_dispatch", reason="diffusers is not installed")
        from microsdpa.integrations.diffusers import NAME, register

        register(strict=True, impl=KERNEL)
        backend = dispatch._AttentionBackendRegistry._backends[dispatch.AttentionBackendName(NAME)]
        given = [tensor.transpose(1, 2) for tensor in tensors()]
        attn_mask = bits() if mask else None
        return lambda: backend(*given, attn_mask).transpose(1, 2)

    return start


FRAMEWORKS = [
    Door("flash backend", flash(False), lse=True, gives_lse=True),
    Door("flash backend, is_causal, heads of the key", flash(True, HEADS_KV), lse=True, gives_lse=True),
    Door("transformers", transformers(False)),
    Door("transformers with a mask", transformers(True)),
    Door(
        "transformers, query dense as [B, H, S, D]",
        transformers(False, heads_first=True),
        Counter({"aten::new_empty": 1}),
    ),
    Door("diffusers", diffusers(False)),
    Door("diffusers with a mask", diffusers(True)),
]


def plan(make: Callable[..., Any], *, out: bool = False, masked: bool = False, **options: Any) -> Opening:
    """The function that a plan is; plan() itself makes none that launches for CPU tensors."""

    def start(setting: Setting) -> Callable[[], Any]:
        expected = plans.Expected({}, True, {"return_lse": False} | options)
        made = make(setting.launcher, expected, Explanation("stub", "a test"))
        given, rest = tensors(), {"out": output()} if out else {}
        rest |= {"attn_mask": bits()} if masked else {}
        return lambda: made(*given, **rest)

    return start


PLANS = [
    Door("plan", plan(plans.make_plan)),
    Door("plan, return_lse", plan(plans.make_plan, return_lse=True), lse=True, gives_lse=True),
    Door("plan, out", plan(plans.make_plan, out=True), NOTHING),
    Door("plan with a mask", plan(plans.make_masked_plan, masked=True)),
    Door(
        "plan with a mask, out, return_lse",
        plan(plans.make_masked_plan, masked=True, out=True, return_lse=True),
        NOTHING,
        lse=True,
        gives_lse=True,
    ),
]

QUERIES = BATCH * SEQLEN_Q
PACKED = QUERIES, HEADS, HEAD_DIM


def packed(function: Callable[..., Any], **options: Any) -> Opening:
    """A call with packed queries and keys, and the offsets of the sequences."""

    def start(_: Setting) -> Callable[[], Any]:
        query, key, value = (torch.zeros(BATCH * rows, HEADS, HEAD_DIM).half() for rows in (SEQLEN_Q, *[SEQLEN_K] * 2))
        offsets = [torch.arange(BATCH + 1, dtype=torch.int32) * rows for rows in (SEQLEN_Q, SEQLEN_K)]
        made = {name: value() if callable(value) else value for name, value in options.items()}
        return lambda: function(query, key, value, *offsets, **made)

    return start


def varlen_of(*given: torch.Tensor, **options: Any) -> Any:
    query, key, value, query_offsets, key_offsets = given
    return microsdpa.sdpa_varlen(query, key, value, query_offsets=query_offsets, key_offsets=key_offsets, **options)


def flash_varlen_of(*given: torch.Tensor) -> Any:
    return flash_attn.flash_attn_varlen_func(*given, SEQLEN_Q, SEQLEN_K)


def paged(function: Callable[..., Any], appends: bool, normalizes: bool = False) -> Opening:
    """One query of each sequence on a cache of pages."""

    def start(_: Setting) -> Callable[[], Any]:
        query, new = (torch.zeros(BATCH, 1, HEADS, HEAD_DIM).half() for _ in range(2))
        cache = [torch.zeros(4, 16, HEADS, HEAD_DIM).half() for _ in range(2)]
        table = torch.arange(4, dtype=torch.int32).view(BATCH, 2)
        lengths = torch.full((BATCH,), 9, dtype=torch.int32)
        cos, sin = (torch.ones(32, HEAD_DIM // 2).half() for _ in range(2))
        rest: dict[str, Any] = {"new": new, "rotary": (cos, sin)} if appends else {}
        rest |= dict.fromkeys(("q_norm", "k_norm"), torch.ones(HEAD_DIM)) if normalizes else {}
        return lambda: function(query, *cache, table, lengths, **rest)

    return start


def varlen_of_pages(query: Any, key: Any, value: Any, table: Any, lengths: Any, **rest: Any) -> Any:
    if not rest:
        return microsdpa.sdpa_varlen(query, key, value, page_table=table, lengths=lengths)
    (cos, sin), new = rest.pop("rotary"), rest.pop("new")
    rotated = {"rotary_cos": cos, "rotary_sin": sin, "new_key": new, "new_value": new}
    return microsdpa.sdpa_varlen(query, key, value, page_table=table, lengths=lengths, causal=True, **rotated, **rest)


def flash_of_pages(query: Any, key: Any, value: Any, table: Any, lengths: Any) -> Any:
    return flash_attn.flash_attn_with_kvcache(query, key, value, block_table=table, cache_seqlens=lengths)


ONE_QUERY = BATCH, 1, HEADS, HEAD_DIM
LENGTHS = [
    Door("sdpa_varlen", packed(varlen_of), shape=PACKED),
    Door("sdpa_varlen, return_lse", packed(varlen_of, return_lse=True), lse=True, gives_lse=True, shape=PACKED),
    Door("sdpa_varlen, out", packed(varlen_of, out=lambda: torch.zeros(PACKED).half()), NOTHING, shape=PACKED),
    Door("sdpa_varlen, every mask", packed(varlen_of, causal=True, window=(4, -1), softcap=2.0), shape=PACKED),
    Door("sdpa_varlen of pages", paged(varlen_of_pages, False), shape=ONE_QUERY),
    Door("sdpa_varlen, appended and rotated", paged(varlen_of_pages, True), shape=ONE_QUERY),
    Door("sdpa_varlen, appended with norms", paged(varlen_of_pages, True, normalizes=True), shape=ONE_QUERY),
    Door("flash_attn_varlen_func", packed(flash_varlen_of), shape=PACKED),
    Door("flash_attn_with_kvcache", paged(flash_of_pages, False), shape=ONE_QUERY),
]

GRADED = [door for door in (*WITH_GRADIENT, *DROPIN, *COMPILED) if door.name.endswith("requires grad")]
DOORS = [*SDPA, *OPERATORS, *WITH_GRADIENT, *DROPIN, *FRAMEWORKS, *COMPILED, *PLANS, *LENGTHS]
