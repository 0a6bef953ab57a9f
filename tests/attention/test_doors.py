"""What a call costs on its second turn, through every public way in: one foreign call, and its output's memory.

The launcher's functions have stand-ins that find a plan for CPU tensors, so no GPU is needed and nothing is computed.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.profiler import profile
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask

import microsdpa
from microsdpa import BlockTable, flash_attn
from microsdpa.attention import api, explain, varlen
from microsdpa.attention import plan as plans
from microsdpa.attention.explain import Explanation
from microsdpa.call import validate, visibility
from microsdpa.call.scales import check_scales
from microsdpa.errors import MicrosdpaError
from microsdpa.execution import forward
from microsdpa.integrations import dropin, flash_backend
from microsdpa.jit import signature as signatures
from microsdpa.kernels.problem import PRECISIONS
from microsdpa.runtime.launcher import NO_MASKS

BATCH, HEADS, HEADS_KV, SEQLEN_Q, SEQLEN_K, HEAD_DIM = 2, 4, 2, 16, 24, 32
KERNEL = "ladder/01_scalar"
"""A kernel by name. With impl="auto" the drop-in leaves CPU tensors to torch; with a name it does as on a GPU."""

OUTPUT = Counter({"aten::empty_like": 1})
NOTHING: Counter[str] = Counter()
CASTS = OUTPUT + Counter({"aten::_to_copy": 3})
VIEWS = {"aten::transpose", "aten::alias", "aten::detach", "aten::view", "aten::view_as"}
"""Operators that allocate no memory, and launch nothing."""

FILES = {"open", "os.listdir", "os.scandir", "import", "subprocess.Popen"}
"""Events of Python's audit that reading a file raises, however it is done."""


@dataclass
class Seen:
    """What a call did."""

    foreign: int = 0
    operators: Counter[str] = field(default_factory=Counter)
    signatures: list[str] = field(default_factory=list)
    masks: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


_watching: list[Seen] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event in FILES:
        _watching[-1].files.append(f"{event} {arguments[:1]}")


sys.addaudithook(_audit)  # there is no way to remove it: it looks at nothing unless a call is watched


class Launcher:
    """Stands for the foreign functions: they find a plan for tensors that have memory, and count their calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.found: list[Any] = []
        # Memory that C++ allocates is no operator of torch's: it is there before a call is watched.
        self.memory = [torch.empty(BATCH, HEADS, SEQLEN_Q) for _ in range(20)]

    def __call__(self, query: Any, key: Any, value: Any, out: Any, lse: Any, *rest: Any) -> Any:
        self.calls.append((query, key, value, out, lse, *rest))
        for tensor in (query, key, value, out):
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                return None  # a tracer's
        self.found.append(self.memory.pop() if lse is True else True)
        return self.found[-1]

    def with_scales(self, *call: Any) -> Any:
        given, scales = call[:-3], call[-3:]
        return self(*given, *NO_MASKS, *scales)

    def with_a_known_mask(self, seqlen_k: int, _: bool, *call: Any) -> Any:
        return self(*call) if call[1].shape[2] == seqlen_k else None


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    found = Launcher()
    for module in (forward, varlen):
        monkeypatch.setattr(module, "_launch", found)
    for module in (api, forward, dropin):
        monkeypatch.setattr(module, "_launch_or_kind", found)
    for module in (api, forward):
        monkeypatch.setattr(module, "_launch_known", found.with_a_known_mask)
    monkeypatch.setattr(api, "_launch_scaled", found.with_scales)
    return found


def watch(call: Callable[[], Any], launcher: Launcher) -> tuple[Any, Seen]:
    """What `call` gives, and what it did."""
    seen, before = Seen(), len(launcher.calls)
    with profile() as events, pytest.MonkeyPatch.context() as patch:
        _refuse_signatures(patch, seen)
        _note_masks(patch, seen)
        _note_files(patch, seen)
        _watching.append(seen)
        try:
            result = call()
        finally:
            _watching.pop()
    seen.foreign = len(launcher.calls) - before
    for event in events.function_events:
        if _counts(event.name) and not (event.cpu_parent is not None and _counts(event.cpu_parent.name)):
            seen.operators[event.name] += event.name not in VIEWS
    seen.operators = +seen.operators
    return result, seen


def _counts(name: str) -> bool:
    """Whether an operator counts, and not those that it calls.

    Operators of other libraries, as microsdpa::attention, are looked into, and aten::to, which often does nothing.
    """
    return name.startswith("aten::") and name != "aten::to"


def _refuse_signatures(patch: pytest.MonkeyPatch, seen: Seen) -> None:
    def refuse(*given: Any, **_: Any) -> Any:
        seen.signatures.append(repr(given))
        raise AssertionError("a signature is computed")

    functions = signatures.signature, signatures.code_signature
    for name, module in list(sys.modules.items()):
        if name.startswith("microsdpa"):
            for attribute, value in list(vars(module).items()):
                if any(value is function for function in functions):
                    patch.setattr(module, attribute, refuse)


def _note_masks(patch: pytest.MonkeyPatch, seen: Seen) -> None:
    """What documents and blocks hide is found once, and then looked up by the tensors that say it."""
    real = visibility.combined

    def noted(*given: Any) -> torch.Tensor:
        seen.masks.append(f"{len(given)} arguments")
        return real(*given)

    patch.setattr(api, "combined", noted)


def _note_files(patch: pytest.MonkeyPatch, seen: Seen) -> None:
    """The audit tells of all that is opened; what is only asked for has no event."""
    for module, name in ((os, "stat"), (os, "lstat"), (io, "open_code")):
        real = getattr(module, name)

        def noted(*given: Any, _real: Any = real, _name: str = name, **options: Any) -> Any:
            seen.files.append(f"{_name} {given[:1]}")
            return _real(*given, **options)

        patch.setattr(module, name, noted)


class Setting(ExitStack):
    """Where a door is opened: contexts that hold until the test's end, and what stands for the foreign functions."""

    def __init__(self, launcher: Launcher) -> None:
        super().__init__()
        self.launcher = launcher


