"""Attention over two ranks of one host against the stub driver: what a warm call does; run by test_launcher.py.

This process is one rank of a group that torch fakes. Its tensors are on a CPU, which the launcher of these tests takes
for a GPU, and its buffer is not shared with anyone.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import tvm_ffi
from fake_cuda import AWAIT_VALUE, COPY, LAUNCH, WRITE, forget_operations, operations, set_integer
from stub_harness import NO_VARLEN, PRIMARY, UNCHANGED, kernel, packed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from microsdpa.attention import api as sdpa_api
from microsdpa.distributed import agree, all_gather, api, symmetric
from microsdpa.errors import MicrosdpaError
from microsdpa.runtime import launcher
from microsdpa.runtime.direct import direct

library = tvm_ffi.load_module(str(Path(os.environ["LD_LIBRARY_PATH"].partition(":")[0]) / "cpu_launcher.so"))
SEQLEN, HEADS, HEADS_KV = 1024, 8, 4
FOREIGN = "foreign calls"


class _Stream:
    """A stream of torch's, of which nothing but the handle may be used on the way of a warm call."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


class _Buffer(symmetric.Buffer):
    """The buffer of one of two ranks; the other's is memory of this process, too."""

    def __init__(self, group: dist.ProcessGroup, capacity: int, device: torch.device) -> None:
        self.capacity, self.device = capacity, device
        self.rank, self.world, self.context = group.rank(), 2, PRIMARY
        memories = [torch.zeros(symmetric.FLAGS + capacity, dtype=torch.uint8) for _ in range(2)]
        self.memory, self.kept = memories[self.rank], memories
        self.addresses = [memory.data_ptr() for memory in memories]
        first, second, self.local, self.flags, self.compute = (_Stream(0x11 + number) for number in range(5))  # type: ignore[assignment]
        self.pushes = [first, second]  # type: ignore[list-item]
        self.events = list(range(0x21, 0x29))
        self.prepared = {}


class _Peers(agree.Peers):
    """The other rank says what this one does."""

    calls = 0

    def exchange(self, mine: Any) -> list[Any]:
        self.calls += 1
        return [mine._replace(device="cuda")] * 2


