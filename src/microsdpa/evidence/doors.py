"""Suite doors: what a call costs through each public way to make it, beside torch's own way of the same kind.

A door is a way to reach attention: a function, an operator, a compiled graph, a model. Its rows have the same `door`
and `case`, one of this library and one of torch, measured in turns in one process. docs/measuring.md has the modes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import attention

import microsdpa
from microsdpa import reference
from microsdpa.call.sequences import rounded_queries
from microsdpa.evidence import compare, results, signatures, statistics, timing
from microsdpa.evidence.expectation import Expectation
from microsdpa.evidence.inputs import Case, Masking, dense_mask, documents, make, make_masks, masks_of
from microsdpa.evidence.peers import Call, Tensors
from microsdpa.evidence.peers.ours import ARITHMETIC, QuantizedTensors
from microsdpa.jit.signature import code_signature, signature
from microsdpa.kernels.problem import PRECISIONS, CacheKind, MaskKind, Precision
from microsdpa.kernels.quantize.spec import SCHEMES
from microsdpa.kernels.select import select
from microsdpa.runtime import launcher

SUITE = "doors"
OURS, TORCHS = "microsdpa", "torch"
WITHOUT_OPTION = "sdpa without the option"
"""The plain call of the same shape, timed in turn with an option of sdpa: hosts are not equally fast all the time."""
Context = Callable[[], contextlib.AbstractContextManager[Any]]
Bind = Callable[[Tensors], Call]
Check = Callable[[Tensors, Any], tuple[dict[str, object], str]]
"""What an output is: the `error` of a row, and why it is wrong or empty."""
GRADIENT_FACTOR = 4
"""Times the error of plain arithmetic that a gradient may have: a backward rounds P and dS too."""

WITHOUT_KERNEL = ("transformers", "diffusers", "import microsdpa")
"""Doors whose rows name no kernel: a model has many calls, an import has none."""

HEADLINE = Case(1, 8, 512, 512, 64)
TRAINED = (
    HEADLINE,
    Case(8, 16, 512, 512, 64),
    Case(8, 16, 512, 512, 64, masks=("padding",)),
    Case(4, 32, 2048, 2048, 128, causal="upper_left"),
    Case(4, 32, 2048, 2048, 128, heads_kv=8, causal="upper_left"),
    Case(2, 16, 1024, 1024, 256, causal="upper_left"),
    Case(1, 8, 4096, 4096, 128, causal="upper_left"),
)


@dataclass(frozen=True)
class Side:
    """One of the two ways of a door.

    Attributes:
        bind: gives the call for the tensors of the case.
        context: entered around every use of the call.
        check: how its result is judged; by default the output against the oracle.
        absent: why there is no such way; empty if there is.
    """

    bind: Bind
    context: Context = contextlib.nullcontext
    check: Check | None = None
    absent: str = ""


@dataclass(frozen=True)
class Door:
    """A way to make a call, and torch's own way of the same kind.

    Attributes:
        text: what the shape and the masks do not say of the case.
        graded: whether the inputs require grad.
        direction: "forward", or "both" for a backward pass too.
        runner: what measures its calls, where the mode's own does not.
        precision: of calls that quantize.
        operands: of calls with 8-bit values.
        continued: whether the call goes on from an output and an LSE.
        granularity: Problem.varlen of calls with sequences of many lengths; None for others.
        ran: the fields that say what ran, where none of these tells.
    """

    name: str
    ours: Side
    torchs: Side
    case: Case = HEADLINE
    text: str = ""
    graded: bool = False
    direction: str = "forward"
    modes: tuple[str, ...] = ("host", "eager")
    runner: Callable[[Call], timing.Runner] | None = None
    precision: Precision | None = None
    operands: str = ""
    granularity: int | None = None
    continued: bool = False
    ran: Callable[[Tensors], dict[str, Any]] | None = None

    @property
    def is_option(self) -> bool:
        """Whether the door is an option of sdpa at the headline shape, whose price is held against the plain call."""
        of_sdpa = self.name.startswith("sdpa") and not self.name.startswith("sdpa_varlen")
        plain = replace(self.case, masks=()) == HEADLINE
        return of_sdpa and plain and self.direction == "forward" and not self.graded and self.name != "sdpa"


def _torch_sdpa(tensors: Tensors, **options: Any) -> Call:
    return lambda: F.scaled_dot_product_attention(*tensors, **options)


def _sdpa(tensors: Tensors, **options: Any) -> Call:
    return lambda: microsdpa.sdpa(*tensors, **options)


PLAIN = Side(_torch_sdpa)
ENABLED = Side(_torch_sdpa, microsdpa.enabled)


def not_torchs(what: str) -> Side:
    """torch's side of a door to what its function lacks."""
    return Side(_torch_sdpa, absent=f"torch's function has no {what}")


