"""Decoding of a small Llama at batch size 1 with random weights: one CUDA graph serves every length.

One launch per layer rotates the new token's query and key, writes its key and value to the cache, and attends. How many
keys there are is read on the device.

    python examples/llama_decode.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import microsdpa

LAYERS, HEADS, HEADS_KV, HEAD_DIM, VOCABULARY, MOST = 2, 4, 2, 64, 200, 64
HIDDEN = HEADS * HEAD_DIM


class Llama(torch.nn.Module):
    """A decoder with a cache of MOST keys, and the number of those in use."""

    def __init__(self) -> None:
        super().__init__()
        packed = (HEADS + 2 * HEADS_KV) * HEAD_DIM
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.packed = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, packed, bias=False) for _ in range(LAYERS))
        self.out = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(LAYERS))
        self.gate = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, 2 * HIDDEN, bias=False) for _ in range(LAYERS))
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(MOST), 10000 ** -torch.arange(0, 1, 2 / HEAD_DIM))
        self.cos, self.sin = torch.nn.Buffer(angles.cos()), torch.nn.Buffer(angles.sin())
        self.cache = torch.nn.Buffer(torch.zeros(LAYERS, 2, 1, MOST, HEADS_KV, HEAD_DIM))
        self.lengths = torch.nn.Buffer(torch.zeros(1, dtype=torch.int32))

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        """The next token [1] after this one, greedily; the cache has one key more then."""
        rows = self.embedding(token).view(1, 1, HIDDEN)
        for layer in range(LAYERS):
            packed = self.packed[layer](F.rms_norm(rows, (HIDDEN,))).view(1, 1, HEADS + 2 * HEADS_KV, HEAD_DIM)
            query, key, value = packed.split([HEADS, HEADS_KV, HEADS_KV], dim=2)
            found = microsdpa.sdpa_varlen(
                *(query, *self.cache[layer]),
                lengths=self.lengths,
                new_key=key,
                new_value=value,
                rotary_cos=self.cos,
                rotary_sin=self.sin,
                causal=True,
            )
            assert isinstance(found, torch.Tensor)
            rows = rows + self.out[layer](found.flatten(2))
            gate, up = self.gate[layer](F.rms_norm(rows, (HIDDEN,))).chunk(2, dim=-1)
            rows = rows + F.silu(gate) * up
        self.lengths += 1
        return self.head(rows[0]).argmax(dim=-1)


@torch.no_grad()
def main(steps: int = 12) -> list[int]:
    """Decode from token 1; on a GPU, a step is a graph that is replayed."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Llama().to(device, torch.float16)
    token = torch.ones(1, dtype=torch.long, device=device)
    tokens, graph = [], None
    for step in range(steps):
        if device == "cuda" and step == 1:  # everything is compiled now
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                token.copy_(model(token))
        if graph is None:
            token.copy_(model(token))
        else:
            graph.replay()
        tokens.append(int(token))
    print("tokens", *tokens)
    return tokens


if __name__ == "__main__":
    main()
