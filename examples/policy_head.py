"""A policy head at batch 1 in a CUDA graph: the whole step is one replay, and attention one of its kernels.

A robot's policy attends from 16 action queries to 256 observation tokens, at hundreds of steps a second. On a CPU the
same step runs without a graph.

    python examples/policy_head.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import microsdpa

ACTIONS, TOKENS, HEADS, HEAD_DIM, STEPS = 16, 256, 8, 64, 20
WIDTH = HEADS * HEAD_DIM


class PolicyHead(torch.nn.Module):
    """Cross attention from learned action queries to observation tokens, and a layer that makes actions of it."""

    def __init__(self) -> None:
        super().__init__()
        self.query = torch.nn.Parameter(torch.randn(1, HEADS, ACTIONS, HEAD_DIM))
        self.key_value = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.action = torch.nn.Linear(WIDTH, 7)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Actions [1, ACTIONS, 7] of an observation [1, TOKENS, WIDTH]."""
        key, value = self.key_value(observation).view(1, TOKENS, 2 * HEADS, HEAD_DIM).transpose(1, 2).chunk(2, dim=1)
        attended = microsdpa.sdpa(self.query, key, value)
        return torch.tanh(self.action(attended.transpose(1, 2).reshape(1, ACTIONS, WIDTH)))


def captured(head: PolicyHead, observation: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A step that is one replay of a graph; observations are copied into `observation`."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # kernels are compiled, and plans made, before anything is captured
            head(observation)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actions = head(observation)

    def step() -> torch.Tensor:
        graph.replay()
        return actions

    return step


@torch.no_grad()
def main() -> torch.Tensor:
    """Some steps, timed; gives the last actions."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    head = PolicyHead().to(device, torch.float16)
    observation = torch.randn(1, TOKENS, WIDTH, device=device, dtype=torch.float16)
    step = captured(head, observation) if device == "cuda" else lambda: head(observation)
    step()
    start = time.perf_counter()
    for _ in range(STEPS):
        actions = step()
    actions = actions.cpu()  # waits for the last step
    print(f"{device}: {(time.perf_counter() - start) / STEPS * 1e6:.0f} us per step, actions {list(actions.shape)}")
    return actions


if __name__ == "__main__":
    main()