def _with_masks(call: Callable[..., Call], case: Case) -> Bind:
    return lambda tensors: call(tensors, **make_masks(case, tensors[0].device.type))


def _as_tensor(case: Case) -> Bind:
    """torch's call with the one mask tensor that says what other masks say, made before."""
    return lambda tensors: _torch_sdpa(tensors, attn_mask=dense_mask(case, tensors[0].device.type))


def document_ids(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of the documents of queries and of keys, of whom the ranges of keys are found in the first call."""
    of_query, of_key = documents(case)
    return of_query.to(device), of_key.to(device)


def _of_documents(case: Case, tensors: Tensors) -> Call:
    return _sdpa(tensors, document_ids=document_ids(case, tensors[0].device)[0])


def _of_pairs(case: Case, tensors: Tensors) -> Call:
    return _sdpa(tensors, document_ids=document_ids(case, tensors[0].device))


def _of_flex_blocks(case: Case, tensors: Tensors) -> Call:
    """A call with the BlockMask of torch's flex_attention that shows what the BlockTable of the case shows."""
    from torch.nn.attention.flex_attention import create_block_mask

    device = tensors[0].device
    shown = make_masks(case, device.type)["block_mask"].mask[0, 0]
    mask = create_block_mask(lambda b, h, i, j: shown[i, j], None, None, case.seqlen_q, case.seqlen_k, device=device)
    return _sdpa(tensors, block_mask=mask)


def packed(tensors: Tensors) -> tuple[torch.Tensor, ...]:
    """Query, key and value [B * S, H, D] of equal sequences, and their offsets, int32 [B + 1]."""
    batch, _, seqlen, _ = tensors[0].shape
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=tensors[0].device) * seqlen
    return *(tensor.transpose(1, 2).flatten(0, 1).contiguous() for tensor in tensors), offsets


def _varlen(tensors: Tensors) -> Call:
    *given, offsets = packed(tensors)
    return lambda: microsdpa.sdpa_varlen(*given, query_offsets=offsets, key_offsets=offsets)


def _compiled_varlen(tensors: Tensors) -> Call:
    *given, offsets = packed(tensors)
    compiled = torch.compile(
        lambda q, k, v: microsdpa.sdpa_varlen(q, k, v, query_offsets=offsets, key_offsets=offsets), fullgraph=True
    )
    return lambda: compiled(*given)


def _torch_varlen(compiles: bool, tensors: Tensors) -> Call:
    from torch.nn.attention.varlen import varlen_attn

    *given, offsets = packed(tensors)
    longest = tensors[0].shape[2]
    function = lambda q, k, v: varlen_attn(q, k, v, offsets, offsets, longest, longest)  # noqa: E731
    called = torch.compile(function, fullgraph=True) if compiles else function
    return lambda: called(*given)


def _packed_output(case: Case, tensors: Tensors, found: torch.Tensor) -> tuple[dict[str, object], str]:
    return against_oracle(case, tensors, found.view(case.batch, case.seqlen_q, *found.shape[1:]).transpose(1, 2))


