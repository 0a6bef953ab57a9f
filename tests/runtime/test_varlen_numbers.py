"""Numbers that the launcher has in C++ and the choice of kernels in Python: both say which calls share a plan."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from microsdpa.call import sequences
from microsdpa.kernels import policy
from microsdpa.kernels.ampere.varlen import spec as ampere
from microsdpa.kernels.hopper.varlen import spec as hopper

HEADER = "".join((files("microsdpa") / "runtime" / name).read_text() for name in ("varlen.h", "sequences.h"))


def value(name: str) -> int:
    """What the launcher's headers say that a constant is."""
    (found,) = re.findall(rf"\b{name} = (.*?)[,;]\s*(?:[A-Z]|//|$)", HEADER, re.MULTILINE)
    return int(eval(found.replace("std::int64_t", "int"), {"__builtins__": {}}, {"int": int}))


def table(name: str) -> list[tuple[int, ...]]:
    """Rows of one of its tables."""
    (found,) = re.findall(rf"\b{name}\[\] = \{{(.*)\}};", HEADER)
    return [tuple(map(int, row.split(","))) for row in re.findall(r"\{(.*?)\}", found)]


COSTS_OF_SHARING = "SHARING_COSTS", "LEAST_SHARE", "WORTH", "APART", "MOST_AT_ONCE", "MOST_TAKEN"


def test_the_kernel_shares_keys_by_the_same_numbers() -> None:
    folder = files("microsdpa") / "kernels/hopper/varlen"
    kernel = "".join((folder / name).read_text() for name in ("scheduler.cuh", "shared.cuh"))
    for name in COSTS_OF_SHARING:
        assert re.findall(rf"\b{name} = (\d+)[,;]", kernel) == [str(getattr(hopper, name))], name
    assert f"L2_BYTES = {hopper.L2_BYTES >> 20} << 20;" in kernel


def test_tables_of_clusters() -> None:
    assert table("SHARING") == [(each.units, each.keys, each.wide_from) for each in ampere.SHARING]
    assert table("SHARING_OF_HOPPER") == [(each.units, each.keys, 0) for each in hopper.SHARING]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, getattr(ampere, name)) for name in ("MOST_KEYS", "MOST_WORK", "FEW_KEYS", "SPLIT_KEYS")),
        *((name, getattr(ampere, name)) for name in ("FEWEST_NARROW_KEYS", "MOST_FEW_KEYS")),
        ("MOST_KEYS_OF_MMA", policy.MOST_KEYS_OF_MMA),
        *((name, getattr(hopper, name)) for name in ("WAVES", "FEWEST_LARGE", "LONG_KEYS")),
        ("LARGEST_GRANULARITY", sequences.LARGEST_GRANULARITY),
        *((name, getattr(hopper, name)) for name in COSTS_OF_SHARING),
        ("BYTES_OF_L2", hopper.L2_BYTES),
    ],
)
def test_numbers(name: str, expected: int) -> None:
    assert value(name) == expected
