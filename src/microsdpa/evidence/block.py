"""Suite block: norms and rotary embedding of Q and K with attention, beside kernels of their own ahead of attention.

A peer's norms and rotary embedding are compiled by torch into as few kernels as it makes of them. Attention behind them
is torch's, or this library's: the second composition is what one call has to beat.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn import attention

import microsdpa
from microsdpa import reference
from microsdpa.call.prologue import Prologue
from microsdpa.evidence import compare, results, signatures, statistics, timing
from microsdpa.evidence.inputs import Case, make
from microsdpa.evidence.peers import Call, Tensors
from microsdpa.execution.prologue import composed
from microsdpa.kernels.problem import Problem, PrologueKind

SUITE = "block"
OURS = "microsdpa"
BASE = 10_000.0
"""Of the angles of rotary embedding."""
EPS = 1e-6

NormName = Literal["none", "rms", "layer"]


@dataclass(frozen=True)
class Cell:
    """One case of the suite.

    Attributes:
        text: the model that it is from.
        rotary: whether rows of Q are rotated, in all columns that a multiple of 16 has.
        rotates_key: whether rows of K are too; those of a cache have been.
        norm: of Q and K, with weights in FP32.
    """

    text: str
    case: Case
    rotary: bool = True
    rotates_key: bool = True
    norm: NormName = "rms"

    @property
    def shift(self) -> int:
        """Position of the first query, where masks align queries and keys at their ends."""
        return self.case.seqlen_k - self.case.seqlen_q if self.case.causal == "lower_right" else 0

    def __str__(self) -> str:
        """What a table calls it."""
        norm = {"none": "", "rms": "RMS norm", "layer": "LayerNorm"}[self.norm]
        rotary = "" if not self.rotary else "rotary" if self.rotates_key else "rotary of Q"
        return f"{self.text}, {' and '.join(filter(None, (norm, rotary)))}"


HEADLINE = Case(1, 8, 512, 512, 64)


def cells() -> list[Cell]:
    """All cells: the headline shape first, then models at batch size 1."""
    causal = Case(1, 8, 512, 512, 64, causal="upper_left")
    found = [
        Cell("headline", HEADLINE),
        Cell("headline", HEADLINE, norm="none"),
        Cell("headline", HEADLINE, rotary=False),
        Cell("headline", HEADLINE, norm="layer"),
        Cell("headline", causal),
    ]
    for prefix in (300, 968):
        found.append(Cell("action expert", Case(1, 8, 51, prefix + 51, 256, heads_kv=1), norm="none"))
    found += [
        Cell("Whisper's encoder", Case(1, 6, 1500, 1500, 64), rotary=False, norm="layer"),
        Cell("Whisper's decoder", Case(1, 6, 1, 1500, 64), rotary=False, norm="layer"),
        Cell("ViT-B", Case(1, 12, 197, 197, 64)),
        Cell("ViT-L", Case(1, 16, 257, 257, 64)),
        Cell("SO400M", Case(1, 16, 256, 256, 72)),
        Cell("Flux", Case(1, 24, 768, 768, 128, dtype="bfloat16")),
        Cell("Wan", Case(1, 12, 1560, 1560, 128, dtype="bfloat16")),
    ]
    for keys in (1024, 4096):
        case = Case(1, 32, 1, keys, 128, heads_kv=8, dtype="bfloat16", causal="lower_right")
        found.append(Cell("Llama-3 8B, a token", case, rotates_key=False, norm="none"))
    return found


class Block(NamedTuple):
    """Tensors of a cell: query, key and value, tables [S_k, R / 2], and weights and biases [D]."""

    inputs: Tensors
    cos: torch.Tensor
    sin: torch.Tensor
    weights: tuple[torch.Tensor, torch.Tensor]
    biases: tuple[torch.Tensor, torch.Tensor]

    def prologue(self, cell: Cell) -> Prologue:
        """The cell's arguments of sdpa."""
        norms: list[Any] = [None, None]
        if cell.norm == "rms":
            norms = list(self.weights)
        elif cell.norm == "layer":
            norms = list(zip(self.weights, self.biases, strict=True))
        positions = None if cell.rotates_key else (cell.shift, None)
        rotary = (self.cos, self.sin) if cell.rotary else None
        return Prologue(rotary, False, positions if cell.rotary else None, norms[0], norms[1], EPS)

    def arguments(self, cell: Cell) -> dict[str, Any]:
        """The same by their names, with the other options of the call."""
        own, case = self.prologue(cell), cell.case
        given = {"rotary": own.rotary, "rotary_positions": own.positions, "q_norm": own.q_norm, "k_norm": own.k_norm}
        options = {name: value for name, value in given.items() if value is not None}
        if case.causal:
            options["causal"] = case.causal
        return options | ({"enable_gqa": True} if case.kv_heads != case.heads else {})


