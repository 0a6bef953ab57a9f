"""Operations of streams as a list of integers, which the launcher plays in one call (runtime/exchange.h)."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

CALLERS = -1
"""In the place of a stream's handle: the stream that is current when the list is played."""
NO_TENSOR = -1
NUMBERS = 6


class Code(IntEnum):
    """What an operation does."""

    COPY = 0
    WRITE = 1
    AWAIT_VALUE = 2
    RECORD = 3
    AWAIT_EVENT = 4
    LAUNCH = 5


class Operand(IntEnum):
    """A tensor that is copied from: the copy follows it to other addresses."""

    KEY = 1
    VALUE = 2


class Rows(NamedTuple):
    """Rows of bytes: the first one's address, and bytes from each to the next."""

    address: int
    pitch: int


class Operations:
    """A list of operations. Streams and events are handles of the driver."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def _add(self, code: Code, stream: int, *numbers: int, tensor: int = NO_TENSOR) -> None:
        self.numbers += (code, stream, tensor, *numbers, *[0] * (NUMBERS - len(numbers)))

    def copy(self, stream: int, to: Rows, of: Rows, size: tuple[int, int], operand: Operand) -> None:
        """Copy rows; `size` is bytes of a row, and rows."""
        self._add(Code.COPY, stream, *to, *of, *size, tensor=operand)

    def write(self, stream: int, address: int, value: int) -> None:
        """Write 32 bits, once what is on the stream before is done and seen."""
        self._add(Code.WRITE, stream, address, value)

    def await_value(self, stream: int, address: int, value: int) -> None:
        """Let a stream wait until 32 bits have a value."""
        self._add(Code.AWAIT_VALUE, stream, address, value)

    def record(self, stream: int, event: int) -> None:
        """Record an event."""
        self._add(Code.RECORD, stream, event)

    def await_event(self, stream: int, event: int) -> None:
        """Let a stream wait for what was recorded last."""
        self._add(Code.AWAIT_EVENT, stream, event)

    def launch(self, stream: int, number: int) -> None:
        """Launch one of the calls that the list is prepared with."""
        self._add(Code.LAUNCH, stream, number)

    def packed(self) -> bytes:
        """What the launcher takes."""
        return struct.pack(f"{len(self.numbers)}q", *self.numbers)
