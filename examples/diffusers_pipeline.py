"""The transformer of a diffusers pipeline on microsdpa: one line more, the same output.

The transformer is a small random Flux. In a pipeline it is `pipeline.transformer`.

    python examples/diffusers_pipeline.py
"""

from __future__ import annotations

import torch
from diffusers import FluxTransformer2DModel

from microsdpa.integrations.diffusers import register

TOKENS, TEXT, CHANNELS, WIDTH = 64, 16, 16, 32


def main() -> float:
    """One denoising step by both attentions; gives the largest difference."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=CHANNELS,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=(8, 12, 12),
    ).to(device, dtype)
    ids = torch.zeros(TOKENS, 3)
    ids[:, 1], ids[:, 2] = torch.arange(TOKENS) // 8, torch.arange(TOKENS) % 8
    inputs = {
        "hidden_states": torch.randn(1, TOKENS, CHANNELS, device=device, dtype=dtype),
        "encoder_hidden_states": torch.randn(1, TEXT, WIDTH, device=device, dtype=dtype),
        "pooled_projections": torch.randn(1, WIDTH, device=device, dtype=dtype),
        "timestep": torch.tensor([0.5], device=device, dtype=dtype),
        "img_ids": ids.to(device, dtype),
        "txt_ids": torch.zeros(TEXT, 3, device=device, dtype=dtype),
    }

    register()
    found = {}
    with torch.no_grad():
        for backend in ("native", "microsdpa"):
            transformer.set_attention_backend(backend)
            found[backend] = transformer(**inputs).sample.float()
    difference = float((found["native"] - found["microsdpa"]).abs().max())
    print(f"{device}: largest difference {difference:.1e} in {found['native'].numel()} numbers")
    return difference


if __name__ == "__main__":
    main()