def problem_of(cell: Cell, target: str) -> Problem:
    """What this library's kernels are chosen for."""
    case, norm = cell.case, None if cell.norm == "none" else cell.norm
    kind = PrologueKind(
        rotary=case.head_dim // 16 * 16 if cell.rotary else 0,
        angles="float32" if cell.rotary else None,
        rotates_key=cell.rotates_key,
        query_norm=norm,
        key_norm=norm,
        weights="float32" if norm else None,
        biased=norm == "layer",
    )
    return replace(case.problem(target), prologue=kind)


def make_block(cell: Cell, device: str) -> Block:
    """The tensors of a cell: the same values on every device."""
    case = cell.case
    columns = case.head_dim // 16 * 16
    angles = torch.outer(torch.arange(case.seqlen_k), BASE ** -(torch.arange(0, columns, 2) / columns))
    generator = torch.Generator().manual_seed(7)
    vectors = [torch.rand(case.head_dim, generator=generator).to(device) for _ in range(4)]
    weights, biases = (vectors[0] + 0.5, vectors[1] + 0.5), (vectors[2] - 0.5, vectors[3] - 0.5)
    return Block(make(case, device), angles.cos().to(device), angles.sin().to(device), weights, biases)


def changed(cell: Cell, rows: torch.Tensor, which: int, block: Block) -> torch.Tensor:
    """Q (which = 0) or K (1) behind norm and rotary embedding as models write them: each rounds what it gives."""
    found = rows
    if cell.norm != "none":
        x = rows.float()
        if cell.norm == "layer":
            shape, bias = rows.shape[-1:], block.biases[which]
            x = F.layer_norm(x, shape, block.weights[which], bias, EPS)
        else:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * block.weights[which]
        found = x.to(rows.dtype)
    if cell.rotary and (which == 0 or cell.rotates_key):
        first, half = cell.shift * (1 - which), block.cos.shape[1]
        cos, sin = (table[first : first + rows.shape[2]] for table in (block.cos, block.sin))
        x = found.float()
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        found = torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1).to(rows.dtype)
    return found


def both(cell: Cell, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """changed() of query and key."""
    return changed(cell, block.inputs[0], 0, block), changed(cell, block.inputs[1], 1, block)


@functools.cache
def _compiled(cell: Cell) -> Any:
    """both() of a cell, compiled once for all ways."""
    return torch.compile(lambda block: both(cell, block), dynamic=False, fullgraph=True)


def forget_compiled() -> None:
    """Ahead of every cell: torch compiles one function for eight shapes at most, and all cells' are one to it."""
    torch.compiler.reset()
    _compiled.cache_clear()


def _ours(cell: Cell, block: Block) -> Call:
    inputs, arguments = block.inputs, block.arguments(cell)
    return lambda: microsdpa.sdpa(*inputs, **arguments)


def torch_options(cell: Cell) -> dict[str, Any]:
    """Of torch's attention: one query sees every key, whatever the alignment of its mask."""
    causal = cell.case.causal is not None and cell.case.seqlen_q > 1
    return {"is_causal": causal, "enable_gqa": cell.case.kv_heads != cell.case.heads}


def _torch(cell: Cell, block: Block) -> Call:
    change, value, options = _compiled(cell), block.inputs[2], torch_options(cell)

    def call() -> torch.Tensor:
        rows, keys = change(block)
        return F.scaled_dot_product_attention(rows, keys, value, **options)

    return call


def _torch_cudnn(cell: Cell, block: Block) -> Call:
    plain = _torch(cell, block)

    def call() -> torch.Tensor:
        with attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION):
            found: torch.Tensor = plain()
            return found

    return call


