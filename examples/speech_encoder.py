"""An encoder of speech as Whisper's with random weights: attention of many frames to one another, on a CUDA graph.

LayerNorm of Q and K, in the call of attention, keeps scores bounded as in ViT-22B. The output of attention is written
where the next projection reads it.

    python examples/speech_encoder.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import microsdpa

LAYERS, HEADS, HEAD_DIM, FRAMES = 2, 6, 64, 150
HIDDEN = HEADS * HEAD_DIM


class Block(torch.nn.Module):
    """Attention and a perceptron of frames [B, S, HIDDEN]."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = torch.nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = torch.nn.Linear(HIDDEN, HIDDEN)
        self.wide, self.narrow = torch.nn.Linear(HIDDEN, 4 * HIDDEN), torch.nn.Linear(4 * HIDDEN, HIDDEN)
        self.weights = torch.nn.ParameterList(torch.ones(HEAD_DIM) for _ in range(2))
        self.biases = torch.nn.ParameterList(torch.zeros(HEAD_DIM) for _ in range(2))

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """The frames behind the block."""
        batch, length, _ = frames.shape
        packed = self.packed(F.layer_norm(frames, (HIDDEN,))).view(batch, length, 3, HEADS, HEAD_DIM)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        joined = torch.empty_like(frames)
        microsdpa.sdpa(
            *(query, key, value),
            q_norm=(self.weights[0], self.biases[0]),
            k_norm=(self.weights[1], self.biases[1]),
            out=joined.view(batch, length, HEADS, HEAD_DIM).transpose(1, 2),
        )
        frames = frames + self.out(joined)
        return frames + self.narrow(F.gelu(self.wide(F.layer_norm(frames, (HIDDEN,)))))


@torch.no_grad()
def main() -> torch.Tensor:
    """Encode once; on a GPU, by a graph that is replayed."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    encoder = torch.nn.Sequential(*(Block() for _ in range(LAYERS))).to(device, torch.float16)
    frames = torch.randn(1, FRAMES, HIDDEN, dtype=torch.float16, device=device)
    found: torch.Tensor = encoder(frames)
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = encoder(frames)
        graph.replay()
    print(f"{FRAMES} frames, mean square {found.float().square().mean().item():.3f}")
    return found


if __name__ == "__main__":
    main()
