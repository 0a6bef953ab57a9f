"""Keys and values of all ranks of one host, pushed into each other's memory by the copy engines.

Every rank has one buffer that all others can write to: torch's symmetric memory. A rank copies its keys and values
straight to their places in everybody's buffer, and then sets a flag there. Nothing runs on the SMs meanwhile, and
nothing is packed or unpacked.

    host  ----- barrier, push group 0, push group 1, ... ----->
    push    |barrier| K 0 | K 1 | K 2 |     one stream for keys, one for values
    compute           wait 0 | attention 0 | wait 1 | attention 1 | ...

The barrier at the start says that all ranks are done with what the buffer had before. A flag is set back as soon as
it was seen: the same launches can be replayed as a CUDA graph.

What goes to the driver is a list of operations. It is played as it is made, or it is kept with the launches of
attention in it: the next call like that plays it in one call of the launcher.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from microsdpa.distributed.collective import new_stream
from microsdpa.distributed.layout import Chunk
from microsdpa.distributed.operations import CALLERS, Operand, Operations, Rows
from microsdpa.distributed.visible import Visible
from microsdpa.errors import MicrosdpaError
from microsdpa.runtime import launcher

FLAGS = 64 * 1024
"""Bytes at the start of a buffer that hold flags of 4 bytes."""
FLAG = 4
ALIGNMENT = 512
MAX_GROUPS = 64
_SET, _CLEAR = 1, 0
MAX_PREPARED = 64
"""Kinds of calls whose operations a buffer keeps."""
_OPERANDS = Operand.KEY, Operand.VALUE
_GIVEN, _BARRIER, _COME, _COPIED, _JOINED, _EVENTS = 0, 1, 2, 3, 5, 8
"""Numbers of a buffer's events: two of _COPIED, for groups that travel in turn, and three of _JOINED."""


def is_by_head(tensor: torch.Tensor) -> bool:
    """Whether a tensor [B, H, S, D] lies in memory as rows of S * D elements, one for each head."""
    _, head, token, unit = tensor.stride()
    return unit == 1 and token == tensor.shape[3] and head >= tensor.shape[2] * token


def is_by_token(tensor: torch.Tensor) -> bool:
    """Whether a tensor [B, H, S, D] lies in memory as rows of H * D elements, one for each token."""
    _, head, token, unit = tensor.stride()
    return unit == 1 and head == tensor.shape[3] and token >= tensor.shape[1] * head


class Prepared(NamedTuple):
    """What a kind of call plays at its next turn.

    Attributes:
        play: launcher.prepared_exchange()'s function.
        mask: the ranges that its launches read.
    """

    play: Callable[..., bool]
    mask: torch.Tensor | None


