from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch

from microsdpa.call.tensors import is_bulk_addressable
from microsdpa.errors import UnsupportedProblem
from microsdpa.kernels import (
    ALL_FAMILIES,
    FAMILIES,
    Family,
    KernelSpec,
    TensorMap,
    catalogue,
    family_named,
    policy,
)
from microsdpa.kernels.problem import MaskKind, Problem, capability_of, target_of, virtual
from microsdpa.kernels.select import chosen, select

MISSION = Problem(1, 8, 8, 512, 512, 64, "float16", target="sm_90a")


@pytest.mark.parametrize(
    ("capability", "target"), [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((12, 0), "sm_120")]
)
def test_target_and_capability_are_inverse(capability: tuple[int, int], target: str) -> None:
    assert target_of(capability) == target
    assert capability_of(target) == capability


@pytest.mark.parametrize("target", ["", "sm_", "89", "sm_x", "lto_89"])
def test_capability_of_refuses_other_names(target: str) -> None:
    with pytest.raises(ValueError, match="expected a name such as"):
        capability_of(target)


def test_flops_and_bytes_of_the_mission() -> None:
    assert MISSION.flops == 4 * 8 * 512 * 512 * 64
    assert dataclasses.replace(MISSION, causal="upper_left").flops == MISSION.flops // 2
    assert MISSION.tensor_bytes == 4 * 8 * 512 * 64 * 2


def test_auto_takes_the_first_family_that_accepts() -> None:
    selection = select(MISSION)
    assert selection.spec.name == FAMILIES[0].name
    assert selection.rejections == ()


def test_a_kernel_is_found_by_full_and_short_name() -> None:
    assert select(MISSION, "ladder/01") == select(MISSION, "ladder/01_scalar")
    assert family_named("ladder/0") is None


