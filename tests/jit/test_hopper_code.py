"""What ptxas makes of the Hopper kernels: wgmma in flight beside other work, registers handed over, nothing spilled."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
from compiled import figures

from microsdpa.kernels.hopper.latency import spec as hopper_latency
from microsdpa.kernels.hopper.split import spec as hopper_split
from microsdpa.kernels.hopper.throughput.spec import CANDIDATES, Tiles, specification, tail
from microsdpa.kernels.problem import Causal, DType, MaskKind, Problem
from microsdpa.kernels.select import select

LONG = Problem(4, 32, 32, 4096, 4096, 64, "float16")
KINDS = ("float16", None), ("bfloat16", "upper_left")
MOST_USED = (64, 128, 256)
"""Head dimensions of which both kinds of calls are compiled; for the others candidates take turns."""
CONFIGURATIONS = [
    (head_dim, candidate, dtype, causal)
    for head_dim, candidates in CANDIDATES.items()
    for i, candidate in enumerate(candidates)
    for dtype, causal in (KINDS if head_dim in MOST_USED else [KINDS[(head_dim // 16 + i) % 2]])
]


@pytest.mark.parametrize(("head_dim", "candidate", "dtype", "causal"), CONFIGURATIONS, ids=str)
def test_no_product_of_throughput_is_serialised(
    head_dim: int, candidate: Tiles, dtype: str, causal: str | None
) -> None:
    problem = replace(LONG, head_dim=head_dim, dtype=cast("DType", dtype), causal=cast("Causal | None", causal))
    kernel = figures(specification(problem, candidate), "sm_90a", counted=True)
    assert not kernel.serialised
    assert not kernel.resources.uses_local_memory
    counts = kernel.instructions
    values = candidate.block_n // 16 * (2 if tail(head_dim) else 1)  # P V, where a tail is a product of its own
    products = head_dim // 16 + values  # of one tile: S, and P V
    # The first tile's S, the last one's P V, and between them one tile, or two when P's registers alternate.
    assert counts["HGMMA"] == products * (1 + 1 if not candidate.overlap else 1 + 2) + (
        values if candidate.overlap else 0
    )
    assert counts["USETMAXREG"] == 2


@pytest.mark.parametrize("causal", [None, "upper_left"])
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(("head_dim", "keys"), [(64, 100), (64, 512), (64, 500), (128, 256)])
def test_no_product_of_latency_on_resident_tiles_is_serialised_or_waited_for_early(
    head_dim: int, keys: int, cluster: int, causal: str | None
) -> None:
    problem = Problem(1, 8, 8, 512, keys, head_dim, "float16", causal=cast("Causal | None", causal))
    kernel = figures(hopper_latency.specification(problem, hopper_latency.configuration(problem, cluster)), "sm_90a")
    assert not kernel.serialised
    assert not kernel.resources.uses_local_memory


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(
    "mask",
    [
        MaskKind("bool"),
        MaskKind("bfloat16"),
        MaskKind("float32", True, True, False, True, "float32"),
        MaskKind("int32", alibi=True),
        MaskKind(left=True, right=True),
        MaskKind("bool", True, True, True, True, "float16"),
    ],
    ids=str,
)
def test_no_product_of_latency_under_masks_is_serialised_or_waited_for_early(mask: MaskKind, head_dim: int) -> None:
    problem = Problem(1, 8, 8, 512, 500, head_dim, "bfloat16", mask=mask)
    cluster = 1 if head_dim == 80 or mask.softcap else 2
    keys = 500 if cluster == 2 else 250
    choice = hopper_latency.configuration(replace(problem, seqlen_k=keys), cluster)
    assert choice.rounds == 2
    kernel = figures(hopper_latency.specification(replace(problem, seqlen_k=keys), choice), "sm_90a")
    assert not kernel.serialised
    assert not kernel.resources.uses_local_memory


@pytest.mark.parametrize(
    ("head_dim", "keys", "causal"),
    [
        *((64, 4096, None), (64, 1500, None), (64, 1500, "upper_left")),
        *((128, 4096, None), (128, 700, None), (128, 700, "upper_left")),
    ],
)
def test_no_product_of_latency_s_ring_is_serialised(head_dim: int, keys: int, causal: str | None) -> None:
    problem = Problem(1, 8, 8, 512, keys, head_dim, "float16", causal=cast("Causal | None", causal))
    choice = hopper_latency.configuration(problem, 1)
    assert choice.rounds == 0
    kernel = figures(hopper_latency.specification(problem, choice), "sm_90a")
    assert not kernel.serialised
    assert not kernel.resources.uses_local_memory


@pytest.mark.parametrize(
    ("head_dim", "keys", "causal", "mask"),
    [
        (64, 512, None, MaskKind("float16", per_query=True, bulk=True)),
        (72, 512, "upper_left", MaskKind("bfloat16", alibi=True, per_head=True, per_query=True, bulk=True)),
        (128, 300, None, MaskKind("float32", softcap=True, per_query=True, bulk=True)),
        (128, 512, "upper_left", MaskKind("float16", per_query=True, bulk=True)),
        (64, 511, None, MaskKind("bfloat16", per_head=True, per_query=True, unaligned=True)),
        (128, 511, None, MaskKind("float32", per_query=True, unaligned=True)),
    ],
    ids=str,
)
def test_no_product_of_throughput_under_numbers_is_serialised(
    head_dim: int, keys: int, causal: str | None, mask: MaskKind
) -> None:
    sizes = 2, 16, 16, 1500, keys, head_dim
    spec = select(Problem(*sizes, "float16", causal=cast("Causal | None", causal), mask=mask, target="sm_90a")).spec
    assert spec.name == "hopper/throughput"
    assert not figures(spec, "sm_90a").serialised


@pytest.mark.parametrize("causal", [None, "upper_left"])
@pytest.mark.parametrize("choice", hopper_split.CANDIDATES, ids=str)
def test_no_product_of_split_is_serialised(choice: hopper_split.Split, causal: str | None) -> None:
    problem = replace(LONG, batch=1, heads=8, heads_kv=8, causal=cast("Causal | None", causal))
    kernel = figures(hopper_split.specification(problem, choice), "sm_90a", counted=True)
    assert not kernel.serialised
    assert not kernel.resources.uses_local_memory
    assert kernel.resources.registers <= 128  # four warpgroups
    # The first S; two turns of S and P V, of P in either of its places; two last P V.
    assert kernel.instructions["HGMMA"] == 4 + 2 * 8 + 2 * 4