class Buffer:
    """Memory of a group that every rank can write to in all others', and what moves data there.

    Attributes:
        capacity: bytes for keys and values.
        prepared: lists of operations by the kind of call; None for a kind that cannot have one.
    """

    def __init__(self, group: dist.ProcessGroup, capacity: int, device: torch.device) -> None:
        """Allocate on every rank and exchange addresses: a collective call of the group."""
        from torch._C._distributed_c10d import _SymmetricMemory

        self.capacity, self.device = capacity, device
        self.rank, self.world = group.rank(), group.size()
        size = FLAGS + capacity
        try:
            self.memory = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
            self.memory[:FLAGS].zero_()
            torch.cuda.synchronize(device)
            self.handle = _SymmetricMemory.rendezvous(self.memory, group.group_name)
        except RuntimeError as error:
            raise MicrosdpaError(
                f"symmetric memory of {size} bytes cannot be set up ({error}); use transport='collective'"
            ) from error
        self.addresses: list[int] = list(self.handle.buffer_ptrs)
        dist.barrier(group)
        torch.cuda.synchronize(device)
        self.pushes = [new_stream(device, -1) for _ in range(2)]
        self.local, self.flags = (new_stream(device, -1) for _ in range(2))
        self.compute = new_stream(device)
        self.context = launcher.primary_context(self.memory.device.index)
        self._kept = [torch.cuda.Event() for _ in range(_EVENTS)]  # type: ignore[no-untyped-call]
        for event in self._kept:
            event.record(self.local)  # its handle is made now
        self.events = [event.cuda_event for event in self._kept]
        self.prepared: dict[Any, Prepared | None] = {}

    def place(self, number: int) -> int:
        """The offset of a flag that each rank sets in this one's memory; `number` says what it is about."""
        return (number * self.world) * FLAG

    def set_flag(self, operations: Operations, stream: int, target: int, number: int) -> None:
        """Tell `target` something, once what was put on the stream before is done."""
        operations.write(stream, self.addresses[target] + self.place(number) + self.rank * FLAG, _SET)

    def wait_flag(self, operations: Operations, stream: int, source: int, number: int) -> None:
        """Let a stream wait until `source` has said something, and take it back."""
        address = self.addresses[self.rank] + self.place(number) + source * FLAG
        operations.await_value(stream, address, _SET)
        operations.write(stream, address, _CLEAR)

    def peers(self) -> list[int]:
        """The other ranks, each rank's own next one first: no two ranks push to the same one at a time."""
        return [(self.rank + step) % self.world for step in range(1, self.world)]

    def barrier(self, operations: Operations, stream: int) -> None:
        """Let a stream wait until all ranks have come here."""
        for peer in self.peers():
            self.set_flag(operations, stream, peer, 0)
        for peer in self.peers():
            self.wait_flag(operations, stream, peer, 0)

    def play(self, operations: Operations, stream: torch.cuda.Stream) -> None:
        """Put operations on their streams; `stream` is the caller's."""
        launcher.play(self.context, stream.cuda_stream, operations.packed())

    def remember(self, kind: Any, prepared: Prepared | None) -> None:
        """Keep what a kind of call plays."""
        if len(self.prepared) >= MAX_PREPARED:
            self.prepared.clear()
        self.prepared[kind] = prepared


_buffers: weakref.WeakKeyDictionary[dist.ProcessGroup, Buffer] = weakref.WeakKeyDictionary()


def known_buffer(group: dist.ProcessGroup) -> Buffer | None:
    """The buffer of a group that has one."""
    return _buffers.get(group)


def buffer_for(group: dist.ProcessGroup, capacity: int, device: torch.device) -> Buffer:
    """The buffer of a group, which grows: a collective call where it does, on all ranks alike."""
    found = _buffers.get(group)
    if found is None or found.capacity < capacity:
        if found is not None:
            torch.cuda.synchronize(device)
        found = Buffer(group, capacity, device)
        _buffers[group] = found
    return found