def _with_narrow_values(tensors: Tensors) -> Tensors:
    """Query and key as they are, and two thirds of the columns of value: 128 of 192, as DeepSeek's models have."""
    query, key, value = tensors
    return query, key, value[..., : value.shape[-1] * 2 // 3]


def _narrow_values() -> Iterator[Door]:
    case = Case(1, 16, 1024, 1024, 192, causal="upper_left")

    def side(call: Callable[..., Call]) -> Side:
        return Side(
            lambda tensors: call(_with_narrow_values(tensors), is_causal=True),
            check=lambda tensors, found: against_oracle(case, _with_narrow_values(tensors), found),
        )

    yield Door("sdpa", side(_sdpa), side(_torch_sdpa), case, "128 columns of value")


def _shared_tiles() -> Iterator[Door]:
    """Few queries whose heads share keys: kernels/policy.py, with_shared_tiles()."""
    case = Case(8, 32, 17, 1500, 64, heads_kv=8)
    ours, torchs = (functools.partial(call, enable_gqa=True) for call in (_sdpa, _torch_sdpa))
    yield Door("sdpa(enable_gqa=)", Side(ours), Side(torchs), case, "tiles that heads share")


def _previous(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of queries that have seen no key yet."""
    return torch.empty_like(query), query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)


def _continued(tensors: Tensors) -> Call:
    """A call that goes on from its own output: that of the same keys many times over, which is the same."""
    return functools.partial(microsdpa.sdpa, *tensors, continue_from=_previous(tensors[0]))


def options() -> Iterator[Door]:
    """sdpa by name: the plain call, a plan, and each option."""
    yield Door("sdpa", Side(_sdpa), PLAIN)
    yield Door("plan", Side(lambda tensors: functools.partial(microsdpa.plan(*tensors), *tensors)), PLAIN)
    yield Door("sdpa(out=)", Side(lambda t: _sdpa(t, out=torch.empty_like(t[0]))), PLAIN)
    yield Door(
        "sdpa(return_lse=)",
        Side(lambda t: _sdpa(t, return_lse=True), check=lambda t, found: against_oracle(HEADLINE, t, found[0])),
        not_torchs("LSE"),
    )
    yield from _narrow_values()
    yield from _shared_tiles()
    yield Door(
        "sdpa(continue_from=)", Side(_continued), not_torchs("output of other keys to go on from"), continued=True
    )
    # Masks of torch's doors leave every query a key: torch's backends differ about rows without one.
    for masking, their in (("left padding", None), ("window", _as_tensor), ("alibi", _as_tensor)):
        case = replace(HEADLINE, masks=(masking,))  # type: ignore[arg-type]
        torchs = Side(their(case) if their else _with_masks(_torch_sdpa, case))
        yield Door(f"sdpa({masking})", Side(_with_masks(_sdpa, case)), torchs, case)
    case = replace(HEADLINE, masks=("documents",))
    yield Door("sdpa(document_ids)", Side(functools.partial(_of_documents, case)), Side(_as_tensor(case)), case)
    yield Door("sdpa(document_ids)", Side(functools.partial(_of_pairs, case)), Side(_as_tensor(case)), case, "a pair")
    case = replace(HEADLINE, masks=("blocks 50%",))
    yield Door("sdpa(block_mask)", Side(_with_masks(_sdpa, case)), Side(_as_tensor(case)), case, "BlockTable")
    yield Door(
        "sdpa(block_mask)", Side(functools.partial(_of_flex_blocks, case)), Side(_as_tensor(case)), case, "BlockMask"
    )
    for masking in ("softcap", "sinks"):
        case = replace(HEADLINE, masks=(masking,))  # type: ignore[arg-type]
        yield Door(f"sdpa({masking})", Side(_with_masks(_sdpa, case)), not_torchs(masking), case)
    for precision in PRECISIONS:
        arithmetic = ARITHMETIC.get(SCHEMES[precision].operands, precision)
        check = functools.partial(against_oracle, HEADLINE, arithmetic=arithmetic)
        yield Door(
            f"sdpa(precision={precision})",
            Side(functools.partial(_sdpa, precision=precision), check=check),
            not_torchs("8-bit arithmetic"),
            precision=precision,
        )
    yield Door(
        "sdpa of 8-bit values",
        Side(_eight_bit, check=functools.partial(against_oracle, HEADLINE, arithmetic="e4m3")),
        not_torchs("8-bit arithmetic"),
        operands="fp8",
    )


def _eight_bit(tensors: Tensors) -> Call:
    made = QuantizedTensors.of(tensors)
    (query, key, value), scales = made.values, made.scales
    return lambda: microsdpa.sdpa(query, key, value, **scales)


def torch_doors() -> Iterator[Door]:
    """The operator, compiled graphs, the patched function, the flash backend."""
    padded = replace(HEADLINE, masks=("left padding",))
    first = functools.partial(_first_output, HEADLINE)
    yield Door(
        "torch.ops.microsdpa.attention",
        Side(lambda t: lambda: torch.ops.microsdpa.attention(*t), check=first),
        PLAIN,
    )
    yield Door(
        "torch.ops.microsdpa.attention_output",
        Side(lambda t: lambda: torch.ops.microsdpa.attention_output(*t)),
        PLAIN,
    )
    yield Door(
        "torch.ops.microsdpa.attention",
        Side(
            lambda t: functools.partial(
                torch.ops.microsdpa.attention, *t, make_masks(padded, t[0].device.type)["attn_mask"]
            ),
            check=functools.partial(_first_output, padded),
        ),
        Side(_with_masks(_torch_sdpa, padded)),
        padded,
    )
    for mode in (None, "reduce-overhead"):
        yield Door(
            "torch.compile",
            Side(functools.partial(_compiled, microsdpa.sdpa, mode)),
            Side(functools.partial(_compiled, F.scaled_dot_product_attention, mode)),
            text=mode or "default",
        )
    yield Door("enable()", ENABLED, PLAIN)
    yield Door(
        "enable()",
        Side(_with_masks(_torch_sdpa, padded), microsdpa.enabled),
        Side(_with_masks(_torch_sdpa, padded)),
        padded,
    )
    yield Door("enable()", Side(_torch_sdpa, _enabled_autocast), Side(_torch_sdpa, _autocast), text="autocast")
    yield Door(
        "enable()",
        Side(_from_float32, _enabled_autocast),
        Side(_from_float32, _autocast),
        text="autocast, float32 inputs",
    )
    yield Door("flash backend", Side(_torch_sdpa, _our_flash), Side(_torch_sdpa, _their_flash))


def varlen_doors() -> Iterator[Door]:
    """Packed sequences, beside torch's own function for them."""
    check = functools.partial(_packed_output, HEADLINE)
    missing = "" if importlib.util.find_spec("torch.nn.attention.varlen") else f"torch {torch.__version__} has none"
    for text, ours in (("", _varlen), ("torch.compile", _compiled_varlen)):
        theirs = Side(functools.partial(_torch_varlen, bool(text)), check=check, absent=missing)
        yield Door("sdpa_varlen", Side(ours, check=check), theirs, text=text, granularity=0)


def _compiled(function: Callable[..., Any], mode: str | None, tensors: Tensors) -> Call:
    compiled = torch.compile(lambda q, k, v: function(q, k, v), fullgraph=True, mode=mode)
    return lambda: compiled(*tensors)


def _from_float32(tensors: Tensors) -> Call:
    query, key, value = (tensor.float() for tensor in tensors)
    return lambda: F.scaled_dot_product_attention(query, key, value)


def _autocast() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.float16)


@contextlib.contextmanager
def _enabled_autocast() -> Iterator[None]:
    with microsdpa.enabled(), _autocast():
        yield


def _their_flash() -> contextlib.AbstractContextManager[Any]:
    context: contextlib.AbstractContextManager[Any] = attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION)
    return context


