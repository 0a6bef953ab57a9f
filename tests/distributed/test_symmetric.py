"""Where pushes land: three ranks in one process, whose copy engines are memmove."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from microsdpa.distributed import all_gather, layout, symmetric, visible

WORLD = 3


class _Stream:
    cuda_stream = 0

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self) -> int:
        return 0


class _Buffer:
    """A rank's view of all memories; it remembers flags."""

    def __init__(self, rank: int, memories: list[torch.Tensor], flags: set[tuple[int, int, int]]) -> None:
        self.rank, self.world, self.memory, self.flags_set = rank, WORLD, memories[rank], flags
        self.addresses = [memory.data_ptr() for memory in memories]
        self.pushes, self.local, self.flags, self.compute = [_Stream(), _Stream()], _Stream(), _Stream(), _Stream()
        self.streams = [*self.pushes, self.local, self.flags, self.compute]

    peers = symmetric.Buffer.peers

    def barrier(self, stream: object) -> None: ...

    def set_flag(self, stream: object, target: int, number: int) -> None:
        assert (self.rank, target, number) not in self.flags_set, "a flag is set twice"
        self.flags_set.add((self.rank, target, number))

    def wait_flag(self, stream: object, source: int, number: int) -> None:
        self.flags_set.remove((source, self.rank, number))  # KeyError: nobody sets it

    def copy(self, to: int, to_pitch: int, of: int, of_pitch: int, width: int, height: int, stream: object) -> None:
        for row in range(height):
            ctypes.memmove(to + row * to_pitch, of + row * of_pitch, width)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("order", ["balanced", "contiguous"])
@pytest.mark.parametrize("seqlen", [37, 5])
@pytest.mark.parametrize("masks", [(None, (-1, -1)), ("lower_right", (5, -1)), ("upper_left", (-1, -1))])
def test_every_rank_gets_what_it_sees(
    monkeypatch: pytest.MonkeyPatch, masks: tuple[Any, tuple[int, int]], seqlen: int, order: Any, by_token: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: _Stream())
    memories = [torch.full((symmetric.FLAGS + 2**17,), 0xFF, dtype=torch.uint8) for _ in range(WORLD)]
    spread = layout.even(seqlen, WORLD, order)
    seen = visible.Visible(spread, spread, *masks, False)
    whole = [torch.randn(2, 4, seqlen, 16).half() for _ in range(2)]
    flags: set[tuple[int, int, int]] = set()
    gathers = []
    for rank in range(WORLD):
        buffer = _Buffer(rank, memories, flags)
        monkeypatch.setattr(symmetric, "buffer_for", lambda *_, buffer=buffer: buffer)
        shards = [layout.take(tensor, spread, rank, 2) for tensor in whole]
        if by_token:
            shards = [shard.transpose(1, 2).contiguous().transpose(1, 2) for shard in shards]
        gather = symmetric.Gather(None, tuple(shards), seen, [(0, 1), (1, 4)], by_token)  # type: ignore[arg-type]
        for number in range(2):
            gather.start(number)
        gathers.append(gather)
    with pytest.raises(RuntimeError, match="here"), all_gather.kept_up(gathers[0]):
        raise RuntimeError("here")  # what this rank has not taken yet it takes now
    assert gathers[0].taken == 2
    for rank, gather in list(enumerate(gathers))[1:]:
        for number, (low, high) in enumerate(gather.heads):
            for found, tensor in zip(gather.wait(number), whole, strict=True):
                for start, stop in seen.needs[rank]:
                    assert torch.equal(found[:, :, start:stop], tensor[:, low:high, start:stop])
    assert not flags, "flags that nobody waits for"
