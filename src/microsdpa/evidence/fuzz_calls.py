"""Random calls for `microsdpa verify --fuzz`: what one is made of, how it is drawn, how it becomes simpler."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.nn.attention.flex_attention import create_block_mask

from microsdpa import BlockTable
from microsdpa.evidence import fuzz_varlen
from microsdpa.evidence.fuzz_varlen import VarlenCall
from microsdpa.evidence.inputs import TORCH_DTYPE, Case
from microsdpa.kernels import FAMILIES, ONE_LENGTH
from microsdpa.kernels.problem import PRECISIONS, Causal, DType, Precision
from microsdpa.kernels.quantize.spec import SCHEMES

Door = Literal["sdpa", "out", "plan", "operator", "enable", "backward", "precision", "quantized", "varlen"]
CausalOption = Literal["none", "is_causal", "upper_left", "lower_right"]
Layout = Literal["bhsd", "bshd", "sbhd", "unaligned", "every other row", "shared heads"]
MaskType = Literal["none", "bool", "inputs", "float32", "ranges"]
Documents = Literal["none", "in order", "apart", "of queries and keys"]
Blocks = Literal["none", "table", "mask_mod"]
SinkType = Literal["none", "inputs", "float32"]
Granularity = Literal["tensor", "head", "block"]

Positions = Literal["counted", "first", "of rows", "of all", "apart", "queries alone"]
Norms = Literal["none", "rms", "layer"]

DOORS: tuple[Door, ...] = (
    *("sdpa", "out", "plan", "operator", "enable", "backward", "precision", "quantized"),
    "varlen",
)
PROLOGUE_DOORS = ("sdpa", "out", "plan", "backward")
"""Doors that take norms and rotary embedding."""
LAYOUTS: tuple[Layout, ...] = ("bhsd", "bshd", "sbhd", "unaligned", "every other row", "shared heads")
HEAD_DIMS = (64, 64, 64, 128, 128, 256, 32, 96, 192, 80, 72, 40, 8, 36, 1)
EIGHT_BIT_HEAD_DIMS = (32, 64, 128, 256)
VALUE_DIM_DOORS = ("sdpa", "out", "plan", "operator", "enable")
"""Doors whose value may have a head dimension of its own."""
EIGHT_BIT_DOORS = ("precision", "quantized")
EDGES = (16, 64, 128, 192, 256, 512, 1024)
"""Lengths of tiles, and of some of them: calls have lengths at and beside these."""

SPARSE = 0.15
"""Share of calls that have documents, and of those that have blocks."""
LONG, MANY_KEYS = 0.1, (520, 1300)
"""Share of the emulator's calls that have a few queries and many keys, and how many: CTAs may share these."""
MOST_WORK, MOST_EMULATED, MOST_LONG = 2**28, 2**18, 2**22
"""Of a call: on a GPU, in the emulator, and there with many keys."""
MASKED = 0.3
"""Share of forms that have each of the masks beside attn_mask."""


