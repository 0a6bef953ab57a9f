"""What only a GPU can show: correctness of every kernel, streams, devices, graphs, threads."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch

import microsdpa
from microsdpa import reference
from microsdpa.errors import UnsupportedProblem
from microsdpa.evidence import compare
from microsdpa.evidence.cases import MASKINGS, verify_cases
from microsdpa.evidence.inputs import Case, make, make_masks
from microsdpa.evidence.verify import check
from microsdpa.kernels import FAMILIES
from microsdpa.kernels.problem import Causal
from microsdpa.runtime import launcher

pytestmark = pytest.mark.gpu

MISSION = Case(1, 8, 512, 512, 64)


@pytest.mark.parametrize("impl", [family.name for family in FAMILIES])
@pytest.mark.parametrize("case", verify_cases(), ids=str)
def test_every_kernel_on_every_case(case: Case, impl: str) -> None:
    try:
        assert check(case, "cuda", impl).failure == ""
    except UnsupportedProblem as refusal:
        pytest.skip(str(refusal))


@pytest.mark.parametrize("case", [case for case in verify_cases() if case.masks], ids=str)
def test_masks_through_the_plan_table(case: Case) -> None:
    """The automatic choice: the second call of a form launches without Python's checks."""
    assert check(case, "cuda", "auto").failure == ""


PACKED = [
    Case(16, 32, 32, 2048, 128, heads_kv=8, causal="lower_right", dtype="bfloat16"),
    Case(64, 14, 50, 968, 64, heads_kv=2, kind="outliers"),
    Case(24, 64, 12, 1000, 96, heads_kv=8, layout="bshd", kind="mean"),
    Case(16, 12, 16, 1500, 128, heads_kv=4, causal="lower_right"),
    Case(2, 24, 900, 900, 128, causal="upper_left"),
    Case(48, 16, 150, 512, 128, heads_kv=1, causal="lower_right", masks=("sinks",)),
    Case(16, 64, 20, 3000, 72, heads_kv=8, dtype="bfloat16"),
]
"""Few queries whose heads share keys."""


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_heads_that_share_keys_share_tiles(case: Case) -> None:
    query, key, value = make(case, "cuda")
    found = microsdpa.explain(query, key, value, **case.options, **make_masks(case, "cuda"))
    assert (found.runs == "hopper/varlen") == (torch.cuda.get_device_capability() == (9, 0))
    assert check(case, "cuda", "auto").failure == ""


def close(out: torch.Tensor, tensors: tuple[torch.Tensor, ...], **options: Any) -> bool:
    expected, _ = reference.oracle(*tensors, **options)
    allowed = compare.tolerance(reference.eager(*tensors, **options)[0], expected, out.dtype)
    return allowed.admits(compare.measure(out, expected))


