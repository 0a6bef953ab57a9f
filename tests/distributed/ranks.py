"""One rank of four that compute attention together on a CPU: runs every case and writes what came of it.

    python ranks.py FOLDER RANK

The result is FOLDER/RANK.json: for each case an empty text, or what went wrong.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import microsdpa
from microsdpa.distributed import agree, attention, compute, explain, shard, unshard
from microsdpa.integrations.flash_backend import flash_forward

WORLD = 4
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "upper_left": {"causal": "upper_left"},
    "lower_right": {"causal": "lower_right"},
    "window": {"window": (5, 3)},
    "causal window": {"causal": "lower_right", "window": (7, -1)},
    "softcap": {"causal": "upper_left", "softcap": 3.0},
    "documents": {"document_ids": 7},
    "scattered documents": {"document_ids": -3, "causal": "lower_right"},
}
REPEATED = "upper_left", "documents"
METHODS = "all_gather", "ring", "heads"
ATOL, RTOL = 3e-2, 3e-2
"""BF16 has 8 bits; gradients here are sums of up to 61 products of numbers around 1."""
Case = Callable[[], None]


def tensors(batch: int, seqlen_q: int, seqlen_k: int, head_dim: int = 16) -> list[torch.Tensor]:
    """The same query, key and value of four key heads on every rank."""
    random = torch.Generator().manual_seed(seqlen_q * 1000 + seqlen_k)
    shapes = (batch, 8, seqlen_q, head_dim), *[(batch, 4, seqlen_k, head_dim)] * 2
    return [torch.randn(shape, generator=random).bfloat16() for shape in shapes]


def documents(number: int, seqlen: int) -> torch.Tensor:
    """Documents of 7 tokens for 7, and three that take turns for -3."""
    places = torch.arange(seqlen)
    return places // number if number > 0 else places % -number


def same(group: Any, order: str, method: str, mask: str, sizes: tuple[int, int]) -> None:
    """Output, LSE and gradients are those of one process."""
    inputs = [tensor.requires_grad_() for tensor in tensors(1, *sizes)]
    options = dict(MASKS[mask])
    mine = dict(options)
    if "document_ids" in options:
        options["document_ids"] = documents(options["document_ids"], sizes[0])
        mine["document_ids"] = shard(options["document_ids"], group, dim=0, order=order)  # type: ignore[arg-type]
    out, lse = microsdpa.sdpa(*inputs, enable_gqa=True, return_lse=True, **options)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    of_rows = torch.where(lse == -torch.inf, 0.0, 1.0)
    wanted = torch.autograd.grad((out, lse), inputs, (weights, of_rows))
    cut = partial(shard, group=group, order=order)  # type: ignore[arg-type]
    parts = [cut(tensor.detach()).requires_grad_() for tensor in inputs]
    given: dict[str, Any] = {"group": group, "order": order, "method": method, "enable_gqa": True, **mine}
    got = attention(*parts, return_lse=True, **given)
    gradients = torch.autograd.grad(got, parts, (cut(weights), cut(of_rows)))
    torch.testing.assert_close(got[1], cut(lse), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(got[0], cut(out), atol=ATOL, rtol=RTOL)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, cut(other), atol=ATOL, rtol=RTOL)
    if mask not in REPEATED:
        return
    again = attention(*parts, return_lse=True, **given)
    repeated = torch.autograd.grad(again, parts, (cut(weights), cut(of_rows)))
    for one, other in zip((*again, *repeated), (*got, *gradients), strict=True):
        assert torch.equal(one, other), "a second run has other bits"


def empty_ranks(method: str) -> None:
    """Three tokens on four ranks, and a rank that has all keys."""
    inputs = tensors(1, 3, 3)
    out = microsdpa.sdpa(*inputs, enable_gqa=True, causal="lower_right")
    parts = [shard(tensor) for tensor in inputs]
    got = attention(*parts, enable_gqa=True, causal="lower_right", method=method)  # type: ignore[arg-type]
    torch.testing.assert_close(unshard(got), out, atol=ATOL, rtol=RTOL)
    query, key, value = tensors(1, 8, 10)
    held = 10 if dist.get_rank() == 1 else 0
    parts = [shard(query, order="contiguous"), key[:, :, :held], value[:, :, :held]]
    given: dict[str, Any] = {"enable_gqa": True, "order": "contiguous", "method": method}
    got = attention(*parts, **given)
    wanted = shard(microsdpa.sdpa(query, key, value, enable_gqa=True), order="contiguous")
    torch.testing.assert_close(got, wanted, atol=ATOL, rtol=RTOL)


def through_the_emulator() -> None:
    """The kernels themselves, on CPU tensors."""
    inputs = tensors(1, 33, 33)
    wanted = microsdpa.sdpa(*inputs, enable_gqa=True, causal="lower_right", return_lse=True)
    plain, compute.sdpa = compute.sdpa, partial(compute.sdpa, impl="emulate:ampere/general")
    try:
        given = [shard(tensor) for tensor in inputs]
        got = attention(*given, enable_gqa=True, causal="lower_right", return_lse=True)
    finally:
        compute.sdpa = plain
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(unshard(one), other, atol=ATOL, rtol=RTOL)


def raises(text: str, call: Callable[[], object]) -> None:
    """Every rank raises an error with this text."""
    with pytest.raises(microsdpa.MicrosdpaError, match=re.escape(text)):
        call()


def errors() -> None:
    """Arguments that are wrong, or not the same, on one rank raise on all."""
    rank = dist.get_rank()
    query, key, value = (shard(tensor) for tensor in tensors(1, 32, 32))
    call = partial(attention, enable_gqa=True)
    odd = rank == 2
    named = "key: expected" if odd else "rank 2: key: expected"
    raises(named, lambda: call(query, key.half() if odd else key, value))
    raises(
        "head_dim = 16, as on rank 0, got 8 on rank 2",
        lambda: call(*(t[..., : 8 if odd else 16] for t in (query, key, value))),
    )
    raises("causal = None, as on rank 0", lambda: call(query, key, value, causal="upper_left" if odd else None))
    short = slice(0, 7 if odd else 8)
    raises("tokens on rank", lambda: call(query[:, :, short], key, value))
    raises("order: expected", lambda: call(query, key, value, order="spiral"))
    raises("method: expected", lambda: attention(query, query[:, :2], query[:, :2], enable_gqa=True, method="heads"))
    raises("transport: expected", lambda: call(query, key, value, transport="symmetric"))
    raises("lengths: expected", lambda: call(query, key, value, lengths=40))
    raises("value: expected 16 columns", lambda: call(query, key, value[..., :8]))
    raises("tensor: expected", lambda: unshard(query[:, : 1 if odd else 2]))
    raises("document_ids: expected", lambda: call(query, key, value, document_ids=torch.zeros(7 if odd else 8).long()))
    got = call(query, key, value)  # the ranks are still together
    assert isinstance(got, torch.Tensor)


def groups() -> None:
    """A dimension of a mesh is a group; a mesh of two is none."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    inputs = tensors(1, 21, 21)
    parts = [shard(tensor, mesh["cp"]) for tensor in inputs]
    got = attention(*parts, group=mesh["cp"], enable_gqa=True, causal="upper_left")
    wanted = shard(microsdpa.sdpa(*inputs, enable_gqa=True, causal="upper_left"), mesh["cp"])
    torch.testing.assert_close(got, wanted, atol=ATOL, rtol=RTOL)
    raises("a DeviceMesh of one dimension", lambda: attention(*parts, group=mesh, enable_gqa=True))
    raises("group: expected", lambda: attention(*parts, group="cp", enable_gqa=True))  # type: ignore[arg-type]
    assert isinstance(mesh, DeviceMesh)


