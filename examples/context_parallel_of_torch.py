"""torch's own context_parallel on GPUs, with microsdpa as its flash attention.

torchrun --nproc-per-node 2 examples/context_parallel_of_torch.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel

import microsdpa
from microsdpa.distributed import shard


def main() -> None:
    """Compute and compare; rank 0 prints."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    microsdpa.register()
    activate_flash_attention_impl("microsdpa")

    random = torch.Generator(device=device).manual_seed(0)
    shape = 1, 8, 16384, 128
    query, key, value = (torch.randn(shape, generator=random, device=device).bfloat16() for _ in range(3))
    expected = shard(microsdpa.sdpa(query, key, value, is_causal=True))
    buffers = context_parallel(mesh, buffers=[query, key, value], buffer_seq_dims=[2, 2, 2])
    with buffers, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        error = ((out - expected).float().norm() / expected.float().norm()).item()
    if dist.get_rank() == 0:
        print(f"relative error: {error:.1e}")
    assert error < 1e-2, error
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
