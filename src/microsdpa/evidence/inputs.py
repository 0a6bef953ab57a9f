"""Inputs of tests and benchmarks: independent random Q, K and V, also with a mean, outliers and awkward layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import torch

from microsdpa.call.blocks import BlockTable
from microsdpa.call.documents import document_ranges
from microsdpa.call.masks import Masks, dense
from microsdpa.call.tensors import DTYPES
from microsdpa.kernels.problem import Causal, DType, Problem

Kind = Literal["normal", "mean", "outliers", "key_bias", "zeros"]
Layout = Literal["bhsd", "bshd", "unaligned"]
Masking = Literal[
    "bool",
    "padding",
    "left padding",
    "left padding, numbers",
    "text",
    "additive",
    "slice",
    "float32",
    "window",
    "window 1024",
    "window 4096",
    "window as a mask",
    "documents",
    "blocks 10%",
    "blocks 30%",
    "blocks 50%",
    "softcap",
    "alibi",
    "sinks",
]

BLOCK = 128
"""Rows and keys of a block of the block masks."""
BLOCK_SHARES = {f"blocks {percent}%": percent / 100 for percent in (10, 30, 50)}
"""Share of the blocks that are shown, by the masking."""
TORCH_DTYPE: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPES.items()}


class CaseOptions(TypedDict):
    """Arguments of sdpa."""

    causal: Causal | None
    scale: float | None
    enable_gqa: bool


@dataclass(frozen=True)
class Case:
    """One attention call to be checked or timed.

    Attributes:
        kind: "normal" is N(0, 1); "mean" adds 0.5; "outliers" adds N(0, 100) to one element in a thousand;
            "key_bias" adds 4 N(0, 1) to every channel of every head of K; "zeros" draw less power.
        layout: "bshd" makes [B, H, S, D] views of [B, S, H, D] memory; "unaligned" rows start off 16-byte boundaries.
        masks: what make_masks gives beside the tensors.
    """

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    heads_kv: int = 0
    dtype: DType = "float16"
    causal: Causal | None = None
    scale: float | None = None
    kind: Kind = "normal"
    layout: Layout = "bhsd"
    seed: int = 0
    masks: tuple[Masking, ...] = ()

    def __post_init__(self) -> None:
        """Masks are a list where a case comes from JSON; a case is hashed."""
        object.__setattr__(self, "masks", tuple(self.masks))

    @property
    def kv_heads(self) -> int:
        """H_kv; `heads_kv` of 0 means as many as query heads."""
        return self.heads_kv or self.heads

    @property
    def options(self) -> CaseOptions:
        """The arguments of sdpa that the case has beside tensors and masks."""
        return {"causal": self.causal, "scale": self.scale, "enable_gqa": self.kv_heads != self.heads}

    def problem(self, target: str) -> Problem:
        """The problem that the case poses on a target, with aligned tensors and no masks."""
        return Problem(
            batch=self.batch,
            heads=self.heads,
            heads_kv=self.kv_heads,
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
            head_dim=self.head_dim,
            dtype=self.dtype,
            causal=self.causal,
            target=target,
        )

    def __str__(self) -> str:
        """A name that tells one case from another in a table."""
        parts = [f"b{self.batch} h{self.heads}"]
        if self.kv_heads != self.heads:
            parts.append(f"hkv{self.kv_heads}")
        parts.append(f"sq{self.seqlen_q} sk{self.seqlen_k} d{self.head_dim} {self.dtype}")
        parts += [str(p) for p in (self.causal, self.kind, self.layout) if p not in (None, "normal", "bhsd")]
        parts += self.masks
        if self.scale is not None:
            parts.append(f"scale{self.scale:g}")
        return " ".join([*parts, f"seed{self.seed}"])


def make(case: Case, device: str = "cpu", salt: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q [B, H, S_q, D], K and V [B, H_kv, S_k, D] of a case: the same values on every device.

    `salt` gives further independent sets of the same case.
    """
    generator = torch.Generator().manual_seed(1_000_003 * case.seed + salt)

    def tensor(heads: int, seqlen: int) -> torch.Tensor:
        shape = (case.batch, heads, seqlen, case.head_dim)
        x = torch.zeros(shape) if case.kind == "zeros" else torch.randn(shape, generator=generator)
        if case.kind == "mean":
            x += 0.5
        elif case.kind == "outliers":
            x += 10 * torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 1e-3)
        return _laid_out(x.to(TORCH_DTYPE[case.dtype]).to(device), case.layout)

    query = tensor(case.heads, case.seqlen_q)
    key, value = tensor(case.kv_heads, case.seqlen_k), tensor(case.kv_heads, case.seqlen_k)
    if case.kind == "key_bias":
        key += (4 * torch.randn(case.batch, case.kv_heads, 1, case.head_dim, generator=generator)).to(key)
    return query, key, value