@contextlib.contextmanager
def _our_flash() -> Iterator[None]:
    microsdpa.register()
    attention.activate_flash_attention_impl(OURS)
    try:
        with _their_flash():
            yield
    finally:
        attention.restore_flash_attention_impl()


def training_doors() -> Iterator[Door]:
    """Inputs that require grad: the forward pass alone, and both passes."""
    yield Door("sdpa, requires grad", Side(_sdpa), PLAIN, graded=True, modes=("host",))
    yield Door("enable(), requires grad", ENABLED, PLAIN, graded=True, modes=("host",))
    own: tuple[tuple[str, Masking], ...] = (("window", "window"), ("document_ids", "documents"))
    for name, masking in own:
        masked = replace(HEADLINE, masks=(masking,))
        masked_check = functools.partial(gradients, masked)
        yield Door(
            f"sdpa({name}), forward and backward",
            Side(_both_passes_of(name, masked), check=masked_check),
            Side(_both_passes_of_mask(masked), check=masked_check),
            masked,
            "kernels of this library in both passes",
            graded=True,
            direction="both",
        )
    for case in TRAINED:
        # The host's part is that of the headline shape; others keep the GPU busy.
        modes = ("host", "eager") if case == HEADLINE else ("eager",)
        bind = functools.partial(_both_passes, case)
        check = functools.partial(gradients, case)
        yield Door(
            "enable(), forward and backward",
            Side(bind, microsdpa.enabled, check),
            Side(bind, check=check),
            case,
            graded=True,
            direction="both",
            modes=modes,
        )


