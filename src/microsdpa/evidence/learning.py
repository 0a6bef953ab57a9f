"""A small transformer, trained on sequences made on the spot: whether this library's attention learns as torch's does.

Each sequence repeats itself after LAG tokens, and some of its tokens are random: what comes next is known only to who
looks LAG tokens back. Runs of both kinds begin with the same weights and see the same sequences. Their losses differ
by rounding and, with dropout, by other random numbers, as those of torch differ from seed to seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import microsdpa
from microsdpa.evidence import results
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.step import Progress, Step, no_progress
from microsdpa.execution.torch_cpu import torch_attention
from microsdpa.runtime import launcher

SUITE = "verify_training"
COMMAND = "microsdpa verify --training"
LAG = 8
REPLACED = 0.1
"""Part of the tokens that are random."""
LAST = 50
"""Steps at the end whose mean loss is a run's."""
MOST_ERRORS = 3.0
"""Standard errors of the difference of the means by which the losses of both kinds may differ."""
LEAST_DIFFERENCE = 0.01
"""Difference in nats that is none: few runs may agree by chance."""

SEEDS = (0, 1, 2)
Attend = Callable[..., Any]


@dataclass(frozen=True)
class Recipe:
    """What is trained.

    Attributes:
        dropout_p: of the attention's weights.
    """

    steps: int = 300
    layers: int = 2
    heads: int = 4
    head_dim: int = 64
    vocabulary: int = 64
    batch: int = 16
    seqlen: int = 256
    dropout_p: float = 0.1
    rate: float = 2e-3

    @property
    def width(self) -> int:
        """Of the model."""
        return self.heads * self.head_dim

    @property
    def case(self) -> Case:
        """The attention of a layer."""
        sizes = self.batch, self.heads, self.seqlen, self.seqlen, self.head_dim
        return Case(*sizes, dtype="bfloat16", causal="upper_left")

    def __str__(self) -> str:
        """What is trained, in a few words."""
        return f"{self.layers} layers, {self.steps} steps, dropout {self.dropout_p:g}"


SMALL = Recipe(steps=20, layers=1, heads=2, head_dim=16, vocabulary=16, batch=4, seqlen=32)
"""What a CPU trains in seconds; it has learned little after so few steps."""


class _Layer(nn.Module):
    def __init__(self, recipe: Recipe, attend: Attend) -> None:
        super().__init__()
        width = recipe.width
        self.recipe, self.attend = recipe, attend
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, width] from the same."""
        batch, seqlen, width = x.shape
        projected = self.inputs(self.norms[0](x)).view(batch, seqlen, 3, self.recipe.heads, self.recipe.head_dim)
        query, key, value = projected.permute(2, 0, 3, 1, 4).bfloat16()
        found = self.attend(query, key, value, is_causal=True, dropout_p=self.recipe.dropout_p)
        x = x + self.output(found.transpose(1, 2).reshape(batch, seqlen, width).to(x.dtype))
        narrowed: torch.Tensor = self.narrow(F.gelu(self.widen(self.norms[1](x))))
        return x + narrowed


class Transformer(nn.Module):
    """Logits of the next token, [B, S, vocabulary], from tokens [B, S]."""

    def __init__(self, recipe: Recipe, attend: Attend) -> None:
        super().__init__()
        self.tokens = nn.Embedding(recipe.vocabulary, recipe.width)
        self.positions = nn.Parameter(0.5 * torch.randn(recipe.seqlen, recipe.width))
        self.layers = nn.Sequential(*(_Layer(recipe, attend) for _ in range(recipe.layers)))
        self.norm, self.head = nn.LayerNorm(recipe.width), nn.Linear(recipe.width, recipe.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits."""
        logits: torch.Tensor = self.head(self.norm(self.layers(self.tokens(tokens) + self.positions)))
        return logits


def sequences(recipe: Recipe, generator: torch.Generator) -> torch.Tensor:
    """Tokens of one step, [B, S + 1]."""
    shape = recipe.batch, recipe.seqlen + 1
    first = torch.randint(recipe.vocabulary, (recipe.batch, LAG), generator=generator)
    repeated = first.repeat(1, math.ceil(shape[1] / LAG))[:, : shape[1]]
    random = torch.randint(recipe.vocabulary, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < REPLACED, random, repeated)


