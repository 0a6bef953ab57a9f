"""Training a small transformer with microsdpa's attention: it learns to copy, as it does with torch's.

python examples/train_transformer.py [steps]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

import microsdpa

WIDTH, HEADS, LENGTH, VOCABULARY = 64, 2, 16, 16
Attention = Callable[..., torch.Tensor]


class Block(torch.nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
        self.first, self.second = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, WIDTH] to the same."""
        batch, length, _ = x.shape
        heads = self.qkv(self.first(x)).view(batch, length, 3 * HEADS, WIDTH // HEADS).transpose(1, 2)
        query, key, value = (one.bfloat16() for one in heads.chunk(3, dim=1))
        attended = self.attention(query, key, value, is_causal=True).float()
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.second(x))))


def train(attention: Attention, steps: int) -> list[float]:
    """The losses of so many steps."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    embed, place = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
    layers = torch.nn.Sequential(Block(attention), Block(attention), torch.nn.Linear(WIDTH, VOCABULARY)).to(device)
    embed, place = embed.to(device), place.to(device)
    parameters = [*embed.parameters(), *place.parameters(), *layers.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    losses = []
    for _ in range(steps):
        half = torch.randint(VOCABULARY, (32, LENGTH // 2)).to(device)
        tokens = torch.cat((half, half), dim=1)
        logits = layers(embed(tokens) + place.weight)
        loss = F.cross_entropy(logits[:, LENGTH // 2 - 1 : -1].flatten(0, 1), half.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def main(steps: int) -> tuple[float, float]:
    """The last losses with microsdpa's and with torch's attention."""
    ours, theirs = (train(one, steps) for one in (microsdpa.sdpa, F.scaled_dot_product_attention))
    print(f"loss {ours[0]:.3f} to {ours[-1]:.3f} with microsdpa, {theirs[0]:.3f} to {theirs[-1]:.3f} with torch")
    return ours[-1], theirs[-1]


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