def _both_passes_of(name: str, case: Case) -> Bind:
    """Both passes of sdpa with a window or document ids: torch's backward passes have none of these."""

    def bind(tensors: Tensors) -> Call:
        factor = weight(tensors[0])
        given: Any = make_masks(case)["window"] if name == "window" else document_ids(case, tensors[0].device)
        return lambda: torch.autograd.grad(microsdpa.sdpa(*tensors, **{name: given}), tensors, factor)

    return bind


def _both_passes_of_mask(case: Case) -> Bind:
    """Both passes of torch's function with a mask tensor."""

    def bind(tensors: Tensors) -> Call:
        factor, mask = weight(tensors[0]), dense_mask(case, tensors[0].device.type)
        return lambda: torch.autograd.grad(F.scaled_dot_product_attention(*tensors, attn_mask=mask), tensors, factor)

    return bind


def _both_passes(case: Case, tensors: Tensors) -> Call:
    """A call of torch's function and of its backward: the gradients of query, key and value."""
    factor = weight(tensors[0])
    given = make_masks(case, tensors[0].device.type) | {"enable_gqa": case.kv_heads != case.heads}

    def call() -> tuple[torch.Tensor, ...]:
        # The function's name is looked up in every call, as a program does: enable() replaces it.
        out = F.scaled_dot_product_attention(*tensors, is_causal=case.causal is not None, **given)
        return torch.autograd.grad(out, tensors, factor)

    return call


def weight(query: torch.Tensor) -> torch.Tensor:
    """The gradient of an output, from which a backward pass starts."""
    return torch.randn(query.shape, generator=torch.Generator().manual_seed(5)).to(query)


def gradients(case: Case, tensors: Tensors, found: tuple[torch.Tensor, ...]) -> tuple[dict[str, object], str]:
    """Gradients of the first batch entry against those of the FP64 oracle; other entries have no part in them.

    Four times the error of plain arithmetic is allowed, and one rounding.
    """
    exact, plain = _expected_gradients(case, tensors[0].device.type)
    worst: tuple[float, dict[str, object], str] = (-1.0, {}, "")
    for name, got, want, rough in zip(("query", "key", "value"), found, exact, plain, strict=True):
        errors = compare.measure(got[:1], want)
        unit = compare.UNIT_ROUNDOFF[got.dtype] * float(want.abs().max())
        allowed = GRADIENT_FACTOR * float((rough.double() - want).abs().max()) + unit
        wrong = "" if errors.max_abs <= allowed else f"the gradient of {name} is off by {errors.max_abs:.3g}"
        record = compare.as_record(errors, compare.tolerance(rough, want, got.dtype))
        worst = max(worst, (errors.max_abs / allowed, record, wrong), key=lambda one: one[0])
    return worst[1], worst[2]