@dataclass(frozen=True)
class Call:
    """One call of the library. Every default is the least that a call can have.

    Attributes:
        heads_kv: heads of key and value; query has `group` times as many.
        layouts: of query, key, value and out in memory.
        causal: how the alignment is asked for.
        outliers: whether one element in some has ten times the size.
        mask: type of attn_mask; mask_dims says which of its dimensions have their full size, and leading ones of size
            one are left out; mask_shown is the share of keys that it shows.
        documents: how document_ids are given; the first two want as many queries as keys.
        blocks: what block_mask is: a BlockTable or a BlockMask.
        window: as sdpa takes it.
        alibi: slopes of a "head", or of each "batch" entry too.
        graded: which of query, key, value, attn_mask, alibi_slopes and sinks require grad: letters of "qkvmas".
        operands: of the doors "precision" and "quantized".
        granularity: of the scales of query and key, for the door "quantized".
        impl: "auto", or a kernel's name.
        seed: of the values.
        dropout_p: of the doors "operator" and "backward", whose calls are then the operator's, with a random state.
        rotary: columns of query and key that are rotated; 0 for none.
        rotary_positions: how they are given; "apart" are other ones for keys.
        norms: of the rows that `normed` names, "q", "k" or both; LayerNorms have a bias where `biased`.
        narrow: whether angles and weights have the inputs' type; else they are float32.
        value_dim: columns of value and the output; 0 for head_dim.
        continued: whether the call goes on from an output and an LSE of other keys.
    """

    door: Door = "sdpa"
    dtype: DType = "float16"
    batch: int = 1
    heads_kv: int = 1
    group: int = 1
    seqlen_q: int = 1
    seqlen_k: int = 1
    head_dim: int = 64
    layouts: tuple[Layout, Layout, Layout, Layout] = ("bhsd", "bhsd", "bhsd", "bhsd")
    causal: CausalOption = "none"
    scale: float | None = None
    outliers: bool = False
    mask: MaskType = "none"
    mask_dims: tuple[bool, bool, bool, bool] = (False, False, False, True)
    mask_shown: float = 1.0
    mask_transposed: bool = False
    documents: Documents = "none"
    blocks: Blocks = "none"
    window: tuple[int, int] | None = None
    softcap: float | None = None
    alibi: Literal["none", "head", "batch"] = "none"
    sinks: SinkType = "none"
    graded: str = "q"
    operands: Precision = "fp8"
    granularity: Granularity = "tensor"
    impl: str = "auto"
    seed: int = 0
    dropout_p: float = 0.0
    rotary: int = 0
    rotary_interleaved: bool = False
    rotary_positions: Positions = "counted"
    norms: Norms = "none"
    normed: str = "qk"
    biased: bool = False
    norm_eps: float = 1e-6
    narrow: bool = False
    value_dim: int = 0
    continued: bool = False
    return_lse: bool = True

    @property
    def heads(self) -> int:
        """Heads of query."""
        return self.heads_kv * self.group

    @property
    def alignment(self) -> Causal | None:
        """The causal alignment that the call asks for."""
        return None if self.causal == "none" else "lower_right" if self.causal == "lower_right" else "upper_left"

    @property
    def work(self) -> int:
        """Multiplications of Q K^T, padded to tiles as kernels do."""
        return self.batch * self.heads * max(self.seqlen_q, 16) * max(self.seqlen_k, 16) * max(self.head_dim, 16)

    @property
    def form(self) -> tuple[Any, ...]:
        """What kernels are compiled for: calls that differ in the rest alone share most of them."""
        sides = tuple(end != -1 for end in self.window or (-1, -1))
        masks = self.mask, sides, self.softcap is not None, self.alibi != "none", self.sinks
        changes = (
            self.rotary,
            self.rotary_interleaved,
            self.rotary_positions,
            self.norms,
            self.normed,
            self.biased,
            self.narrow,
        )
        further = self.dropout_p > 0.0, self.continued
        return self.dtype, self.head_dim, self.operands, self.impl, *further, *masks, *changes

    def case(self) -> Case:
        """Shape, type and alignment, for tolerances and rows."""
        sizes = self.batch, self.heads, self.seqlen_q, self.seqlen_k, self.head_dim, self.heads_kv
        return Case(*sizes, self.dtype, self.alignment, self.scale, seed=self.seed)

    @property
    def is_masked(self) -> bool:
        """Whether something else than an alignment decides about scores."""
        kinds = self.mask, self.documents, self.blocks, self.alibi, self.sinks
        return set(kinds) != {"none"} or self.window is not None or self.softcap is not None

    def __str__(self) -> str:
        """The constructor with what is not a default."""
        given = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        )
        return f"Call({', '.join(given)})"

    def line(self, device: str) -> str:
        """One line of Python that makes the call again and says what is wrong."""
        return f"from microsdpa.evidence.fuzz_check import Call, check; print(check({self}, {device!r}).failure)"


