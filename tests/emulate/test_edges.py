"""Where kernels' conditions turn: one key missing, scores that jump, windows, strides of more than 32 bits."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import microsdpa
from microsdpa import reference
from microsdpa.emulate import run
from microsdpa.errors import UnsupportedProblem
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, make
from microsdpa.kernels import FAMILIES

KERNELS = [family.name for family in FAMILIES]
Tensors = tuple[torch.Tensor, ...]


def assert_right(tensors: Tensors, kernel: str, **options: object) -> None:
    found = microsdpa.sdpa(*tensors, **options, return_lse=True, impl=f"emulate:{kernel}")  # type: ignore[call-overload]
    expected, expected_lse = reference.oracle(*tensors, **options)  # type: ignore[arg-type]
    plain, _ = reference.eager(*tensors, **options)  # type: ignore[arg-type]
    out, lse = found
    assert compare.tolerance(plain, expected, out.dtype).admits(compare.measure(out, expected))
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keys", [63, 65, 127, 255, 383])
@pytest.mark.parametrize("kernel", KERNELS)
def test_one_key_is_missing_or_left_over(kernel: str, keys: int) -> None:
    """A stale or foreign key would show: it lies beside the last one, and is as large as none of the others."""
    case = Case(1, 1, 70, keys, 64)
    query, key, value = make(case)
    whole = torch.cat([key, query.new_full((1, 1, 1, 64), 4.0)], dim=2), torch.cat([value, value[:, :, :1] + 99], dim=2)
    assert_right((query, whole[0][:, :, :keys], whole[1][:, :, :keys]), kernel)
    assert_right((query, whole[0][:, :, :keys], whole[1][:, :, :keys]), kernel, causal="lower_right")


@pytest.mark.parametrize("bits", [7, 9, 12, 15, 17, 20])
@pytest.mark.parametrize("place", [1, 20, 150, 290])
@pytest.mark.parametrize("kernel", KERNELS)
def test_one_score_exceeds_the_first_ones(kernel: str, place: int, bits: int) -> None:
    """Its probability is 2^bits, relative to theirs: FP16 ends below 2^16, and references move or they do not."""
    query = torch.ones(1, 1, 16, 64).half()
    key, value = torch.zeros(1, 1, 320, 64).half(), torch.randn(1, 1, 320, 64).half()
    key[:, :, place] = bits * 0.6931 / 8.0
    assert_right((query, key, value), kernel)


@pytest.mark.parametrize("left", [0, 5, 63, 64, 65, 100])
@pytest.mark.parametrize("seqlen_q", [3, 40])
def test_a_window_begins_anywhere_in_a_tile(seqlen_q: int, left: int) -> None:
    tensors = make(Case(1, 2, seqlen_q, 200, 64))
    for kernel in ("ampere/general", *(["ampere/mma"] if seqlen_q <= 16 else [])):
        assert_right(tensors, kernel, causal="lower_right", window=(left, 0))


FAR = 2**31 + 64
"""Elements from one batch entry, head or row to the next: more than 32 bits count, and 2^32 bytes and more."""


def far_apart(tensor: torch.Tensor, dimension: int) -> torch.Tensor:
    """The tensor with FAR elements from one index of a dimension of size 2 to the next."""
    strides = list(tensor.stride())
    strides[dimension] = FAR
    wide = torch.empty(2**31 + 2**16, dtype=tensor.dtype).as_strided(tensor.shape, strides)
    return wide.copy_(tensor)


@pytest.fixture(params=["query", "key", "value", "out"])
def spread(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("dimension", [0, 1, 2], ids=["batch", "head", "row"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_strides_are_followed_in_64_bits(kernel: str, dimension: int, spread: str) -> None:
    tensors = dict(zip(("query", "key", "value"), make(Case(2, 2, 2, 2, 64)), strict=True))
    try:
        expected = microsdpa.sdpa(**tensors, impl=f"emulate:{kernel}")
    except UnsupportedProblem as refusal:
        pytest.skip(str(refusal))
    given = tensors | {"out": torch.full_like(tensors["query"], torch.nan)}
    given[spread] = far_apart(given[spread], dimension)
    assert run._extent(given[spread]) > run.SPARSE
    microsdpa.sdpa(**given, impl=f"emulate:{kernel}")
    assert torch.equal(given["out"], expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("dimension", [0, 1, 2], ids=["batch", "head", "row"])
@pytest.mark.parametrize("kernel", ["ampere/mma", "ampere/general"])
def test_strides_of_masks_are_followed_in_64_bits(kernel: str, dimension: int) -> None:
    tensors = make(Case(2, 2, 2, 40, 64))
    mask = torch.rand(2, 2, 2, 40) < 0.6
    expected = microsdpa.sdpa(*tensors, attn_mask=mask, impl=f"emulate:{kernel}")
    found = microsdpa.sdpa(*tensors, attn_mask=far_apart(mask, dimension), impl=f"emulate:{kernel}")
    assert torch.equal(found, expected)  # type: ignore[arg-type]


LACKING = """
import resource, torch, microsdpa
from microsdpa.emulate.run import EmulationError
inputs = [torch.ones(1, 1, 16, 64, dtype=torch.float16) for _ in range(3)]
microsdpa.sdpa(*inputs, impl="emulate:ampere/mma")
out = torch.empty(2**31, dtype=torch.float16).as_strided((1, 1, 16, 64), (2**31, 2**31, 2**26, 1))
with open("/proc/self/statm") as pages:
    used = int(pages.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**33, used + 2**33))
try:
    microsdpa.sdpa(*inputs, out=out, impl="emulate:ampere/mma")
except EmulationError as error:
    print(error)
"""
"""The output takes 4 GB of addresses, and what the emulator knows of it 32 times as many; there are 8 GB left."""


def test_a_process_without_memory_gets_an_error() -> None:
    run = subprocess.run([sys.executable, "-c", LACKING], capture_output=True, text=True, check=True)
    assert "the emulator lacks memory for this launch" in run.stdout
