"""Keys and values of all ranks of one host, pushed into each other's memory by the copy engines.

Every rank has one buffer that all others can write to: torch's symmetric memory. A rank copies its keys and values
straight to their places in everybody's buffer, and then sets a flag there. Nothing runs on the SMs meanwhile, and
nothing is packed or unpacked.

    host  ----- barrier, push group 0, push group 1, ... ----->
    push    |barrier| K 0 | K 1 | K 2 |     one stream for keys, one for values
    compute           wait 0 | attention 0 | wait 1 | attention 1 | ...

The barrier at the start says that all ranks are done with what the buffer had before. A flag is set back as soon as
it was seen: the same launches can be replayed as a CUDA graph.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from microsdpa.distributed.collective import new_stream
from microsdpa.distributed.visible import Visible
from microsdpa.errors import MicrosdpaError

FLAGS = 64 * 1024
"""Bytes at the start of a buffer that hold flags of 4 bytes."""
FLAG = 4
ALIGNMENT = 512
MAX_GROUPS = 64
_SET, _CLEAR = 1, 0


def is_by_head(tensor: torch.Tensor) -> bool:
    """Whether a tensor [B, H, S, D] lies in memory as rows of S * D elements, one for each head."""
    _, head, token, unit = tensor.stride()
    return unit == 1 and token == tensor.shape[3] and head >= tensor.shape[2] * token


def is_by_token(tensor: torch.Tensor) -> bool:
    """Whether a tensor [B, H, S, D] lies in memory as rows of H * D elements, one for each token."""
    _, head, token, unit = tensor.stride()
    return unit == 1 and head == tensor.shape[3] and token >= tensor.shape[1] * head


def _check(result: Any) -> None:
    if int(result[0]):
        raise MicrosdpaError(f"symmetric memory: the driver said {result[0]}; use transport='collective'")


class Buffer:
    """Memory of a group that every rank can write to in all others'.

    Attributes:
        capacity: bytes for keys and values.
    """

    def __init__(self, group: dist.ProcessGroup, capacity: int, device: torch.device) -> None:
        """Allocate on every rank and exchange addresses: a collective call of the group."""
        from cuda.bindings import driver, runtime
        from torch._C._distributed_c10d import _SymmetricMemory

        self.driver, self.runtime = driver, runtime
        self.group, self.capacity, self.device = group, capacity, device
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

    @property
    def streams(self) -> list[torch.cuda.Stream]:
        """All streams beside the caller's."""
        return [*self.pushes, self.local, self.flags, self.compute]

    def place(self, number: int) -> int:
        """The offset of a flag that each rank sets in this one's memory; `number` says what it is about."""
        return (number * self.world) * FLAG

    def set_flag(self, stream: torch.cuda.Stream, target: int, number: int) -> None:
        """Tell `target` something, once what was put on the stream before is done."""
        address = self.addresses[target] + self.place(number) + self.rank * FLAG
        _check(self.driver.cuStreamWriteValue32(stream.cuda_stream, address, _SET, 0))

    def wait_flag(self, stream: torch.cuda.Stream, source: int, number: int) -> None:
        """Let a stream wait until `source` has said something, and take it back."""
        address = self.addresses[self.rank] + self.place(number) + source * FLAG
        equal = self.driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
        _check(self.driver.cuStreamWaitValue32(stream.cuda_stream, address, _SET, int(equal)))
        _check(self.driver.cuStreamWriteValue32(stream.cuda_stream, address, _CLEAR, 0))

    def peers(self) -> list[int]:
        """The other ranks, each rank's own next one first: no two ranks push to the same one at a time."""
        return [(self.rank + step) % self.world for step in range(1, self.world)]

    def barrier(self, stream: torch.cuda.Stream) -> None:
        """Let a stream wait until all ranks have come here."""
        for peer in self.peers():
            self.set_flag(stream, peer, 0)
        for peer in self.peers():
            self.wait_flag(stream, peer, 0)

    def copy(self, to: int, to_pitch: int, of: int, of_pitch: int, width: int, height: int, stream: Any) -> None:
        """Rows of bytes from one address to another."""
        kind = self.runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        _check(self.runtime.cudaMemcpy2DAsync(to, to_pitch, of, of_pitch, width, height, kind, stream.cuda_stream))


_buffers: weakref.WeakKeyDictionary[dist.ProcessGroup, Buffer] = weakref.WeakKeyDictionary()


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
    """Keys and values [B, H_kv, S_k, D] of all ranks, in groups of heads, in this rank's buffer."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        tensors: tuple[torch.Tensor, ...],
        visible: Visible,
        heads: list[tuple[int, int]],
        by_token: bool,
    ) -> None:
        """`tensors` are this rank's shards; `heads` the first head of each group and one past the last.

        by_token: whether the tensors of all ranks lie in memory token by token, [B, S, H, D].
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
        self.main = torch.cuda.current_stream(first.device)
        buffer = self.buffer
        given = self.main.record_event()
        for stream in buffer.streams:
            stream.wait_event(given)
        buffer.barrier(buffer.pushes[0])
        buffer.pushes[1].wait_event(buffer.pushes[0].record_event())
        self.compute = buffer.compute
        self.copied: dict[int, torch.cuda.Event] = {}

    begun, taken = 0, 0
    """Groups that travel, and those that were waited for."""

    def start(self, number: int) -> None:
        """Put the copies of a group of heads on their streams."""
        buffer, low_high, self.begun = self.buffer, self.heads[number], number + 1
        for target in (buffer.rank, *buffer.peers()):
            chunks = self.visible.sends[buffer.rank][target]
            for index in range(len(self.tensors)):
                stream = buffer.local if target == buffer.rank else buffer.pushes[index % 2]
                for chunk in chunks:
                    self._push(index, target, low_high, chunk, stream)
                if target != buffer.rank:
                    buffer.set_flag(stream, target, 1 + number * len(self.tensors) + index)
        self.copied[number] = buffer.local.record_event()

    def _push(self, index: int, target: int, heads: tuple[int, int], chunk: Any, stream: torch.cuda.Stream) -> None:
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
            target_at = buffer.addresses[target] + self.at[index] + to * size, pitches[0] * size
            source_at = self.sources[index] + of * size, pitches[1] * size
            buffer.copy(*target_at, *source_at, width * size, height, stream)

    def wait(self, number: int, *streams: torch.cuda.Stream) -> list[torch.Tensor]:
        """Let streams wait for a group of heads; gives its tensors [B, heads, S_k, D]."""
        buffer, self.taken = self.buffer, number + 1
        for peer in buffer.peers():
            for index in range(len(self.tensors)):
                buffer.wait_flag(buffer.flags, peer, 1 + number * len(self.tensors) + index)
        come = buffer.flags.record_event()
        for stream in streams:
            stream.wait_event(self.copied[number])
            stream.wait_event(come)
        low, high = self.heads[number]
        return [whole[:, low:high] for whole in self.wholes]

    def finish(self) -> None:
        """Join the streams: the shards may be freed, and the buffer be filled again, after what is launched next."""
        for stream in (*self.buffer.pushes, self.buffer.local, self.buffer.flags, self.compute):
            self.main.wait_event(stream.record_event())
