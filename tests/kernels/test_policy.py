"""Which kernels impl="auto" tries, why it skips one, and what an error calls the nearest supported problem."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from microsdpa.errors import UnsupportedProblem
from microsdpa.kernels import EIGHT_BIT_FAMILIES, FAMILIES, KernelSpec, family_named, policy
from microsdpa.kernels import spec as specs
from microsdpa.kernels.ampere.mma import tiles
from microsdpa.kernels.hopper.backward import spec as hopper_backward
from microsdpa.kernels.problem import OPERANDS, MaskKind, Problem
from microsdpa.kernels.select import chosen, select

SMALL = Problem(1, 8, 8, 512, 512, 64, "float16", target="sm_90a")
QUANTIZED = replace(SMALL, operands="fp8")
MASK = MaskKind("bool")


@pytest.mark.parametrize("problem", [SMALL, QUANTIZED], ids=["16 bits", "8 bits"])
def test_auto_tries_the_kernels_of_the_policy_in_its_order(problem: Problem) -> None:
    names = [family.name for family in policy.candidates(problem, "auto")]
    assert names == [name for name in policy.PREFERENCES if name in names]
    assert names
    assert all(family.eight_bit == (problem is QUANTIZED) for family in policy.candidates(problem, "auto"))


def test_every_preferred_name_is_a_kernels() -> None:
    families = {name: family_named(name) for name in policy.PREFERENCES}
    assert all(families.values()), families


def test_the_ladder_runs_where_it_is_named_and_is_not_in_an_error() -> None:
    automatic = {family.name for family in policy.candidates(SMALL, "auto")}
    assert not [name for name in automatic if name.startswith("ladder/")]
    for family in FAMILIES:
        if family.name.startswith("ladder/"):
            assert select(SMALL, family.name).spec.name == select(SMALL, family.short_name).spec.name == family.name
    with pytest.raises(UnsupportedProblem) as caught:
        select(replace(SMALL, head_dim=300))
    assert "ladder" not in caught.value.reason


def test_a_kernel_for_other_operands_is_no_candidate() -> None:
    for family in FAMILIES:
        assert policy.candidates(QUANTIZED, family.name) == ()
    for family in EIGHT_BIT_FAMILIES:
        assert policy.candidates(SMALL, family.name) == ()
        assert policy.candidates(QUANTIZED, family.name) == (family,)


@pytest.mark.parametrize(
    ("sizes", "kernel"),
    [
        ((5, 10, 1, 40, 389, 192), "hopper/throughput"),  # 9.05 us on an H200, ampere/mma 17.5
        ((8, 16, 16, 20, 1500, 160), "hopper/throughput"),  # 33.4 and 71.9
        ((2, 8, 8, 20, 389, 160), "hopper/throughput"),  # 7.6 and 9.4
        ((1, 32, 8, 40, 1500, 256), "hopper/throughput"),  # 23.3 and 28.7
        ((2, 8, 8, 20, 389, 192), "ampere/mma"),  # 8.6 and 6.4
        ((2, 8, 8, 63, 1500, 256), "ampere/mma"),  # 23.1 and 15.8
        ((1, 32, 8, 28, 1500, 192), "hopper/varlen"),  # 16.7, ampere/mma 15.6: estimates are that near
        ((1, 8, 8, 28, 1500, 192), "ampere/mma"),
        ((8, 16, 16, 16, 1500, 192), "ampere/mma"),  # decoding
        ((1, 8, 1, 51, 351, 256), "ampere/mma"),  # too few heads to know
    ],
)
def test_few_queries_of_wide_heads(sizes: tuple[int, int, int, int, int, int], kernel: str) -> None:
    found = chosen(Problem(*sizes, "bfloat16", target="sm_90a"))
    assert found is not None
    assert found.name == kernel


@pytest.mark.parametrize(
    ("kernel", "problem", "reason"),
    [
        (
            "hopper/latency",
            replace(SMALL, seqlen_q=1, seqlen_k=4096),
            "4096 keys are too many .* with 1 in 8 heads",
        ),
        ("hopper/latency", replace(SMALL, seqlen_q=256, seqlen_k=8192, heads=1, heads_kv=1), "too many for tiles"),
        ("hopper/latency", replace(SMALL, seqlen_q=1024, seqlen_k=1024, heads=16, heads_kv=16), "hopper/split"),
        ("hopper/latency", replace(SMALL, batch=16), "hopper/throughput is faster"),
        (
            "hopper/split",
            replace(SMALL, seqlen_q=1, seqlen_k=4096),
            "leave SMs idle, come in several rounds or have all of many keys",
        ),
        ("hopper/throughput", replace(SMALL, seqlen_q=1, seqlen_k=4096), "too few queries"),
        ("hopper/throughput_8bit", replace(QUANTIZED, seqlen_k=4096), "32 tiles of 128 queries are too few"),
        ("hopper/latency_8bit", replace(QUANTIZED, batch=5), "more than the SMs"),
        (
            "hopper/throughput_8bit",
            replace(QUANTIZED, batch=64, heads_kv=2, seqlen_q=1, seqlen_k=4096),
            "1 queries leave its tiles of 128 empty: ada/mma_8bit has all heads",
        ),
        ("hopper/throughput_8bit_qk", replace(QUANTIZED, operands="int8_fp16"), "32 tiles of 128 queries are too few"),
    ],
)
def test_a_skip_has_its_reason_and_explains_itself(kernel: str, problem: Problem, reason: str) -> None:
    family = family_named(kernel)
    assert family is not None
    assert isinstance(family.specify(problem), KernelSpec), (
        "the kernel computes the problem: it is only not the fastest"
    )
    skipped = policy.skip_reason(family, problem)
    assert skipped is not None
    assert re.search(reason, skipped.reason)
    assert skipped.nearest
    assert (kernel, skipped.reason) in select(problem).reasons
    assert select(problem, kernel).spec.name == kernel


def test_the_kernel_that_runs_is_skipped_by_no_rule_and_those_before_it_have_a_reason() -> None:
    draw = random.Random(7)
    for _ in range(400):
        problem = Problem(
            *(draw.choice((1, 4, 40)), 8, draw.choice((1, 8))),
            *(draw.choice((1, 17, 64, 512, 2048)), draw.choice((16, 512, 4096))),
            *(draw.choice((32, 40, 64, 96, 128, 256)), "float16"),
            mask=draw.choice((None, None, MASK)),
            target=draw.choice(("sm_80", "sm_89", "sm_90a", "sm_120")),
        )
        selection = select(problem)
        tried = [family.name for family in policy.candidates(problem, "auto")]
        shared = policy.with_shared_tiles(problem)
        before = tried if shared else tried[: tried.index(selection.spec.name)]
        assert [name for name, _ in selection.reasons] == before
        assert (shared is not None) == (selection.spec.name == "hopper/varlen")
        if shared:
            continue
        family = family_named(selection.spec.name)
        assert family is not None
        assert policy.skip_reason(family, problem) is None
        assert all(reason for _, reason in selection.reasons)


@pytest.mark.parametrize(
    ("problem", "impl", "nearest"),
    [
        (replace(SMALL, head_dim=300), "auto", "head_dim 256"),
        (replace(SMALL, head_dim=300, target="sm_89"), "auto", "head_dim 256"),
        (replace(SMALL, head_dim=300, mask=MASK), "auto", "head_dim 256"),
        (replace(SMALL, head_dim=300), "hopper/latency", "head_dim 128"),
        (replace(SMALL, head_dim=300), "ampere/general", "head_dim 256"),
        (replace(SMALL, target="sm_75"), "auto", "a GPU of compute capability 8.0 or newer"),
        (replace(SMALL, head_dim=300, target="sm_75"), "auto", "a GPU of compute capability 8.0 or newer"),
        (replace(QUANTIZED, head_dim=200), "auto", "head_dim 256"),
        (replace(QUANTIZED, head_dim=200, operands="int8_fp16"), "auto", "head_dim 128"),
        (replace(QUANTIZED, head_dim=200, target="sm_89"), "auto", "head_dim 128"),
        (replace(QUANTIZED, head_dim=48), "auto", "head_dim 64"),
        (replace(QUANTIZED, target="sm_86"), "auto", "float16 or bfloat16 tensors without precision="),
        (replace(SMALL, mask=MASK), "hopper/split", "a call without a bool mask"),
    ],
)
def test_the_nearest_supported_problem_is_the_nearest(problem: Problem, impl: str, nearest: str) -> None:
    with pytest.raises(UnsupportedProblem) as caught:
        select(problem, impl)
    assert caught.value.nearest == nearest


@pytest.mark.parametrize("target", ["sm_89", "sm_90a", "sm_120"])
@pytest.mark.parametrize("operands", [None, *OPERANDS])
def test_no_head_dimension_that_is_computed_is_nearer(operands: str | None, target: str) -> None:
    """The head dimension that an error names is computed, and none between it and the one asked for is."""
    computed: set[int] = set()
    refused: dict[int, str] = {}
    for head_dim in range(1, 513):
        try:
            select(replace(SMALL, head_dim=head_dim, operands=operands, target=target))  # type: ignore[arg-type]
            computed.add(head_dim)
        except UnsupportedProblem as error:
            refused[head_dim] = error.nearest
    assert refused
    for head_dim, nearest in refused.items():
        assert nearest == f"head_dim {min(computed, key=lambda d: (abs(d - head_dim), -d))}"


def test_gradients_of_one_tile_of_keys_need_sms_or_few_queries() -> None:
    def whole(batch: int, heads: int, heads_kv: int, seqlen_q: int) -> bool:
        problem = Problem(batch, heads, heads_kv, seqlen_q, 128, 64, "float16", target="sm_90a")
        found = policy.five_products(problem, False)
        return isinstance(found, hopper_backward.Tiling) and found.whole

    assert whole(4, 8, 8, 128)
    assert whole(32, 12, 12, 512)
    assert not whole(2, 32, 8, 512)


@pytest.mark.parametrize(
    ("head_dim", "seqlen", "mask", "ours"),
    [
        (64, 1024, "bool", False),
        (128, 1024, "bool", False),
        (72, 1024, "bool", True),  # cuDNN has 128 columns, backward 96
        (160, 1024, "bool", True),
        (48, 1024, "bool", False),
        (64, 1024, "bool of keys", True),  # five products, and none of tiles that are hidden
        (64, 1024, "int32", True),
        (72, 1024, "float16", False),
        (72, 1024, None, True),
        (72, 256, None, True),  # by hopper/backward: tiles of 96 columns are no gain
    ],
)
def test_gradients_under_a_mask_are_left_to_cudnn_where_that_is_faster(
    head_dim: int, seqlen: int, mask: str | None, ours: bool
) -> None:
    kind = None
    if mask:
        kind = MaskKind(mask.split()[0], per_query=mask != "bool of keys")  # type: ignore[arg-type]
    problem = Problem(8, 16, 16, seqlen, seqlen, head_dim, "float16", mask=kind, target="sm_90a")
    assert policy.beats_torch_backward(problem) is ours
    if mask is None:
        assert isinstance(policy.five_products(problem, False), hopper_backward.Tiling)


def test_a_node_is_worth_its_time_from_fewer_operations_on_where_cudnn_fills_up_heads() -> None:
    def worth(head_dim: int, heads: int) -> bool:
        return policy.is_worth_a_node(Problem(8, heads, heads, 1024, 1024, head_dim, "float16", target="sm_90a"))

    assert worth(80, 16)  # 277 us on an H200, cuDNN 359
    assert not worth(80, 12)
    assert not worth(64, 24)
    assert worth(64, 32)


def test_heads_side_by_side_are_at_least_those_of_all_sms() -> None:
    def together(heads_kv: int) -> int:
        problem = Problem(4, 32, heads_kv, 2048, 2048, 128, "float16", causal="upper_left", target="sm_90a")
        tiling = hopper_backward.choose(problem)
        assert isinstance(tiling, hopper_backward.Tiling)
        return hopper_backward.heads_together(problem, tiling)

    assert together(8) == together(32) == 8


def test_the_kernels_in_turn_are_those_that_no_rule_skips() -> None:
    drawn = random.Random(20261124)
    sizes = [*range(1, 70), 127, 128, 129, 512, 1000, 4096, 20_000]
    seen = set()
    for _ in range(3000):
        heads_kv = drawn.choice((1, 2, 8))
        problem = Problem(
            *(drawn.choice(sizes), heads_kv * drawn.choice((1, 4)), heads_kv, drawn.choice(sizes), drawn.choice(sizes)),
            *(drawn.choice((32, 64, 100, 128, 192)), "float16"),
            causal=drawn.choice((None, "upper_left")),
            mask=drawn.choice((None, MASK)),
            target=drawn.choice(("sm_80", "sm_90a", "sm_120")),
            operands=drawn.choice((None, None, "fp8")),
            continued=drawn.random() < 0.1,
        )
        found = policy.in_turn(problem)
        asked = policy.candidates(problem, "auto")
        assert found == tuple(family for family in asked if not policy.skips(family, problem))
        seen.add(found)
    assert len(seen) > 6


def test_small_problems_are_never_too_large() -> None:
    """What is not looked at is small enough whatever the kernel: a CTA for each part of each row fits a launch."""
    assert max(tiles.SPLITS) <= specs.MOST_PARTS
    for sizes in (
        (65_535, 1, 1, 1, 127),
        (1, 1, 1, 32_000, 33_535),
        (3, 64, 64, 1000, 1000),
        (250, 1, 1, 32_768, 32_767),
    ):
        problem = Problem(*sizes, 64, "float16", target="sm_90a")
        assert problem.batch * problem.heads * (problem.seqlen_q + problem.seqlen_k) < specs.SMALL
        spec = select(problem).spec
        x, y, z = spec.work(problem)
        assert x * specs.MOST_PARTS // spec.split < specs.MAX_GRID_X
        assert max(y, z) <= specs.MAX_GRID_YZ


@pytest.mark.parametrize(
    ("sizes", "change", "expected"),
    [
        ((16, 32, 8, 32, 2048, 128), {}, True),  # 37.0 us on an H200, and 95.5 with a tile for each head
        ((24, 64, 8, 12, 8192, 96), {"causal": "lower_right"}, True),  # 172 and 859
        ((64, 14, 2, 50, 968, 64), {}, True),  # 28.8 and 65.6
        ((48, 16, 1, 150, 512, 128), {"causal": "lower_right", "mask": MaskKind(sinks="float16")}, True),  # 55 and 82
        ((16, 12, 4, 16, 1500, 128), {"causal": "lower_right"}, True),  # 19.6 and 25.3: clusters
        ((64, 8, 1, 80, 256, 256), {}, True),  # 32.7 and 36.0
        ((2, 8, 1, 17, 256, 64), {}, False),  # 6.4 and 2.7
        ((24, 16, 1, 256, 700, 256), {}, False),  # 114 and 110
        ((8, 64, 8, 2, 422, 192), {}, False),  # 10.9 and 7.5
        ((16, 32, 4, 300, 8192, 64), {}, False),  # more queries than were measured
        ((16, 8, 8, 32, 2048, 128), {}, False),  # every head has keys of its own
        ((16, 32, 8, 1, 2048, 128), {}, False),
        ((16, 32, 8, 32, 2048, 128), {"causal": "upper_left"}, False),
        ((16, 32, 8, 32, 2048, 128), {"causal": "lower_right", "mask": MaskKind(left=True)}, False),
        ((16, 32, 8, 32, 2048, 128), {"mask": MASK}, False),
        ((16, 32, 8, 32, 2048, 128), {"dropout": True}, False),
        ((16, 32, 8, 32, 2048, 128), {"alignment": 2}, False),
        ((16, 32, 8, 32, 2048, 128), {"bulk": False}, False),
        ((16, 32, 8, 32, 2048, 128), {"target": "sm_89"}, False),
    ],
)
def test_heads_that_share_keys_share_tiles_where_that_is_faster(
    sizes: tuple[int, int, int, int, int, int], change: dict[str, object], expected: bool
) -> None:
    problem = replace(Problem(*sizes, "bfloat16", target="sm_90a"), **change)  # type: ignore[arg-type]
    found = chosen(problem)
    assert found is not None
    assert found is chosen(replace(problem))
    assert found == select(problem).spec
    assert (found.name == "hopper/varlen") == (policy.with_shared_tiles(problem) is found) == expected


@pytest.mark.parametrize(
    ("sizes", "change", "expected"),
    [
        ((64, 64, 1, 1, 4096, 128), {}, True),  # 48.7 us on an H100, as the heads that they are 121
        ((200, 24, 1, 1, 1024, 128), {"causal": "lower_right"}, True),  # 40.8 and 74.6
        ((8, 71, 1, 1, 8192, 64), {}, True),  # 14.4 and 20.5: few tiles of many keys
        ((8, 48, 1, 1, 1024, 128), {}, False),  # 7.6 and 5.5
        ((1, 64, 1, 1, 32768, 64), {}, False),  # 15.0 and 10.4
        ((200, 16, 1, 1, 1024, 128), {}, False),  # the heads fill a tile of ampere/mma
        ((64, 64, 1, 1, 4096, 128), {"causal": "upper_left"}, False),  # which sees one key
        ((64, 64, 1, 2, 4096, 128), {}, False),
        ((64, 64, 1, 1, 4096, 128), {"mask": MASK}, False),
        ((64, 64, 1, 1, 4096, 128), {"dropout": True}, False),
    ],
)
def test_many_heads_of_a_key_head_are_its_queries(
    sizes: tuple[int, int, int, int, int, int], change: dict[str, object], expected: bool
) -> None:
    problem = Problem(*sizes, "bfloat16", target="sm_90a", **change)  # type: ignore[arg-type]
    found = chosen(problem)
    assert found is not None
    assert found is chosen(replace(problem))
    assert found == select(problem).spec
    assert {stage.heads_as_queries for stage in found.stages} == {expected}
    if expected:
        as_queries = chosen(problem.heads_as_queries)
        assert as_queries is not None
        assert found.grid(problem) == as_queries.grid(problem.heads_as_queries)
        assert found.workspace_bytes(problem) == as_queries.workspace_bytes(problem.heads_as_queries)