def make_masks(case: Case, device: str = "cpu") -> dict[str, Any]:
    """Further arguments of sdpa, and of the oracle, for the masks of a case: the same values on every device.

    "bool" is [B, 1, S_q, S_k] and hides half the keys, all of them from some rows; "padding" is [B, 1, 1, S_k];
    "left padding" is the [B, 1, S_q, S_k] of a batch of prompts that are filled up to one length on the left, and the
    causal mask of their last S_q tokens: up to half of the keys are hidden, a padded query sees itself. As numbers it
    has the lowest one for what is hidden, in the inputs' type. "text" is [B, 1, 1, S_k] and hides some of the first
    eighth of the keys. "additive" is [H, S_q, S_k] in the inputs' type, -inf in places, "float32" [S_q, S_k];
    "slice" is like "additive", of a larger tensor: it starts at the second number of that one's rows.
    "window 1024" shows a query the 1,024 keys before it and its own; "window as a mask" is [S_q, S_k] and shows 128.
    "documents" has the ranges of keys of a query's own document, as documents() has them; "blocks 30%" is a BlockTable
    that shows 30% of the blocks, as block_table() has them.
    """
    generator = torch.Generator().manual_seed(7 + case.seed)
    b, h, s_q, s_k = case.batch, case.heads, case.seqlen_q, case.seqlen_k
    found: dict[str, Any] = {}
    for name in case.masks:
        if name == "bool":
            mask = torch.rand(b, 1, s_q, s_k, generator=generator) < 0.5
            mask[:, :, ::7] = False
            found["attn_mask"] = mask.to(device)
        elif name == "padding":
            lengths = torch.randint(1, s_k + 1, (b,), generator=generator)
            found["attn_mask"] = (torch.arange(s_k) < lengths[:, None])[:, None, None].to(device)
        elif name in ("left padding", "left padding, numbers"):
            padding = torch.randint(0, s_k // 2 + 1, (b, 1, 1), generator=generator)
            keys, queries = torch.arange(s_k), torch.arange(s_k - s_q, s_k)[:, None]
            mask = ((keys <= queries) & ((keys >= padding) | (keys == queries)))[:, None]
            lowest = torch.finfo(TORCH_DTYPE[case.dtype]).min
            numbers = torch.zeros(mask.shape, dtype=TORCH_DTYPE[case.dtype]).masked_fill(~mask, lowest)
            found["attn_mask"] = (mask if name == "left padding" else numbers).to(device)
        elif name == "text":
            lengths = torch.randint(0, s_k // 8 + 1, (b, 1), generator=generator)
            keys = torch.arange(s_k)
            found["attn_mask"] = ((keys < lengths) | (keys >= s_k // 8))[:, None, None].to(device)
        elif name in ("additive", "slice", "float32"):
            columns = s_k + 3 if name == "slice" else s_k
            shape = (s_q, columns) if name == "float32" else (h, s_q, columns)
            bias = torch.randn(shape, generator=generator).where(
                torch.rand(shape, generator=generator) < 0.8, -torch.inf
            )
            bias = bias.to(torch.float32 if name == "float32" else TORCH_DTYPE[case.dtype]).to(device)
            found["attn_mask"] = bias[..., 1 : s_k + 1] if name == "slice" else bias
        elif name == "window":
            found["window"] = (s_k // 3, s_k // 5)
        elif name in ("window 1024", "window 4096"):
            found["window"] = (int(name.split()[1]), 0)
        elif name == "window as a mask":
            distance = torch.arange(s_q, device=device)[:, None] - torch.arange(s_k, device=device)
            found["attn_mask"] = (distance >= 0) & (distance < 128)
        elif name == "documents":
            of_query, of_key = documents(case)
            found["attn_mask"] = document_ranges((of_query.to(device), of_key.to(device)))
        elif name in BLOCK_SHARES:
            found["block_mask"] = BlockTable(block_table(case, BLOCK_SHARES[name]).to(device), BLOCK, s_q, s_k)
        elif name == "softcap":
            found["softcap"] = 3.0
        elif name == "alibi":
            found["alibi_slopes"] = torch.rand(b, h, generator=generator).to(device)
        else:
            found["sinks"] = torch.randn(h, generator=generator).to(TORCH_DTYPE[case.dtype]).to(device)
    return found


def masks_of(case: Case, device: str = "cpu") -> Masks:
    """What make_masks gives, as kernels have it."""
    given = make_masks(case, device)
    table: BlockTable | None = given.pop("block_mask", None)
    return Masks(**given) if table is None else Masks(**given | {"attn_mask": table.memory})


def documents(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B, S_q] and [B, S_k] of documents that share a sequence, int32: in order, none over a quarter of the keys.

    Queries stand among the keys at equal distances: where there are as many, they are the same tokens.
    """
    generator = torch.Generator().manual_seed(11 + case.seed)
    longest = max(1, case.seqlen_k // 4)
    lengths = torch.randint(max(1, longest // 8), longest + 1, (case.batch, 40), generator=generator)
    positions = torch.arange(case.seqlen_k).expand(case.batch, -1).contiguous()
    of_key = torch.searchsorted(lengths.cumsum(dim=1), positions, right=True).int()
    return of_key[:, torch.arange(case.seqlen_q) * case.seqlen_k // case.seqlen_q], of_key


def block_table(case: Case, share: float) -> torch.Tensor:
    """Blocks that are shown, bool [1, 1, blocks of S_q, blocks of S_k]: a share of them, and one of every row."""
    generator = torch.Generator().manual_seed(13 + case.seed)
    rows, keys = (-(-length // BLOCK) for length in (case.seqlen_q, case.seqlen_k))
    order = torch.rand(rows, keys, generator=generator)
    own = torch.arange(rows)
    order[own, own * keys // rows] = -1.0
    least = order.flatten().sort().values[max(rows, round(share * rows * keys)) - 1]
    return (order <= least)[None, None]


def dense_mask(case: Case, device: str = "cpu") -> torch.Tensor | None:
    """All that hides keys in a case, and its slopes, as one tensor of those that torch takes; None for nothing.

    It is bool, or numbers in the inputs' type, and broadcasts to [B, H, S_q, S_k].
    """
    masks = masks_of(case, device)
    mask, slopes = masks.attn_mask, masks.alibi_slopes
    if mask is not None:
        mask = dense(mask, case.seqlen_k)
    visible = masks.visible(case.causal, case.seqlen_q, case.seqlen_k, torch.device(device))
    if slopes is not None:
        position = masks.bounds(case.causal, case.seqlen_q, case.seqlen_k)[0]
        away = torch.arange(case.seqlen_k, device=device) - torch.arange(case.seqlen_q, device=device)[:, None]
        bias = -slopes.expand(case.batch, -1)[:, :, None, None] * (away - position).abs()
        if mask is not None:
            bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
        mask = bias.to(TORCH_DTYPE[case.dtype])
    if mask is None or visible is None:
        return visible if mask is None else mask
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -torch.inf)


def _laid_out(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    if layout == "bshd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "unaligned":
        wide = torch.full((*x.shape[:3], x.shape[3] + 3), torch.nan, dtype=x.dtype, device=x.device)
        wide[..., 1:-2] = x
        return wide[..., 1:-2]
    return x
