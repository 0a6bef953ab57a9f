"""The model of continuous_batching.py: a small random Llama whose keys and values lie in the pages of a cache.

Not a program: examples/continuous_batching.py imports examples/paged_llama.py. One call per layer rotates queries and
new keys, writes new keys and values to their pages, and attends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

import microsdpa

PAGE, PAGES = 16, 256
"""Keys of a page, and pages of the cache."""


@dataclass
class Config:
    """Sizes of a Llama."""

    layers: int = 2
    heads: int = 4
    heads_kv: int = 2
    head_dim: int = 32
    vocabulary: int = 500
    hidden: int = 128
    positions: int = 1024


class Model:
    """Random weights, and the forward pass of packed tokens."""

    def __init__(self, config: Config, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.config = c = config
        generator = torch.Generator().manual_seed(0)

        def weight(rows: int, columns: int) -> torch.Tensor:
            return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(device, dtype)

        rows = (c.heads + 2 * c.heads_kv) * c.head_dim
        self.embedding, self.head = weight(c.vocabulary, c.hidden) * c.hidden**0.5, weight(c.vocabulary, c.hidden)
        self.layers = [
            {
                "qkv": weight(rows, c.hidden),
                "out": weight(c.hidden, c.heads * c.head_dim),
                "up": weight(8 * c.hidden, c.hidden),
                "down": weight(c.hidden, 4 * c.hidden),
            }
            for _ in range(c.layers)
        ]
        frequencies = 10000.0 ** -(torch.arange(0, c.head_dim, 2) / c.head_dim)
        angles = torch.arange(c.positions)[:, None] * frequencies
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)
        # [layers, K and V, pages, H_kv, page, D]: the views that a layer gets are [pages, page, H_kv, D].
        self.cache = torch.zeros(c.layers, 2, PAGES, c.heads_kv, PAGE, c.head_dim, device=device, dtype=dtype)

    def forward(self, tokens: torch.Tensor, **where: torch.Tensor) -> torch.Tensor:
        """Logits [tokens, vocabulary] of packed tokens; `where` has query_offsets, lengths and page_table."""
        c, x = self.config, self.embedding[tokens]
        for layer, cache in zip(self.layers, self.cache, strict=True):
            rows = F.linear(_normal(x), layer["qkv"]).view(len(tokens), -1, c.head_dim)
            query, new_key, new_value = rows.split([c.heads, c.heads_kv, c.heads_kv], dim=1)
            key, value = cache.transpose(2, 3)
            out = microsdpa.sdpa_varlen(
                query, key, value, new_key=new_key, new_value=new_value, rotary_cos=self.cos, rotary_sin=self.sin,
                causal=True, **where,
            )  # fmt: skip
            assert isinstance(out, torch.Tensor)
            x = x + F.linear(out.flatten(1), layer["out"])
            gate, up = F.linear(_normal(x), layer["up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        return F.linear(_normal(x), self.head).float()


def _normal(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],))
