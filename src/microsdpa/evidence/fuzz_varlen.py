"""Random calls of sdpa_varlen for `microsdpa verify --fuzz`: drawn, made, judged and made simpler."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

import torch

import microsdpa
from microsdpa import reference
from microsdpa.call.call import Call as LibraryCall
from microsdpa.call.call import mask_tensors, scales_of
from microsdpa.call.options import Options
from microsdpa.call.sequences import Sequences
from microsdpa.call.tensors import output_shape
from microsdpa.call.validate import Checked
from microsdpa.call.validate import check as check_call
from microsdpa.emulate.run import Schedule, scheduled
from microsdpa.errors import UnsupportedProblem
from microsdpa.evidence import compare
from microsdpa.evidence.fuzz_outcome import LSE_SLACK, Outcome, failed
from microsdpa.evidence.inputs import TORCH_DTYPE, Case
from microsdpa.execution.choice import problem_of
from microsdpa.kernels import VARLEN_FAMILIES, KernelSpec
from microsdpa.kernels.ampere.varlen.spec import batch_invariant
from microsdpa.kernels.problem import Causal, DType, Problem
from microsdpa.kernels.select import select

SinkType = Literal["none", "inputs", "float32"]
Storage = Literal["dense", "packed", "paged"]
CacheType = Literal["inputs", "e4m3", "int8"]
ScaleOf = Literal["number", "call", "heads", "sequences", "tokens", "keys' tokens"]

CACHES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST = {"e4m3": 448.0, "int8": 127.0}
STEP = {"e4m3": (2.0**-4, 2.0**-10), "int8": (0.0, 0.5)}
"""Error of a number in 8 bits: a part of it, and a part of its scale."""
NORM_EPS = 1e-3
CHANGED = 2.0
"""Times one rounding of its type that a changed key may be off: tables are rounded, and so is the product."""
HEAD_DIMS = (64, 128, 32, 48, 96, 256, 16, 72)


@dataclass(frozen=True)
class VarlenCall:
    """One call of sdpa_varlen. Every default is the least that a call can have.

    Attributes:
        queries: of each sequence; dense queries all have the first one's number.
        keys: of each sequence, ahead of those that are appended.
        value_dim: columns of value and the output; 0 for head_dim.
        packed: whether queries are packed.
        storage: how keys lie in memory; `page` is the size of a page, and `spare` what the cache has room for beyond.
        hint: whether max_queries is given.
        append: whether each query brings a new key.
        rotary: columns of queries and new keys that are rotated; 0 for none.
        narrow: whether angles and norms' weights have the inputs' type; else they are float32.
        norms: which norms there are; that of keys is of those that are appended.
        cache: type of keys and values; 8-bit ones have scales of `scale_of`.
        invariant: batch_invariant.
        out: whether an output is given.
    """

    door: Literal["varlen"] = "varlen"
    dtype: DType = "float16"
    queries: tuple[int, ...] = (1,)
    keys: tuple[int, ...] = (1,)
    heads_kv: int = 1
    group: int = 1
    head_dim: int = 64
    value_dim: int = 0
    packed: bool = False
    storage: Storage = "dense"
    page: int = 16
    spare: int = 0
    hint: bool = False
    append: bool = False
    rotary: int = 0
    interleaved: bool = False
    narrow: bool = False
    norms: tuple[str, ...] = ()
    causal: bool = False
    scale: float | None = None
    window: tuple[int, int] | None = None
    softcap: float | None = None
    alibi: Literal["none", "head", "batch"] = "none"
    sinks: SinkType = "none"
    cache: CacheType = "inputs"
    scale_of: ScaleOf = "number"
    invariant: bool = False
    out: bool = False
    return_lse: bool = True
    impl: str = "auto"
    seed: int = 0

    @property
    def heads(self) -> int:
        """Heads of query."""
        return self.heads_kv * self.group

    @property
    def work(self) -> int:
        """Multiplications of Q K^T, padded to tiles as kernels do."""
        pairs = zip(self.queries, self.keys, strict=True)
        return self.heads * max(self.head_dim, 16) * sum(max(q, 16) * max(k + q, 16) for q, k in pairs)

    @property
    def form(self) -> tuple[Any, ...]:
        """What kernels are compiled for: calls that differ in the rest alone share most of them."""
        sides = tuple(end != -1 for end in self.window or (-1, -1))
        masks = sides, self.softcap is not None, self.alibi != "none", self.sinks, self.causal
        return (
            "varlen",
            self.dtype,
            self.head_dim,
            self.value_dim,
            self.group,
            self.storage,
            self.cache,
            self.impl,
            *masks,
        )

    def case(self) -> Case:
        """Shape and type, for rows: the longest sequence stands for all."""
        sizes = len(self.queries), self.heads, max(1, *self.queries), max(1, *self.keys), self.head_dim, self.heads_kv
        return Case(*sizes, self.dtype, "lower_right" if self.causal else None, self.scale, seed=self.seed)

    def __str__(self) -> str:
        """The constructor with what is not a default."""
        given = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        )
        return f"VarlenCall({', '.join(given)})"

    def line(self, device: str) -> str:
        """One line of Python that makes the call again and says what is wrong."""
        return f"from microsdpa.evidence.fuzz_varlen import VarlenCall, check; print(check({self}, {device!r}).failure)"


def valid(call: VarlenCall) -> VarlenCall:
    """The call without what sdpa_varlen refuses, and with as many queries and keys as it has sequences."""
    if not call.packed:
        call = replace(call, queries=(max(1, call.queries[0]),) * len(call.queries))
    if not sum(call.queries):
        call = replace(call, queries=(*call.queries[:-1], 1))
    if call.storage == "packed":
        call = replace(call, append=False, spare=0)  # packed keys have no room for new ones
    if call.storage == "packed" and not sum(call.keys):
        call = replace(call, keys=(*call.keys[:-1], 1))
    if call.storage != "paged":
        call = replace(call, page=VarlenCall.page)
    if call.append and call.storage == "dense":
        call = replace(call, spare=max(call.spare, max(call.queries)))
    if call.storage == "packed":
        call = replace(call, rotary=0, norms=())  # positions are counted from lengths, which packed keys lack
    call = replace(call, rotary=min(call.rotary, call.head_dim // 16 * 16))
    if not call.append:
        call = replace(call, norms=tuple(name for name in call.norms if name != "k_norm"))
    if not call.rotary:
        call = replace(call, interleaved=False)
    if not call.rotary and not call.norms:
        call = replace(call, narrow=False)
    if call.cache == "inputs":
        call = replace(call, scale_of="number")
    elif call.head_dim % 16:
        call = replace(call, head_dim=64)
    if call.append and call.scale_of == "keys' tokens":
        call = replace(call, scale_of="tokens")
    if call.storage == "packed" and call.scale_of == "sequences" and _is_ambiguous(call):
        call = replace(call, scale_of="heads")
    if not call.packed:
        call = replace(call, hint=False)
    if call.cache != "inputs" or call.value_dim >= call.head_dim:
        call = replace(call, value_dim=0)
    return call


def _is_ambiguous(call: VarlenCall) -> bool:
    """Whether scales of sequences have the shape that scales of tokens have, [keys, H_kv]."""
    return sum(call.keys) == len(call.keys)


def tensors(call: VarlenCall) -> dict[str, Any]:
    """Keyword arguments of sdpa_varlen, with CPU tensors, but for impl, return_lse and out."""
    generator = torch.Generator().manual_seed(call.seed)
    dtype, batch = TORCH_DTYPE[call.dtype], len(call.queries)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    rows = (sum(call.queries),) if call.packed else (batch, call.queries[0])
    given: dict[str, Any] = {"query": numbers(*rows, call.heads, call.head_dim), "causal": call.causal}
    if call.packed:
        given["query_offsets"] = _offsets(call.queries)
    if call.hint:
        given["max_queries"] = max(call.queries)
    lengths = torch.tensor(call.keys, dtype=torch.int32)
    columns = {"key": call.head_dim, "value": call.value_dim or call.head_dim}
    if call.storage == "packed":
        places: tuple[int, ...] = (sum(call.keys),)
        given["key_offsets"] = _offsets(call.keys)
    elif call.storage == "dense":
        places = batch, max(1, max(call.keys) + call.spare)
        given["lengths"] = lengths
    else:
        longest = max(k + q * call.append for q, k in zip(call.queries, call.keys, strict=True)) + call.spare
        width = max(1, -(-longest // call.page))
        order = torch.randperm(batch * width + 2, generator=generator)[: batch * width]
        places = batch * width + 2, call.page
        given |= {"page_table": order.view(batch, width).int(), "lengths": lengths}
    for name in ("key", "value"):
        given[name] = numbers(*places, call.heads_kv, columns[name])
    if call.append:
        for name in ("key", "value"):
            given[f"new_{name}"] = numbers(*rows, call.heads_kv, columns[name])
    if call.rotary:
        angles = torch.rand(max(call.keys) + max(call.queries), call.rotary // 2, generator=generator) * 6
        of = dtype if call.narrow else torch.float32
        given |= {"rotary_cos": angles.cos().to(of), "rotary_sin": angles.sin().to(of)}
        given["rotary_interleaved"] = call.interleaved
    for name in call.norms:
        weights = torch.randn(call.head_dim, generator=generator)
        given |= {name: weights.to(dtype if call.narrow else torch.float32), "norm_eps": NORM_EPS}
    for name in ("scale", "window", "softcap"):
        if getattr(call, name) is not None:
            given[name] = getattr(call, name)
    if call.alibi != "none":
        given["alibi_slopes"] = torch.rand([batch, call.heads][call.alibi == "head" :], generator=generator)
    if call.sinks != "none":
        of = dtype if call.sinks == "inputs" else torch.float32
        given["sinks"] = torch.randn(call.heads, generator=generator).to(of)
    if call.cache != "inputs":
        _narrow(call, given, generator)
    if call.invariant:
        given["batch_invariant"] = True
    return given


def _offsets(counts: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)


def _narrow(call: VarlenCall, given: dict[str, Any], generator: torch.Generator) -> None:
    """Put 8-bit values and their scales in the place of keys and values."""
    largest, batch = LARGEST[call.cache], len(call.queries)
    for name, scale_name in (("key", "k_scale"), ("value", "v_scale")):
        wide = given[name].float()
        whole = float(wide.abs().max()) / largest
        of_tokens = call.scale_of == "tokens" or (call.scale_of == "keys' tokens" and name == "key")
        if of_tokens:
            scale: Any = wide.abs().amax(-1) / largest + 1e-6
            divisor = scale[..., None]
        else:
            shape = {"heads": (call.heads_kv,), "sequences": (batch, call.heads_kv)}.get(call.scale_of, ())
            scale = (torch.rand(shape, generator=generator) + 0.5) * whole
            divisor = torch.tensor(whole)  # scales of a sequence or head: whatever its values stand for
            scale = float(scale) if call.scale_of == "number" else scale
        values = (wide / divisor).clamp(-largest, largest)
        given[name] = (values.round() if call.cache == "int8" else values).to(CACHES[call.cache])
        given[scale_name] = scale


def moved(given: dict[str, Any], device: str) -> dict[str, Any]:
    """Copies of all tensors on a device: a call may write to its cache."""
    return {name: one.to(device, copy=True) if isinstance(one, torch.Tensor) else one for name, one in given.items()}


def check(call: VarlenCall, device: str) -> Outcome:
    """Make a call twice, and judge it; on the CPU the emulator runs it. Whatever it raises is a failure."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _check(call, device)
    except UnsupportedProblem as refusal:
        if call.impl == "auto":
            return Outcome(call, "UnsupportedProblem", f"it is refused: {refusal}")
        return Outcome(call, "refused")
    except Exception as error:
        return Outcome(call, type(error).__name__, f"it raises {type(error).__name__}: {error}")


