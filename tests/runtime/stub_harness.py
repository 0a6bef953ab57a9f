"""What the tests against the stub driver share: a call's arguments, the kernels of a plan, a clean state."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fake_cuda import KDL_BFLOAT, integer, last, record, set_context, set_integer, tensor

from microsdpa.runtime import launcher

SHAPE = (2, 4, 16, 32)
KV = (2, 2, 24, 32)
ADDRESSES = (0x100000, 0x200000, 0x300000, 0x400000)
PRIMARY = 0x1000
LAUNCH_FAILED = 719
NO_MEMORY = 0
"""The address of a tensor that a tracer shows, as torch's FakeTensor."""
UNCHANGED, NO_VARLEN = launcher.NO_CHANGED_ROWS, launcher.NO_VARLEN
LSE_BYTES = 2 * 4 * 16 * 4
library = launcher._library


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    library.clear_plans()
    set_context(0)
    set_integer("stub_error", 0)
    record.pushes = record.pops = 0
    yield
    assert record.pushes == record.pops


def call(**changes: Any) -> list[Any]:
    """Arguments of launch(): aligned, contiguous, apart from one another."""
    arguments = {
        "query": tensor(SHAPE, ADDRESSES[0]),
        "key": tensor(KV, ADDRESSES[1]),
        "value": tensor(KV, ADDRESSES[2]),
        "out": tensor(SHAPE, ADDRESSES[3]),
        "lse": None,
        "options": 5,
        "scale": None,
    }
    return list((arguments | changes).values())


OF_LAUNCH = 11
"""Integers of a launch, ahead of those of its parameter."""


def kernel(
    function: int = 0x3000, grid: tuple[int, ...] = (7, 1, 1), maps: tuple[int, ...] = (), **fields: int
) -> list[int]:
    """The integers of a plan's kernel, whose parameter is that of kernels with 16-bit operands.

    `maps` are (operand, rows, columns, swizzle, heads) of its tensor maps, which describe the operands themselves.
    """
    flags = {"programmatic": 0, "heads_as_queries": 0, "sequence_rows": 0, "sequence_keys": 0}
    rest = {"threads": 128, "shared_bytes": 4096, "cluster": 1} | flags | fields
    boxes = [maps[i : i + 5] for i in range(0, len(maps), 5)]
    own = [0, 0, 0, 0]  # only_with_lse; bytes of a parameter, addresses and numbers of its own
    launch = [function, *grid, *rest.values()]
    assert len(launch) == OF_LAUNCH
    return [*launch, *own, len(boxes), *(n for box in boxes for n in (*box, *[0] * 10))]


def address_of(tensor: Any) -> int:
    """Where a tensor of tvm_ffi lies: the first field of what it exports. Versions before 0.1.12 do not tell it."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    exported = tensor.__dlpack__()
    return ctypes.c_void_p.from_address(pointer(exported, b"dltensor")).value or 0


def check_allocated_lse(lse: Any, address: int, among_others: bool = False) -> None:
    """What a launch with lse=True gave is FP32 of [B, H, S_q] at the address that the kernel got.

    It was the latest memory to be allocated, unless a call allocates `among_others`.
    """
    assert (tuple(lse.shape), str(lse.dtype)) == (SHAPE[:3], "float32")
    assert tuple(lse.strides) == (4 * 16, 16, 1)
    assert address_of(lse) == address != 0
    assert among_others or integer("stub_last_bytes") == LSE_BYTES


def packed(*integers: int) -> bytes:
    return struct.pack(f"{len(integers)}q", *integers)


def register(
    arguments: list[Any],
    kernels: list[list[int]] | None = None,
    workspace_bytes: int = 0,
    growth: tuple[int, int] = (1, 0),
    varlen: tuple[int, ...] = NO_VARLEN,
    changed: tuple[int, int, int] = UNCHANGED,
) -> None:
    """Register the plan of a call's arguments, whatever of them there are."""
    kernels = kernels or [kernel()]
    plan = PRIMARY, workspace_bytes, *growth, *varlen, *changed, len(kernels)
    numbers = packed(*plan, *(n for each in kernels for n in each))
    library.register_plan(numbers, b"", *arguments)


def prepared(arguments: list[Any]) -> Any:
    return library.prepared_call(*arguments)


@pytest.fixture
def _programmatic() -> Iterator[None]:
    launcher.set_programmatic(True)
    yield
    launcher.set_programmatic(True)


@dataclass(frozen=True)
class Map:
    """What the stub was asked to encode."""

    address: int
    dtype: int
    rank: int
    interleave: int
    swizzle: int
    promotion: int
    fill: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]

    @staticmethod
    def of(words: Any) -> Map:
        """Read the words that the stub wrote."""
        box, steps = (tuple(word >> shift & 0xFFFF for shift in (0, 16, 32, 48)) for word in words[14:16])
        return Map(*words[:7], tuple(words[7:11]), tuple(words[11:14]), box, steps)


FLOAT16, BFLOAT16, UINT8 = 6, 9, 0
PROMOTION_256B = 3
ALL_MAPS = (0, 64, 32, 64, 0, 1, 80, 32, 128, 0, 2, 16, 16, 32, 0, 3, 8, 32, 0, 0)


def maps_of_last(count: int = 4) -> list[Map]:
    return [Map.of(list(words)) for words in last().tensor_maps[:count]]


@pytest.fixture
def _four_maps() -> Iterator[None]:
    set_integer("stub_tensor_maps", 4)
    yield
    set_integer("stub_tensor_maps", 0)


MISSES = {
    "shape": {"query": tensor((2, 4, 17, 32), 0x100000), "out": tensor((2, 4, 17, 32), 0x400000)},
    "strides": {"value": tensor(KV, 0x300000, strides=(24 * 2 * 32, 32, 64, 1))},
    "dtype": {"key": tensor(KV, 0x200000, code=KDL_BFLOAT)},
    "device": {"value": tensor(KV, 0x300000, device=1)},
    "options": {"options": 6},
    "misaligned": {"query": tensor(SHAPE, 0x100002)},
    "misaligned out": {"out": tensor(SHAPE, 0x400008)},
    "no out of that layout": {"out": tensor(SHAPE, 0x400000, strides=(4 * 16 * 32, 32, 128, 1))},
    "rank": {"query": tensor((4, 16, 32), 0x100000)},
    "CPU tensor": {"key": torch.zeros(KV, dtype=torch.float16)},
    "NaN scale": {"scale": math.nan},
    "infinite scale": {"scale": math.inf},
    "scale of float64": {"scale": -1e300},
    "out is query": {"out": tensor(SHAPE, 0x100000)},
    "out ends inside key": {"out": tensor(SHAPE, 0x200000 - 16)},
    "out starts inside value": {"out": tensor(SHAPE, 0x300000 + 2 * 2 * 24 * 32 * 2 - 16)},
    "query without memory": {"query": tensor(SHAPE, NO_MEMORY)},
    "key without memory": {"key": tensor(KV, NO_MEMORY)},
    "value without memory": {"value": tensor(KV, NO_MEMORY)},
    "out without memory": {"out": tensor(SHAPE, NO_MEMORY)},
}
