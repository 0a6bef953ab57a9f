"""When impl="auto" takes hopper/split, how many query tiles share a CTA, and which problems it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from microsdpa.errors import UnsupportedProblem
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.chip import chip_of
from microsdpa.kernels.hopper.split import spec as hopper_split
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.select import select

WIDE = Problem(1, 16, 16, 1024, 1024, 64, "float16")


@pytest.mark.parametrize(
    ("change", "kernel", "query_tiles"),
    [
        ({}, "hopper/split", 2),
        ({"seqlen_q": 512, "seqlen_k": 512, "batch": 2, "causal": "upper_left"}, "hopper/split", 2),
        ({"heads": 8, "heads_kv": 8}, "hopper/split", 1),
        ({"heads": 8, "heads_kv": 2, "causal": "lower_right"}, "hopper/split", 1),
        ({"heads": 4, "heads_kv": 4}, "hopper/latency", 1),  # a pair of CTAs a query tile
        ({"seqlen_q": 512, "seqlen_k": 512}, "hopper/latency", 1),
        ({"seqlen_q": 1, "batch": 8}, "ampere/mma", 1),
        ({"head_dim": 128}, "hopper/throughput", 0),
        ({"heads": 32, "heads_kv": 32}, "hopper/throughput", 2),
        ({"seqlen_q": 64, "seqlen_k": 128, "heads": 128, "heads_kv": 128, "batch": 2}, "hopper/latency", 2),
    ],
)
def test_choices(change: dict[str, int], kernel: str, query_tiles: int) -> None:
    problem = replace(WIDE, **change)  # type: ignore[arg-type]
    assert select(problem).spec.name == kernel
    if query_tiles:
        assert hopper_split.choose(problem).query_tiles == query_tiles


@pytest.mark.parametrize("choice", hopper_split.CANDIDATES, ids=str)
def test_every_candidate_has_an_sm_to_itself(choice: hopper_split.Split) -> None:
    chip = chip_of("sm_90a")
    spec = hopper_split.specification(WIDE, choice)
    assert chip.shared_per_cta // 2 < spec.shared_bytes <= chip.shared_per_cta
    assert int(dict(spec.template_args)["STAGES"]) >= choice.query_tiles + 1  # one is filled while another is read
    assert spec.grid(WIDE) == (16, 1024 // choice.block_m, 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 128}, "head_dim 128 is not 64"),
        ({"alignment": 2}, "rows that are not aligned to 16 bytes"),
        ({"target": "sm_89"}, "sm_89 has no wgmma, which is sm_90a's"),
        ({"batch": 65_536}, "8 query tiles of 65536 batch entries exceed the 65535 CTAs along y or z"),
    ],
)
def test_refusals(change: dict[str, int], reason: str) -> None:
    with pytest.raises(UnsupportedProblem) as caught:
        select(replace(WIDE, **change), "hopper/split")  # type: ignore[arg-type]
    assert caught.value.reason == f"hopper/split: {reason}"


def test_it_can_be_named_for_any_shape() -> None:
    small = replace(WIDE, heads=1, heads_kv=1, seqlen_q=1, seqlen_k=1)
    assert isinstance(hopper_split.split(small), KernelSpec)
    assert select(small, "hopper/split").spec.name == "hopper/split"