class Gather:
    """Keys and values [B, H_kv, S_k, D] of all ranks, in groups of heads, in this rank's buffer.

    Attributes:
        streams: those that wait for a group of heads: the caller's alone, or the one for computing beside it, too.
        operations: what has not been played yet; all of them where they are recorded.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        tensors: tuple[torch.Tensor, ...],
        visible: Visible,
        heads: list[tuple[int, int]],
        by_token: bool,
        spread: bool = True,
        recorded: bool = False,
    ) -> None:
        """`tensors` are this rank's shards; `heads` the first head of each group and one past the last.

        by_token: whether the tensors of all ranks lie in memory token by token, [B, S, H, D].
        spread: whether the stream for computing is used beside the caller's.
        recorded: whether operations are not played, but kept.
        """
        if not by_token:
            tensors = tuple(tensor if is_by_head(tensor) else tensor.contiguous() for tensor in tensors)
        self.tensors, self.visible, self.heads, self.by_head = tensors, visible, heads, not by_token
        by_head = self.by_head
        first = tensors[0]
        batch, heads_kv, _, head_dim = first.shape
        shape = batch, heads_kv, visible.keys.total, head_dim
        self.bytes = -(-shape[0] * shape[1] * shape[2] * shape[3] * first.element_size() // ALIGNMENT) * ALIGNMENT
        self.buffer = buffer_for(group, len(tensors) * self.bytes, first.device)
        self.sources = [tensor.data_ptr() for tensor in tensors]
        self.at = [FLAGS + number * self.bytes for number in range(len(tensors))]
        self.wholes: list[torch.Tensor] = []
        for at in self.at:
            flat = self.buffer.memory[at : at + self.bytes].view(first.dtype)
            memory = shape if by_head else (shape[0], shape[2], shape[1], shape[3])
            whole = flat[: batch * heads_kv * shape[2] * head_dim].view(memory)
            self.wholes.append(whole if by_head else whole.transpose(1, 2))
        self.main, self.recorded = torch.cuda.current_stream(first.device), recorded
        buffer, self.operations = self.buffer, Operations()
        self.streams = [self.main, buffer.compute] if spread else [self.main]
        self.pushes = [stream.cuda_stream for stream in buffer.pushes]
        self.beside = [buffer.compute.cuda_stream, buffer.flags.cuda_stream] if spread else []
        self._join(CALLERS, _GIVEN, [self.pushes[0], buffer.local.cuda_stream, *self.beside])
        buffer.barrier(self.operations, self.pushes[0])
        self._join(self.pushes[0], _BARRIER, self.pushes[1:])

    begun, taken = 0, 0
    """Groups that travel, and those that were waited for."""

    def handle(self, stream: torch.cuda.Stream | None) -> int:
        """What stands for one of `streams` in an operation."""
        return CALLERS if stream is None or stream is self.main else stream.cuda_stream

    def _join(self, stream: int, event: int, others: list[int]) -> None:
        """Let streams wait for what was put on one of them."""
        self.operations.record(stream, self.buffer.events[event])
        for other in others:
            self.operations.await_event(other, self.buffer.events[event])

    def _play(self) -> None:
        if not self.recorded:
            played, self.operations = self.operations, Operations()
            self.buffer.play(played, self.main)

    def start(self, number: int) -> None:
        """Put the copies of a group of heads on their streams."""
        buffer, low_high, self.begun = self.buffer, self.heads[number], number + 1
        for target in (*buffer.peers(), buffer.rank):
            chunks = self.visible.sends[buffer.rank][target]
            for index in range(len(self.tensors)):
                stream = buffer.local.cuda_stream if target == buffer.rank else self.pushes[index % 2]
                for chunk in chunks:
                    self._push(index, target, low_high, chunk, stream)
                if target != buffer.rank:
                    buffer.set_flag(self.operations, stream, target, 1 + number * len(self.tensors) + index)
        self._join(buffer.local.cuda_stream, _COPIED + number % 2, [])
        self._play()

    def _push(self, index: int, target: int, heads: tuple[int, int], chunk: Chunk, stream: int) -> None:
        tensor, whole, buffer = self.tensors[index], self.wholes[index], self.buffer
        size, head_dim = tensor.element_size(), tensor.shape[3]
        if self.by_head:
            pitches, width, height = (whole.stride(1), tensor.stride(1)), chunk.length * head_dim, heads[1] - heads[0]
        else:
            pitches, width, height = (whole.stride(2), tensor.stride(2)), (heads[1] - heads[0]) * head_dim, chunk.length
        low = heads[0]
        for b in range(tensor.shape[0]):
            of = b * tensor.stride(0) + low * tensor.stride(1) + chunk.at * tensor.stride(2)
            to = b * whole.stride(0) + low * whole.stride(1) + chunk.start * whole.stride(2)
            target_rows = Rows(buffer.addresses[target] + self.at[index] + to * size, pitches[0] * size)
            source_rows = Rows(self.sources[index] + of * size, pitches[1] * size)
            self.operations.copy(stream, target_rows, source_rows, (width * size, height), _OPERANDS[index])

    def wait(self, number: int) -> list[torch.Tensor]:
        """Let `streams` wait for a group of heads; gives its tensors [B, heads, S_k, D]."""
        buffer, self.taken = self.buffer, number + 1
        streams = [self.handle(stream) for stream in self.streams]
        taker = buffer.flags.cuda_stream if self.beside else CALLERS  # a flag is taken back by one stream
        for stream in streams:
            self.operations.await_event(stream, buffer.events[_COPIED + number % 2])
        for peer in buffer.peers():
            for index in range(len(self.tensors)):
                buffer.wait_flag(self.operations, taker, peer, 1 + number * len(self.tensors) + index)
        if self.beside:
            self._join(taker, _COME, streams)
        self._play()
        low, high = self.heads[number]
        return [whole[:, low:high] for whole in self.wholes]

    def finish(self) -> None:
        """Join the streams: the shards may be freed, and the buffer be filled again, after what is launched next.

        `streams` have waited for own copies and for all flags.
        """
        for number, stream in enumerate([*self.pushes, *self.beside[:1]]):
            self._join(stream, _JOINED + number, [CALLERS])
        self._play()
