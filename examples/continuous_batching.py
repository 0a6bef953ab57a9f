"""A server in one file: continuous batching of a small random Llama on a paged cache.

Requests come and go at any step. Every step is one batch of packed tokens: prompts that have just come, and one token
of each sequence that runs. One call per layer rotates queries and new keys, writes new keys and values to their pages,
and attends. Lengths and pages stay on the device.

    python examples/continuous_batching.py
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.nn.functional as F

import microsdpa

PAGE, PAGES = 16, 256
"""Keys of a page, and pages of the cache."""
MOST_SEQUENCES, MOST_PAGES = 8, 32
"""Sequences that run at a time, and pages of each."""


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


@dataclass
class Request:
    """A prompt, and what has been generated of it.

    Attributes:
        steps: tokens to generate.
        slot: its row of the page table while it runs.
        pages: of the cache, in the order of its tokens.
    """

    prompt: list[int]
    steps: int
    tokens: list[int] = field(default_factory=list)
    slot: int = -1
    pages: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens whose keys are in the cache."""
        return len(self.prompt) + len(self.tokens) - 1 if self.tokens else 0


class Server:
    """Takes requests, and computes one step of all that run."""

    def __init__(self, model: Model, device: str) -> None:
        self.model, self.device = model, device
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.free_pages, self.free_slots = list(range(PAGES)), list(range(MOST_SEQUENCES))
        self.table = torch.full((MOST_SEQUENCES, MOST_PAGES), -1, dtype=torch.int32)

    def add(self, prompt: list[int], steps: int) -> Request:
        """Queue a request."""
        if len(prompt) + steps > MOST_PAGES * PAGE:
            raise ValueError(
                f"prompt and steps: expected at most {MOST_PAGES * PAGE} tokens, got {len(prompt) + steps}"
            )
        self.waiting.append(Request(prompt, steps))
        return self.waiting[-1]

    def _reserve(self, request: Request, tokens: int) -> bool:
        """Give a request pages for so many tokens; False where there are too few."""
        needed = -(-tokens // PAGE) - len(request.pages)
        if needed > len(self.free_pages):
            return False
        for _ in range(needed):
            self.table[request.slot, len(request.pages)] = self.free_pages[-1]
            request.pages.append(self.free_pages.pop())
        return True

    def _admit(self) -> None:
        while self.waiting and self.free_slots:
            request = self.waiting[0]
            request.slot = self.free_slots[-1]
            if not self._reserve(request, len(request.prompt) + request.steps):
                return
            self.free_slots.pop()
            self.running.append(self.waiting.popleft())

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self.free_pages += request.pages
        self.free_slots.append(request.slot)
        self.table[request.slot] = -1
        request.pages = []

    def step(self) -> bool:
        """One token more of each request that runs; False when there is nothing to do."""
        self._admit()
        if not self.running:
            return False
        batch = list(self.running)
        new = [request.tokens[-1:] or request.prompt for request in batch]

        def integers(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        offsets = [0, *accumulate(map(len, new))]
        with torch.no_grad():
            logits = self.model.forward(
                torch.tensor([token for own in new for token in own], device=self.device),
                query_offsets=integers(offsets),
                lengths=integers([request.length for request in batch]),
                page_table=self.table[[request.slot for request in batch]].to(self.device),
            )
        chosen = logits[torch.tensor(offsets[1:]) - 1].argmax(dim=-1).tolist()
        for request, token in zip(batch, chosen, strict=True):
            request.tokens.append(token)
            if len(request.tokens) == request.steps:
                self._release(request)
        return True


def main() -> None:
    """Serve twelve requests that do not all fit at once."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    server = Server(Model(Config(), device), device)
    requests = [server.add([(7 * i + j) % 500 for j in range(3 + 5 * i)], 8 + i) for i in range(12)]
    steps = 0
    while server.step():
        steps += 1
    for request in requests:
        print(f"{len(request.prompt):3} tokens -> {request.tokens}")
    print(f"{steps} steps for {sum(len(request.tokens) for request in requests)} tokens on {device}")


if __name__ == "__main__":
    main()
