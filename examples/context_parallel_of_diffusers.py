"""diffusers' ContextParallelConfig with microsdpa as the attention backend: a call as its models make it.

    torchrun --nproc-per-node 2 examples/context_parallel_of_diffusers.py

It runs on CPUs, too, by gloo. A model does the same after
model.set_attention_backend("microsdpa") and model.enable_parallelism(config=ContextParallelConfig(ring_degree=2)).
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.models._modeling_parallel import ParallelConfig
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn
from torch.distributed.device_mesh import init_device_mesh

import microsdpa
from microsdpa.distributed import shard


def main() -> None:
    """Compute and compare; rank 0 prints."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    microsdpa.integrations.diffusers.register(strict=True)

    config = ContextParallelConfig(ring_degree=dist.get_world_size())
    mesh = init_device_mesh(device.type, config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
    config.setup(dist.get_rank(), dist.get_world_size(), device, mesh)

    random = torch.Generator(device=device).manual_seed(0)
    shape = 1, 4096 if on_gpu else 256, 8, 64  # [B, S, H, D], as diffusers has them
    whole = [torch.randn(shape, generator=random, device=device).bfloat16() for _ in range(3)]
    parts = [shard(tensor, dim=1, order="contiguous").contiguous() for tensor in whole]
    with attention_backend("microsdpa"):
        expected = shard(dispatch_attention_fn(*whole), dim=1, order="contiguous")
        out = dispatch_attention_fn(*parts, parallel_config=ParallelConfig(context_parallel_config=config))
    error = ((out - expected).float().norm() / expected.float().norm()).item()
    if dist.get_rank() == 0:
        print(f"relative error: {error:.1e}")
    assert error < 1e-2, error
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
