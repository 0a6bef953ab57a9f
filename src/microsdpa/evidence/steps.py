"""Suite steps: whole steps of small models at batch size 1, with attention of this library and with torch's.

The models have random weights, and the sizes of a robot's policy head, of Whisper's smallest encoder and of a Llama of
a billion parameters that decodes a token. Everything but attention, its norms and rotary embedding is torch's in all
rows, as it is or compiled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

import microsdpa
from microsdpa.evidence import block, compare, results, signatures, statistics, timing
from microsdpa.evidence.block import Block, Cell
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.peers import Call

SUITE = "steps"
OURS = "microsdpa"


@dataclass(frozen=True)
class Model:
    """A stack of layers, each with attention and a perceptron.

    Attributes:
        cell: attention of a layer, with its norms and rotary embedding.
        layers: how many there are.
        memory: whether keys and values are made of other rows than the queries, once: a cache, or what is observed.
    """

    cell: Cell
    layers: int
    memory: bool

    @property
    def width(self) -> int:
        """Columns of a token."""
        return self.cell.case.heads * self.cell.case.head_dim


MODELS = (
    Model(Cell("policy head", Case(1, 8, 16, 256, 64), rotary=False), 4, True),
    Model(Cell("Whisper's encoder", Case(1, 6, 1500, 1500, 64), rotary=False, norm="layer"), 4, False),
    Model(
        Cell(
            "Llama of 1B, a token",
            Case(1, 32, 1, 1024, 64, heads_kv=8, causal="lower_right"),
            rotates_key=False,
            norm="none",
        ),
        16,
        True,
    ),
)


def attend_ours(cell: Cell, own: Block) -> torch.Tensor:
    """Attention of a layer by one call."""
    found: torch.Tensor = microsdpa.sdpa(*own.inputs, **own.arguments(cell))
    return found


def attend_torch(cell: Cell, own: Block) -> torch.Tensor:
    """The same by torch's operators."""
    return F.scaled_dot_product_attention(*block.both(cell, own), own.inputs[2], **block.torch_options(cell))


class Layer(torch.nn.Module):
    """One layer. Rows are [1, S, width]; keys and values of a memory are [2, 1, H_kv, S_k, D]."""

    def __init__(self, model: Model) -> None:
        """Random weights."""
        super().__init__()
        case = model.cell.case
        self.model, self.own = model, case.head_dim * (0 if model.memory else 2 * case.kv_heads)
        self.packed = torch.nn.Linear(model.width, model.width + self.own, bias=False)
        self.out = torch.nn.Linear(model.width, model.width, bias=False)
        self.wide = torch.nn.Linear(model.width, 4 * model.width, bias=False)
        self.narrow = torch.nn.Linear(4 * model.width, model.width, bias=False)

    def forward(self, rows: torch.Tensor, memory: torch.Tensor, own: Block, attend: Any) -> torch.Tensor:
        """The rows behind the layer."""
        case, (batch, length, width) = self.model.cell.case, rows.shape
        heads = self.packed(F.rms_norm(rows, (width,))).view(batch, length, -1, case.head_dim).transpose(1, 2)
        if self.model.memory:
            inputs = heads, memory[0], memory[1]
        else:
            inputs = heads.split([case.heads, case.kv_heads, case.kv_heads], dim=1)
        attended = attend(self.model.cell, own._replace(inputs=inputs))
        rows = rows + self.out(attended.transpose(1, 2).flatten(2))
        changed: torch.Tensor = rows + self.narrow(F.gelu(self.wide(F.rms_norm(rows, (width,)))))
        return changed


class Step(torch.nn.Module):
    """All layers of a model, with its inputs."""

    def __init__(self, model: Model) -> None:
        """Random weights, rows and memory, always the same ones."""
        super().__init__()
        case, generator = model.cell.case, torch.Generator().manual_seed(11)
        self.model = model
        self.layers = torch.nn.ModuleList(Layer(model) for _ in range(model.layers))
        for weight in self.parameters():
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5, generator=generator)
        memory = model.layers, 2, case.batch, case.kv_heads, case.seqlen_k, case.head_dim
        self.rows = torch.nn.Buffer(torch.randn(case.batch, case.seqlen_q, model.width, generator=generator))
        self.memory = torch.nn.Buffer(torch.randn(memory if model.memory else (model.layers, 1), generator=generator))

    def forward(self, own: Block, attend: Callable[[Cell, Block], torch.Tensor]) -> torch.Tensor:
        """The rows behind the last layer, [1, S, width]."""
        rows = self.rows
        for i, layer in enumerate(self.layers):
            rows = layer(rows, self.memory[i], own, attend)
        return rows