@functools.lru_cache(maxsize=1)
def _expected_gradients(case: Case, device: str) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Gradients of the first batch entry by the oracle, and by plain arithmetic in the case's type."""
    tensors = make(case, device)
    masks = {
        name: mask[:1] if isinstance(mask, torch.Tensor) and mask.dim() == 4 else mask
        for name, mask in make_masks(case, device).items()
    }
    factor = weight(tensors[0])[:1]

    def through(function: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [tensor[:1].to(dtype).requires_grad_() for tensor in tensors]
        with torch.enable_grad():
            out = function(*leaves, causal=case.causal, scale=case.scale, **masks)[0]
            return torch.autograd.grad(out, leaves, factor.to(out.dtype))

    return through(reference.oracle, torch.float64), through(reference.eager, tensors[0].dtype)


def against_oracle(
    case: Case, tensors: Tensors, output: torch.Tensor, arithmetic: str = ""
) -> tuple[dict[str, object], str]:
    """The error of an output, and why it is wrong or empty."""
    return Expectation(case, tensors).check(output, arithmetic)


def _first_output(case: Case, tensors: Tensors, found: tuple[torch.Tensor, ...]) -> tuple[dict[str, object], str]:
    return against_oracle(case, tensors, found[0])


def doors() -> list[Door]:
    """All doors but those of models and of lengths that are new (door_models.py)."""
    return [*options(), *torch_doors(), *varlen_doors(), *training_doors()]


def run(
    chosen: Sequence[Door],
    modes: Sequence[str],
    advance: Callable[[str], None] = lambda message: None,
    keep: Callable[[list[results.Row]], None] = lambda rows: None,
) -> list[results.Row]:
    """Rows of these doors on the current CUDA device, in those of `modes` that each has."""

    def measured(door: Door) -> tuple[list[results.Row], str]:
        return _measure(door, [mode for mode in door.modes if mode in modes]), f"{door.name} {door.text}".strip()

    return results.gathered(map(measured, chosen), advance, keep)


def _measure(door: Door, modes: Sequence[str]) -> list[results.Row]:
    tensors = make(door.case, "cuda")
    if door.graded:
        tensors = tuple(tensor.requires_grad_() for tensor in tensors)  # type: ignore[assignment]
    calls: dict[str, Call] = {}
    sides, fields, rows = {OURS: door.ours, TORCHS: door.torchs}, {}, []
    for impl, side in sides.items():
        fields[impl] = fields_of(door, impl, tensors)
        outcome = _checked(door, side, tensors)
        if isinstance(outcome, str):
            absent = bool(side.absent)
            status = {"status": "unavailable" if absent or impl == TORCHS else "wrong", "reason": outcome}
            rows += [results.row(door.case, **fields[impl], mode=mode, **status) for mode in modes]
            continue
        calls[impl], fields[impl]["error"] = outcome
    if door.is_option and OURS in calls:
        sides[WITHOUT_OPTION] = Side(_sdpa)
        calls[WITHOUT_OPTION] = _sdpa(tensors)
    for mode in modes:
        runners = {}
        for impl, call in calls.items():
            with _around(door, sides[impl]):
                runners[impl] = door.runner(call) if door.runner else timing.prepare(mode, [call])

        def turn_of(impl: str, turn: Callable[[], list[float]]) -> list[float]:
            with _around(door, sides[impl]):
                return turn()

        timed = timing.interleave(runners, 0, turn_of)
        if WITHOUT_OPTION in timed:
            fields[OURS]["plain_us"] = round(min(timed.pop(WITHOUT_OPTION)), 4)
        for impl, samples in timed.items():
            rows.append(results.row(door.case, **fields[impl], mode=mode, **statistics.summary(samples)))
    torch._dynamo.reset()
    return rows


def _checked(door: Door, side: Side, tensors: Tensors) -> tuple[Call, dict[str, object]] | str:
    """A side's call and its error, or why it is not timed."""
    if side.absent:
        return side.absent
    check = side.check or functools.partial(against_oracle, door.case)
    try:
        with _around(door, side):
            call = side.bind(tensors)
            found = call()
        with torch.no_grad():
            error, wrong = check(tuple(t.detach() for t in tensors), found)  # type: ignore[arg-type]
    except Exception as failure:  # a row says so, and the other doors are measured
        torch.cuda.synchronize()
        return f"{type(failure).__name__}: {str(failure).strip().splitlines()[0] if str(failure) else ''}"[:240]
    return wrong or (call, error)


@contextlib.contextmanager
def _around(door: Door, side: Side) -> Iterator[None]:
    with warnings.catch_warnings(), torch.set_grad_enabled(door.graded), side.context():
        warnings.simplefilter("ignore")
        yield


def of_varlen(
    case: Case, granularity: int = 0, cache: CacheKind | None = None, mask: MaskKind | None = None
) -> dict[str, Any]:
    """The fields of packed sequences, or of a cache, that say what ran; `granularity` is Problem.varlen."""
    target, rounded = launcher.target_of_device(), rounded_queries(case.seqlen_q)
    shared: dict[str, Any] = {"seqlen_q": rounded, "varlen": granularity, "cache": cache, "mask": mask}
    spec = select(replace(case.problem(target), **shared)).spec
    signed = {"signature": signature(spec, target), "code_signature": code_signature(spec, target)}
    lengths = [case.seqlen_k] * case.batch
    shape = {"varlen": granularity, "rounded_queries": rounded, "lengths": lengths, "requested": "auto"}
    kinds = {"cache_kind": cache, "mask_kind": mask}
    return {"kernel": spec.name, **signed, **shape} | {name: asdict(kind) for name, kind in kinds.items() if kind}


def fields_of(door: Door, impl: str, tensors: Tensors) -> dict[str, Any]:
    """What the rows of a door share."""
    fields: dict[str, Any] = {"impl": impl, "door": door.name, "case": door.text, "direction": door.direction}
    fields["variant"] = ""
    fields |= {"inputs": door.case.dtype, "kind": door.case.kind, "op": "sdpa"}
    if impl == TORCHS:
        return fields | {"version": torch.__version__}
    fields |= {"version": microsdpa.__version__}
    if door.name in WITHOUT_KERNEL:
        return fields
    if door.granularity is not None:
        return fields | of_varlen(door.case, door.granularity)
    if door.ran is not None:
        return fields | door.ran(tensors)
    if door.operands:
        made = QuantizedTensors.of(tensors)
        found = microsdpa.explain(*made.values, **made.scales)
        return fields | signatures.of_call(found, tensors[0]) | {"requested": "auto", "operands": door.operands}
    case, masks = door.case, make_masks(door.case, "cuda")
    kind = masks_of(door.case, "cuda").kind_in_memory
    shared: dict[str, Any] = {"causal": case.causal, "enable_gqa": case.kv_heads != case.heads}
    shared |= {"precision": door.precision} | masks
    query, key, value = tensors
    if door.continued:
        shared["continue_from"], fields["continued"] = _previous(query), True
    with torch.no_grad():
        found = microsdpa.explain(query, key, value, **shared)
    further = {"precision": door.precision} if door.precision else {"mask_kind": asdict(kind)} if kind else {}
    return fields | signatures.of_call(found, tensors[0], quantizes=bool(door.precision)) | further
