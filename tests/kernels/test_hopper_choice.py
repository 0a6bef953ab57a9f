"""Which configuration of hopper/latency a problem gets, and which problems it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from microsdpa.errors import UnsupportedProblem
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.chip import chip_of
from microsdpa.kernels.hopper.latency import spec as hopper_latency
from microsdpa.kernels.problem import MaskKind, Problem
from microsdpa.kernels.select import select

MISSION = Problem(1, 8, 8, 512, 512, 64, "float16")


def specify(**changes: object) -> KernelSpec:
    spec = hopper_latency.latency(dataclasses.replace(MISSION, **changes))
    assert isinstance(spec, KernelSpec)
    return spec


def test_a_pair_of_ctas_shares_a_query_tile_while_all_fit_the_chip() -> None:
    assert select(MISSION).spec.name == "hopper/latency"
    spec = specify()
    assert spec.cluster == 2
    assert spec.grid(MISSION) == (16, 8, 1)
    assert specify(heads=16, heads_kv=16).cluster == 1


def test_keys_that_one_cta_computes_in_one_round_are_not_split() -> None:
    assert [specify(seqlen_k=keys).cluster for keys in (1, 64, 128, 129, 4096)] == [1, 1, 1, 2, 2]


def test_shared_memory_fits_the_chip_and_keeps_ctas_apart() -> None:
    chip = chip_of("sm_90a")
    for head_dim in hopper_latency.TILE_DIMS:
        for keys in range(1, 4097, 63):
            for cluster in (1, 2):
                problem = dataclasses.replace(MISSION, seqlen_k=keys, head_dim=head_dim)
                choice = hopper_latency.configuration(problem, cluster)
                spec = hopper_latency.specification(problem, choice)
                assert choice.shared_bytes(head_dim) <= spec.shared_bytes <= chip.shared_per_cta
                assert 2 * spec.shared_bytes > chip.shared_per_sm - 2048
                assert choice.rounds in (0, hopper_latency.key_rounds(problem, cluster))
                assert choice.rounds <= choice.stages


@pytest.mark.parametrize(
    ("mask", "changes", "rows"),
    [
        (MaskKind("bool", per_query=True, bulk=True), {}, 64),
        (MaskKind("bool", per_batch=True, bulk=True), {}, 1),
        (MaskKind("float32", per_head=True, per_query=True, bulk=True), {}, 64),
        (MaskKind("bool", per_query=True), {}, 0),  # rows off 16 bytes
        (MaskKind(softcap=True, bulk=False), {}, 0),
        (MaskKind("float32", per_query=True, bulk=True), {"head_dim": 128}, 0),  # no room
        (MaskKind("float16", per_query=True, bulk=True), {"seqlen_k": 4096}, 0),  # a ring
    ],
)
def test_bulk_copies_bring_masks_that_have_room(mask: MaskKind, changes: dict[str, Any], rows: int) -> None:
    spec = specify(mask=mask, **changes)
    assert [box.rows for box in spec.tensor_maps if box.tensor == "attn_mask"] == ([rows] if rows else [])
    assert dict(spec.template_args).get("MASK_ROWS", "0") == str(rows)


@pytest.mark.parametrize(
    ("head_dim", "padded"), [(8, 64), (64, 64), (72, 80), (80, 80), (88, 96), (96, 96), (104, 128), (128, 128)]
)
def test_head_dimensions_are_padded_to_the_next_kernel(head_dim: int, padded: int) -> None:
    arguments = dict(specify(head_dim=head_dim).template_args)
    assert (arguments["HEAD_DIM"], arguments["COLUMNS"]) == (str(padded), str(head_dim))


@pytest.mark.parametrize(
    ("mask", "keys", "rounds"),
    [
        (MaskKind("bool"), 512, 2),
        (MaskKind("float32", True, True, False, True, "float32"), 512, 2),
        (MaskKind(softcap=True), 512, 2),
        (MaskKind("bool", softcap=True), 512, 2),
        (MaskKind("float32", softcap=True), 512, 0),  # numbers and the accumulators take too many registers
        (MaskKind("bool"), 600, 3),
        (MaskKind(left=True, right=True), 1024, 4),
        (MaskKind("float16"), 600, 0),
        (MaskKind("bool"), 1088, 0),
    ],
)
def test_masked_problems_of_few_rounds_have_them_unrolled(mask: MaskKind, keys: int, rounds: int) -> None:
    spec = specify(mask=mask, seqlen_k=keys)
    assert spec.cluster == 2
    assert dict(spec.template_args)["ROUNDS"] == str(rounds)
    assert select(dataclasses.replace(MISSION, mask=mask)).spec.name == "hopper/latency"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"target": "sm_89"}, "sm_89 has no wgmma"),
        ({"head_dim": 92}, "head_dim 92 is not a multiple of 8 up to 128"),
        ({"head_dim": 136}, "head_dim 136 is not a multiple of 8 up to 128"),
        ({"alignment": 2}, "not aligned to 16 bytes"),
        ({"batch": 66_000}, "exceed the 65535 CTAs"),
    ],
)
def test_refusals_say_why(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(UnsupportedProblem) as caught:
        select(dataclasses.replace(MISSION, **changes), "hopper/latency")
    assert reason in caught.value.reason
    assert caught.value.nearest
