"""A server: continuous batching of a small random Llama on a paged cache (paged_llama.py).

Requests come and go at any step. Every step is one batch of packed tokens: prompts that have just come, and one token
of each sequence that runs. Lengths and pages stay on the device.

    python examples/continuous_batching.py
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from paged_llama import PAGE, PAGES, Config, Model

MOST_SEQUENCES, MOST_PAGES = 8, 32
"""Sequences that run at a time, and pages of each."""


@dataclass
class Request:
    """A prompt, the tokens to generate, those that are there, its row of the page table, and its pages."""

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
        self.waiting, self.running = deque[Request](), list[Request]()
        self.free_pages, self.free_slots = list(range(PAGES)), list(range(MOST_SEQUENCES))
        self.table = torch.full((MOST_SEQUENCES, MOST_PAGES), -1, dtype=torch.int32)

    def add(self, prompt: list[int], steps: int) -> Request:
        """Queue a request."""
        if (tokens := len(prompt) + steps) > MOST_PAGES * PAGE:
            raise ValueError(f"prompt and steps: expected at most {MOST_PAGES * PAGE} tokens, got {tokens}")
        self.waiting.append(Request(prompt, steps))
        return self.waiting[-1]

    def _admit(self) -> None:
        while self.waiting and self.free_slots:
            needed = -(-(len(self.waiting[0].prompt) + self.waiting[0].steps) // PAGE)
            if needed > len(self.free_pages):
                return
            self.running.append(request := self.waiting.popleft())
            request.slot, request.pages = self.free_slots.pop(), [self.free_pages.pop() for _ in range(needed)]
            self.table[request.slot] = torch.tensor(request.pages + [-1] * (MOST_PAGES - needed))

    def step(self) -> bool:
        """One token more of each request that runs; False when there is nothing to do."""
        self._admit()
        if not (batch := list(self.running)):
            return False
        new = [request.tokens[-1:] or request.prompt for request in batch]
        offsets, lengths = [0, *accumulate(map(len, new))], [request.length for request in batch]
        with torch.no_grad():
            logits = self.model.forward(
                torch.tensor([token for own in new for token in own], device=self.device),
                query_offsets=torch.tensor(offsets, dtype=torch.int32, device=self.device),
                lengths=torch.tensor(lengths, dtype=torch.int32, device=self.device),
                page_table=self.table[[request.slot for request in batch]].to(self.device),
            )
        chosen = logits[torch.tensor(offsets[1:]) - 1].argmax(dim=-1)
        for request, token in zip(batch, chosen.tolist(), strict=True):
            request.tokens.append(token)
            if len(request.tokens) == request.steps:
                self.running.remove(request)
                self.free_pages += request.pages
                self.free_slots.append(request.slot)
        return True


def main() -> None:
    """Serve twelve requests that do not all fit at once."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    server = Server(Model(Config(), device), device)
    requests = [server.add([(7 * i + j) % 500 for j in range(3 + 5 * i)], 8 + i) for i in range(12)]
    steps = sum(1 for _ in iter(server.step, False))
    for request in requests:
        print(f"{len(request.prompt):3} tokens -> {request.tokens}")
    print(f"{steps} steps for {sum(len(request.tokens) for request in requests)} tokens on {device}")


if __name__ == "__main__":
    main()