def test_a_capture_may_be_the_first_call() -> None:
    tensors = make(Case(1, 3, 70, 90, 64, seed=11), "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = microsdpa.sdpa(*tensors, is_causal=True)
    graph.replay()
    assert close(out, tensors, causal="upper_left")
    for tensor, fresh in zip(tensors, make(Case(1, 3, 70, 90, 64, seed=12), "cuda"), strict=True):
        tensor.copy_(fresh)
    graph.replay()
    assert close(out, tensors, causal="upper_left")


REPLAYS = 10_000
CHAIN = (
    MISSION,
    Case(1, 8, 512, 512, 64, causal="upper_left"),
    Case(1, 2, 64, 64, 64),
    Case(2, 16, 512, 512, 64, causal="upper_left"),
    Case(1, 4, 1, 700, 128, heads_kv=2),
    Case(1, 32, 512, 512, 128, dtype="bfloat16"),
    Case(1, 3, 130, 77, 96, causal="lower_right"),
    Case(24, 32, 17, 700, 64, heads_kv=4),
    Case(16, 12, 16, 1500, 128, heads_kv=4, causal="lower_right"),
    Case(2, 24, 900, 900, 128, causal="upper_left"),
)


@pytest.mark.parametrize("programmatic", [True, False])
def test_replays_of_a_chain_beside_other_work_are_bitwise_equal(programmatic: bool) -> None:
    """Kernels of several shapes follow one another, each overlapping the end of the one ahead, while products run."""
    before = launcher.set_programmatic(programmatic)
    try:
        calls = []
        for case in CHAIN:
            query, key, value = make(case, "cuda")
            options = {"causal": case.causal, "enable_gqa": case.kv_heads != case.heads}
            first = microsdpa.sdpa(query, key, value, **options)  # type: ignore[arg-type]
            assert isinstance(first, torch.Tensor)
            assert close(first, (query, key, value), **({"causal": case.causal} if case.causal else {}))
            calls.append((query, key, value, options, first, torch.empty_like(query)))
        differ = torch.zeros((), dtype=torch.bool, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for *_, out in calls:
                out.fill_(torch.nan)
            for query, key, value, options, _, out in calls:
                microsdpa.sdpa(query, key, value, out=out, **options)  # type: ignore[arg-type]
            for *_, first, out in calls:
                differ |= (out != first).any()
        side, matrix = torch.cuda.Stream(), torch.randn(512, 512, dtype=torch.float16, device="cuda")
        for replay in range(REPLAYS):
            if replay % 10 == 0:
                with torch.cuda.stream(side):
                    torch.mm(matrix, matrix)
            graph.replay()
        torch.cuda.synchronize()
        assert not differ.item()
    finally:
        launcher.set_programmatic(before)


def test_the_current_stream_is_used() -> None:
    tensors = make(Case(1, 8, 512, 512, 64), "cuda")
    microsdpa.sdpa(*tensors)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        out = microsdpa.sdpa(*tensors)
        done = torch.cuda.Event()
        done.record()
    torch.cuda.current_stream().synchronize()
    assert not done.query()  # the kernel waits behind the sleep of its own stream
    side.synchronize()
    assert close(out, tensors)


def test_a_call_does_not_synchronise() -> None:
    tensors = make(MISSION, "cuda")
    microsdpa.sdpa(*tensors)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(100_000_000)
        microsdpa.sdpa(*tensors)
        done = torch.cuda.Event()
        done.record()
        assert not done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_threads_get_right_answers() -> None:
    cases = [Case(1, 2, 50 + 10 * i, 64, 64, seed=i) for i in range(8)]
    wrong: list[Case] = []

    def work(case: Case) -> None:
        tensors = make(case, "cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            outs = [microsdpa.sdpa(*tensors) for _ in range(50)]
            torch.cuda.current_stream().synchronize()
        if not all(torch.equal(out, outs[0]) for out in outs) or not close(outs[0], tensors):
            wrong.append(case)

    threads = [threading.Thread(target=work, args=(case,)) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_every_device_of_the_process() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, this machine has {torch.cuda.device_count()}")
    torch.cuda.set_device(0)
    for device in ("cuda:1", "cuda:0"):
        tensors = make(Case(1, 2, 70, 90, 64), device)
        assert close(microsdpa.sdpa(*tensors), tensors)
    assert torch.cuda.current_device() == 0


def test_the_output_has_the_memory_order_of_the_query() -> None:
    for layout in ("bhsd", "bshd"):
        tensors = make(Case(2, 3, 16, 16, 64, layout=layout), "cuda")  # type: ignore[arg-type]
        assert microsdpa.sdpa(*tensors).stride() == tensors[0].stride()


def test_no_input_is_written_and_nothing_beyond_the_output() -> None:
    tensors = make(Case(2, 3, 33, 65, 64), "cuda")
    copies = [tensor.clone() for tensor in tensors]
    wide = torch.full((2, 3, 35, 64), 7.0, dtype=torch.float16, device="cuda")
    microsdpa.sdpa(*tensors, out=wide[:, :, 1:-1])
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))
    assert (wide[:, :, 0] == 7).all()
    assert (wide[:, :, -1] == 7).all()


def test_a_plan_does_not_admit_what_validation_refuses() -> None:
    q, k, v = make(MISSION, "cuda")
    out = microsdpa.sdpa(q, k, v)
    assert isinstance(out, torch.Tensor)
    with pytest.raises(microsdpa.InvalidArgument, match="out"):
        microsdpa.sdpa(q, k, v, out=q)
    with pytest.raises(microsdpa.InvalidArgument, match="scale"):
        microsdpa.sdpa(q, k, v, scale=float("nan"))
    with pytest.raises(microsdpa.InvalidArgument, match="value"):
        microsdpa.sdpa(q, k, v.cpu())


@pytest.mark.parametrize("head_dim", [72, 200])
def test_any_head_dim_runs_and_a_rung_names_the_nearest(head_dim: int) -> None:
    tensors = make(Case(1, 2, 16, 16, head_dim), "cuda")
    out = microsdpa.sdpa(*tensors)
    assert isinstance(out, torch.Tensor)
    assert close(out, tensors)
    with pytest.raises(microsdpa.UnsupportedProblem, match="nearest supported: head_dim"):
        microsdpa.sdpa(*tensors, impl="ladder/01_scalar")


def test_non_finite_inputs_reach_the_output_where_the_oracle_has_them() -> None:
    q, k, v = make(Case(1, 2, 40, 70, 64), "cuda")
    q[0, 0, 3, 5] = torch.nan
    v[0, 1, 60, 7] = torch.inf
    out = microsdpa.sdpa(q, k, v)
    expected, _ = reference.oracle(q, k, v)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isinf(), expected.isinf())


def test_explain_names_the_kernel_and_whether_it_is_compiled() -> None:
    tensors = make(Case(1, 2, 16, 16, 128, dtype="bfloat16"), "cuda")
    microsdpa.sdpa(*tensors)
    found = microsdpa.explain(*tensors)
    assert found.runs == ("hopper/latency" if torch.cuda.get_device_capability() == (9, 0) else "ampere/mma")
    assert found.compiled
    assert found.signature is not None
    assert found.signature in str(found)


def test_plans_are_reused() -> None:
    tensors = make(Case(1, 2, 21, 16, 64), "cuda")
    microsdpa.sdpa(*tensors)
    before = launcher._library.plan_count()
    for _ in range(10):
        microsdpa.sdpa(*tensors)
    assert launcher._library.plan_count() == before


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "unaligned"])
def test_a_plan_object_computes_what_sdpa_does(layout: str) -> None:
    case = Case(2, 4, 70, 90, 64, heads_kv=2, causal="lower_right", layout=layout)  # type: ignore[arg-type]
    options = {"causal": "lower_right", "enable_gqa": True, "scale": 0.2}
    plan = microsdpa.plan(*make(case, "cuda"), **options, return_lse=True)  # type: ignore[arg-type]
    for seed in range(3):
        tensors = make(dataclasses.replace(case, seed=seed), "cuda")
        expected, expected_lse = microsdpa.sdpa(*tensors, **options, return_lse=True)  # type: ignore[arg-type]
        given = torch.empty_like(expected)
        for out in (None, given):
            found, lse = plan(*tensors, out=out)
            assert torch.equal(found, expected)
            assert torch.equal(lse, expected_lse)
            assert out is None or found is out
    assert plan.explanation.compiled


