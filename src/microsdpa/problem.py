"""Problem: the frozen description of one attention call, all that kernel selection may depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DType = Literal["float16", "bfloat16"]
Causal = Literal["upper_left", "lower_right"]

ELEMENT_BYTES: dict[str, int] = {"float16": 2, "bfloat16": 2}
VECTOR_BYTES = 16
"""Alignment, in bytes, at which every row of every tensor can be read with the widest loads."""


@dataclass(frozen=True)
class Problem:
    """One call of attention: O = softmax(scale * Q K^T + mask) V.

    Q and O are [batch, heads, seqlen_q, head_dim]; K and V are [batch, heads_kv, seqlen_k, head_dim]; query
    head h reads key head h // (heads / heads_kv).

    Attributes:
        causal: None; "upper_left" lets query i see keys j <= i; "lower_right" lets it see
            j <= i + seqlen_k - seqlen_q.
        alignment: bytes that divide every base pointer and every row, head and batch stride: 16, or else the
            size of one element.
        bulk: whether tensor maps can describe every tensor: no stride reaches 2**40 bytes.
        target: compilation target of the device, such as "sm_90a".
    """

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: DType
    causal: Causal | None = None
    alignment: int = VECTOR_BYTES
    bulk: bool = True
    target: str = "sm_90a"

    @property
    def flops(self) -> int:
        """Floating-point operations of both matrix products, halved when causal (the usual convention)."""
        total = 4 * self.batch * self.heads * self.seqlen_q * self.seqlen_k * self.head_dim
        return total // 2 if self.causal else total

    @property
    def tensor_bytes(self) -> int:
        """Bytes of Q, K, V and O, each counted once."""
        rows = 2 * self.heads * self.seqlen_q + 2 * self.heads_kv * self.seqlen_k
        return self.batch * rows * self.head_dim * ELEMENT_BYTES[self.dtype]


VIRTUAL = "compute_"
"""How targets begin that name PTX, which a driver compiles for the GPU at hand, and not machine code."""


def virtual(target: str) -> str:
    """The PTX of a target: "sm_89" gives "compute_89".

    Raises:
        ValueError: the target has features of its own, as sm_90a does: its PTX runs nowhere else.
    """
    if not target.removeprefix("sm_").isdecimal():
        raise ValueError(f"target: expected one whose PTX runs on later GPUs, such as 'sm_89', got {target!r}")
    return target.replace("sm_", VIRTUAL)


def target_of(capability: tuple[int, int]) -> str:
    """Compilation target of a compute capability: (9, 0) gives "sm_90a", since wgmma needs the "a" features."""
    major, minor = capability
    return f"sm_{major}{minor}{'a' if (major, minor) == (9, 0) else ''}"


def capability_of(target: str) -> tuple[int, int]:
    """Compute capability of a target: "sm_90a" gives (9, 0), and "compute_89", its PTX, (8, 9).

    Raises:
        ValueError: `target` is not of the form sm_NN, sm_NNa or compute_NN.
    """
    digits = target.removeprefix(VIRTUAL).removeprefix("sm_").rstrip("af")
    if not target.startswith(("sm_", VIRTUAL)) or not digits.isdecimal() or len(digits) < 2:
        raise ValueError(f"target: expected a name such as 'sm_89' or 'sm_90a', got {target!r}")
    return int(digits[:-1]), int(digits[-1])