def _composition(cell: Cell, block: Block) -> Call:
    change, value = _compiled(cell), block.inputs[2]
    options: dict[str, Any] = {"causal": cell.case.causal} if cell.case.causal else {}
    options |= {"enable_gqa": True} if cell.case.kv_heads != cell.case.heads else {}

    def call() -> torch.Tensor:
        rows, keys = change(block)
        found: torch.Tensor = microsdpa.sdpa(rows, keys, value, **options)
        return found

    return call


@dataclass(frozen=True)
class Way:
    """One way to compute a cell; `bind` gives the call for its tensors."""

    name: str
    bind: Callable[[Cell, Block], Call]


WAYS = (
    Way(OURS, _ours),
    Way("torch.compile, torch", _torch),
    Way("torch.compile, cuDNN", _torch_cudnn),
    Way("torch.compile, microsdpa", _composition),
)


class Expected(NamedTuple):
    """The oracle's output of a cell, and what an output may differ from it."""

    exact: torch.Tensor
    tolerance: compare.Tolerance


def exact_output(cell: Cell, block: Block) -> torch.Tensor:
    """The output of a cell in FP64, nothing rounded."""
    rows = composed(block.inputs, block.prologue(cell), cell.shift, torch.float64)
    return reference.oracle(*rows, causal=cell.case.causal)[0]


def expected(cell: Cell, block: Block) -> Expected:
    """Of a cell: what plain arithmetic makes of rows that are rounded twice, as models do, bounds the error."""
    exact = exact_output(cell, block)
    plain = reference.eager(*both(cell, block), block.inputs[2], causal=cell.case.causal)[0]
    return Expected(exact, compare.tolerance(plain, exact, plain.dtype))


def judged(way: Way, cell: Cell, block: Block, right: Expected) -> tuple[dict[str, object], str]:
    """The error of a way, and why it is wrong or empty."""
    errors = compare.measure(way.bind(cell, block)(), right.exact)
    wrong = "" if right.tolerance.admits(errors) else f"off by {errors.max_abs:.3g}"
    return compare.as_record(errors, right.tolerance), wrong


def fields_of(way: Way, cell: Cell, block: Block) -> dict[str, Any]:
    """What the rows of a way and a cell share."""
    fields: dict[str, Any] = {"impl": way.name, "case": str(cell), "inputs": cell.case.dtype, "variant": ""}
    if way.name != OURS:
        return fields | {"version": torch.__version__}
    found = microsdpa.explain(*block.inputs, **block.arguments(cell))
    kind = {"prologue_kind": asdict(block.prologue(cell).kind()), "requested": "auto"}
    return fields | {"version": microsdpa.__version__} | kind | signatures.of_call(found, block.inputs[0])


def run(
    chosen: Sequence[Cell],
    modes: Sequence[str],
    advance: Callable[[str], None] = lambda message: None,
    keep: Callable[[list[results.Row]], None] = lambda rows: None,
) -> list[results.Row]:
    """Rows of these cells on the current CUDA device; `keep` is given the rows so far after every cell."""
    with torch.no_grad():
        return results.gathered(((_measure(cell, modes), str(cell)) for cell in chosen), advance, keep)


def _measure(cell: Cell, modes: Sequence[str]) -> list[results.Row]:
    forget_compiled()
    block = make_block(cell, "cuda")
    right, rows, calls, fields = expected(cell, block), [], {}, {}
    for way in WAYS:
        status = "wrong"
        try:
            fields[way.name] = fields_of(way, cell, block)
            fields[way.name]["error"], reason = judged(way, cell, block, right)
            calls[way.name] = way.bind(cell, block)
        except Exception as failure:  # a row says so, and the others are measured
            torch.cuda.synchronize()
            fields.setdefault(way.name, {"impl": way.name, "case": str(cell)})
            status = "wrong" if way.name == OURS else "unavailable"
            reason = f"{type(failure).__name__}: {next(iter(str(failure).splitlines()), '')}"[:240]
        if reason:
            calls.pop(way.name, None)
            rows += [results.row(cell.case, **fields[way.name], mode=m, status=status, reason=reason) for m in modes]
    for mode in modes:
        runners = {name: timing.prepare(mode, [call]) for name, call in calls.items()}
        for name, samples in timing.interleave(runners, 0, lambda _, turn: turn()).items():
            rows.append(results.row(cell.case, **fields[name], mode=mode, **statistics.summary(samples)))
    return rows