def run(call: VarlenCall, given: dict[str, Any], device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output, and the LSE if the call asks for it, on the CPU."""
    impl = call.impl if device == "cuda" else emulated_impl(call.impl)
    query, shape = given["query"], output_shape(given["query"], given["value"])
    out = query.new_full(shape, torch.nan) if call.out else None
    found: Any = microsdpa.sdpa_varlen(**given, out=out, return_lse=call.return_lse, impl=impl)
    result, lse = found if call.return_lse else (found, None)
    if out is not None and result is not out:
        raise AssertionError("the output that was given is not the one that is returned")
    return result.cpu(), None if lse is None else lse.cpu()


def checked(call: VarlenCall, given: dict[str, Any], device: str) -> Checked:
    """A call as the library has checked it; `given` is what tensors() makes of it."""
    given_sequences = {name: given[name] for name in Sequences._fields if name in given}
    given_sequences |= {"rotary_interleaved": call.interleaved, "batch_invariant": call.invariant}
    sequences = Sequences(**given_sequences)
    impl = call.impl if device == "cuda" else emulated_impl(call.impl)
    causal: Causal | None = "lower_right" if call.causal else None
    options = Options(False, causal, call.scale, True, call.window, call.softcap, impl)
    scales = scales_of(None, *(given.get(name) for name in ("k_scale", "v_scale")))
    masks = mask_tensors(None, given.get("alibi_slopes"), given.get("sinks"))
    inputs = given["query"], given["key"], given["value"]
    return check_call(LibraryCall(inputs, masks, scales, options, call.return_lse, None, sequences))


def chosen(call: VarlenCall, device: str) -> tuple[KernelSpec, Problem]:
    """The kernel of attention that the library runs for a call, and the problem that the call poses.

    Raises:
        UnsupportedProblem: there is none.
    """
    found = checked(call, moved(tensors(call), device), device)
    problem = problem_of(found)
    spec = select(problem, found.kernel).spec
    return (batch_invariant(problem) if call.invariant else spec), problem


def emulated_impl(impl: str) -> str:
    """`impl` for CPU tensors that the emulator runs."""
    return "emulate" if impl == "auto" else f"emulate:{impl}"


def _check(call: VarlenCall, device: str) -> Outcome:
    before = tensors(call)
    given, again = moved(before, device), moved(before, device)
    out, lse = run(call, given, device)
    with scheduled(Schedule(seed=1, late=False)):
        out_again, lse_again = run(call, again, device)
    outcome = judged(call, before, moved(given, "cpu"), out, lse)
    same = torch.equal(out, out_again) and (lse is None or lse_again is None or torch.equal(lse, lse_again))
    if outcome.failure or same:
        return outcome
    return failed(outcome, "bits", "a second run gave other bits")


def judged(
    call: VarlenCall, before: dict[str, Any], after: dict[str, Any], out: torch.Tensor, lse: torch.Tensor | None
) -> Outcome:
    """What is wrong with a call's output and LSE, and with the cache; its tensors `before` and `after` it."""
    expected = _appended(call, before, after)
    if isinstance(expected, str):
        return failed(Outcome(call), "cache", expected)
    inputs = expected["query"], after["key"], after["value"]
    names = "query_offsets", "key_offsets", "lengths", "page_table", "k_scale", "v_scale"
    sequences = {name: expected[name] for name in names if name in expected}
    for name in ("k_scale", "v_scale"):
        if name in sequences:
            sequences[name] = torch.as_tensor(after[name], dtype=torch.float32)
    masks = {name: before[name] for name in ("window", "softcap", "alibi_slopes", "sinks") if name in before}
    options: dict[str, Any] = {"causal": call.causal, "scale": call.scale, "masks": masks}
    exact, rough = (reference.varlen(inputs, sequences, exact=exact, **options) for exact in (True, False))
    errors = compare.measure(out, exact[0])
    stands_for = max(
        (float(one.tensors[2].abs().max()) for one in reference.sequences(inputs, sequences) if one.tensors[2].numel()),
        default=0.0,
    )
    rounding = compare.UNIT_ROUNDOFF[out.dtype] * stands_for
    limit = compare.tolerance(rough[0], exact[0], out.dtype)
    outcome = Outcome(call, errors=errors, allowed=limit.max_abs + rounding)
    if not errors.max_abs <= outcome.allowed:
        return failed(outcome, "output", f"the output is off by {errors.max_abs:.3g} at {list(errors.worst)}")
    if lse is not None:
        largest = float(exact[1].where(exact[1].isfinite(), 0.0).abs().max())
        allowed = compare.tolerance(rough[1], exact[1], torch.float32).max_abs + LSE_SLACK * (1.0 + largest)
        error = compare.measure(lse, exact[1])
        if not error.max_abs <= allowed:
            return failed(outcome, "LSE", f"the LSE is off by {error.max_abs:.3g} at {list(error.worst)}", allowed)
    return outcome


def _appended(call: VarlenCall, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any] | str:
    """The call that gives the same with all keys in the cache, or what is wrong with the cache that was written."""
    written = {name: torch.zeros(before[name].shape[:-1], dtype=torch.bool) for name in ("key", "value")}
    expected = dict(before)
    if call.append or call.rotary or call.norms:
        query = before["query"].clone()
        for b, (count, start) in enumerate(zip(call.queries, call.keys, strict=True)):
            first = sum(call.queries[:b])
            own: Any = slice(first, first + count) if call.packed else b
            positions = torch.arange(start, start + count)
            query[own] = _changed(before, before["query"][own], positions, "q_norm").to(query.dtype)
            if not call.append:
                continue
            news = {
                "key": _changed(before, before["new_key"][own], positions, "k_norm"),
                "value": before["new_value"][own].double(),
            }
            place = _places(call, before, b, positions)
            for name, rows in news.items():
                written[name][place] = True
                if said := _miswritten(call, name, after, place, rows):
                    return said
        expected["query"] = query
    if call.append:
        lengths = [k + q for q, k in zip(call.queries, call.keys, strict=True)]
        expected["lengths"] = torch.tensor(lengths, dtype=torch.int32)
    for name, mask in written.items():
        kept = before[name].view(torch.uint8)[~mask], after[name].view(torch.uint8)[~mask]
        if not torch.equal(*kept):
            return f"the {name}s that nothing was to be written to have changed"
    return expected


def _places(call: VarlenCall, given: dict[str, Any], b: int, positions: torch.Tensor) -> tuple[Any, Any]:
    if call.storage == "dense":
        return torch.full_like(positions, b), positions
    return given["page_table"][b].long()[positions // call.page], positions % call.page


def _changed(given: dict[str, Any], rows: torch.Tensor, positions: torch.Tensor, norm: str) -> torch.Tensor:
    """Rows [S, heads, D] in FP64, with a norm and rotated where the call says so."""
    if not rows.numel():
        return rows.double()
    angles = (given["rotary_cos"], given["rotary_sin"]) if "rotary_cos" in given else None
    interleaved = given.get("rotary_interleaved", False)
    turned = reference.changed_rows(
        rows.transpose(0, 1)[None], (given.get(norm), None), NORM_EPS, angles, positions, interleaved=interleaved
    )
    return turned[0].transpose(0, 1)


def _miswritten(call: VarlenCall, name: str, after: dict[str, Any], place: tuple[Any, Any], rows: torch.Tensor) -> str:
    """What is wrong with new keys or values in the cache, which should stand for `rows`; empty if nothing is."""
    found, changes = after[name][place].float().double(), call.rotary > 0 or "k_norm" in call.norms
    unit = compare.UNIT_ROUNDOFF[TORCH_DTYPE[call.dtype]] * CHANGED if changes and name == "key" else 0.0
    allowed = unit * rows.abs().amax(-1, keepdim=True).expand_as(rows)
    if call.cache != "inputs":
        scale = torch.as_tensor(after["k_scale" if name == "key" else "v_scale"], dtype=torch.float32)
        if call.scale_of == "tokens":
            scale = scale[place]
        elif call.scale_of == "sequences":
            scale = scale[place[0]] if call.storage == "dense" else scale[_sequence(call, after, place)]
        scale = scale.double().expand(rows.shape[:-1])[..., None]
        found, most = found * scale, scale * LARGEST[call.cache]
        rows = rows.clamp(-most, most)
        relative, absolute = STEP[call.cache]
        allowed = allowed + 1.01 * (relative * rows.abs() + absolute * scale)
    error = (found - rows).abs()
    if bool((error <= allowed).all()):
        return ""
    return f"a new {name} is off by {float(error.max()):.3g} in the cache"


def _sequence(call: VarlenCall, after: dict[str, Any], place: tuple[Any, Any]) -> torch.Tensor:
    """The sequence of each place in pages, none of which is shared."""
    has: torch.Tensor = after["page_table"][None].long() == place[0][:, None, None]
    return has.any(-1).long().argmax(-1)


def form(choose: random.Random, emulated: bool) -> dict[str, Any]:
    """What a kernel is compiled for."""
    caches: tuple[CacheType, ...] = ("inputs", "inputs", "e4m3", "int8")
    of: tuple[ScaleOf, ...] = ("number", "call", "heads", "sequences", "tokens", "keys' tokens")
    found: dict[str, Any] = {
        "dtype": choose.choice(("float16", "bfloat16")),
        "heads_kv": choose.choice((1, 2)),
        "group": choose.choice((1, 2, 4) if emulated else (1, 2, 4, 7, 8)),
        "head_dim": choose.choice(HEAD_DIMS[:3] if emulated else HEAD_DIMS),
        "storage": choose.choice(("dense", "packed", "paged", "paged")),
        "most": choose.choice((1, 1, 7, 33)),
        "append": choose.random() < 0.4,
        "interleaved": choose.random() < 0.5,
        "narrow": choose.random() < 0.5,
        "causal": choose.random() < 0.6,
        "sides": tuple(choose.random() < 0.3 for _ in range(2)),
        "softcap": choose.choice((0.5, 5.0)) if choose.random() < 0.2 else None,
        "alibi": choose.choice(("head", "batch")) if choose.random() < 0.2 else "none",
        "sinks": choose.choice(("inputs", "float32")) if choose.random() < 0.2 else "none",
        "cache": choose.choice(caches),
        "scale_of": choose.choice(of),
        "invariant": choose.random() < 0.15,
    }
    if not emulated and choose.random() < 0.3:
        found["impl"] = choose.choice([family.name for family in VARLEN_FAMILIES])
    found["rotary"] = choose.choice((0, 16, found["head_dim"]))
    found["value_dim"] = choose.choice((0, 0, 0, 16, 40))
    return found | {"norms": choose.choice(((), (), ("q_norm",), ("k_norm",), ("q_norm", "k_norm")))}


def draw(choose: random.Random, form: dict[str, Any], emulated: bool) -> VarlenCall:
    """A random call of a form; those for the emulator are small."""
    rest = {name: value for name, value in form.items() if name not in ("most", "sides")}
    batch, longest = choose.choice((1, 2, 3)), 40 if emulated else 600
    if any(form["sides"]):
        rest["window"] = tuple(choose.choice((0, 5, 30, 400)) if side else -1 for side in form["sides"])
    return valid(
        VarlenCall(
            queries=tuple(choose.choice((0, 1, form["most"])) for _ in range(batch)),
            keys=tuple(choose.choice((0, 1, longest, choose.randint(0, longest))) for _ in range(batch)),
            packed=choose.random() < 0.5,
            page=choose.choice((1, 3, 16, 32)),
            spare=choose.choice((0, 0, 5)),
            hint=choose.random() < 0.5,
            scale=choose.choice((None, None, 0.0, -0.3, 1.0)),
            out=choose.random() < 0.3,
            return_lse=choose.random() < 0.8,
            seed=choose.randrange(2**31),
            **rest,
        )
    )


def simpler(call: VarlenCall) -> Iterator[VarlenCall]:
    """Calls that differ from a call by one step towards the least: a default, or a number that is smaller."""

    def changed(**fields: Any) -> Iterator[VarlenCall]:
        made = valid(replace(call, **fields))
        if made != call and made.work <= call.work:
            yield made

    for i in range(len(call.queries)):
        if len(call.queries) > 1:
            queries, keys = (one[:i] + one[i + 1 :] for one in (call.queries, call.keys))
            yield from changed(queries=queries, keys=keys)
    sizes = {"queries", "keys", "door", "seed"}
    for name in (field.name for field in dataclasses.fields(VarlenCall) if field.name not in sizes):
        if getattr(call, name) != getattr(VarlenCall, name):
            yield from changed(**{name: getattr(VarlenCall, name)})
    for name in ("queries", "keys"):
        for i, size in enumerate(getattr(call, name)):
            for less in sorted({0, 1, size // 2, size - 1}):
                if 0 <= less < size:
                    counts = getattr(call, name)
                    yield from changed(**{name: (*counts[:i], less, *counts[i + 1 :])})
    for name in ("heads_kv", "group", "page", "rotary", "head_dim"):
        size, least = getattr(call, name), 16 if name in ("rotary", "head_dim") else 1
        if size // 2 >= least and size > getattr(VarlenCall, name):
            yield from changed(**{name: size // 2})
    if call.window is not None:
        for ends in ((-1, call.window[1]), (call.window[0], -1)):
            if ends not in (call.window, (-1, -1)):
                yield from changed(window=ends)
    if call.seed > 0:
        yield from changed(seed=0)
