"""Whether one random call is right: its output, LSE and gradients against FP64, and the same bits a second time."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

import microsdpa
from microsdpa import reference
from microsdpa.attention.explain import Explanation
from microsdpa.attention.quantize import Quantized, expand_scale, quantize
from microsdpa.emulate.run import Schedule, scheduled
from microsdpa.errors import UnsupportedProblem
from microsdpa.evidence import compare, fuzz_varlen, verify_eight_bit
from microsdpa.evidence.fuzz_calls import EIGHT_BIT_DOORS, Call, Granularity, Tensors, tensors
from microsdpa.evidence.fuzz_outcome import LSE_SLACK, Outcome, failed
from microsdpa.evidence.fuzz_varlen import VarlenCall, emulated_impl
from microsdpa.evidence.inputs import TORCH_DTYPE
from microsdpa.evidence.short_sums import lost_of_scores
from microsdpa.evidence.verify_eight_bit import LSE_TOLERANCE, specified
from microsdpa.kernels import family_named
from microsdpa.kernels.quantize.spec import SCHEMES, UNSMOOTHED

__all__ = ["Call", "Outcome", "check", "explained", "quantized"]

GRADIENT_FACTOR = 4
"""Times the error of plain arithmetic that a gradient may have: a backward rounds P and dS too."""
ENABLED = threading.Lock()
"""The drop-in is the process's, and its kernel too: one call at a time goes through it."""
UNITS_OF_WEIGHTS = (1.0, 2**-0.25, 2**-0.5, 2**-0.75)
"""Units that a modelled backward rounds P in: a kernel's depends on the row max, and another unit errs otherwise."""
Result = tuple[torch.Tensor, "torch.Tensor | None"]