def lengths() -> None:
    """With lengths, nothing is exchanged from the second call on; without, every time."""
    world = dist.group.WORLD
    assert world is not None
    query, key, value = (shard(tensor) for tensor in tensors(1, 30, 30))
    peers = agree.peers(world)
    turns = []
    for given in (None, None, 30, 30, (7, 7, 8, 8), (7, 7, 8, 8)):
        before = peers.turn
        attention(query, key, value, enable_gqa=True, lengths=given)
        turns.append(peers.turn - before)
    assert turns == [1, 1, 1, 0, 1, 0], turns


def explained() -> None:
    """The choice is that of the shortest estimate, and printed."""
    given = [shard(tensor) for tensor in tensors(1, 32, 32)]
    found = explain(*given, enable_gqa=True, causal="lower_right")
    text = str(found)
    assert found.method == found.estimates[0].method, text
    assert {one.method for one in found.estimates} == set(METHODS), text
    for word in ("method", "transport  collective", "MB received", "wire", "compute"):
        assert word in text, text
    assert explain(*given, enable_gqa=True, method="ring").because == "method names it"


def context_parallel_of_torch() -> None:
    """torch's own ring, whose attention is what microsdpa.register() puts in place of torch's flash attention."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    world = dist.group.WORLD
    assert world is not None
    query, key, value = tensors(1, 64, 64)
    wanted, rows = microsdpa.sdpa(query, key, value, enable_gqa=True, is_causal=True, return_lse=True)
    parts = [shard(tensor) for tensor in (query, key, value)]
    got, lse, *_ = _attention._templated_ring_attention(world, 2, flash_forward, *parts, is_causal=True)
    torch.testing.assert_close(got.bfloat16(), shard(wanted), atol=ATOL, rtol=RTOL)
    torch.testing.assert_close(lse, shard(rows), atol=1e-3, rtol=1e-3)


def context_parallel_of_diffusers() -> None:
    """A ContextParallelConfig of ring, of heads and of both; LSE [B, S, H]."""
    from diffusers import ContextParallelConfig
    from diffusers.models._modeling_parallel import ParallelConfig
    from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn

    microsdpa.integrations.diffusers.register(strict=True)
    random = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 32, 4, 16, generator=random).bfloat16().requires_grad_() for _ in range(3)]
    wanted, rows = microsdpa.sdpa(*(tensor.transpose(1, 2) for tensor in inputs), return_lse=True)
    gradients = torch.autograd.grad(wanted.sum(), inputs)
    for ring, ulysses in ((4, 1), (1, 4), (2, 2)):
        config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses)
        mesh = init_device_mesh("cpu", config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
        config.setup(dist.get_rank(), WORLD, torch.device("cpu"), mesh)
        parallel = ParallelConfig(context_parallel_config=config)
        cut = partial(shard, dim=1, order="contiguous")
        parts = [cut(tensor.detach()).requires_grad_() for tensor in inputs]
        with attention_backend("microsdpa"):
            out = dispatch_attention_fn(*parts, parallel_config=parallel)
            pair = dispatch_attention_fn(*parts, parallel_config=parallel, attention_kwargs={"return_lse": True})
        torch.testing.assert_close(out, cut(wanted.transpose(1, 2)), atol=ATOL, rtol=RTOL)
        torch.testing.assert_close(pair[1], cut(rows.transpose(1, 2)), atol=1e-3, rtol=1e-3)
        for one, other in zip(torch.autograd.grad(out.sum(), parts), gradients, strict=True):
            torch.testing.assert_close(one, cut(other), atol=ATOL, rtol=RTOL)


def absent_rank() -> None:
    """A rank that does not come is named when the group's timeout is over."""
    group = dist.new_group([2, 3], timeout=timedelta(seconds=2))
    if dist.get_rank() == 2:
        query, key, value = tensors(1, 8, 8)
        raises("rank 1 of the group has not come", lambda: attention(query, key, value, group=group, enable_gqa=True))