Opening = Callable[[Setting], Callable[[], Any]]


@dataclass(frozen=True)
class Door:
    """A way to call attention.

    Attributes:
        open: makes the call.
        operators: what it asks torch for on a second turn.
        lse: whether the launch has to give one.
        gives_lse: whether the caller gets it.
        dtype: of the output.
        shape: of the output.
    """

    name: str
    open: Opening
    operators: Counter[str] = field(default_factory=lambda: OUTPUT)
    lse: bool = False
    gives_lse: bool = False
    dtype: torch.dtype = torch.float16
    shape: tuple[int, ...] = (BATCH, HEADS, SEQLEN_Q, HEAD_DIM)


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


@pytest.mark.parametrize("masks", [{}, {"window": (4, 0)}, {"attn_mask": bits}, {"rotary": angles}])
@pytest.mark.parametrize("with_lse", [False, True])
def test_a_value_of_other_columns_is_one_foreign_call_with_an_output_of_its_own(
    with_lse: bool, masks: dict[str, Any], launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = tensors()
    value = value[..., : HEAD_DIM // 2]
    made = {name: mask() if callable(mask) else mask for name, mask in masks.items()}
    monkeypatch.setattr(api, "other_value_dims", {HEAD_DIM // 2})  # as the first call on a GPU leaves it
    monkeypatch.setattr(forward, "other_value_dims", {HEAD_DIM // 2})

    def call() -> Any:
        return microsdpa.sdpa(query, key, value, return_lse=with_lse, **made)

    call()
    result, seen = watch(call, launcher)
    assert seen == Seen(1, Counter({"aten::empty_strided": 1}))
    out = result[0] if with_lse else result
    assert out.data_ptr() == launcher.calls[-1][3].data_ptr()
    assert out.shape == (BATCH, HEADS, SEQLEN_Q, HEAD_DIM // 2)
    assert out.transpose(1, 2).is_contiguous()  # the memory order is that of query
    with microsdpa.enabled(strict=True, impl=KERNEL):
        through = F.scaled_dot_product_attention(query, key, value)
    assert through.data_ptr() == launcher.calls[-1][3].data_ptr()
    assert through.shape == out.shape


@pytest.mark.parametrize("with_lse", [False, True])
def test_packed_values_of_fewer_columns_are_one_foreign_call_with_an_output_of_their_own(
    with_lse: bool, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = (torch.zeros(6, HEADS, columns).half() for columns in (HEAD_DIM, HEAD_DIM, HEAD_DIM // 2))
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
    monkeypatch.setattr(varlen, "other_value_dims", {HEAD_DIM // 2})

    def call() -> Any:
        where = {"query_offsets": offsets, "key_offsets": offsets}
        return microsdpa.sdpa_varlen(query, key, value, return_lse=with_lse, **where)

    call()
    result, seen = watch(call, launcher)
    assert seen == Seen(1, Counter({"aten::empty_strided": 1}))
    out = result[0] if with_lse else result
    assert out.data_ptr() == launcher.calls[-1][3].data_ptr()
    assert out.shape == (6, HEADS, HEAD_DIM // 2)


CONTINUED = {
    "plain": {},
    "with masks": {"attn_mask": bits, "window": (4, 4), "softcap": 2.0, "sinks": slopes},
    "causal": {"causal": "lower_right", "scale": 0.3},
}


@pytest.mark.parametrize("name", CONTINUED)
def test_a_second_call_that_goes_on_from_an_output_is_one_foreign_call(name: str, launcher: Launcher) -> None:
    """It allocates nothing: the launch writes to both tensors that it is given."""
    given, previous = tensors(), (output(), torch.zeros(BATCH, HEADS, SEQLEN_Q))
    made = {key: value() if callable(value) else value for key, value in CONTINUED[name].items()}

    def call() -> Any:
        return microsdpa.sdpa(*given, **made, continue_from=previous, return_lse=True)

    call()
    result, seen = watch(call, launcher)
    assert seen == Seen(1, NOTHING)
    assert [id(tensor) for tensor in result] == [id(tensor) for tensor in previous]
    assert [id(tensor) for tensor in launcher.calls[-1][3:5]] == [id(tensor) for tensor in previous]


@pytest.mark.parametrize("option", [{"rotary_positions": 3}, {"q_norm": weights()}, {"rotary": angles()}])
def test_an_option_that_continue_from_lacks_is_refused_although_there_is_a_plan(
    option: dict[str, Any], launcher: Launcher
) -> None:
    previous = output(), torch.zeros(BATCH, HEADS, SEQLEN_Q)
    with pytest.raises(microsdpa.MicrosdpaError):
        microsdpa.sdpa(*tensors(), continue_from=previous, **option)
    assert not launcher.calls


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


def check(door: Door, launcher: Launcher) -> None:
    """The second call through a door does no more than it must, and gives what the launch wrote to."""
    with Setting(launcher) as setting:
        call = door.open(setting)
        call()
        result, seen = watch(call, launcher)
    assert seen == Seen(1, door.operators), f"{door.name}: {seen}"
    out, lse = result if door.gives_lse else (result, None)
    written, asked = launcher.calls[-1][3:5]
    assert out.data_ptr() == written.data_ptr(), f"{door.name}: the output is not what the launch wrote to"
    assert (out.shape, out.dtype) == (door.shape, door.dtype), door.name
    assert asked is door.lse, f"{door.name}: lse={asked}"
    if door.operators and door not in LENGTHS:
        assert written.stride() == tensors()[0].stride(), f"{door.name}: the memory order is not that of query"
    if door.gives_lse:
        assert lse is not None
        assert lse.data_ptr() == launcher.found[-1].data_ptr(), f"{door.name}: the LSE is not that of the launch"
    assert out.requires_grad == (door in GRADED), door.name


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
def test_a_second_call_is_one_foreign_call_and_the_memory_of_its_output(door: Door, launcher: Launcher) -> None:
    check(door, launcher)


@pytest.mark.parametrize("door", GRADED, ids=lambda door: door.name)
def test_a_gradient_comes_back_through_each_door_that_records_one(door: Door, launcher: Launcher) -> None:
    with Setting(launcher) as setting:
        found = door.open(setting)()
        out = found[0] if door.gives_lse else found
        out.backward(torch.ones_like(out))
    inputs = [node.variable for node, _ in out.grad_fn.next_functions if hasattr(node, "variable")]
    query, key, value = inputs[:3]
    assert all(tensor.grad.shape == tensor.shape and tensor.grad.isfinite().all() for tensor in inputs), door.name
    assert query.shape[2] == SEQLEN_Q, door.name
    assert key.shape[2] == value.shape[2] == SEQLEN_K, door.name
    # A query's weights add up to 1: so do the gradients of the values, over all keys, but for FP16's rounding.
    total = value.grad.float().sum(2)
    torch.testing.assert_close(total, torch.full_like(total, SEQLEN_Q), rtol=2.0**-11, atol=0.0)


def _twice(*given: torch.Tensor) -> Any:
    return microsdpa.sdpa(*given, out=microsdpa.sdpa(*given))  # type: ignore[arg-type]


def _opens_a_file(*given: torch.Tensor) -> Any:
    with open(__file__) as file:
        file.read(1)
    return microsdpa.sdpa(*given)


def _asks_for_a_file(*given: torch.Tensor) -> Any:
    Path(__file__).is_file()
    return microsdpa.sdpa(*given)


def _computes_a_signature(*given: torch.Tensor) -> Any:
    with suppress(AssertionError, AttributeError):
        explain.signature(None, "sm_90a")  # type: ignore[arg-type, attr-defined]
    return microsdpa.sdpa(*given)


def _allocates(*given: torch.Tensor) -> Any:
    torch.empty(3)
    return microsdpa.sdpa(*given)


def _casts(*given: torch.Tensor) -> Any:
    given[1].to(torch.float32)
    return microsdpa.sdpa(*given)


def _copies(*given: torch.Tensor) -> Any:
    return microsdpa.sdpa(*given).clone()  # type: ignore[union-attr]


def _asks_for_an_lse(*given: torch.Tensor) -> Any:
    return microsdpa.sdpa(*given, return_lse=True)[0]


def _finds_a_mask_anew(*given: torch.Tensor) -> Any:
    mask = api.combined(given, None, documents(SEQLEN_Q, SEQLEN_K), None)  # type: ignore[arg-type]
    return microsdpa.sdpa(*given, attn_mask=mask)


def _has_another_order(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
    return microsdpa.sdpa(query, key, value, out=torch.empty_like(query, memory_format=torch.contiguous_format))


def _misses(*given: torch.Tensor) -> Any:
    return F.scaled_dot_product_attention(given[0], given[1], given[2])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (_twice, "foreign=2"),
        (_misses, "foreign=0"),
        (_opens_a_file, "open.*test_doors"),
        (_asks_for_a_file, "stat.*test_doors"),
        (_computes_a_signature, "signatures=.*sm_90a"),
        (_allocates, "aten::empty'"),
        (_casts, "aten::_to_copy"),
        (_copies, "aten::clone"),
        (_finds_a_mask_anew, "masks=.*arguments"),
        (_asks_for_an_lse, "lse=True"),
        (_has_another_order, "memory order"),
    ],
)
def test_a_door_that_does_more_is_caught(wrong: Callable[..., Any], told: str, launcher: Launcher) -> None:
    def start(_: Setting) -> Callable[[], Any]:
        given = tensors()
        return lambda: wrong(*given)

    with pytest.raises(AssertionError, match=f"(?s)a wrong door.*{told}"):
        check(Door("a wrong door", start), launcher)


SIDE_BY_SIDE = [
    *(SDPA[0], OPERATORS[0], DROPIN[0], LENGTHS[0]),
    *(door for door in SDPA if door.name in ("sdpa attn_mask of bool", "sdpa precision fp8")),
]


@pytest.mark.parametrize("other", SIDE_BY_SIDE, ids=lambda door: door.name)
@pytest.mark.parametrize("held", SIDE_BY_SIDE, ids=lambda door: door.name)
def test_a_thread_waits_for_no_launch_of_another(held: Door, other: Door, launcher: Launcher) -> None:
    """A launch through one door does not come back before a call of another thread has ended."""
    launching, ended = threading.Event(), threading.Event()
    launch, waiting = launcher.__call__, threading.local()

    class Slow(Launcher):
        def __call__(self, *given: Any) -> Any:
            if getattr(waiting, "here", False):
                launching.set()
                assert ended.wait(20), "the other call does not end while this one is launching"
            return launch(*given)

    with Setting(launcher) as setting:
        calls = held.open(setting), other.open(setting)
        for call in calls:
            call()
        launcher.__class__ = Slow
        failures: list[BaseException] = []

        def hold() -> None:
            waiting.here = True
            try:
                calls[0]()
            except BaseException as failure:
                failures.append(failure)

        thread = threading.Thread(target=hold)
        thread.start()
        assert launching.wait(20)
        calls[1]()
        ended.set()
        thread.join()
    assert not failures


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("other", ["changed", "a number", "not looked at", "missing"])
def test_scales_that_are_not_known_to_be_positive_are_not_launched_with(
    launcher: Launcher, which: int, other: str
) -> None:
    values = tuple(torch.zeros(BATCH, HEADS, SEQLEN_Q, HEAD_DIM).to(E4M3) for _ in range(3))
    scales: list[Any] = [torch.ones(BATCH, HEADS) for _ in range(3)]
    check_scales(*values, tuple(scales))

    def attend() -> torch.Tensor:
        return microsdpa.sdpa(*values, q_scale=scales[0], k_scale=scales[1], v_scale=scales[2])

    with torch.no_grad():
        attend()
        assert len(launcher.calls) == 1
        if other == "changed":
            scales[which].neg_()
        else:
            scales[which] = {"a number": 1.0, "not looked at": torch.ones(BATCH, HEADS), "missing": None}[other]
        if other == "missing":
            attend()  # a value of 16 bits has no scale: whether a call has a plan, the launcher's key says
            assert len(launcher.calls) == 2
        else:
            with pytest.raises(MicrosdpaError):  # these tensors are on no GPU
                attend()
            assert len(launcher.calls) == 1


def test_scales_of_inference_mode_are_launched_with(launcher: Launcher) -> None:
    values = tuple(torch.zeros(BATCH, HEADS, SEQLEN_Q, HEAD_DIM).to(E4M3) for _ in range(3))
    with torch.inference_mode():
        scales = tuple(torch.ones(BATCH, HEADS) for _ in range(3))
        check_scales(*values, scales)
        out = microsdpa.sdpa(*values, q_scale=scales[0], k_scale=scales[1], v_scale=scales[2])
    assert (out.dtype, len(launcher.calls)) == (HALF, 1)
