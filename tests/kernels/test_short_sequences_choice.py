"""Which kernel computes short sequences of many heads on a Hopper; docs/log/hopper-throughput.md has the times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from microsdpa.kernels import policy
from microsdpa.kernels.ampere.general import spec as general
from microsdpa.kernels.chip import chip_of
from microsdpa.kernels.problem import MaskKind, Problem
from microsdpa.kernels.select import chosen, select
from microsdpa.kernels.spec import KernelSpec

PADDING = MaskKind("bool", per_batch=True, bulk=True)
OF_QUERIES = MaskKind("bool", per_batch=True, per_query=True, bulk=True)
NUMBERS = MaskKind("float16", per_head=True, per_query=True, bulk=True)
DOCUMENTS = MaskKind("int32", per_batch=True, per_query=True)
BLOCKS = MaskKind("uint8", per_query=True)
WINDOW = MaskKind(left=True, right=True)
MINILM = Problem(32, 12, 12, 128, 128, 32, "float16", mask=PADDING)
WINDOWS = Problem(64, 12, 12, 49, 49, 32, "float16")
PACKED = Problem(1, 3, 3, 2048, 2048, 64, "float16", mask=DOCUMENTS, target="sm_90a")
GENERAL, LATENCY, THROUGHPUT = "ampere/general", "hopper/latency", "hopper/throughput"


@pytest.mark.parametrize(
    ("problem", "change", "kernel"),
    [
        (WINDOWS, {}, GENERAL),
        (WINDOWS, {"batch": 11}, LATENCY),  # a tile an SM
        (WINDOWS, {"seqlen_q": 16}, "ampere/mma"),
        (WINDOWS, {"head_dim": 128}, GENERAL),
        (WINDOWS, {"head_dim": 64, "seqlen_k": 256}, LATENCY),
        (WINDOWS, {"head_dim": 128, "seqlen_k": 65}, LATENCY),
        (WINDOWS, {"head_dim": 160}, THROUGHPUT),
        (WINDOWS, {"head_dim": 160, "seqlen_q": 32}, GENERAL),
        (WINDOWS, {"head_dim": 160, "seqlen_q": 32, "seqlen_k": 65}, THROUGHPUT),
        (WINDOWS, {"head_dim": 160, "seqlen_k": 32}, GENERAL),
        (WINDOWS, {"head_dim": 256, "causal": "upper_left"}, GENERAL),
        (WINDOWS, {"head_dim": 256, "causal": "upper_left", "seqlen_k": 791}, GENERAL),  # those behind count nothing
        (WINDOWS, {"head_dim": 256, "causal": "lower_right", "seqlen_k": 791}, THROUGHPUT),
        (WINDOWS, {"head_dim": 192, "mask": PADDING, "seqlen_k": 64}, GENERAL),
        (WINDOWS, {"head_dim": 192, "mask": PADDING, "seqlen_k": 96}, THROUGHPUT),
        (WINDOWS, {"head_dim": 192, "mask": PADDING, "seqlen_k": 96, "batch": 11}, GENERAL),
        (WINDOWS, {"head_dim": 192, "mask": OF_QUERIES, "seqlen_k": 1024, "batch": 1}, THROUGHPUT),
        (WINDOWS, {"head_dim": 136, "seqlen_k": 1024, "batch": 1, "seqlen_q": 24}, "ampere/mma"),
        (WINDOWS, {"head_dim": 136, "seqlen_k": 1024, "batch": 1, "seqlen_q": 24, "mask": PADDING}, THROUGHPUT),
        (WINDOWS, {"head_dim": 160, "mask": PADDING, "seqlen_q": 16, "seqlen_k": 4096, "batch": 1}, "ampere/mma"),
        (WINDOWS, {"head_dim": 144, "seqlen_k": 1024, "batch": 1, "seqlen_q": 24}, "ampere/mma"),
        (WINDOWS, {"mask": BLOCKS, "head_dim": 64, "seqlen_k": 512}, GENERAL),
        (WINDOWS, {"mask": BLOCKS, "head_dim": 64, "seqlen_k": 513}, THROUGHPUT),
        (WINDOWS, {"mask": BLOCKS, "batch": 11, "seqlen_k": 64}, GENERAL),
        (WINDOWS, {"mask": BLOCKS, "batch": 11, "seqlen_k": 256}, LATENCY),
        (WINDOWS, {"mask": BLOCKS, "batch": 11, "seqlen_k": 257}, THROUGHPUT),  # many may be hidden
        (WINDOWS, {"mask": BLOCKS, "head_dim": 192, "seqlen_k": 256}, GENERAL),
        (WINDOWS, {"mask": BLOCKS, "head_dim": 192, "seqlen_k": 257}, THROUGHPUT),
        (WINDOWS, {"mask": DOCUMENTS, "head_dim": 64, "seqlen_k": 3072}, GENERAL),
        (WINDOWS, {"mask": DOCUMENTS, "head_dim": 64, "seqlen_k": 3073}, LATENCY),
        (WINDOWS, {"mask": DOCUMENTS, "batch": 11}, LATENCY),
        (WINDOWS, {"mask": DOCUMENTS, "batch": 11, "seqlen_q": 32, "seqlen_k": 32}, LATENCY),
        (WINDOWS, {"mask": DOCUMENTS, "head_dim": 192, "batch": 1, "seqlen_q": 129, "seqlen_k": 256}, GENERAL),
        (WINDOWS, {"mask": DOCUMENTS, "head_dim": 192, "batch": 1, "seqlen_q": 129, "seqlen_k": 257}, THROUGHPUT),
        (PACKED, {}, GENERAL),
        (PACKED, {"heads": 2, "heads_kv": 2, "seqlen_q": 4096, "seqlen_k": 4096}, GENERAL),
        (PACKED, {"heads": 2, "heads_kv": 2, "seqlen_q": 4096, "seqlen_k": 4097}, THROUGHPUT),
        (PACKED, {"seqlen_q": 1024}, LATENCY),
        (PACKED, {"seqlen_k": 1024}, LATENCY),
        (PACKED, {"head_dim": 72}, THROUGHPUT),
        (PACKED, {"head_dim": 72, "seqlen_q": 1024}, LATENCY),
        (PACKED, {"mask": WINDOW}, LATENCY),
        (PACKED, {"heads": 8, "heads_kv": 8}, THROUGHPUT),  # two tiles an SM
        (PACKED, {"heads": 8, "heads_kv": 8, "head_dim": 32}, GENERAL),
        (PACKED, {"heads": 8, "heads_kv": 8, "head_dim": 32, "seqlen_k": 2049}, THROUGHPUT),
        (PACKED, {"heads": 16, "heads_kv": 16, "head_dim": 32, "seqlen_k": 768}, GENERAL),
        (PACKED, {"heads": 16, "heads_kv": 16, "head_dim": 32, "seqlen_k": 769}, THROUGHPUT),
        (MINILM, {"mask": DOCUMENTS, "seqlen_k": 512}, GENERAL),
        (MINILM, {"mask": DOCUMENTS, "batch": 64, "seqlen_k": 512}, GENERAL),
        (MINILM, {"mask": DOCUMENTS, "batch": 64, "seqlen_k": 513}, THROUGHPUT),
        (MINILM, {"mask": DOCUMENTS, "head_dim": 64, "seqlen_k": 96}, GENERAL),
        (MINILM, {"mask": DOCUMENTS, "head_dim": 64, "batch": 16, "seqlen_k": 256}, LATENCY),
        (MINILM, {"mask": DOCUMENTS, "head_dim": 64, "batch": 16, "seqlen_k": 257}, THROUGHPUT),
        (MINILM, {"mask": DOCUMENTS, "head_dim": 72, "batch": 16, "seqlen_k": 128}, LATENCY),
        (MINILM, {"mask": DOCUMENTS, "head_dim": 72, "batch": 16, "seqlen_k": 129}, THROUGHPUT),
        (MINILM, {"mask": DOCUMENTS, "head_dim": 64}, THROUGHPUT),
        (MINILM, {"mask": DOCUMENTS, "head_dim": 64, "batch": 16}, LATENCY),
        (MINILM, {"mask": BLOCKS, "head_dim": 64, "batch": 8, "seqlen_k": 64}, GENERAL),
        (MINILM, {"mask": BLOCKS, "head_dim": 64, "batch": 8, "seqlen_k": 65}, THROUGHPUT),
        (MINILM, {"mask": BLOCKS, "head_dim": 64, "batch": 3, "seqlen_q": 129, "seqlen_k": 768}, LATENCY),
        (MINILM, {"mask": BLOCKS, "head_dim": 64, "batch": 3, "seqlen_q": 129, "seqlen_k": 769}, THROUGHPUT),
        (MINILM, {"mask": BLOCKS, "head_dim": 128, "batch": 3, "seqlen_q": 129, "seqlen_k": 512}, LATENCY),
        (MINILM, {"mask": BLOCKS, "head_dim": 128, "batch": 3, "seqlen_q": 129, "seqlen_k": 513}, THROUGHPUT),
        (
            MINILM,
            {"mask": OF_QUERIES, "head_dim": 256, "batch": 1, "heads": 2, "heads_kv": 2, "seqlen_k": 2304},
            THROUGHPUT,
        ),
        (MINILM, {"mask": WINDOW, "head_dim": 64, "batch": 8}, LATENCY),
        (MINILM, {"mask": WINDOW, "head_dim": 64, "batch": 12}, THROUGHPUT),
        (WINDOWS, {"seqlen_k": 256}, GENERAL),
        (WINDOWS, {"seqlen_k": 257}, LATENCY),
        (MINILM, {"dropout": True, "mask": None, "causal": "upper_left"}, THROUGHPUT),  # not measured
        (MINILM, {}, GENERAL),
        (MINILM, {"mask": None}, GENERAL),
        (MINILM, {"mask": None, "batch": 64}, THROUGHPUT),
        (MINILM, {"mask": None, "batch": 64, "seqlen_k": 96}, GENERAL),
        (MINILM, {"mask": None, "seqlen_q": 129}, THROUGHPUT),
        (MINILM, {"mask": None, "head_dim": 64, "seqlen_k": 64}, GENERAL),
        (MINILM, {"mask": None, "head_dim": 64}, THROUGHPUT),
        (MINILM, {"mask": None, "causal": "upper_left"}, GENERAL),
        (MINILM, {"mask": OF_QUERIES, "seqlen_q": 384, "seqlen_k": 384}, GENERAL),
        (MINILM, {"head_dim": 64, "batch": 8}, LATENCY),
        (MINILM, {"head_dim": 64, "batch": 64}, THROUGHPUT),
        (MINILM, {"head_dim": 64, "batch": 8, "mask": NUMBERS}, THROUGHPUT),
        (MINILM, {"head_dim": 128, "batch": 8, "mask": OF_QUERIES}, LATENCY),
        (MINILM, {"head_dim": 64, "batch": 8, "mask": replace(PADDING, bulk=False)}, LATENCY),
        (MINILM, {"head_dim": 64, "batch": 8, "mask": replace(PADDING, bulk=False), "seqlen_k": 129}, THROUGHPUT),
        (MINILM, {"head_dim": 64, "seqlen_q": 64, "seqlen_k": 258, "mask": replace(PADDING, bulk=False)}, THROUGHPUT),
        (MINILM, {"head_dim": 64, "seqlen_q": 64, "seqlen_k": 1024}, THROUGHPUT),
        (MINILM, {"head_dim": 64, "seqlen_q": 64, "seqlen_k": 512}, LATENCY),
    ],
)
def test_choices(problem: Problem, change: dict[str, object], kernel: str) -> None:
    changed = replace(problem, **change)  # type: ignore[arg-type]
    assert select(changed).spec.name == kernel
    assert chosen(changed) is select(changed).spec


@pytest.mark.parametrize(
    ("problem", "name", "words"),
    [
        (PACKED, LATENCY, "documents hide much of 2048 keys from few heads: ampere/general's small CTAs are faster"),
        (replace(PACKED, head_dim=72), LATENCY, "it computes what documents hide, too, and more than 1024 tokens"),
        (WINDOWS, LATENCY, "are mostly beginnings and ends: ampere/general's small CTAs are faster"),
        (
            replace(WINDOWS, mask=DOCUMENTS, head_dim=64, seqlen_q=100, seqlen_k=200, batch=16),
            THROUGHPUT,
            "finding the",
        ),
    ],
)
def test_a_kernel_is_skipped_for_a_reason(problem: Problem, name: str, words: str) -> None:
    rule = policy.PREFERENCES[name]
    assert rule.skips(problem)
    assert words in rule.words(problem).reason


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_120"])
def test_other_gpus_were_not_measured(target: str) -> None:
    assert select(replace(WINDOWS, target=target)).spec.name == "ampere/mma"


def test_a_batch_that_a_grid_cannot_have_is_left_to_others() -> None:
    assert select(replace(WINDOWS, batch=65_536, heads=1, heads_kv=1)).spec.name == "ampere/mma"


EVERY_MASK = [None, PADDING, replace(PADDING, bulk=False), OF_QUERIES, NUMBERS, DOCUMENTS, BLOCKS, WINDOW]


@pytest.mark.parametrize("mask", EVERY_MASK, ids=str)
@pytest.mark.parametrize("head_dim", [32, 48, 64, 96, 128, 136, 256])
def test_what_is_tried_in_turn_is_what_no_rule_skips(head_dim: int, mask: MaskKind | None) -> None:
    """The questions that in_turn() asks once are those of the rules, on both sides of each limit."""
    sms = chip_of("sm_90a").sms
    for queries in (16, 17, 32, 33, 64, 65, 128, 129):
        for keys in (32, 33, 64, 65, 128, 129, 256, 257, 384, 385, 1024, 1025):
            for heads in (sms, sms + 1, 2 * sms + 1, 4 * sms, 8 * sms + 1):
                problem = Problem(1, heads, heads, queries, keys, head_dim, "float16", mask=mask)
                tried = [family.name for family in policy.in_turn(problem)]
                left = [f.name for f in policy.candidates(problem, "auto") if not policy.skips(f, problem)]
                assert tried == left, problem


def test_the_reasons_say_what_is_faster() -> None:
    reasons = dict(select(WINDOWS).reasons)
    assert {"hopper/latency", "hopper/split", "hopper/throughput", "ampere/mma"} <= set(reasons)
    assert "49 queries and 49 keys of 768 heads in all" in reasons["hopper/latency"]
    listed = dict(select(replace(MINILM, head_dim=96, batch=8, heads=16, heads_kv=16, mask=OF_QUERIES)).reasons)
    assert listed == {}  # hopper/latency comes first
    shown = policy.skip_reason(policy.candidates(MINILM, "auto")[2], replace(MINILM, head_dim=64, batch=8))
    assert shown is not None
    assert "listing the tiles of its mask takes longer" in shown.reason


@pytest.mark.parametrize(
    ("change", "rows", "keys"),
    [
        ({}, 128, "32"),
        ({"batch": 10}, 64, "64"),  # fewer CTAs of 128 rows than SMs
        ({"seqlen_q": 64}, 64, "64"),
        ({"seqlen_q": 64, "seqlen_k": 24}, 64, "32"),
        ({"seqlen_q": 64, "seqlen_k": 33}, 64, "64"),
        ({"seqlen_q": 64, "seqlen_k": 96}, 64, "32"),
        ({"seqlen_q": 64, "seqlen_k": 97}, 64, "64"),
        ({"head_dim": 64}, 64, "64"),
        ({"head_dim": 64, "batch": 66}, 128, "64"),
        ({"head_dim": 64, "batch": 66, "mask": NUMBERS}, 128, "32"),
        ({"head_dim": 128, "batch": 66}, 128, "32"),
        ({"head_dim": 128, "seqlen_q": 129}, 128, "32"),
        ({"head_dim": 128, "seqlen_q": 129, "mask": replace(NUMBERS, tensor="float32")}, 64, "64"),
        ({"seqlen_q": 129}, 128, "64"),
        ({"head_dim": 160, "batch": 66}, 64, "32"),
        ({"dropout": True}, 64, "64"),
    ],
)
def test_tiles_of_ampere_general(change: dict[str, object], rows: int, keys: str) -> None:
    spec = general.forward(replace(MINILM, **change))  # type: ignore[arg-type]
    assert isinstance(spec, KernelSpec)
    assert (spec.block_m, dict(spec.template_args)["BLOCK_N"]) == (rows, keys)
