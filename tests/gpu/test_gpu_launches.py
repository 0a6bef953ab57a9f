"""What the launcher hands to a kernel, with kernels made for the purpose: clusters, tensor maps, programmatic launch,
scratch memory, kernels that follow one another."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from microsdpa.evidence.inputs import Case, make
from microsdpa.jit import nvrtc
from microsdpa.jit.source import KERNELS_DIR, expand
from microsdpa.kernels import KernelSpec, TensorMap
from microsdpa.kernels.problem import Problem, capability_of, target_of
from microsdpa.runtime import launcher

pytestmark = pytest.mark.gpu

KERNELS = (Path(__file__).parent / "kernels", Path(__file__).parents[1] / "emulate/kernels")
OPTIONS = 1 << 31
"""No public call has these options: the plans of this file are met by its own launches alone."""

Launch = Callable[..., Any]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """launch(spec, query, key, value, out, lse=None): plan and launch a kernel of the test directories; gives `out`."""
    root = tmp_path / "cuda"
    shutil.copytree(KERNELS_DIR, root)
    for directory in KERNELS:
        shutil.copytree(directory, root / "test", dirs_exist_ok=True)
    target = target_of(torch.cuda.get_device_capability())

    def compile_kernel(spec: KernelSpec, target: str, strict: bool = True) -> SimpleNamespace:
        cubin = nvrtc.compile_cubin(expand(spec.source, root), spec.source, spec.expression, target, spec.flags)
        return SimpleNamespace(spec=spec, signature=str(spec), cubin=cubin.code, symbol=cubin.symbol)

    monkeypatch.setattr(launcher, "compile_kernel", compile_kernel)
    monkeypatch.setattr(launcher, "unexcused", lambda kernel: "")

    def run(spec: KernelSpec, query: Any, key: Any, value: Any, out: Any, lse: Any = None) -> Any:
        if capability_of(target) < (9, 0) and (spec.tensor_maps or spec.cluster > 1 or spec.programmatic):
            pytest.skip(f"{target} has no clusters, bulk copies or programmatic launch: they need sm_90")
        problem = Problem(
            *query.shape[:2], key.shape[1], query.shape[2], key.shape[2], query.shape[3], "float16", target=target
        )
        result = launcher.launch(query, key, value, out, lse, OPTIONS, None)
        if result is None:
            launcher.prepare(problem, spec, (query, key, value, out, None, OPTIONS, None))
            result = launcher.launch(query, key, value, out, lse, OPTIONS, None)
        assert result is True
        return out

    launcher._library.clear_plans()
    return run


def copy_keys(rows: int = 64, **fields: Any) -> KernelSpec:
    spec = KernelSpec(
        name="test/copy_keys",
        source="test/copy_keys.cu",
        template="test::copy_keys",
        template_args=(("DIM", "64"), ("ROWS", str(rows))),
        threads=32,
        block_m=rows,
        tensor_maps=(TensorMap("key", rows, 64, 0), TensorMap("out", rows, 64, 0)),
    )
    return dataclasses.replace(spec, **fields)


@pytest.mark.parametrize("swizzle", [0, 128])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_tensor_maps_reach_every_element_and_no_other(launch: Launch, layout: str, swizzle: int) -> None:
    query, key, value = make(Case(2, 3, 100, 100, 64, layout=layout), "cuda")  # type: ignore[arg-type]
    maps = (TensorMap("key", 64, 64, swizzle), TensorMap("out", 64, 64, swizzle))
    wide = torch.full((2, 3, 104, 64), 7.0, dtype=torch.float16, device="cuda")
    launch(copy_keys(tensor_maps=maps), query, key, value, wide[:, :, 2:-2])
    assert torch.equal(wide[:, :, 2:-2], key)
    assert (wide[:, :, :2] == 7).all()
    assert (wide[:, :, -2:] == 7).all()


def test_tensor_maps_follow_other_tensors(launch: Launch) -> None:
    spec = copy_keys()
    for seed in range(5):
        query, key, value = make(Case(1, 3, 70, 70, 64, seed=seed), "cuda")
        outs = [torch.full_like(key, torch.nan) for _ in range(2)]
        for out in outs:
            launch(spec, query, key, value, out)
        assert all(torch.equal(out, key) for out in outs)


def test_dimensions_of_size_one_may_have_any_stride(launch: Launch) -> None:
    query, key, value = make(Case(1, 1, 70, 70, 64), "cuda")
    odd = key.as_strided(key.shape, (3, 5, 64, 1))
    assert torch.equal(launch(copy_keys(), query, odd, value, torch.empty_like(key)), key)


def test_an_expanded_tensor_is_read_through_strides_of_zero(launch: Launch) -> None:
    query, key, value = make(Case(2, 4, 70, 70, 64), "cuda")
    for part in (key[:, :1], key[:1], key[:1, :1], key[:, :, :1]):
        expanded = part.expand(key.shape)
        assert torch.equal(launch(copy_keys(), query, expanded, value, torch.empty_like(key)), expanded)


@pytest.mark.parametrize("cluster", [2, 8, 16])
def test_ctas_form_clusters(launch: Launch, cluster: int) -> None:
    query, key, value = make(Case(1, 4, 256, 256, 64), "cuda")
    lse = torch.full((1, 4, 256), torch.nan, device="cuda")
    out = launch(copy_keys(cluster=cluster), query, key, value, torch.empty_like(key), lse)
    assert torch.equal(out, key)
    assert lse.flatten()[:16].tolist() == [cta % cluster for cta in range(16)]


def test_an_lse_that_is_asked_for_is_torchs_and_the_calls_own(launch: Launch) -> None:
    query, key, value = make(Case(1, 4, 256, 256, 64), "cuda")
    out = torch.empty_like(key)
    launch(copy_keys(cluster=2), query, key, value, out)
    found = [launcher.launch(query, key, value, out, True, OPTIONS, None) for _ in range(3)]
    assert len({lse.data_ptr() for lse in found}) == 3
    for lse in found:
        assert isinstance(lse, torch.Tensor)
        assert (lse.shape, lse.dtype, lse.device) == ((1, 4, 256), torch.float32, query.device)
        assert lse.is_contiguous()
        assert lse.flatten()[:16].tolist() == [cta % 2 for cta in range(16)]


@pytest.mark.parametrize("enabled", [True, False])
def test_programmatic_launch_waits_for_what_is_ahead(launch: Launch, enabled: bool) -> None:
    """Behind kernels, memsets and copies, eagerly and captured, the kernel reads what they wrote."""
    query, key, value = make(Case(1, 8, 512, 512, 64), "cuda")
    spec, out, second = copy_keys(programmatic=True, cluster=2), torch.empty_like(key), torch.empty_like(key)
    source = torch.randn_like(key)
    graph = torch.cuda.CUDAGraph()

    def work() -> None:
        key.zero_()
        launch(spec, query, key, value, out)
        key.copy_(source)
        launch(spec, query, key, value, out)
        launch(spec, query, out, value, second)  # reads what the launch ahead of it writes
        key.mul_(2)
        launch(spec, query, key, value, out)

    before = launcher.set_programmatic(enabled)
    try:
        work()
        with torch.cuda.graph(graph):
            work()
        for _ in range(50):
            source.normal_()
            for run in (work, graph.replay):
                out.fill_(torch.nan)
                second.fill_(torch.nan)
                run()
                assert torch.equal(second, source)
                assert torch.equal(out, 2 * source)
    finally:
        launcher.set_programmatic(before)


def two_launches(**fields: Any) -> KernelSpec:
    first, second = (
        KernelSpec(
            name="test/two_launches",
            source="test/two_launches.cu",
            template="test::two_launches",
            template_args=(("SECOND", second), ("DIM", "64"), ("ROWS", "2147483647")),
            threads=64,
            block_m=1,
            workspace_row_bytes=4 * 64,
        )
        for second in ("false", "true")
    )
    return dataclasses.replace(first, next_kernel=second, **fields)


def test_kernels_follow_one_another_over_one_workspace(launch: Launch) -> None:
    spec = two_launches()
    for rows in (100, 7, 3000):
        query, key, value = make(Case(1, 2, rows, 10, 64), "cuda")
        assert torch.equal(launch(spec, query, key, value, torch.empty_like(query)), 2 * query)


def test_torch_describes_its_tensors_on_the_stack(launch: Launch) -> None:
    """The functions are built-in ones with every supported torch, and give what those of tvm_ffi do."""
    assert type(launcher.launch) is type(len)
    query, key, value = make(Case(1, 4, 256, 256, 64), "cuda")
    out = torch.empty_like(key)
    launch(copy_keys(cluster=2), query, key, value, out)
    found = [
        function(query, key, value, out, True, OPTIONS, None) for function in (launcher.launch, launcher._library.sdpa)
    ]
    assert all(type(lse) is torch.Tensor for lse in found)
    assert torch.equal(*(lse.flatten()[:16] for lse in found))
    with torch.cuda.stream(torch.cuda.Stream()):
        out.fill_(torch.nan)
        assert launcher.launch(query, key, value, out, None, OPTIONS, None) is True
        assert torch.equal(out, key)  # in the same stream as what is around it


def test_a_workspace_is_the_calls_own(launch: Launch) -> None:
    """On two streams and in a replayed graph at once: no call meets the scratch memory of another."""
    spec = two_launches()
    tensors = [make(Case(1, 4, 2000, 10, 64, seed=seed), "cuda") for seed in range(3)]
    outs = [torch.empty_like(query) for query, _, _ in tensors]
    launch(spec, *tensors[2], outs[2])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(spec, *tensors[2], outs[2])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in tensors]
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                graph.replay() if i == 2 else launch(spec, *tensors[i], outs[i])
    torch.cuda.synchronize()
    assert all(torch.equal(out, 2 * query) for out, (query, _, _) in zip(outs, tensors, strict=True))