@pytest.mark.parametrize("layout", ["bhsd", "unaligned"])
@pytest.mark.parametrize(("causal", "masks"), MASKINGS)
def test_a_plan_object_with_masks_computes_what_sdpa_does(causal: Causal | None, masks: Any, layout: Any) -> None:
    case = Case(2, 4, 70, 90, 64, heads_kv=2, causal=causal, masks=masks, layout=layout)
    options: dict[str, Any] = {"causal": causal, "enable_gqa": True, "return_lse": True}
    plan = microsdpa.plan(*make(case, "cuda"), **options, **make_masks(case, "cuda"))
    for seed in (1, 2):
        other = dataclasses.replace(case, seed=seed)
        tensors, given = make(other, "cuda"), make_masks(other, "cuda")
        arrays = {name: mask for name, mask in given.items() if isinstance(mask, torch.Tensor)}
        expected, expected_lse = microsdpa.sdpa(*tensors, **options, **given)
        for out in (None, torch.empty_like(expected)):
            found, lse = plan(*tensors, out=out, **arrays)
            assert torch.equal(found, expected)
            assert torch.equal(lse, expected_lse)
        assert close(expected.cpu(), make(other), causal=causal, **make_masks(other))
    explained = microsdpa.explain(*make(case, "cuda"), **options, **make_masks(case, "cuda"))
    assert plan.explanation.runs == explained.runs


