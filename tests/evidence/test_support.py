"""The support matrix is asked of the specifications, and the page has it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from microsdpa.evidence import render, support
from microsdpa.evidence.survey import TARGETS
from microsdpa.kernels import Rejection, policy
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.quantize.spec import SCHEMES

PAGE = Path(__file__).parents[2] / "docs/support.md"


@pytest.fixture
def _anew() -> Iterator[None]:
    yield
    support.matrix.cache_clear()


def test_the_page_is_in_step_with_the_specifications() -> None:
    assert support.markdown() in PAGE.read_text(encoding="utf-8")


def test_every_feature_has_a_kernel_for_every_head_dimension() -> None:
    header, *lines = support.matrix()
    assert len(header) == 2 + len(TARGETS)
    for line in lines[: len(support.FEATURES)]:
        for cell in line[2:]:
            assert re.search("1 to 256$|1 to 256 but ([0-9, ]+|multiples of 8 to [0-9]+)$|all others to 256$", cell), (
                line
            )
            assert len(cell) < 250, line
    masked = len(support.MASKS_OF_EIGHT_BITS) + 1  # and those beside values of 16 bits
    modes = len(SCHEMES)
    caches = [line[2:] for line in lines[: -modes - masked][-len(support.CACHES) :]]
    assert [cells[0] for cells in caches] == ["no", "ampere/varlen: multiples of 16 to 256"]
    assert {cell for cells in caches for cell in cells[1:]} == {"ampere/varlen: multiples of 16 to 256"}
    eight_bit = {line[0]: line[2:] for line in lines[-modes - masked : -masked]}
    assert [cells[0] for cells in eight_bit.values()] == ["no"] * modes
    assert all("ada/mma_8bit: 32, 64, 128" in cell for cells in eight_bit.values() for cell in cells[1:])
    hopper = 2 + TARGETS.index("sm_90a")
    for line in lines[-masked:]:
        assert line[hopper].startswith("hopper/")
        assert {cell for column, cell in enumerate(line) if column > 1 and column != hopper} == {"no"}


@pytest.mark.usefixtures("_anew")
def test_a_kernel_that_goes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = support.markdown()
    gone = tuple(
        dataclasses.replace(family, specify=lambda _: Rejection("gone", "another"))
        if family.name == "ampere/general"
        else family
        for family in policy.candidates(Problem(1, 1, 1, 1, 1, 64, "float16"), "auto")
    )
    monkeypatch.setattr(policy, "candidates", lambda problem, impl: gone)
    monkeypatch.setattr(support, "SIZES", support.SIZES[1:2])
    support.matrix.cache_clear()
    after = support.markdown()
    assert after != before
    assert "| no | no | no | no |" in after
    text = f"<!-- microsdpa:support -->\n{before}<!-- microsdpa:end -->\n"
    assert render.rendered(text, PAGE, "page") != text


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        (range(1, 257), "1 to 256"),
        (range(16, 257, 16), "multiples of 16 to 256"),
        (range(8, 129, 8), "multiples of 8 to 128"),
        ([*range(17, 33), 49, 50, 64], "17 to 32, 49, 50, 64"),
        (set(range(1, 257)) - set(range(16, 257, 16)), "all others to 256"),
        (range(8, 257, 8), "multiples of 8 to 256"),
        (set(range(1, 257)) - set(range(8, 257, 8)), "all others to 256"),
        (set(range(1, 257)) - {96, 160}, "1 to 256 but 96, 160"),
        (set(range(1, 257)) - set(range(8, 193, 8)), "1 to 256 but multiples of 8 to 192"),
        ([128, 64], "64, 128"),
    ],
)
def test_head_dimensions_in_words(dims: list[int], words: str) -> None:
    assert support.dimensions(dims) == words