@pytest.mark.parametrize(("head_dim", "nearest"), [(16, 32), (48, 64), (80, 64), (96, 128), (256, 128)])
def test_an_unsupported_head_dim_names_the_nearest(head_dim: int, nearest: int) -> None:
    with pytest.raises(UnsupportedProblem, match=f"head_dim {head_dim}") as caught:
        select(dataclasses.replace(MISSION, head_dim=head_dim), "ladder/01")
    assert caught.value.nearest == f"head_dim {nearest}"


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"alignment": 2}, "does not start on 16 bytes"), ({"bulk": False}, "a stride of a tensor is 2")],
)
def test_tensor_maps_need_a_layout_that_bulk_copies_address(
    change: dict[str, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = KernelSpec("test/plain", "test/plain.cu", "plain", (), threads=128, block_m=64)
    mapped = dataclasses.replace(plain, name="test/mapped", tensor_maps=(TensorMap("query", 64, 64),))
    split = dataclasses.replace(plain, name="test/split", next_kernel=mapped)
    families = tuple(Family(spec.name, "", lambda _, spec=spec: spec) for spec in (mapped, split, plain))  # type: ignore[misc]
    monkeypatch.setattr(policy, "candidates", lambda problem, impl: families)
    monkeypatch.setattr(policy, "skips", lambda family, problem: False)
    monkeypatch.setattr(policy, "skip_reason", lambda family, problem: None)
    assert select(MISSION).spec is mapped
    selection = select(dataclasses.replace(MISSION, **change))  # type: ignore[arg-type]
    assert selection.spec is plain
    assert [name for name, _ in selection.rejections] == ["test/mapped", "test/split"]
    assert all(reason in rejection.reason for _, rejection in selection.rejections)


@pytest.mark.parametrize(("head_dim", "nearest"), [(4, 8), (76, 80), (100, 104), (264, 256), (512, 256)])
def test_the_production_kernel_takes_multiples_of_8(head_dim: int, nearest: int) -> None:
    with pytest.raises(UnsupportedProblem, match=f"head_dim {head_dim} is not a multiple of 8") as caught:
        select(dataclasses.replace(MISSION, head_dim=head_dim), "ampere/mma")
    assert caught.value.nearest == f"head_dim {nearest}"


def test_unaligned_tensors_fall_to_the_general_kernel() -> None:
    selection = select(dataclasses.replace(MISSION, alignment=2))
    assert selection.spec.name == "ampere/general"
    name, rejection = selection.rejections[-1]
    assert name == "ampere/mma"
    assert rejection.nearest == "tensors whose rows start on 16 bytes"


def test_a_gpu_older_than_sm_80_is_refused() -> None:
    with pytest.raises(UnsupportedProblem, match="sm_75 is older than sm_80"):
        select(dataclasses.replace(MISSION, target="sm_75"))


def test_more_tiles_than_a_launch_takes_are_refused() -> None:
    with pytest.raises(UnsupportedProblem, match="exceed the 2147483647 CTAs"):
        select(dataclasses.replace(MISSION, batch=2**20, heads=2**10, heads_kv=1, seqlen_q=256))


def test_the_grid_covers_every_query_once() -> None:
    spec = select(dataclasses.replace(MISSION, seqlen_q=33, batch=70_000), "ladder/01").spec
    assert spec.grid(dataclasses.replace(MISSION, seqlen_q=33, batch=70_000)) == (3 * 70_000 * 8, 1, 1)


def test_unaligned_tensors_get_element_loads() -> None:
    aligned, unaligned = (select(dataclasses.replace(MISSION, alignment=a), "ladder/01").spec for a in (16, 2))
    assert dict(aligned.template_args)["LOAD_BYTES"] == "16"
    assert dict(unaligned.template_args)["LOAD_BYTES"] == "2"


def test_the_catalogue_has_no_kernel_twice_and_every_family() -> None:
    specs = catalogue("sm_90a")
    assert len(set(specs)) == len(specs)
    assert {spec.name for spec in specs} == {family.name for family in ALL_FAMILIES} | {
        "backward",
        "hopper/backward",
        "prologue/rows",
        "quantize/fused",
        "quantize/restore_lse",
    }
    every = catalogue("sm_90a", every=True)
    assert len(set(every)) == len(every)
    assert set(specs) < set(every)
    for family in FAMILIES:
        for choice in ("T", "HEAD_DIM", "CAUSAL", "LOAD_BYTES"):
            few, all_of_them = (
                {dict(spec.template_args).get(choice) for spec in found if spec.name == family.name}
                for found in (specs, every)
            )
            assert few == all_of_them


@pytest.mark.parametrize("name", ["hopper/latency_8bit", "hopper/throughput_8bit"])
def test_the_catalogue_has_masked_kernels_for_8_bits(name: str) -> None:
    few, every = (
        {(spec.params, dict(spec.template_args).get("MASKS")) for spec in catalogue("sm_90a", every=whole)}
        for whole in (False, True)
    )
    masked = {
        kinds
        for spec in catalogue("sm_90a", every=True)
        if spec.name == name and "Masked" in (kinds := (spec.params, dict(spec.template_args).get("MASKS")))[0]
    }
    assert masked & few
    assert len(masked & every) >= 2


def test_bulk_copies_address_all_but_very_large_strides() -> None:
    dense = torch.empty(2, 1, 3, 32, dtype=torch.float16)
    assert is_bulk_addressable(dense)
    assert is_bulk_addressable(dense.transpose(1, 2))
    assert is_bulk_addressable(dense[:1].expand(1, 1, 3, 32))
    assert is_bulk_addressable(dense.expand(2, 4, 3, 32))
    far = torch.empty(1, device="meta", dtype=torch.float16)
    for stride, fits in ((2**39 - 8, True), (2**39, False)):
        assert is_bulk_addressable(far.as_strided((2, 1, 1, 1), (stride, 0, 0, 1))) is fits


def test_a_virtual_target_has_the_capability_of_its_real_one() -> None:
    assert virtual("sm_89") == "compute_89"
    assert capability_of("compute_89") == capability_of("sm_89") == (8, 9)
    with pytest.raises(ValueError, match="whose PTX runs on later GPUs"):
        virtual("sm_90a")


def test_the_quick_choice_is_the_choice() -> None:
    """chosen() asks the families in another order of questions, for speed; it must answer as select() does."""
    draw = random.Random(20)
    answers = 0
    for _ in range(5000):
        heads_kv = draw.choice((1, 2, 8))
        dtype = draw.choice(("float16", "bfloat16"))
        problem = Problem(
            batch=draw.choice((1, 2, 16, 300, 2**16)),
            heads=heads_kv * draw.choice((1, 4, 8, 2**15)),
            heads_kv=heads_kv,
            seqlen_q=draw.choice((1, 3, 16, 17, 64, 130, 512, 2048, 2**28)),
            seqlen_k=draw.choice((1, 16, 128, 513, 1024, 4096, 70_000, 2**31 - 2)),
            head_dim=draw.choice((8, 16, 40, 64, 72, 96, 128, 192, 256, 264)),
            dtype=dtype,  # type: ignore[arg-type]
            causal=draw.choice((None, "upper_left", "lower_right")),  # type: ignore[arg-type]
            mask=draw.choice((None, None, MaskKind("bool"), MaskKind(left=True, sinks="float32"))),
            alignment=draw.choice((16, 16, 2)),
            bulk=draw.random() < 0.9,
            target=draw.choice(("sm_80", "sm_89", "sm_90a", "sm_120", "sm_75")),
        )
        impl = draw.choice(("auto", "auto", "auto", "hopper/latency", "ampere/mma", "ladder/01_scalar"))
        try:
            expected = select(problem, impl).spec
        except UnsupportedProblem:
            expected = None
        assert chosen(problem, impl) == expected, (problem, impl)
        answers += expected is not None
    assert answers > 1000


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90a"])
@pytest.mark.parametrize("head_dim", [64, 72, 100, 128, 256])
def test_a_specification_is_one_object(head_dim: int, target: str) -> None:
    """The launcher knows specifications by their id: a new one for each size would be loaded anew, and kept."""
    for batch, seqlen_q, seqlen_k in itertools.product((1, 2, 40), (1, 200, 4096), (17, 512)):
        problem = Problem(batch, 8, 8, seqlen_q, seqlen_k, head_dim, "float16", target=target)
        spec = chosen(problem)
        assert spec is not None
        assert chosen(dataclasses.replace(problem)) is spec
        other = chosen(dataclasses.replace(problem, batch=batch + 1))
        assert other is spec or other != spec


def test_ranges_of_keys_are_for_kernels_that_say_so() -> None:
    """Of a kernel that does not, int32 would be numbers to be added."""
    kind = MaskKind("int32", per_query=True, bulk=True)
    problem = Problem(2, 16, 16, 2048, 2048, 128, "float16", mask=kind, target="sm_90a")
    for family in FAMILIES:
        if family.ranges:
            continue
        with pytest.raises(UnsupportedProblem, match=r"not know ranges of keys|not ranges of keys"):
            select(problem, family.name)
    assert select(problem).spec.name in {family.name for family in FAMILIES if family.ranges}
    assert chosen(problem) == select(problem).spec
    assert select(problem).spec.name == "hopper/throughput"