def test_a_plan_object_with_masks_is_captured() -> None:
    tensors, mask = make(MISSION, "cuda"), torch.ones(512, 512, dtype=torch.bool, device="cuda")
    plan = microsdpa.plan(*tensors, attn_mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = plan(*tensors, attn_mask=mask)
    mask.copy_(torch.rand(512, 512) < 0.5)
    graph.replay()
    assert torch.equal(captured, microsdpa.sdpa(*tensors, attn_mask=mask))


def test_a_plan_object_is_captured_and_used_by_threads() -> None:
    tensors = make(MISSION, "cuda")
    plan = microsdpa.plan(*tensors)
    expected = microsdpa.sdpa(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = plan(*tensors)
    graph.replay()
    assert torch.equal(captured, expected)
    wrong: list[int] = []

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            outs = [plan(*tensors) for _ in range(50)]
            torch.cuda.current_stream().synchronize()
        if not all(torch.equal(out, expected) for out in outs):
            wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_plan_object_refuses_other_tensors() -> None:
    q, k, v = make(MISSION, "cuda")
    plan = microsdpa.plan(q, k, v)
    with pytest.raises(microsdpa.InvalidArgument, match="an address that is a multiple of 16 bytes"):
        plan(torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view(q.shape), k, v)
    with pytest.raises(microsdpa.InvalidArgument, match="device cuda:0, as the plan has, got cpu"):
        plan(q, k, v.cpu())
    with pytest.raises(microsdpa.InvalidArgument, match="shape"):
        plan(q[:, :4], k, v)
    with pytest.raises(microsdpa.InvalidArgument, match="memory that no input uses"):
        plan(q, k, v, out=q)
    with pytest.raises(microsdpa.UnsupportedProblem, match="query requires grad"):
        plan(q.clone().requires_grad_(), k, v)


@pytest.mark.parametrize("head_dim", [40, 64, 72, 128])
@pytest.mark.parametrize(("causal", "masks"), MASKINGS)
def test_masks_at_the_headline_shape(causal: Causal | None, masks: Any, head_dim: int) -> None:
    """Tiles whose masks are read ahead of the products, in every width."""
    case = Case(1, 8, 512, 512, head_dim, causal=causal, masks=masks)
    assert check(case, "cuda", "auto").failure == ""
    assert check(dataclasses.replace(case, scale=3.0), "cuda", "auto").failure == ""  # out of range: computed again


@pytest.mark.parametrize(("head_dim", "columns"), [(192, 128), (128, 64), (96, 40), (32, 24)])
@pytest.mark.parametrize(("causal", "lengths"), [(None, (300, 500)), ("upper_left", (300, 500)), (None, (70, 3000))])
def test_a_value_with_fewer_columns(
    causal: Causal | None, lengths: tuple[int, int], head_dim: int, columns: int
) -> None:
    query, key, value = make(Case(2, 3, *lengths, head_dim, seed=3), "cuda")
    if launcher.target_of_device() != "sm_90a":
        with pytest.raises(UnsupportedProblem, match="one head dimension"):
            microsdpa.sdpa(query, key, value[..., :columns])
        return
    for narrow in (value[..., :columns], value[..., :columns].contiguous()):
        for _ in range(2):  # the second call has a plan
            out = microsdpa.sdpa(query, key, narrow, causal=causal)
            assert isinstance(out, torch.Tensor)
            assert out.shape == (2, 3, lengths[0], columns)
            assert close(out, (query, key, narrow), causal=causal)
        with microsdpa.enabled(strict=True):
            again = torch.nn.functional.scaled_dot_product_attention(query, key, narrow, is_causal=causal is not None)
        assert torch.equal(again, out)


def test_calls_at_once_count_their_own_query_tiles() -> None:
    """On two streams and in two graphs of one capturing stream: CTAs take query tiles by a count of their launch."""
    calls = [make(Case(2, 40, 1000, 1000, 128, causal="upper_left", seed=seed), "cuda") for seed in range(4)]
    expected = [microsdpa.sdpa(*call, causal="upper_left", impl="hopper/throughput") for call in calls]
    outs = [torch.full_like(call[0], torch.nan) for call in calls]

    def launch(i: int) -> None:
        microsdpa.sdpa(*calls[i], causal="upper_left", impl="hopper/throughput", out=outs[i])

    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for i, graph in enumerate(graphs):
        launch(i)
        with torch.cuda.graph(graph):
            launch(i)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(30):
        for out in outs:
            out.fill_(torch.nan)
        torch.cuda.synchronize()
        for _ in range(3):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    graphs[i].replay() if i < 2 else launch(i)
        torch.cuda.synchronize()
        assert all(torch.equal(*pair) for pair in zip(outs, expected, strict=True))


@pytest.mark.parametrize("window", [None, (200, 0)])
def test_causal_calls_of_other_lengths_count_their_query_tiles(window: tuple[int, int] | None) -> None:
    """Calls whose plan follows from that of another length."""
    causal: Causal | None = None if window else "upper_left"
    for seqlen in (1200, 1210, 1300, 1201, 1250):
        call = make(Case(2, 40, seqlen, seqlen, 128, causal="upper_left", seed=seqlen), "cuda")
        out = microsdpa.sdpa(*call, causal=causal, window=window)
        again = microsdpa.sdpa(*call, causal=causal, window=window)
        assert isinstance(out, torch.Tensor)
        assert torch.equal(out, again)
        assert close(out, call, **({"window": window} if window else {"causal": causal}))
