"""Causal attention of one sequence over several GPUs, forward and backward, checked against one.

    torchrun --nproc-per-node 2 examples/context_parallel.py

It runs on CPUs, too, by gloo, with a short sequence.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import microsdpa
from microsdpa.distributed import attention, explain, shard, unshard


def main() -> None:
    """Compute and compare; rank 0 prints."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    seqlen = 16384 if on_gpu else 256

    random = torch.Generator(device=device).manual_seed(0)  # the same sequence on every rank
    shapes = (1, 8, seqlen, 64), (1, 2, seqlen, 64), (1, 2, seqlen, 64)
    whole = [torch.randn(shape, generator=random, device=device).bfloat16() for shape in shapes]

    # Every rank keeps two chunks of the sequence, an early and a late one.
    query, key, value = (shard(tensor).requires_grad_() for tensor in whole)
    options = {"causal": "lower_right", "enable_gqa": True, "lengths": seqlen}
    found = explain(query, key, value, **options)
    out = attention(query, key, value, **options)
    gradients = torch.autograd.grad(out.square().sum(), (query, key, value))

    inputs = [tensor.requires_grad_() for tensor in whole]
    expected = microsdpa.sdpa(*inputs, causal="lower_right", enable_gqa=True)
    wanted = torch.autograd.grad(expected.square().sum(), inputs)
    pairs = [(unshard(out.detach()), expected.detach())]
    pairs += [(unshard(one), other) for one, other in zip(gradients, wanted, strict=True)]
    errors = [((one - other).float().norm() / other.float().norm()).item() for one, other in pairs]
    if dist.get_rank() == 0:
        print(found)
        print("relative error of output, dQ, dK, dV:", ", ".join(f"{error:.1e}" for error in errors))
    assert max(errors) < 1e-2, errors
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
