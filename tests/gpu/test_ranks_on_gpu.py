"""Attention over two GPUs of one host: calls that play their list of operations, beside one GPU's attention.

    torchrun --nproc-per-node 2 tests/gpu/test_ranks_on_gpu.py

The test runs that command.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import microsdpa
from microsdpa.distributed import attention, shard, symmetric
from microsdpa.errors import MicrosdpaError

COUNT = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(COUNT < 2, reason=f"needs 2 GPUs, this machine has {COUNT}"),
]
ATOL, RTOL = 1e-2, 2**-6
KINDS: dict[str, dict[str, Any]] = {
    "causal": {"causal": "upper_left"},
    "no mask": {},
    "a window": {"causal": "lower_right", "window": (300, -1)},
    "a soft cap": {"causal": "lower_right", "softcap": 20.0},
}
SIZES = {
    "one launch": (1, 32, 8, 8192, 128),
    "two sequences": (2, 8, 4, 2048, 64),
    "two groups of heads": (1, 4, 4, 1024, 128),
    "many launches": (1, 32, 8, 32768, 128),
    "lengths that do not divide": (1, 8, 2, 4099, 64),
}
Sizes = tuple[int, int, int, int, int]


def tensors(sizes: Sizes, seed: int = 0) -> list[torch.Tensor]:
    """The same whole query, key and value on every rank."""
    batch, heads, heads_kv, seqlen, head_dim = sizes
    random = torch.Generator(device="cuda").manual_seed(seed)
    shapes = [(batch, count, seqlen, head_dim) for count in (heads, heads_kv, heads_kv)]
    return [torch.randn(shape, generator=random, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, shard(wanted), atol=ATOL, rtol=RTOL)


def prepared() -> list[symmetric.Prepared | None]:
    """What the buffer of the group keeps."""
    (buffer,) = symmetric._buffers.values()
    return list(buffer.prepared.values())


def same(sizes: Sizes, kind: str, by_token: bool) -> None:
    """The first call, the second one and those of other tensors; output and LSE; on a stream that is not the first."""
    options: dict[str, Any] = {"enable_gqa": True, **KINDS[kind]}
    given = {"lengths": sizes[3], "method": "all_gather", **options}
    for lse in (False, True):
        first: Any = None
        for turn in range(6):
            whole = tensors(sizes, turn // 2)
            parts = [shard(tensor).contiguous() for tensor in whole]
            if by_token:
                parts = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in parts]
            stream = torch.cuda.Stream() if turn == 5 else torch.cuda.current_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found = attention(*parts, return_lse=lse, **given)
            torch.cuda.current_stream().wait_stream(stream)
            got = found if isinstance(found, tuple) else (found,)
            wanted = microsdpa.sdpa(*whole, return_lse=True, **options)[: 1 + lse]
            for one, other in zip(got, wanted, strict=True):
                close(one, other)
            if turn % 2:
                assert all(torch.equal(one, other) for one, other in zip(got, first, strict=True)), "other bits"
            first = got
    assert any(prepared())


def without_a_pause() -> None:
    """Many calls one after another, whose host is ahead of the GPU, and whose tensors change between them."""
    sizes = SIZES["one launch"]
    whole = [tensors(sizes, seed) for seed in range(4)]
    parts = [[shard(tensor).contiguous() for tensor in one] for one in whole]
    given: dict[str, Any] = {"causal": "upper_left", "enable_gqa": True, "method": "all_gather", "lengths": sizes[3]}
    found = [attention(*parts[turn % 4], **given) for turn in range(60)]
    wanted = [microsdpa.sdpa(*one, causal="upper_left", enable_gqa=True) for one in whole]
    for turn, got in enumerate(found):
        assert isinstance(got, torch.Tensor)
        assert torch.equal(got, found[turn % 4])  # type: ignore[arg-type]
    for got, other in zip(found[:4], wanted, strict=True):
        close(got, other)  # type: ignore[arg-type]


def captured() -> None:
    """A CUDA graph of two calls after one like them, replayed with other numbers."""
    for sizes in (SIZES["one launch"], SIZES["two groups of heads"]):
        parts = [shard(tensor).contiguous() for tensor in tensors(sizes)]
        options: dict[str, Any] = {"causal": "upper_left", "enable_gqa": True}
        given = {"lengths": sizes[3], "method": "all_gather", **options}
        for _ in range(2):
            attention(*parts, **given)
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [attention(*parts, **given) for _ in range(2)]
        for seed in (5, 6):
            whole = tensors(sizes, seed)
            for part, tensor in zip(parts, whole, strict=True):
                part.copy_(shard(tensor))
            graph.replay()
            wanted = microsdpa.sdpa(*whole, **options)
            for out in outs:
                close(out, wanted)  # type: ignore[arg-type]
        close(attention(*parts, **given), wanted)  # type: ignore[arg-type]
        torch.cuda.synchronize()


def gradients() -> None:
    """Forward and backward, twice."""
    for sizes in (SIZES["one launch"], SIZES["lengths that do not divide"]):
        whole = [tensor.requires_grad_() for tensor in tensors(sizes)]
        wanted = torch.autograd.grad(microsdpa.sdpa(*whole, causal="upper_left", enable_gqa=True).sum(), whole)
        for _ in range(2):
            parts = [shard(tensor.detach()).contiguous().requires_grad_() for tensor in whole]
            given: dict[str, Any] = {"lengths": sizes[3], "method": "all_gather"}
            out = attention(*parts, causal="upper_left", enable_gqa=True, **given)
            assert isinstance(out, torch.Tensor)
            for got, other in zip(torch.autograd.grad(out.sum(), parts), wanted, strict=True):
                error = (got - shard(other)).float().norm() / shard(other).float().norm()
                assert error < 2e-2, error


def another_length_on_one_rank() -> None:
    """It raises on every rank, and the calls after it are right."""
    whole = tensors(SIZES["two groups of heads"])
    parts = [shard(tensor).contiguous() for tensor in whole]
    given: dict[str, Any] = {"causal": "upper_left", "enable_gqa": True}
    for _ in range(3):
        close(attention(*parts, **given), microsdpa.sdpa(*whole, **given))  # type: ignore[arg-type]
    short = slice(0, 511 if dist.get_rank() else 512)
    with pytest.raises(MicrosdpaError, match="tokens on rank"):
        attention(*(part[:, :, short] for part in parts), **given)
    close(attention(*parts, **given), microsdpa.sdpa(*whole, **given))  # type: ignore[arg-type]


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """All cases by name, in an order in which the buffer grows."""
    for name, sizes in sorted(SIZES.items(), key=lambda item: item[1][3]):
        for kind in KINDS:
            for by_token in (False, True):
                yield f"{name}, {kind}, {by_token=}", lambda s=sizes, k=kind, b=by_token: same(s, k, b)  # type: ignore[misc]
    for case in (without_a_pause, captured, gradients, another_length_on_one_rank):
        yield case.__name__, case


@pytest.mark.timeout(600)
def test_two_ranks() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=580)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-6000:]
    assert "all cases" in run.stdout


def main() -> None:
    """Run all cases; the first that fails ends the process."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=120))
    for name, case in cases():
        if dist.get_rank() == 0:
            print(name, flush=True)
        case()
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        print("all cases", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
