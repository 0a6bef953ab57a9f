"""Where pushes land: three ranks in one process, whose copy engines are memmove."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from microsdpa.distributed import all_gather, layout, symmetric, visible
from microsdpa.distributed.operations import CALLERS, NUMBERS, Code, Operations

WORLD = 3
EVENTS = range(0x21, 0x29)


class _Stream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


def operations_of(given: Operations) -> list[tuple[Code, int, int, list[int]]]:
    """Code, stream, operand and numbers of each operation."""
    each = [given.numbers[at : at + 3 + NUMBERS] for at in range(0, len(given.numbers), 3 + NUMBERS)]
    return [(Code(code), stream, operand, numbers) for code, stream, operand, *numbers in each]


class _Buffer(symmetric.Buffer):
    """A rank's view of all memories. What it plays happens at once, and flags are remembered."""

    def __init__(self, rank: int, memories: list[torch.Tensor], flags: set[int]) -> None:
        self.rank, self.world, self.memory, self.flags_set = rank, WORLD, memories[rank], flags
        self.addresses = [memory.data_ptr() for memory in memories]
        first, second, self.local, self.flags, self.compute = (_Stream(0x11 + number) for number in range(5))  # type: ignore[assignment]
        self.pushes = [first, second]  # type: ignore[list-item]
        self.events, self.played = list(EVENTS), Operations()
        self.behind: dict[int, set[int]] = {}

    def barrier(self, operations: Operations, stream: int) -> None: ...

    def play(self, operations: Operations, stream: object) -> None:
        self.played.numbers += operations.numbers
        for code, at, _, (first, second, third, fourth, width, height) in operations_of(operations):
            if code == Code.COPY:
                for row in range(height):
                    ctypes.memmove(first + row * second, third + row * fourth, width)
            elif code == Code.WRITE and second:
                assert first not in self.flags_set, "a flag is set twice"
                self.flags_set.add(first)
            elif code == Code.AWAIT_VALUE:
                assert second == 1
                self.taken_by = at
            elif code == Code.WRITE:
                self.flags_set.remove(first)  # KeyError: nobody sets it
                assert self.taken_by == at, "a flag is taken back by the stream that waited for it"
            self._follow(code, at, first)

    def _follow(self, code: Code, stream: int, event: int) -> None:
        """Which streams have waited for what was on others."""
        seen = self.behind.setdefault(stream, {stream})
        if code == Code.RECORD:
            self.behind[event] = set(seen)
        elif code == Code.AWAIT_EVENT:
            seen |= self.behind[event]  # KeyError: nobody records it


def memories() -> list[torch.Tensor]:
    return [torch.full((symmetric.FLAGS + 2**17,), 0xFF, dtype=torch.uint8) for _ in range(WORLD)]


@pytest.fixture(autouse=True)
def _stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: _Stream(0))


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("order", ["balanced", "contiguous"])
@pytest.mark.parametrize("seqlen", [37, 5])
@pytest.mark.parametrize("masks", [(None, (-1, -1)), ("lower_right", (5, -1)), ("upper_left", (-1, -1))])
def test_every_rank_gets_what_it_sees(
    monkeypatch: pytest.MonkeyPatch,
    masks: tuple[Any, tuple[int, int]],
    seqlen: int,
    order: Any,
    by_token: bool,
    spread: bool,
) -> None:
    every = memories()
    spans = layout.even(seqlen, WORLD, order)
    seen = visible.Visible(spans, spans, *masks, False)
    whole = [torch.randn(2, 4, seqlen, 16).half() for _ in range(2)]
    flags: set[int] = set()
    gathers = []
    for rank in range(WORLD):
        buffer = _Buffer(rank, every, flags)
        monkeypatch.setattr(symmetric, "buffer_for", lambda *_, buffer=buffer: buffer)
        shards = [layout.take(tensor, spans, rank, 2) for tensor in whole]
        if by_token:
            shards = [shard.transpose(1, 2).contiguous().transpose(1, 2) for shard in shards]
        gather = symmetric.Gather(None, tuple(shards), seen, [(0, 1), (1, 4)], by_token, spread)  # type: ignore[arg-type]
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


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("heads", [[(0, 4)], [(0, 1), (1, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)]])
def test_a_recorded_list_is_what_is_played_step_by_step(
    monkeypatch: pytest.MonkeyPatch, heads: list[tuple[int, int]], spread: bool
) -> None:
    """And the caller's stream is ahead of all others at first, and behind all of them in the end."""
    spans = layout.even(40, WORLD, "balanced")
    seen = visible.Visible(spans, spans, "upper_left", (-1, -1), False)
    shards = [torch.randn(1, 4, spans.lengths[1], 16).half() for _ in range(2)]
    lists, every = [], memories()
    for recorded in (False, True):
        buffer = _Buffer(1, every, set())
        monkeypatch.setattr(buffer, "wait_flag", lambda operations, *given: operations.await_value(given[0], 0, 1))
        monkeypatch.setattr(symmetric, "buffer_for", lambda *_, buffer=buffer: buffer)
        gather = symmetric.Gather(None, tuple(shards), seen, heads, False, spread, recorded)  # type: ignore[arg-type]
        gather.start(0)
        for number in range(len(heads)):
            if number + 1 < len(heads):
                gather.start(number + 1)
            gather.wait(number)
        gather.finish()
        lists.append(gather.operations if recorded else buffer.played)
        if recorded:
            assert not buffer.played.numbers
        else:
            others = {stream for _, stream, _, _ in operations_of(buffer.played)} - {CALLERS}
            assert others == {0x11, 0x12, 0x13, *((0x14, 0x15) if spread else ())}
            assert buffer.behind[CALLERS] == {CALLERS, *others}
            assert all(CALLERS in buffer.behind[stream] for stream in others)
    assert lists[0].numbers == lists[1].numbers
    codes = [code for code, *_ in operations_of(lists[0])]
    assert codes.count(Code.AWAIT_VALUE) == 2 * (WORLD - 1) * len(heads)


def test_parts_of_a_shard_that_lie_side_by_side_are_sent_as_one() -> None:
    spans = layout.even(64, 2, "balanced")  # rank 0 has the first and the last quarter, rank 1 those between
    every = visible.Visible(spans, spans, None, (-1, -1), False)
    assert every.sends[1] == ((layout.Chunk(16, 32, 0),),) * 2
    assert every.sends[0] == ((layout.Chunk(0, 16, 0), layout.Chunk(48, 16, 16)),) * 2
    causal = visible.Visible(spans, spans, "upper_left", (-1, -1), False)
    assert causal.sends[0][1] == (layout.Chunk(0, 16, 0),)