@dataclass(frozen=True)
class Way:
    """One way to compute a step: whose attention, and whether torch compiles the rest."""

    name: str
    attend: Callable[[Cell, Block], torch.Tensor]
    compiles: bool

    @property
    def variant(self) -> str:
        """What a table calls it beside its name."""
        return "torch.compile" if self.compiles else ""

    def bind(self, step: Step, own: Block) -> Call:
        """The call of a step."""
        run = torch.compile(step, dynamic=False) if self.compiles else step
        return lambda: run(own, self.attend)


WAYS = (
    Way(OURS, attend_ours, True),
    Way(OURS, attend_ours, False),
    Way("torch", attend_torch, True),
    Way("torch", attend_torch, False),
)


def expected(model: Model, step: Step, own: Block) -> block.Expected:
    """The step in FP64, and what torch's operators in the step's type differ from it."""
    exact = copy.deepcopy(step).double()(own, block.exact_output)
    plain = step(own, attend_torch)
    return block.Expected(exact, compare.tolerance(plain, exact, plain.dtype))


def kernels_of(cell: Cell, own: Block) -> dict[str, object]:
    """The fields of a row that say which kernels of this library ran; none on a CPU."""
    found = microsdpa.explain(*own.inputs, **own.arguments(cell))
    if found.spec is None:
        return {}
    kind = {"prologue_kind": asdict(own.prologue(cell).kind()), "requested": "auto"}
    return kind | signatures.of_call(found, own.inputs[0])


def run(
    models: Sequence[Model],
    modes: Sequence[str],
    advance: Callable[[str], None] = lambda message: None,
    keep: Callable[[list[results.Row]], None] = lambda rows: None,
) -> list[results.Row]:
    """Rows of these models on the current CUDA device; `keep` is given the rows so far after every model."""
    with torch.no_grad():
        return results.gathered(((measure(model, modes, "cuda"), model.cell.text) for model in models), advance, keep)


def measure(model: Model, modes: Sequence[str], device: str, ways: Sequence[Way] = WAYS) -> list[results.Row]:
    """Rows of a model; one that is wrong or raises says so, and the others are timed."""
    case = model.cell.case
    own, step = block.make_block(model.cell, device), Step(model).to(device, torch.float16)
    right, rows, calls, fields = expected(model, step, own), [], {}, {}
    for way in ways:
        version = microsdpa.__version__ if way.name == OURS else torch.__version__
        shared: dict[str, object] = {
            "impl": way.name,
            "variant": way.variant,
            "version": version,
            "inputs": "float16",
            "op": "step",
        }
        shared |= {"case": f"{model.cell.text}, {model.layers} layers"}
        if way.name == OURS:
            shared |= kernels_of(model.cell, own)
        try:
            call = way.bind(step, own)
            errors = compare.measure(call(), right.exact)
            shared["error"] = compare.as_record(errors, right.tolerance)
            reason, status = "" if right.tolerance.admits(errors) else f"off by {errors.max_abs:.3g}", "wrong"
        except Exception as failure:
            reason, status = f"{type(failure).__name__}: {next(iter(str(failure).splitlines()), '')}"[:240], "wrong"
        if reason:
            rows += [results.row(case, **shared, mode=mode, status=status, reason=reason) for mode in modes]
        else:
            calls[way], fields[way] = call, shared
    for mode in modes:
        runners = {str(i): timing.prepare(mode, [call]) for i, call in enumerate(calls.values())}
        for name, samples in timing.interleave(runners, 0, lambda _, turn: turn()).items():
            found = statistics.summary(samples)
            rows.append(results.row(case, **list(fields.values())[int(name)], mode=mode, **found))
    return rows
