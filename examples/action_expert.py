"""A robot policy's action head with random weights: ten steps of denoising over the output of a vision model.

Every layer norms Q and K, rotates them and attends to context and actions, all in one launch. Q, K and V are views of
one projection. On a GPU all steps are one CUDA graph.

    python examples/action_expert.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import microsdpa

LAYERS, HEADS, HEADS_KV, HEAD_DIM, HIDDEN = 2, 8, 1, 64, 256
CONTEXT, ACTIONS, STEPS = 48, 16, 10


class PolicyHead(torch.nn.Module):
    """Denoises actions [1, ACTIONS, HIDDEN] beside a context [1, CONTEXT, HIDDEN]."""

    def __init__(self) -> None:
        super().__init__()
        width, packed = HEADS * HEAD_DIM, (HEADS + 2 * HEADS_KV) * HEAD_DIM
        self.packed = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, packed, bias=False) for _ in range(LAYERS))
        self.out = torch.nn.ModuleList(torch.nn.Linear(width, HIDDEN, bias=False) for _ in range(LAYERS))
        self.q_norms = torch.nn.ParameterList(torch.ones(HEAD_DIM) for _ in range(LAYERS))
        self.k_norms = torch.nn.ParameterList(torch.ones(HEAD_DIM) for _ in range(LAYERS))
        angles = torch.outer(torch.arange(CONTEXT + ACTIONS), 10000 ** -torch.arange(0, 1, 2 / HEAD_DIM))
        self.cos, self.sin = torch.nn.Buffer(angles.cos()), torch.nn.Buffer(angles.sin())

    def layer(self, index: int, tokens: torch.Tensor) -> torch.Tensor:
        """Attention of a layer, [1, S, HIDDEN]."""
        rows = self.packed[index](F.rms_norm(tokens, (HIDDEN,)))
        rows = rows.view(1, -1, HEADS + 2 * HEADS_KV, HEAD_DIM).transpose(1, 2)
        found = microsdpa.sdpa(
            *rows.split([HEADS, HEADS_KV, HEADS_KV], dim=1),
            enable_gqa=True,
            rotary=(self.cos, self.sin),
            q_norm=self.q_norms[index],
            k_norm=self.k_norms[index],
        )
        assert isinstance(found, torch.Tensor)
        return tokens + self.out[index](found.transpose(1, 2).flatten(2))

    def forward(self, actions: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """The actions after all steps."""
        for _ in range(STEPS):
            tokens = torch.cat([context, actions], dim=1)
            for index in range(LAYERS):
                tokens = self.layer(index, tokens)
            actions = actions + 0.1 * torch.tanh(tokens[:, CONTEXT:])
        return actions


@torch.no_grad()
def main() -> torch.Tensor:
    """Denoise once; on a GPU, by a graph that is replayed."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = PolicyHead().to(device, torch.float16)
    context = torch.randn(1, CONTEXT, HIDDEN, dtype=torch.float16, device=device)
    actions = torch.randn(1, ACTIONS, HIDDEN, dtype=torch.float16, device=device)
    found = head(actions, context)
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = head(actions, context)
        graph.replay()
    print(f"{STEPS} steps of {ACTIONS} actions, mean square {found.float().square().mean().item():.3f}")
    return found


if __name__ == "__main__":
    main()