@dataclass(frozen=True)
class Tensors:
    """The tensors of a call, in the layouts that it has.

    Attributes:
        masks: arguments of sdpa: attn_mask, document_ids, block_mask, alibi_slopes and sinks.
        prologue: arguments of sdpa: rotary, q_norm and what belongs to them.
        rng_state: two int64; None without dropout.
        shown: bool [B, 1, S_q, S_k]: what documents and blocks show; None where there are none.
        previous: output and LSE of other keys; rows that have seen none have an LSE of -inf and an output of NaN.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    masks: dict[str, Any]
    prologue: dict[str, Any]
    shown: torch.Tensor | None = None
    rng_state: torch.Tensor | None = None
    previous: tuple[torch.Tensor, torch.Tensor] | None = None


def tensors(call: Call, device: str) -> Tensors:
    """Tensors of a call: the same values on every device; `out` is full of NaN."""
    generator = torch.Generator().manual_seed(call.seed)
    dtype = TORCH_DTYPE[call.dtype]

    def normal(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=generator)
        if call.outliers:
            x = torch.where(torch.rand(shape, generator=generator) < 0.01, 10 * x, x)
        return x

    def one(heads: int, seqlen: int, layout: Layout, head_dim: int = call.head_dim) -> torch.Tensor:
        batch = call.batch
        if layout == "bshd":
            return normal(batch, seqlen, heads, head_dim).to(dtype).to(device).transpose(1, 2)
        if layout == "sbhd":
            return normal(seqlen, batch, heads, head_dim).to(dtype).to(device).permute(1, 2, 0, 3)
        if layout == "unaligned":
            return normal(batch, heads, seqlen, head_dim + 3).to(dtype).to(device)[..., 1:-2]
        if layout == "every other row":
            return normal(batch, heads, 2 * seqlen, head_dim).to(dtype).to(device)[:, :, 1::2]
        if layout == "shared heads":
            return normal(batch, 1, seqlen, head_dim).to(dtype).to(device).expand(-1, heads, -1, -1)
        return normal(batch, heads, seqlen, head_dim).to(dtype).to(device)

    of_query, of_key, of_value, of_out = call.layouts
    columns = call.value_dim or call.head_dim
    query, key = one(call.heads, call.seqlen_q, of_query), one(call.heads_kv, call.seqlen_k, of_key)
    value = one(call.heads_kv, call.seqlen_k, of_value, columns)
    out = one(call.heads, call.seqlen_q, of_out, columns).fill_(torch.nan)
    masks: dict[str, Any] = {}
    if call.mask == "ranges":
        sizes = call.batch, call.heads, call.seqlen_q
        shape = [size if full else 1 for size, full in zip(sizes, call.mask_dims, strict=False)]
        first = torch.randint(-2, call.seqlen_k, shape, generator=generator)
        length = torch.randint(0, round(call.mask_shown * call.seqlen_k) + 3, shape, generator=generator)
        masks["attn_mask"] = torch.stack([first, first + length], dim=-1).int().to(device)
    elif call.mask != "none":
        whole = call.batch, call.heads, call.seqlen_q, call.seqlen_k
        shape = [size if full else 1 for size, full in zip(whole, call.mask_dims, strict=True)]
        shown = torch.rand(shape, generator=generator) < call.mask_shown
        of = dtype if call.mask == "inputs" else torch.float32
        mask = shown if call.mask == "bool" else torch.randn(shape, generator=generator).to(of)
        if call.mask != "bool":
            mask = mask.where(shown, -torch.inf)
        mask = mask[(0,) * min(2, next((i for i, full in enumerate(call.mask_dims) if full), 2))].to(device)
        masks["attn_mask"] = mask.mT.contiguous().mT if call.mask_transposed else mask
    if call.alibi != "none":
        shape = [call.batch, call.heads][call.alibi == "head" :]
        masks["alibi_slopes"] = torch.rand(shape, generator=generator).to(device)
    if call.sinks != "none":
        of = dtype if call.sinks == "inputs" else torch.float32
        masks["sinks"] = torch.randn(call.heads, generator=generator).to(of).to(device)
    of_sparse = _sparse(call, device, masks, generator)
    state = torch.randint(2**62, (2,), generator=generator).to(device) if call.dropout_p else None
    prologue = _prologue(call, device, generator)
    previous = _previous(call, device, generator) if call.continued else None
    return Tensors(query, key, value, out, masks, prologue, of_sparse, state, previous)


def _previous(call: Call, device: str, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """What a call goes on from: some rows have seen much more than it shows, some much less, and some nothing."""
    shape = call.batch, call.heads, call.seqlen_q
    out = torch.randn(*shape, call.head_dim, generator=generator).to(TORCH_DTYPE[call.dtype])
    lse = torch.randn(shape, generator=generator) * 4 + math.log(call.seqlen_k)
    unseen = torch.rand(shape, generator=generator) < 0.1
    lse, out = lse.masked_fill(unseen, -torch.inf), out.masked_fill(unseen[..., None], torch.nan)
    return out.to(device), lse.to(device)


def _prologue(call: Call, device: str, generator: torch.Generator) -> dict[str, Any]:
    """Arguments of norms and rotary embedding; none where the call has neither."""
    found: dict[str, Any] = {}
    of = TORCH_DTYPE[call.dtype] if call.narrow else torch.float32
    sizes, most = (call.seqlen_q, call.seqlen_k), call.seqlen_q + call.seqlen_k + 20
    if call.rotary:
        angles = torch.rand(most, call.rotary // 2, generator=generator) * 6
        found["rotary"] = tuple(table.to(of).to(device) for table in (angles.cos(), angles.sin()))
        found["rotary_interleaved"] = call.rotary_interleaved
        batches = () if call.rotary_positions == "of rows" else (call.batch,)
        rows = [torch.randint(0, most, (*batches, size), generator=generator).to(device) for size in sizes]
        found["rotary_positions"] = {
            "counted": None,
            "first": 7,
            "of rows": rows[0],
            "of all": rows[0],
            "apart": (rows[0], rows[1].int()),
            "queries alone": (rows[0], None),
        }[call.rotary_positions]
    if call.norms != "none":
        for name in ("q", "k"):
            weight, bias = (torch.rand(call.head_dim, generator=generator).add(0.5).to(of).to(device) for _ in range(2))
            if name in call.normed:
                found[f"{name}_norm"] = weight if call.norms == "rms" else (weight, bias if call.biased else None)
    return found | {"norm_eps": call.norm_eps} if found else found


def _sparse(call: Call, device: str, masks: dict[str, Any], generator: torch.Generator) -> torch.Tensor | None:
    """Add document_ids and block_mask to the masks of a call, and give what they show."""
    shown = None
    if call.documents != "none":
        most = max(1, call.seqlen_k // 20)
        ids = [torch.randint(-1, most, (call.batch, s), generator=generator) for s in (call.seqlen_q, call.seqlen_k)]
        if call.documents != "apart":
            ids[1] = ids[1].sort(dim=1).values
        of_query, of_key = (one.int().to(device) for one in ids)
        if call.documents == "of queries and keys":
            masks["document_ids"] = of_query, of_key
        else:
            masks["document_ids"] = of_query = of_key
        shown = of_query[:, None, :, None] == of_key[:, None, None]
    if call.blocks != "none":
        rows, keys = torch.arange(call.seqlen_q, device=device), torch.arange(call.seqlen_k, device=device)
        table = torch.rand(call.batch, 1, *(-(-s // 64) for s in (call.seqlen_q, call.seqlen_k)), generator=generator)
        seen = (table < 0.6).to(device)
        of_blocks = seen[:, :, rows // 64][..., keys // 64]
        if call.blocks == "table":
            masks["block_mask"] = BlockTable(seen, 64, call.seqlen_q, call.seqlen_k)
        else:

            def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
                return seen[b, 0, i // 64, j // 64] & (((3 * i + j) % 128 < 100) | (j % 128 < 64))

            sizes = call.seqlen_q, call.seqlen_k
            masks["block_mask"] = create_block_mask(mask_mod, call.batch, None, *sizes, device=device, BLOCK_SIZE=64)
            of_blocks = of_blocks & (((3 * rows[:, None] + keys) % 128 < 100) | (keys % 128 < 64))
        shown = of_blocks if shown is None else shown & of_blocks
    return shown


def valid(call: Call) -> Call:
    """The call without what its door does not take, or what torch and this library refuse."""
    if call.door == "enable" and call.mask == "ranges":
        call = _as_default(call, "mask")  # which torch does not know
    if call.door not in ("operator", "backward"):
        call = _as_default(call, "dropout_p")
    if call.mask == "none":
        call = _as_default(call, "mask_dims", "mask_shown", "mask_transposed")
    if call.mask == "ranges":
        call = _as_default(call, "mask_transposed")
    of_operator = call.door == "operator" or call.dropout_p > 0.0
    if of_operator or call.door == "enable":  # which have no such arguments
        call = _as_default(call, "documents", "blocks")
    if call.door not in PROLOGUE_DOORS or call.dropout_p or call.head_dim % 8:
        call = _as_default(call, "rotary", "norms")
    whole = call.dropout_p or call.head_dim % 8 or call.value_dim >= call.head_dim
    if call.door not in VALUE_DIM_DOORS or whole:
        call = _as_default(call, "value_dim")
    if call.door != "sdpa" or call.dropout_p or call.value_dim or call.rotary or call.norms != "none":
        call = _as_default(call, "continued")
    if call.value_dim:  # what one kernel has, which refuses what it has not
        call = _as_default(replace(call, impl="hopper/throughput"), "rotary", "norms")
    call = replace(call, rotary=min(call.rotary, call.head_dim // 16 * 16))
    if not call.rotary:
        call = _as_default(call, "rotary_interleaved", "rotary_positions")
    if call.norms == "none":
        call = _as_default(call, "normed", "norm_eps")
    if call.norms != "layer":
        call = _as_default(call, "biased")
    if not call.rotary and call.norms == "none":
        call = _as_default(call, "narrow")
    if call.rotary_positions in ("of rows", "of all") or call.documents in ("in order", "apart"):
        call = replace(call, seqlen_k=call.seqlen_q)
    query, key, value, out = call.layouts
    if call.door != "out" or out == "shared heads":
        out = "bhsd"
    call = replace(call, layouts=(query, key, value, out))
    if call.door == "enable":
        call = _as_default(call, "window", "softcap", "alibi", "sinks")
        causal: CausalOption = "none" if call.causal == "none" or call.mask != "none" else "is_causal"
        call = replace(call, causal=causal)
    elif call.causal == "is_causal" and (call.mask != "none" or of_operator):
        call = replace(call, causal="upper_left")
    before_first = call.causal == "lower_right" and call.seqlen_q > call.seqlen_k
    if call.rotary and before_first and call.rotary_positions in ("counted", "first"):
        call = replace(call, rotary_positions="apart")  # tables have no rows for negative positions
    if call.door in EIGHT_BIT_DOORS:
        call = _as_default(call, "impl")
        if call.door == "precision" and call.operands == "int8_fp16":  # whose kernel with masks reads none
            call = _as_default(call, "mask", "mask_dims", "mask_shown", "mask_transposed", "documents", "blocks")
            if call.head_dim <= EIGHT_BIT_HEAD_DIMS[0]:
                call = _as_default(call, "window", "softcap", "alibi", "sinks")
        most = 128 if call.door == "precision" and call.operands == "int8_fp16" else EIGHT_BIT_HEAD_DIMS[-1]
        dim = next((dim for dim in EIGHT_BIT_HEAD_DIMS if dim >= min(call.head_dim, most)), most)
        aligned = tuple("bhsd" if layout == "unaligned" else layout for layout in call.layouts)
        call = replace(call, head_dim=dim, layouts=aligned)  # type: ignore[arg-type]
        if call.door == "quantized":
            call = replace(call, operands=SCHEMES[call.operands].operands)
            if "inputs" in (call.mask, call.sinks):
                call = replace(call, dtype="float16")  # that of the output
    else:
        call = _as_default(call, "operands")
    if call.door != "quantized":
        call = _as_default(call, "granularity")
    if call.door not in ("sdpa", "out", "plan"):
        call = _as_default(call, "return_lse")
    if call.door != "backward":
        return _as_default(call, "graded")
    there = {"m": call.mask in ("inputs", "float32"), "a": call.alibi != "none", "s": call.sinks != "none"}
    graded = "".join(name for name in "qkvmas" if name in call.graded and there.get(name, True))
    return replace(call, graded=graded or Call.graded)


def _as_default(call: Call, *names: str) -> Call:
    return replace(call, **{name: getattr(Call, name) for name in names})


def draw(count: int, seed: int, emulated: bool, doors: tuple[Door, ...] = DOORS) -> list[Call | VarlenCall]:
    """`count` calls through these doors; those for the emulator are small.

    What kernels are compiled for comes from a pool that grows with `count` more slowly than it: the rest of every call
    is free.
    """
    choose, choose_varlen = random.Random(seed), random.Random(f"varlen {seed}")
    forms = 6 if emulated else 20 + count // 200
    pool = [_form(choose, emulated) for _ in range(forms)]
    pool_varlen = [fuzz_varlen.form(choose_varlen, emulated) for _ in range(forms // 2)]
    others = tuple(door for door in doors if door != "varlen")
    share = (len(doors) - len(others)) / len(doors)
    calls: list[Call | VarlenCall] = []
    while len(calls) < count:
        call: Call | VarlenCall
        if choose_varlen.random() < share:
            call = fuzz_varlen.draw(choose_varlen, choose_varlen.choice(pool_varlen), emulated)
        else:
            drawn = _call(choose, choose.choice(pool), emulated)
            call = valid(drawn if drawn.door in others else replace(drawn, door=choose.choice(others)))
        if call.work <= (_most_emulated(call) if emulated else MOST_WORK):
            calls.append(call)
    return calls


def _most_emulated(call: Call | VarlenCall) -> int:
    return MOST_LONG if isinstance(call, Call) and call.seqlen_k >= MANY_KEYS[0] else MOST_EMULATED


def _form(choose: random.Random, emulated: bool) -> dict[str, Any]:
    """What a kernel is compiled for."""
    form: dict[str, Any] = {"dtype": choose.choice(("float16", "bfloat16"))}
    form["head_dim"] = choose.choice((64, 32, 40)) if emulated else choose.choice(HEAD_DIMS)
    form["operands"] = choose.choice(PRECISIONS)
    if choose.random() < 0.5:
        form["mask"] = choose.choice(("bool", "inputs", "float32", "ranges"))
    form["left"], form["right"] = (choose.random() < MASKED for _ in range(2))
    if choose.random() < MASKED:
        form["softcap"] = choose.choice((0.5, 5.0, 50.0))
    if choose.random() < MASKED:
        form["alibi"] = choose.choice(("head", "batch"))
    if choose.random() < MASKED:
        form["sinks"] = choose.choice(("inputs", "float32"))
    if not emulated and choose.random() < 0.3:
        form["impl"] = choose.choice([family.name for family in (*FAMILIES, ONE_LENGTH)])
    later = random.Random(repr(form))
    form["dropout_p"] = later.choice((0.0, 0.0, 0.1, 0.7))
    form["rotary"] = later.choice((0, 0, 16, form["head_dim"]))
    form["rotary_interleaved"], form["biased"], form["narrow"] = (later.random() < 0.5 for _ in range(3))
    form["rotary_positions"] = later.choice(("counted", "first", "of rows", "of all", "apart", "queries alone"))
    form["norms"] = later.choice(("none", "none", "rms", "layer"))
    form["normed"] = later.choice(("qk", "q", "k"))
    return form


def _call(choose: random.Random, form: dict[str, Any], emulated: bool) -> Call:
    lengths = 40 if emulated else 1100
    rest = {name: value for name, value in form.items() if name not in ("left", "right")}
    if form["left"] or form["right"]:
        ends = (choose.choice((0, 3, choose.randint(0, lengths))) if form[side] else -1 for side in ("left", "right"))
        rest["window"] = tuple(ends)
    layouts = [choose.choice(LAYOUTS) if choose.random() < 0.5 else "bhsd" for _ in range(4)]
    made = Call(
        door=choose.choice([door for door in DOORS if door != "varlen"]),
        batch=choose.choice((1, 1, 2, 3)),
        heads_kv=choose.choice((1, 2, 3) if emulated else (1, 2, 3, 8)),
        group=choose.choice((1, 1, 2, 4, 7)),
        seqlen_q=_length(choose, lengths),
        seqlen_k=_length(choose, 4 * lengths if emulated else 2 * lengths),
        layouts=tuple(layouts),  # type: ignore[arg-type]
        causal=choose.choice(("none", "none", "is_causal", "upper_left", "lower_right")),
        scale=choose.choice((None, None, 0.0, -0.2, 0.5, 3.0)),
        outliers=choose.random() < 0.2,
        mask_dims=tuple(choose.random() < 0.5 for _ in range(4)),  # type: ignore[arg-type]
        mask_shown=choose.choice((0.1, 0.5, 0.9, 1.0)),
        mask_transposed=choose.random() < 0.2,
        documents=choose.choice(("in order", "apart", "of queries and keys")) if choose.random() < SPARSE else "none",
        blocks=choose.choice(("table", "mask_mod")) if choose.random() < SPARSE else "none",
        graded="".join(name for name in "qkvmas" if choose.random() < 0.6),
        granularity=choose.choice(("tensor", "head", "block")),
        seed=choose.randrange(2**31),
        **rest,
    )
    later = random.Random(made.seed)
    made = replace(made, norm_eps=later.choice((1e-6, 1e-3)), return_lse=later.random() < 0.8)
    made = replace(made, value_dim=later.choice((16, 24, 64, 128)) if later.random() < SPARSE else 0)
    if later.random() < 2 * SPARSE and made.door == "sdpa":
        made = replace(made, continued=True, rotary=0, norms="none", value_dim=0)
    if later.random() < SPARSE and made.causal in ("none", "lower_right"):  # which "auto" takes for larger calls
        made = replace(made, impl=ONE_LENGTH.name, value_dim=0, mask="none", documents="none", blocks="none")
    if emulated and later.random() < LONG and made.door not in EIGHT_BIT_DOORS:
        made = replace(made, batch=1, heads_kv=1, group=min(made.group, 2))
        made = replace(made, seqlen_q=later.randint(1, 20), seqlen_k=later.randint(*MANY_KEYS))
        if not made.value_dim and not made.continued and made.impl == "auto":
            made = replace(made, impl=later.choice(("hopper/latency", "hopper/throughput")))
        if later.random() < 0.5:  # with masks CTAs share keys more rarely
            made = _as_default(made, "mask", "documents", "blocks", "window", "softcap", "alibi", "sinks", "dropout_p")
    return made


def _length(choose: random.Random, most: int) -> int:
    kind = choose.random()
    if kind < 0.3:
        return choose.randint(1, min(20, most))
    if kind < 0.6:
        near = choose.choice([edge for edge in EDGES if edge < most]) + choose.choice((-1, 0, 1))
        return max(1, min(near, most))
    return choose.randint(1, most)


def simpler(call: Call | VarlenCall) -> Iterator[Call | VarlenCall]:
    """Calls that differ from a call by one step towards the least: a default, or a number that is smaller."""
    yield from fuzz_varlen.simpler(call) if isinstance(call, VarlenCall) else _simpler(call)


def _simpler(call: Call) -> Iterator[Call]:
    """Calls that differ from a call by one step towards the least: a default, or a number that is smaller."""

    def changed(**fields: Any) -> Iterator[Call]:
        made = valid(replace(call, **fields))
        if made != call and made.work <= call.work:
            yield made

    if call.door not in EIGHT_BIT_DOORS:
        yield from changed(door="sdpa")
    for name in (
        "documents",
        "blocks",
        "mask",
        "window",
        "softcap",
        "alibi",
        "sinks",
        "causal",
        "scale",
        "outliers",
        "dtype",
        "granularity",
        "dropout_p",
        "rotary",
        "rotary_interleaved",
        "rotary_positions",
        "norms",
        "normed",
        "biased",
        "norm_eps",
        "narrow",
        "value_dim",
        "continued",
        "return_lse",
    ):
        if getattr(call, name) != getattr(Call, name):
            yield from changed(**{name: getattr(Call, name)})
    for name in ("batch", "heads_kv", "group", "seqlen_q", "seqlen_k"):
        size = getattr(call, name)
        for less in sorted({1, size // 2, size - 1} - {0, size}):
            yield from changed(**{name: less})
    if call.head_dim > Call.head_dim:
        yield from changed(head_dim=Call.head_dim)
    yield from changed(layouts=Call.layouts)
    for i in range(4):
        kept = list(call.layouts)
        kept[i] = "bhsd"
        yield from changed(layouts=tuple(kept))
        if call.mask_dims[i] and i < 3:
            yield from changed(mask_dims=(*call.mask_dims[:i], False, *call.mask_dims[i + 1 :]))
    if call.mask_transposed:
        yield from changed(mask_transposed=False)
    if call.window is not None:
        for ends in ((-1, call.window[1]), (call.window[0], -1)):
            if ends not in (call.window, (-1, -1)):
                yield from changed(window=ends)
    for letter in call.graded:
        if len(call.graded) > 1:
            yield from changed(graded=call.graded.replace(letter, ""))
    if call.seed > 0:
        yield from changed(seed=0)
