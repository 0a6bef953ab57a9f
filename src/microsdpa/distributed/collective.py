"""Keys and values of all ranks by collective calls of the group: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from microsdpa.distributed.layout import put
from microsdpa.distributed.visible import Visible


class Gather:
    """Keys and values [B, H_kv, S_k, D] of all ranks, in groups of heads.

    Shards are padded to the longest, gathered, and put to their places in new tensors. On a GPU that happens on a
    stream of its own.

    Attributes:
        streams: those that wait for a group of heads; none on a CPU.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        tensors: tuple[torch.Tensor, ...],
        visible: Visible,
        heads: list[tuple[int, int]],
        spread: bool = True,
    ) -> None:
        """`tensors` are this rank's shards; `heads` the first head of each group and one past the last.

        spread: whether the stream for computing is used beside the caller's.
        """
        self.group, self.tensors, self.visible, self.heads = group, tensors, visible, heads
        self.main: torch.cuda.Stream | None = None
        self.side: torch.cuda.Stream | None = None
        self.compute: torch.cuda.Stream | None = None
        device = tensors[0].device
        if device.type == "cuda":
            self.main = torch.cuda.current_stream(device)
            self.side, self.compute = side_streams(device)
        batch, heads_kv, _, head_dim = tensors[0].shape
        shape = batch, heads_kv, visible.keys.total, head_dim
        self.wholes = [tensor.new_empty(shape) for tensor in tensors]
        self.done: dict[int, torch.cuda.Event] = {}
        self.streams: list[torch.cuda.Stream] = []
        if self.main is not None and self.side is not None and self.compute is not None:
            self.streams = [self.main, self.compute] if spread else [self.main]
            self.side.wait_stream(self.main)
            self.compute.wait_stream(self.main)

    begun, taken = 0, 0
    """Groups that travel, and those that were waited for."""

    def start(self, number: int) -> None:
        """Gather a group of heads."""
        low, high = self.heads[number]
        self.begun = number + 1
        layout, first = self.visible.keys, self.tensors[0]
        with on(self.side):
            shape = len(self.tensors), first.shape[0], high - low, layout.longest, first.shape[3]
            packed = first.new_empty(shape)
            for index, tensor in enumerate(self.tensors):
                packed[index, :, :, : tensor.shape[2]] = tensor[:, low:high]
                packed[index, :, :, tensor.shape[2] :] = 0
            found = first.new_empty((layout.world, *shape))
            dist.all_gather_into_tensor(found.flatten(0, 1), packed, group=self.group)
            for rank in range(layout.world):
                for index, whole in enumerate(self.wholes):
                    put(found[rank, index], whole[:, low:high], layout, rank, 2)
            if self.side is not None:
                self.done[number] = self.side.record_event()

    def wait(self, number: int) -> list[torch.Tensor]:
        """Let `streams` wait for a group of heads; gives its tensors [B, heads, S_k, D]."""
        self.taken = number + 1
        for stream in self.streams:
            stream.wait_event(self.done[number])
        low, high = self.heads[number]
        return [whole[:, low:high] for whole in self.wholes]

    def finish(self) -> None:
        """Join the streams: the shards may be freed after what is launched next."""
        if self.main is not None and self.side is not None and self.compute is not None:
            self.main.wait_stream(self.side)
            self.main.wait_stream(self.compute)


_streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}


def side_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Streams of a device: for data on its way, and for computing beside the current stream."""
    if device not in _streams:
        _streams[device] = new_stream(device, -1), new_stream(device)
    return _streams[device]


def new_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """A stream of a device; -1 is a high priority."""
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]


def on(stream: torch.cuda.Stream | None) -> Any:
    """A context in which a stream is the current one; none for None."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)
