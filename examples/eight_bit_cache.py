"""An 8-bit KV cache: keys and values are quantized once, when they are written, and read in 8 bits ever after.

The queries are quantized in every step. Without a GPU the kernels run in the emulator.

    python examples/eight_bit_cache.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import microsdpa

HEADS, KEY_HEADS, TOKENS, HEAD_DIM = 4, 2, 200, 64


def main() -> float:
    """A query for 8 new tokens over a cache; gives the relative L1 error against FP64 on the tensors in 16 bits."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    query = torch.randn(1, HEADS, 8, HEAD_DIM, device=device).half()
    key, value = (torch.randn(1, KEY_HEADS, TOKENS, HEAD_DIM, device=device).half() for _ in range(2))

    cached_key = microsdpa.quantize(key, "e4m3", "block", block=1)  # a scale per token
    cached_value = microsdpa.quantize(value, "e4m3", "channel")  # a scale per channel
    cached_query = microsdpa.quantize(query, "e4m3", "block", block=1)
    out = microsdpa.sdpa(
        cached_query.values,
        cached_key.values,
        cached_value.values,
        q_scale=cached_query.scale,
        k_scale=cached_key.scale,
        v_scale=cached_value.scale,
        enable_gqa=True,
        impl="auto" if device == "cuda" else "emulate",
    )
    expected = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), enable_gqa=True)
    error = float((out.double() - expected).abs().sum() / expected.abs().sum())
    saved = 1 - (cached_key.values.nbytes + cached_value.values.nbytes) / (key.nbytes + value.nbytes)
    print(f"{device}: relative error {error:.3f}, {100 * saved:.0f}% of the cache's memory saved")
    return error


if __name__ == "__main__":
    main()