def check(call: Call | VarlenCall, device: str) -> Outcome:
    """Make a call twice, and judge it; on the CPU the emulator runs it. Whatever it raises is a failure."""
    if isinstance(call, VarlenCall):
        return fuzz_varlen.check(call, device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _check_eight_bit(call, device) if call.door in EIGHT_BIT_DOORS else _check(call, device)
    except UnsupportedProblem as refusal:
        if call.impl == "auto" and not (call.door in EIGHT_BIT_DOORS and call.is_masked):
            return Outcome(call, "UnsupportedProblem", f"it is refused: {refusal}")
        return Outcome(call, "refused")
    except Exception as error:
        return Outcome(call, type(error).__name__, f"it raises {type(error).__name__}: {error}")


def explained(call: Call, device: str) -> Explanation:
    """What the library says that it runs for a call.

    Raises:
        UnsupportedProblem: it says that it cannot.
    """
    made = tensors(call, device)
    inputs, options = (made.query, made.key, made.value), _options(call, made, device)
    if call.door == "quantized":
        operands = quantized(call, made)
        inputs = tuple(one.values for one in operands)  # type: ignore[assignment]
        options |= {f"{name}_scale": one.scale for name, one in zip("qkv", operands, strict=True)}
    elif call.door == "precision":
        options["precision"] = call.operands
    return microsdpa.explain(*inputs, **options)


def _options(call: Call, made: Tensors, device: str) -> dict[str, Any]:
    """Keyword arguments of sdpa, without out and return_lse."""
    found: dict[str, Any] = {"impl": call.impl if device == "cuda" else emulated_impl(call.impl)}
    found |= {"scale": call.scale, "enable_gqa": call.group > 1, **made.masks}
    if call.causal == "is_causal":
        found["is_causal"] = True
    elif call.causal != "none":
        found["causal"] = call.causal
    for name in ("window", "softcap"):
        if getattr(call, name) is not None:
            found[name] = getattr(call, name)
    if call.dropout_p:
        found["dropout_p"] = call.dropout_p
    if made.previous is not None:
        found["continue_from"] = made.previous
    return found | made.prologue


def _through(call: Call, made: Tensors, device: str) -> Callable[[], Result]:
    """The call through its door: what makes it, and gives the output and, where the door has it, the LSE."""
    inputs, options = (made.query, made.key, made.value), _options(call, made, device)

    def named(out: torch.Tensor | None = None) -> Result:
        if made.previous is not None:  # each run writes to what it goes on from
            output, lse = made.previous
            options["continue_from"] = output.clone(), lse.clone()
        found: Any = microsdpa.sdpa(*inputs, **options, return_lse=call.return_lse, out=out)
        return (found[0], found[1]) if call.return_lse else (found, None)

    if call.door == "out":
        return lambda: named(out=made.out)
    if call.door == "plan":
        plan: Any = microsdpa.plan(*inputs, **options, return_lse=call.return_lse)

        def planned() -> Result:
            found = plan(*inputs, **made.masks)
            return (found[0], found[1]) if call.return_lse else (found, None)

        return planned
    if call.door == "operator" or call.dropout_p:
        return lambda: _operator(call, inputs, options, made.rng_state)
    if call.door == "enable":
        mask = made.masks.get("attn_mask")
        rest_of: dict[str, Any] = {
            "is_causal": call.causal == "is_causal",
            "scale": call.scale,
            "enable_gqa": call.group > 1,
        }

        def enabled() -> Result:
            with ENABLED, microsdpa.enabled(strict=True, impl=options["impl"]):
                return F.scaled_dot_product_attention(*inputs, mask, **rest_of), None

        return enabled
    return named


def _operator(
    call: Call, inputs: Sequence[torch.Tensor], options: dict[str, Any], rng_state: torch.Tensor | None
) -> Result:
    masks = [options.get(name) for name in ("attn_mask", "alibi_slopes", "sinks")]
    rest = call.alignment, call.scale, call.group > 1, list(call.window or (-1, -1)), call.softcap, options["impl"]
    found: Result = torch.ops.microsdpa.attention(*inputs, *masks, *rest, call.dropout_p, rng_state)
    return found


def _check(call: Call, device: str) -> Outcome:
    made = tensors(call, device)
    run = _through(call, made, device)
    found = [_copied(run())]
    # The emulator also gets another order of threads, and early instead of late copies: neither may change a bit.
    made.out.fill_(torch.nan)
    with scheduled(Schedule(seed=1, late=False)):
        found.append(_copied(run()))
    (out, lse), (again, lse_again) = found
    options: dict[str, Any] = {"causal": call.alignment, "scale": call.scale, **made.masks}
    options |= {
        "window": call.window,
        "softcap": call.softcap,
        "dropout_p": call.dropout_p,
        "rng_state": made.rng_state,
    }
    exact, rough = _changed(call, made, torch.float64), _changed(call, made, torch.float32)
    query, key = (rows.to(made.value.dtype) for rows in rough)
    # Roundings of changed rows may cancel in eager's sums, or in exact ones: outputs are compared with those of the
    # rows as they are rounded, once.
    of_rows = (query.double(), key.double()) if made.prologue else exact
    expected, expected_lse = reference.oracle(*of_rows, made.value, **options)
    eager, eager_lse = reference.eager(query, key, made.value, **options)
    if made.previous is not None:
        expected, expected_lse = merged(made.previous, expected, expected_lse)
        eager, eager_lse = merged(made.previous, eager, eager_lse)
    errors, of_ties = compare.measure(out, expected), _of_ties(call, exact, rough) if made.prologue else 0.0
    # Where plain arithmetic happens to be exact, what rounding P once may cost is allowed: one rounding of V.
    rounding = compare.UNIT_ROUNDOFF[out.dtype] * float(made.value.abs().max()) * reference.kept_of(call.dropout_p)[1]
    of_weights = 2 * of_ties * float(made.value.abs().max())  # by how much a row's scores differ, its weights may
    allowed = compare.tolerance(eager, expected, out.dtype).max_abs + rounding + of_weights
    outcome = Outcome(call, errors=errors, allowed=allowed)
    if not errors.max_abs <= allowed:
        return failed(outcome, "output", f"the output is off by {errors.max_abs:.3g} at {list(errors.worst)}", allowed)
    if lse is not None:
        largest = float(expected_lse.where(expected_lse.isfinite(), 0.0).abs().max())
        of_lse = compare.tolerance(eager_lse, expected_lse, torch.float32).max_abs + LSE_SLACK * (1.0 + largest)
        of_lse += of_ties
        error = compare.measure(lse, expected_lse)
        if not error.max_abs <= of_lse:
            return failed(outcome, "LSE", f"the LSE is off by {error.max_abs:.3g} at {list(error.worst)}", of_lse)
    if not torch.equal(out, again) or (lse is not None and lse_again is not None and not torch.equal(lse, lse_again)):
        return failed(outcome, "bits", "a second run gave other bits")
    return _check_gradients(call, device, outcome) if call.door == "backward" else outcome


def merged(previous: Rows, out: torch.Tensor, lse: torch.Tensor) -> Rows:
    """An output and its LSE of all keys, of those before and others, in FP64 and rounded to the others' types."""
    before, sums = (tensor.double() for tensor in previous)
    both = torch.logaddexp(sums, lse.double())
    parts = []
    for part, own in ((before, sums), (out.double(), lse.double())):
        share = (own - both).exp().nan_to_num(0.0)[..., None]
        parts.append(torch.where(share == 0.0, 0.0, part * share))
    return (parts[0] + parts[1]).to(out.dtype), both.to(lse.dtype)


_FP32_REACH = 2.0**-21
"""Of the largest number of a row: what an order of FP32 sums and products moves a normalized or rotated one by."""
Rows = tuple[torch.Tensor, torch.Tensor]


def _of_ties(call: Call, exact: Rows, rough: Rows) -> float:
    """What a score may differ by where query or key, in FP64 and FP32, lies between two 16-bit numbers.

    Numbers within FP32's error of such a tie are rounded up by one implementation and down by another.
    """
    dtype, spreads = TORCH_DTYPE[call.dtype], []
    for before, after in zip(exact, rough, strict=True):
        if torch.equal(before, before.to(dtype).double()):  # the call's own rows
            spreads.append(torch.zeros_like(before))
            continue
        error = (after.double() - before).abs().amax(dim=-1, keepdim=True)
        reach = 4 * error + _FP32_REACH * before.abs().amax(dim=-1, keepdim=True)
        up, down = ((before + move).to(dtype).double() for move in (reach, -reach))
        spreads.append(up - down)
    (query, key), (of_query, of_key) = (rows.double().abs() for rows in rough), spreads
    key, of_key = (rows.repeat_interleave(call.group, dim=1) for rows in (key, of_key))
    scores = of_query @ key.mT + query @ of_key.mT
    factor = call.head_dim**-0.5 if call.scale is None else abs(call.scale)
    return factor * float(scores.max()) if scores.numel() else 0.0


def _changed(
    call: Call, made: Tensors, dtype: torch.dtype, of: dict[str, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key, those `of` a dict or of the call, behind the norms and the rotation of the call, in `dtype`."""
    given = of or {"query": made.query, "key": made.key}
    query, key = given["query"], given["key"]
    if not made.prologue:
        return query, key
    angles, positions = made.prologue.get("rotary"), made.prologue.get("rotary_positions")
    shift = call.seqlen_k - call.seqlen_q if call.causal == "lower_right" else 0
    pair = positions if isinstance(positions, tuple) else (positions, positions)
    found = []
    for name, rows, position, first in (("q_norm", query, pair[0], shift), ("k_norm", key, pair[1], 0)):
        norm = made.prologue.get(name)
        weights = norm if isinstance(norm, tuple) else (norm, None)
        counted = not isinstance(position, torch.Tensor)
        if counted and (position is not None or name == "q_norm" or not isinstance(positions, tuple)):
            position = torch.arange(rows.shape[2], device=rows.device) + (position or 0) + first
        changed = reference.changed_rows(
            rows,
            weights,
            made.prologue["norm_eps"],
            angles,
            position,
            layer=isinstance(norm, tuple),
            interleaved=call.rotary_interleaved,
            dtype=dtype,
        )
        found.append(changed)
    return found[0], found[1]


def _copied(result: Result) -> Result:
    """Of the door "out", the next run writes to the same memory."""
    out, lse = result
    return out.clone(), None if lse is None else lse.clone()


NAMES = {"q": "query", "k": "key", "v": "value", "m": "attn_mask", "a": "alibi_slopes", "s": "sinks"}


def _check_gradients(call: Call, device: str, outcome: Outcome) -> Outcome:
    """Gradients of the output and the LSE, of what requires grad, against FP64."""
    made = tensors(call, device)
    masks = {name: mask for name, mask in made.masks.items() if name not in ("document_ids", "block_mask")}
    given = {"query": made.query, "key": made.key, "value": made.value, **masks}
    shown = {} if made.shown is None else {"shown": made.shown}
    if made.rng_state is not None:
        heads = torch.arange(call.batch * call.heads, device=device)
        kept = reference.kept(call.dropout_p, made.rng_state, heads, call.seqlen_q, call.seqlen_k)
        shown["kept"] = kept.view(call.batch, call.heads, call.seqlen_q, call.seqlen_k)
    generator = torch.Generator().manual_seed(call.seed + 1)
    weight = torch.randn(made.query.shape, generator=generator).to(made.query)
    chosen = [NAMES[letter] for letter in call.graded]
    leaves = {name: given[name].detach().requires_grad_() for name in chosen}
    options = _options(call, made, device) | {name: leaf for name, leaf in leaves.items() if name in made.masks}
    inputs = [leaves.get(name, given[name]) for name in ("query", "key", "value")]
    if call.dropout_p:
        out: Any = _operator(call, inputs, options, made.rng_state)[0]
    else:
        out = microsdpa.sdpa(*inputs, **options)
    found = torch.autograd.grad(out, list(leaves.values()), weight)
    exact, plain = (
        _plain_gradients(call, given | shown, chosen, weight, dtype) for dtype in (torch.float64, weight.dtype)
    )
    modelled = _modelled_errors(call, given | shown, chosen, weight, exact)
    for name, got, want, rough, of_model in zip(chosen, found, exact, plain, modelled, strict=True):
        error = compare.measure(got, want)
        of_plain = float((rough.double() - want).abs().max())
        unit = compare.UNIT_ROUNDOFF[weight.dtype] * float(want.abs().max())
        allowed = GRADIENT_FACTOR * max(of_plain, of_model) + unit + _error_of_sums(call, given, name)
        if not error.max_abs <= allowed:
            failure = f"the gradient of {name} is off by {error.max_abs:.3g} at {list(error.worst)}"
            return failed(outcome, f"gradient of {name}", failure, allowed)
    return outcome


def _error_of_sums(call: Call, given: dict[str, torch.Tensor], name: str) -> float:
    """What orders of FP32 sums move a gradient by, where dP and rowsum(dO O) cancel and 16 bits show no error."""
    largest = {letter: float(given[letter].abs().max()) for letter in ("query", "key", "value")}
    scale = call.head_dim**-0.5 if call.scale is None else abs(call.scale)
    factors = {"query": scale * largest["key"], "key": scale * largest["query"], "alibi_slopes": call.seqlen_k}
    terms = call.batch * call.heads * call.seqlen_q * call.head_dim
    reach = largest["value"] * reference.kept_of(call.dropout_p)[1] * factors.get(name, 1.0)
    return _FP32_REACH * math.sqrt(terms) * reach


def _modelled_errors(
    call: Call, given: dict[str, torch.Tensor], chosen: list[str], weight: torch.Tensor, exact: Sequence[torch.Tensor]
) -> list[float]:
    """Largest error of each gradient of a backward that rounds P, O, dS and gradients of changed rows, as kernels do.

    Plain operations get rowsum(dO O) from P and dP, where it cancels with dP. A kernel gets it from O, as rounded.
    """
    errors = [0.0] * len(chosen)
    for unit in UNITS_OF_WEIGHTS:
        found = _plain_gradients(call, given, chosen, weight, torch.float32, (weight.dtype, unit))
        errors = [
            max(error, float((got.double() - want).abs().max()))
            for error, got, want in zip(errors, found, exact, strict=True)
        ]
    return errors


class _RoundedAttention(torch.autograd.Function):
    """softmax(scores) times kept, times V, and its gradients, with P, O and dS rounded to a 16-bit type.

    Args of apply: scores [B, H, S_q, S_k or, with sinks, S_k + 1], value [B, H, S_k, D], the factor of each weight
    [B, H, S_q, S_k] (0 where it is hidden or dropped), the type, and the unit that weights are rounded in.
    """

    @staticmethod
    def forward(
        ctx: Any, scores: torch.Tensor, value: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, unit: float
    ) -> torch.Tensor:
        weights = scores.softmax(dim=-1)
        shown = weights[..., : value.shape[-2]]
        rounded = _rounded(shown * unit, dtype) / unit * factor
        out = _rounded(rounded @ value, dtype)
        ctx.save_for_backward(weights, rounded, value, factor, out)
        ctx.dtype = dtype
        return out

    @staticmethod
    def backward(ctx: Any, of_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weights, rounded, value, factor, out = ctx.saved_tensors
        of_weights = of_out @ value.mT * factor
        if weights.shape[-1] > value.shape[-2]:  # the sink has no value
            of_weights = torch.cat([of_weights, torch.zeros_like(of_weights[..., :1])], dim=-1)
        of_scores = weights * (of_weights - (of_out * out).sum(dim=-1, keepdim=True))
        return _rounded(of_scores, ctx.dtype), rounded.mT @ of_out, None, None, None


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.to(dtype).to(values.dtype)


def _plain_gradients(
    call: Call,
    given: dict[str, torch.Tensor],
    chosen: list[str],
    weight: torch.Tensor,
    dtype: torch.dtype,
    roundings: tuple[torch.dtype, float] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Gradients by plain operations in `dtype`; rows that see no key have none. `roundings` are those of plain()."""
    leaves = {name: given[name].detach().to(dtype).requires_grad_() for name in chosen}
    of = {
        name: leaves.get(name, tensor.to(dtype) if tensor.is_floating_point() else tensor)
        for name, tensor in given.items()
    }
    out = plain(call, of, roundings)
    return torch.autograd.grad(out, list(leaves.values()), weight.to(dtype), allow_unused=True, materialize_grads=True)


def plain(call: Call, of: dict[str, torch.Tensor], roundings: tuple[torch.dtype, float] | None = None) -> torch.Tensor:
    """The output by plain operations that torch differentiates, in the type of query: [B, H, S_q, D].

    Args:
        call: a random call.
        of: its inputs by name, in the type to compute in.
        roundings: a 16-bit type that P, O and their gradients are rounded to, and the unit that P is rounded in.
    """
    value = of["value"]
    made = tensors(call, str(value.device))
    query, key = _changed(call, made, value.dtype, of)
    if made.prologue:  # kernels take these rows rounded once: so are these, whose gradients are those of the sums
        of_call = TORCH_DTYPE[call.dtype]
        query, key = (x + (_rounded(x.detach(), of_call) - x.detach()) for x in (query, key))
        for rows_changed in (query, key):
            if roundings is not None and rows_changed.requires_grad:
                rows_changed.register_hook(lambda gradient: _rounded(gradient, of_call))  # type: ignore[no-untyped-call]
    key, value = (tensor.repeat_interleave(call.group, dim=1) for tensor in (key, value))
    device = query.device
    position = call.seqlen_k - call.seqlen_q if call.alignment == "lower_right" else 0
    rows = torch.arange(call.seqlen_q, device=device)[:, None] + position
    distance = torch.arange(call.seqlen_k, device=device) - rows
    left, right = call.window or (-1, -1)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    hidden = hidden | (distance > 0) if call.alignment is not None else hidden
    hidden = hidden | (distance < -left) if left != -1 else hidden
    hidden = hidden | (distance > right) if right != -1 else hidden
    scores = query @ key.mT * (call.head_dim**-0.5 if call.scale is None else call.scale)
    if call.softcap is not None:
        scores = call.softcap * (scores / call.softcap).tanh()
    if "alibi_slopes" in of:
        slopes = of["alibi_slopes"].expand(call.batch, call.heads)
        scores = scores - slopes[:, :, None, None] * distance.abs()
    hidden = hidden.expand_as(scores)
    if "attn_mask" in of:
        mask = of["attn_mask"]
        if mask.dtype == torch.int32:
            keys = torch.arange(call.seqlen_k, device=device)
            mask = (mask[..., :1] <= keys) & (keys < mask[..., 1:])
        hidden = hidden | (~mask if mask.dtype == torch.bool else mask == -torch.inf)
        if mask.dtype != torch.bool:
            scores = scores + mask.where(mask != -torch.inf, 0.0)
    if "shown" in of:
        hidden = hidden | ~of["shown"]
    # A row of nothing but -inf has no softmax: such rows get zeros for scores, and their weights are hidden below.
    scores = scores.masked_fill(hidden, -torch.inf)
    if "sinks" in of:
        column = of["sinks"][:, None, None].expand(call.batch, -1, call.seqlen_q, 1)
        scores = torch.cat([scores, column.to(scores)], dim=-1)
    scores = scores.masked_fill((scores == -torch.inf).all(dim=-1, keepdim=True), 0.0)
    factor = (~hidden).to(scores.dtype)
    if "kept" in of:
        factor = factor * reference.kept_of(call.dropout_p)[1] * of["kept"]
    if roundings is not None:
        rounded: torch.Tensor = _RoundedAttention.apply(scores, value, factor, *roundings)  # type: ignore[no-untyped-call]
        return rounded
    return (scores.softmax(dim=-1)[..., : call.seqlen_k] * factor) @ value


def quantized(call: Call, made: Tensors) -> tuple[Quantized, Quantized, Quantized]:
    """Query, key and value as quantized values with scales, for the door "quantized"."""
    format = "e4m3" if call.operands == "fp8" else "int8"
    query, key = (quantize(x, format, call.granularity) for x in (made.query, made.key))  # type: ignore[arg-type]
    return query, key, quantize(made.value, "e4m3", "tensor" if call.granularity == "tensor" else "head")


def _check_eight_bit(call: Call, device: str) -> Outcome:
    """Output and LSE of the dequantized values, by the bounds of verify_eight_bit."""
    here, there = tensors(call, "cpu"), tensors(call, device)
    inputs = (there.query, there.key, there.value)
    options = _options(call, there, device)
    operands = SCHEMES[call.operands].operands
    if call.door == "precision":
        shifted = call.softcap is None and call.sinks == "none"
        scheme = (SCHEMES if shifted else UNSMOOTHED)[call.operands]
        made, (q, k, v) = specified((here.query, here.key, here.value), scheme)
        options["precision"] = call.operands
        of_scores = made.query, made.key
        granularity: Granularity = "block"
        scales, block = (made.query_scale, made.key_scale), scheme.block
        mean = made.key_mean
    else:
        operands = "int8_fp8" if operands == "int8_fp16" else operands
        ours, mean = quantized(call, here), None
        q, k, v = (one.dequantize().double() for one in ours)
        inputs = tuple(one.values.to(device) for one in ours)  # type: ignore[assignment]
        options |= {f"{name}_scale": one.scale.to(device) for name, one in zip("qkv", ours, strict=True)}
        of_scores, scales = (ours[0].values, ours[1].values), (ours[0].scale, ours[1].scale)
        granularity, block = call.granularity, ours[0].block
    # The bounds are for the usual factor: another one is a part of query.
    factor = call.head_dim**-0.5 if call.scale is None else call.scale
    plain_inputs = (q.double() * (factor * call.head_dim**0.5), k.double(), v.double())
    case = replace(call.case(), scale=None)
    masks = here.masks | {"window": call.window, "softcap": call.softcap}
    if call.is_masked and device == "cpu":  # where "auto" is a GPU whose kernels know no masks
        options["impl"] = emulated_impl(f"hopper/{'throughput_8bit_qk' if operands == 'int8_fp16' else 'latency_8bit'}")
    expected, expected_lse = verify_eight_bit.oracle(*plain_inputs, case, None, masks)
    spec = microsdpa.explain(*inputs, **options).spec
    family, lost = family_named(spec.name) if spec else None, None
    if family is not None and operands in family.short_sums:
        of_rows = "head" if call.door == "precision" and scales[1].dim() == 2 else granularity
        kinds = zip(scales, (granularity, of_rows), (q, k), strict=True)
        wide = tuple(expand_scale(scale, kind, block, x.shape) for scale, kind, x in kinds)
        lost = lost_of_scores(of_scores, wide, factor)  # type: ignore[arg-type]
        expected, expected_lse = verify_eight_bit.oracle(*plain_inputs, case, lost, masks)
    if mean is not None:
        wide_mean = mean.repeat_interleave(call.group, dim=1).double()
        expected_lse = expected_lse + (here.query.double() @ wide_mean[..., None]).squeeze(-1) * factor

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        found: Any = microsdpa.sdpa(*inputs, **options, return_lse=True)
        return found[0].cpu(), found[1].cpu()

    out, lse = run()
    with scheduled(Schedule(seed=1, late=False)):
        again, lse_again = run()
    bound = verify_eight_bit.allowed(plain_inputs, case, operands, expected, spec, lost, masks)
    errors = compare.measure(out, expected)
    outcome = Outcome(call, errors=errors, allowed=float(bound.max()))
    if not ((out.double() - expected).abs() <= bound).all():
        return failed(outcome, "output", f"the output is off by {errors.max_abs:.3g} at {list(errors.worst)}")
    largest = float(expected_lse.where(expected_lse.isfinite(), 0.0).abs().max())
    of_lse = LSE_TOLERANCE * max(1.0, largest)
    error = compare.measure(lse, expected_lse)
    if not error.max_abs <= of_lse:
        return failed(outcome, "LSE", f"the LSE is off by {error.max_abs:.3g} at {list(error.worst)}", of_lse)
    if not torch.equal(out, again) or not torch.equal(lse, lse_again):
        return failed(outcome, "bits", "a second run gave other bits")
    return outcome
