"""Calls captured in a CUDA graph, how many kernels were caught, and an empty kernel to compare with."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch

from microsdpa.evidence.peers import Call
from microsdpa.jit import compile_kernel
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.problem import target_of
from microsdpa.runtime import launcher

EMPTY = KernelSpec(
    name="probe/empty",
    source="probes/empty.cu",
    template="microsdpa::probe_empty",
    template_args=(("UNUSED", "0"),),
    threads=32,
    block_m=1,
)


class CapturedGraph:
    """One CUDA graph of calls that follow one another.

    Attributes:
        nodes: nodes of the graph, kernels and copies; 0 when the calls ran on a stream that was not captured.
        calls: kept, because they own memory and code that the graph uses.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = tuple(calls)
        side = capture_stream(torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in (*calls[:3], *dict.fromkeys(calls)):
                call()
        side.synchronize()
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(self._graph, stream=side):
            for call in calls:
                call()
        self.nodes = _node_count(self._graph.raw_cuda_graph())
        self._graph.instantiate()

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()


@contextlib.contextmanager
def programmatic_launches(enabled: bool) -> Iterator[None]:
    """Whether this library's kernels may begin before the one ahead has ended, for what is captured inside."""
    before = launcher.set_programmatic(enabled)
    try:
        yield
    finally:
        launcher.set_programmatic(before)


@functools.cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """The one stream for all captures: where a process has used some seven, each plain node takes 0.18 us longer."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _node_count(handle: int) -> int:
    from cuda.bindings import driver

    error, _, count = driver.cuGraphGetNodes(driver.CUgraph(handle), 0)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuGraphGetNodes failed with {error}")
    return int(count)


def empty_kernel() -> Call:
    """A call that launches a kernel of one warp that does nothing, on torch's current stream."""
    from cuda.bindings import driver

    target = target_of(torch.cuda.get_device_capability())
    function, _ = launcher.load_kernel(compile_kernel(EMPTY, target), torch.cuda.current_device())

    def launch() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        (error,) = driver.cuLaunchKernel(function, 1, 1, 1, EMPTY.threads, 1, 1, 0, stream, 0, 0)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{EMPTY.name}: cuLaunchKernel failed with {error}")

    return launch