def train(recipe: Recipe, attend: Attend, seed: int, device: str) -> list[float]:
    """The loss of each step, in nats, on a device."""
    torch.manual_seed(seed)
    model, generator = Transformer(recipe, attend).to(device), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate)
    losses = []
    for _ in range(recipe.steps):
        tokens = sequences(recipe, generator).to(device)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


@dataclass(frozen=True)
class Comparison:
    """Mean losses of the last steps of each run, by torch and by this library, in nats."""

    torch: tuple[float, ...]
    ours: tuple[float, ...]

    @property
    def difference(self) -> float:
        """Mean of this library's, less that of torch's."""
        return sum(self.ours) / len(self.ours) - sum(self.torch) / len(self.torch)

    @property
    def allowed(self) -> float:
        """What the difference may be: standard errors of it, from the spread of the runs."""
        variances = (_variance(losses) / len(losses) for losses in (self.torch, self.ours))
        return max(LEAST_DIFFERENCE, MOST_ERRORS * math.sqrt(sum(variances)))

    @property
    def is_same(self) -> bool:
        """Whether both learn the same."""
        return abs(self.difference) <= self.allowed


def _variance(numbers: Sequence[float]) -> float:
    mean = sum(numbers) / len(numbers)
    return sum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1)


def compare(recipe: Recipe, seeds: Sequence[int], device: str) -> Comparison:
    """Train with torch's attention and with this library's, from each seed; there are two seeds at least."""

    def runs(attend: Attend) -> tuple[float, ...]:
        losses = (train(recipe, attend, seed, device)[-LAST:] for seed in seeds)
        return tuple(sum(last) / len(last) for last in losses)

    return Comparison(runs(torch_attention), runs(microsdpa.sdpa))


def step(progress: Progress = no_progress, output: Path | None = None, command: str = COMMAND) -> Step:
    """Train with dropout and without it, on the GPU, or briefly on the CPU; both kinds must learn the same."""
    reason = launcher.device_error()
    device, recipe = ("cpu", SMALL) if reason else ("cuda", Recipe())
    recipes = [recipe, replace(recipe, dropout_p=0.0)]
    advance = progress("training", len(recipes))
    rows: list[results.Row] = []
    table = [["trained", "torch", "microsdpa", "difference", "allowed"]]
    wrong = 0
    for one in recipes:
        found = compare(one, SEEDS, device)
        wrong += not found.is_same
        rows += _rows(one, found)
        means = (f"{sum(losses) / len(losses):.4f}" for losses in (found.torch, found.ours))
        table.append([str(one), *means, f"{found.difference:+.4f}", f"{found.allowed:.4f}"])
        advance(str(one))
    where = "on the CPU" if reason else "on the GPU"
    summary = f"{len(recipes) - wrong} of {len(recipes)} transformers reached the loss of torch's {where}"
    result = results.make(SUITE, command, rows)
    if output is not None:
        summary += f"; wrote {results.write(result, output)}"
    return Step("verify", "failed" if wrong else "passed", summary, table, data=result)


def _rows(recipe: Recipe, found: Comparison) -> list[results.Row]:
    """A row for each run: the mean loss of its last steps, in nats."""
    rows = []
    for impl, losses in (("torch", found.torch), ("microsdpa", found.ours)):
        reason = "" if found.is_same or impl == "torch" else f"its loss is off by {found.difference:+.4f} nats"
        version = torch.__version__ if impl == "torch" else microsdpa.__version__
        fields = {"impl": impl, "version": version, "mode": "verify", "case": str(recipe), "reason": reason}
        fields["status"] = "wrong" if reason else "ok"
        for seed, loss in zip(SEEDS, losses, strict=True):
            metrics = {"seed": seed, "loss": loss, "steps": recipe.steps, "dropout_p": recipe.dropout_p}
            rows.append(results.row(recipe.case, **fields, metrics=metrics))
    return rows