def groups_end() -> None:
    """A group that is destroyed is gone, though its agreements and an output that requires grad are still there."""
    for method in METHODS:
        group = dist.new_group()
        query, key, value = (shard(tensor, group).requires_grad_() for tensor in tensors(1, 16, 16))
        out = attention(query, key, value, group=group, enable_gqa=True, method=method)
        torch.autograd.grad(out.sum(), query, retain_graph=True)
        reference = weakref.ref(group)
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        assert reference() is None, method
        raises("the process group of this attention was destroyed", partial(torch.autograd.grad, out.sum(), query))


DOORS = context_parallel_of_torch, context_parallel_of_diffusers


def cases() -> Iterator[tuple[str, Case]]:
    """All cases, by name; every rank runs all of them in this order."""
    pair = dist.new_group([0, 1])
    for method, mask in product(METHODS, MASKS):
        yield f"same balanced {method} {mask}", partial(same, None, "balanced", method, mask, (37, 37))
    for method, mask in product(METHODS, ("lower_right", "documents")):
        yield f"same contiguous {method} {mask}", partial(same, None, "contiguous", method, mask, (37, 37))
    for method, mask in product(METHODS, ("none", "upper_left", "causal window")):
        yield f"lengths differ {method} {mask}", partial(same, None, "balanced", method, mask, (61, 37))
        if dist.get_rank() < 2:
            yield f"two ranks {method} {mask}", partial(same, pair, "balanced", method, mask, (23, 50))
    for method in METHODS:
        yield f"empty ranks {method}", partial(empty_ranks, method)
    for case in (errors, groups, lengths, explained, through_the_emulator, *DOORS, groups_end, absent_rank):
        yield case.__name__, case


def main() -> None:
    """Run all cases."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    method = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=WORLD, timeout=timedelta(seconds=30))
    found = {}
    for name, case in cases():
        try:
            case()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