class _Operators(TorchDispatchMode):
    """What torch's dispatcher is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often the launcher is called, from here on."""
    found: Counter[str] = Counter()
    library.clear_plans()
    symmetric._buffers.clear()
    agree._peers.clear()
    forget_operations()
    launch = direct(library, library.sdpa)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            found[FOREIGN] += 1
            return function(*arguments)

        return call

    def sdpa(*arguments: Any) -> Any:
        """The launch of a call, which makes its plan."""
        result = launch(*arguments)
        if result is None:
            numbers = packed(PRIMARY, 0, 1, 0, *NO_VARLEN, *UNCHANGED, 1, *kernel())
            library.register_plan(numbers, b"", *arguments)
            result = launch(*arguments)
        return result

    monkeypatch.setattr(sdpa_api, "_launch_or_kind", counted(sdpa))
    monkeypatch.setattr(launcher, "_library", library)
    monkeypatch.setattr(launcher, "play", counted(library.play))
    monkeypatch.setattr(launcher, "direct", lambda owner, function: counted(direct(owner, function)))
    monkeypatch.setattr(symmetric, "Buffer", _Buffer)
    monkeypatch.setattr(agree, "Peers", _Peers)
    current = _Stream(0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    yield found
    set_integer("stub_refused", -1)


def inputs(seqlen: int = SEQLEN, batch: int = 1) -> list[torch.Tensor]:
    """This rank's shards."""
    shapes = [(batch, heads, seqlen // 2, 64) for heads in (HEADS, HEADS_KV, HEADS_KV)]
    return [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]


def attend(tensors: list[torch.Tensor], **options: Any) -> Any:
    given = {"causal": "upper_left", "enable_gqa": True, "lengths": 2 * tensors[0].shape[2], "method": "all_gather"}
    return api.attention(*tensors, **given | options)  # type: ignore[arg-type]


def buffer() -> symmetric.Buffer:
    (found,) = symmetric._buffers.values()
    return found


KINDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "no mask": {"causal": None},
    "a window": {"window": (100, 0)},
    "a soft cap": {"softcap": 3.0, "scale": 0.2},
    "an LSE": {"return_lse": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_call_is_one_foreign_call(counts: Counter[str], kind: str) -> None:
    """It allocates the output, and the LSE that is asked for, and asks torch for nothing else."""
    tensors = inputs()
    for _ in range(2):
        attend(tensors, **KINDS[kind])
    counts.clear(), forget_operations()
    with _Operators() as operators:
        attend(tensors, **KINDS[kind])
    assert counts == {FOREIGN: 1}
    expected = ["empty_like.default"] + ["new_empty.default"] * (kind == "an LSE")
    assert [name for name in operators.names if not name.startswith(("alias", "detach"))] == expected
    assert any(code == LAUNCH for code, _, _ in operations())


def test_what_a_warm_call_puts_on_streams(counts: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch: its stream takes the flags itself, and the one beside it stays out of it."""
    monkeypatch.setattr(api.model, "head_groups", lambda problem, machine=None: [(0, HEADS_KV)])
    tensors = inputs()
    attend(tensors)
    forget_operations()
    attend(tensors)
    found = operations()
    codes = Counter(code for code, _, _ in found)
    # Own copies of K and V, of a shard whose chunks are side by side, and those for the other rank; a barrier and a
    # flag for each of the two; the launch.
    assert (codes[COPY], codes[WRITE], codes[AWAIT_VALUE], codes[LAUNCH]) == (4, 6, 3, 1)
    assert len(found) == 25
    assert {stream for _, stream, _ in found} == {0, 0x11, 0x12, 0x13}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [[(0, 4)], [(0, 1), (1, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)]])
def test_it_is_what_the_long_way_puts_on_streams(
    counts: Counter[str], kind: str, groups: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same operations in the same order, and launches of the same tensors, moved with them."""
    monkeypatch.setattr(api.model, "head_groups", lambda problem, machine=None: groups)
    long, tensors = [], inputs()
    with monkeypatch.context() as patched:
        patched.setattr(all_gather, "_record", lambda *given: None)
        for _ in range(2):
            forget_operations()
            result = attend(tensors, **KINDS[kind])
            long = operations()
    out = result[0] if isinstance(result, tuple) else result
    attend(tensors, **KINDS[kind])
    if (kind, len(groups)) == ("an LSE", 1) or kind != "an LSE":
        assert list(buffer().prepared.values()) != [None]
    forget_operations()
    again = [tensor.clone() for tensor in tensors]
    result = attend(again, **KINDS[kind])
    warm_out = result[0] if isinstance(result, tuple) else result
    warm = operations()
    assert [(code, stream) for code, stream, _ in warm] == [
        # fakes of streams do not become current, so that the long way launches on the caller's
        (code, warm[at][1] if code == LAUNCH else stream)
        for at, (code, stream, _) in enumerate(long)
    ]
    places = [(one.data_ptr(), other.data_ptr(), one.nbytes) for one, other in zip(tensors, again, strict=True)]
    places.append((out.data_ptr(), warm_out.data_ptr(), out.nbytes))
    for (code, _, one), (_, _, other) in zip(long, warm, strict=True):
        numbers = one[:2] if code == LAUNCH else one
        moved = [number + _moved(number, places) for number in numbers]
        assert moved == list(other[: len(moved)])


def _moved(number: int, places: list[tuple[int, int, int]]) -> int:
    """How far the tensor that an address lies in has moved."""
    return next((new - old for old, new, size in places if old <= number < old + size), 0)


def test_launches_take_turns_on_two_streams(counts: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.model, "head_groups", lambda problem, machine=None: [(0, 1), (1, 4)])
    tensors = inputs()
    attend(tensors, window=(100, 0))
    forget_operations()
    attend(tensors, window=(100, 0))
    assert [stream for code, stream, _ in operations() if code == LAUNCH] == [0x15, 0, 0x15, 0]


def test_an_lse_of_rows_apart_goes_the_long_way(counts: Counter[str]) -> None:
    """Kernels write contiguous ones alone: heads of two sequences, or chunks of a shard, are copied."""
    tensors = inputs()
    for _ in range(2):
        attend(tensors, window=(100, 0), return_lse=True)
    assert list(buffer().prepared.values()) == [None]


def test_other_kinds_of_calls_are_not_mixed_up(counts: Counter[str]) -> None:
    """Strides, options and lengths: each has its own list, and what is misaligned goes the long way."""
    tensors = inputs()
    by_token = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    for given, options in ((tensors, {}), (by_token, {}), (tensors, {"softcap": 2.0}), (inputs(512), {})):
        for _ in range(2):
            attend(given, **options)
        counts.clear()
        attend(given, **options)
        assert counts == {FOREIGN: 1}
    assert len(buffer().prepared) == 4
    memory = torch.zeros(tensors[0].numel() + 1, dtype=torch.bfloat16)
    query = memory[1:].view(tensors[0].shape)
    counts.clear()
    attend([query, *tensors[1:]])
    assert counts[FOREIGN] > 1


def test_shards_that_have_to_be_copied_first_go_the_long_way(counts: Counter[str]) -> None:
    query, key, value = inputs()
    wide = torch.zeros(*key.shape[:3], key.shape[3] + 8, dtype=key.dtype)[..., : key.shape[3]]
    for _ in range(2):
        attend([query, wide, value])
    assert list(buffer().prepared.values()) == [None]


def test_the_table_of_lists_is_bounded(counts: Counter[str]) -> None:
    for number in range(symmetric.MAX_PREPARED + 5):
        attend(inputs(), softcap=1.0 + number)
        assert 0 < len(buffer().prepared) <= symmetric.MAX_PREPARED
    counts.clear()
    attend(inputs(), softcap=1.0 + number)
    assert counts == {FOREIGN: 1}


def test_a_larger_buffer_has_lists_of_its_own(counts: Counter[str]) -> None:
    for _ in range(2):
        attend(inputs())
    before = buffer()
    attend(inputs(2 * SEQLEN))
    assert buffer() is not before
    assert len(buffer().prepared) == 1
    forget_operations()
    attend(inputs())
    assert len(buffer().prepared) == 2
    own = range(buffer().memory.data_ptr(), buffer().memory.data_ptr() + buffer().memory.nbytes)
    attend(inputs())
    flags = [numbers[0] for code, _, numbers in operations() if code == AWAIT_VALUE]
    assert flags
    assert all(address in own for address in flags)


def test_ranks_speak_at_the_first_call_of_a_kind_and_without_lengths(counts: Counter[str]) -> None:
    tensors = inputs()
    peers = agree.peers(dist.group.WORLD)  # type: ignore[arg-type]
    assert isinstance(peers, _Peers)
    for _ in range(3):
        attend(tensors)
    assert peers.calls == 1
    for expected in (2, 3, 4):
        attend(tensors, lengths=None)
        assert peers.calls == expected
    counts.clear()
    attend(tensors, lengths=None)
    assert counts == {FOREIGN: 1}


def test_an_operation_that_is_refused_is_an_error(counts: Counter[str]) -> None:
    tensors = inputs()
    for _ in range(2):
        attend(tensors)
    counts.clear()
    set_integer("stub_refused", COPY)
    with pytest.raises(MicrosdpaError, match=r"cuMemcpy2DAsync failed .*; use transport='collective'"):
        attend(tensors)
    assert counts == {FOREIGN: 1}
    set_integer("stub_refused", -1)
    attend(tensors)


def test_an_output_that_finds_no_memory_goes_the_long_way(
    counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which sends and takes what others wait for, ahead of the error."""
    tensors = inputs()
    attend(tensors)
    forget_operations()
    attend(tensors)
    expected = [one for one in operations() if one[0] != LAUNCH]

    def full(*given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(all_gather, "_results", full)
    with pytest.raises(torch.OutOfMemoryError):
        attend(tensors)
    assert operations() == expected
