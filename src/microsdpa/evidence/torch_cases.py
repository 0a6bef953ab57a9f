"""The calls that torch's own tests make of F.scaled_dot_product_attention, as data.

The parameters are those of pytorch/test/test_transformers.py: its comparisons of fused kernels with the math backend,
of masks, of packed inputs, its causal variants, and the corner and failure cases around them. Values are N(0, 1), where
torch's tests mostly take uniform ones: the softmax of those is nearly flat.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from microsdpa.evidence.inputs import TORCH_DTYPE
from microsdpa.kernels.problem import DType, MaskKind, Problem

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments and keyword arguments of F.scaled_dot_product_attention."""
MaskForm = Literal["none", "bool", "float", "strided", "diagonal"]
Layout = Literal["dense", "packed", "bshd", "shared"]
Variant = Literal["upper_left", "lower_right"]


@dataclass(frozen=True)
class TorchCase:
    """One call.

    Attributes:
        family: what of torch's tests it comes from.
        mask: "bool" and "float" are random; "strided" repeats one row of keys through strides of zero; "diagonal" is
            -inf but for a band of ten keys.
        mask_shape: what the mask is before it is broadcast.
        layout: "packed" are thirds of one [B, S, 3 H D] tensor, "bshd" views of [B, S, H, D] memory, "shared" keys of
            which all heads are one, through a stride of zero.
        variant: a torch.nn.attention.bias of this alignment for a mask.
        scale: factor of Q K^T.
    """

    family: str
    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: DType = "float16"
    heads_kv: int = 0
    is_causal: bool = False
    scale: float | None = None
    mask: MaskForm = "none"
    mask_shape: tuple[int, ...] = ()
    layout: Layout = "dense"
    variant: Variant | None = None

    def __str__(self) -> str:
        """A name that tells one case from another."""
        heads = f"{self.heads}" if not self.heads_kv else f"{self.heads}/{self.heads_kv}"
        parts = [f"{self.family}: b{self.batch} h{heads} sq{self.seqlen_q} sk{self.seqlen_k} d{self.head_dim}"]
        parts += [self.dtype, *(["causal"] if self.is_causal else []), *([self.variant] if self.variant else [])]
        parts += [f"{self.mask}{list(self.mask_shape)}"] if self.mask != "none" else []
        parts += [self.layout] if self.layout != "dense" else []
        return " ".join([*parts, *([f"scale {self.scale:g}"] if self.scale is not None else [])])

    @property
    def work(self) -> int:
        """Multiplications of Q K^T."""
        return self.batch * self.heads * self.seqlen_q * self.seqlen_k * self.head_dim

    def problem(self, target: str) -> Problem:
        """The problem that the case poses, as far as kernels are chosen by it."""
        tensor: Any = "bool" if self.mask == "bool" else self.dtype
        causal: Variant | None = "upper_left" if self.is_causal else self.variant
        return Problem(
            batch=self.batch,
            heads=self.heads,
            heads_kv=self.heads_kv or self.heads,
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
            head_dim=self.head_dim,
            dtype=self.dtype,
            causal=causal,
            mask=MaskKind(tensor) if self.mask != "none" else None,
            alignment=16 if self.head_dim % 8 == 0 else 2,
            target=target,
        )

    def call(self, device: str) -> Call:
        """Its arguments, the same ones whenever they are made on a device."""
        generator = torch.Generator(device).manual_seed(self.work + 7 * self.head_dim + len(self.mask_shape))
        dtype = TORCH_DTYPE[self.dtype]

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        def heads_of(heads: int, seqlen: int) -> torch.Tensor:
            if self.layout == "bshd":
                return normal(self.batch, seqlen, heads, self.head_dim).transpose(1, 2)
            if self.layout == "shared" and seqlen == self.seqlen_k:
                return normal(self.batch, 1, seqlen, self.head_dim).expand(-1, heads, -1, -1)
            return normal(self.batch, heads, seqlen, self.head_dim)

        if self.layout == "packed":
            packed = normal(self.batch, self.seqlen_q, 3 * self.heads * self.head_dim)
            size = self.batch, self.seqlen_q, self.heads, self.head_dim
            query, key, value = (part.view(size).transpose(1, 2) for part in packed.chunk(3, dim=-1))
        else:
            heads_kv = self.heads_kv or self.heads
            query = heads_of(self.heads, self.seqlen_q)
            key, value = (heads_of(heads_kv, self.seqlen_k) for _ in range(2))
        mask: Any = None
        if self.mask == "bool":
            mask = torch.randint(0, 2, self.mask_shape, generator=generator, device=device) > 0
        elif self.mask == "float":
            mask = normal(*self.mask_shape)
        elif self.mask == "strided":
            mask = normal(self.seqlen_k).as_strided(self.mask_shape, (0, 0, 0, 1))
        elif self.mask == "diagonal":
            hidden = torch.full((self.seqlen_q, self.seqlen_k), -torch.inf, dtype=dtype, device=device)
            mask = hidden.triu(1) + hidden.tril(-10)
        if self.variant:
            mask = _causal_bias(self.variant, self.seqlen_q, self.seqlen_k)
        options = {"is_causal": self.is_causal, "scale": self.scale, "enable_gqa": bool(self.heads_kv)}
        return (query, key, value, mask), options


def _causal_bias(variant: str, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    from torch.nn.attention import bias  # which loads torch.compile

    made = bias.causal_upper_left if variant == "upper_left" else bias.causal_lower_right
    return made(seqlen_q, seqlen_k)


DTYPES: tuple[DType, ...] = ("float16", "bfloat16")


def _fused() -> list[TorchCase]:
    sizes = itertools.product(
        (1, 8),
        (4, 8, 64, 143, 256, 512, 1024, 2048),
        (4, 8, 64, 128, 256, 587, 1024, 2048),
        (8, 16, 21, 32, 64, 72, 96, 128, 160, 192, 203, 256),
    )
    return [
        TorchCase("fused", b, 4, s_q, s_k, d, dtype, 2 if gqa else 0, causal, 1 / d if by_size else None)
        for (b, s_q, s_k, d), dtype, gqa, causal, by_size in itertools.product(
            sizes, DTYPES, (False, True), (False, True), (False, True)
        )
    ]


def _masked() -> list[TorchCase]:
    sizes = itertools.product(
        (1, 8),
        (4, 8, 64, 128, 256, 312, 512, 1024, 2048),
        (4, 8, 64, 65, 128, 256, 408, 512, 1024, 2048),
        (8, 16, 32, 64, 72, 96, 128),
    )
    return [
        TorchCase("masked", b, 4, s_q, s_k, d, dtype, 0, False, 1 / d if by_size else None, "float", (s_q, s_k))
        for (b, s_q, s_k, d), dtype, by_size in itertools.product(sizes, DTYPES, (False, True))
    ]


def _mask_shapes() -> list[TorchCase]:
    forms: tuple[MaskForm, ...] = ("bool", "float")
    two = list(itertools.product((267, 1), (514, 1)))
    four = list(itertools.product((2, 1), (3, 1), (267, 1), (514, 1)))
    found = [
        TorchCase("mask shapes", 2, 3, 267, 514, 8, dtype, mask=form, mask_shape=shape)
        for dtype, form, shape in itertools.product(DTYPES, forms, [*two, *four])
    ]
    whole = (8, 8, 64, 32)
    found += [
        TorchCase("mask shapes", 8, 8, 64, 32, 64, dtype, mask="float", mask_shape=whole[4 - rank :])
        for dtype, rank in itertools.product(DTYPES, (1, 2, 3, 4))
    ]
    for dtype in DTYPES:
        found += [
            TorchCase("mask shapes", 8, 8, 64, 15, 64, dtype, mask="float", mask_shape=(8, 8, 64, 15)),
            TorchCase("mask shapes", 8, 8, 64, 16, 64, dtype, mask="strided", mask_shape=(8, 8, 64, 16)),
            TorchCase("mask shapes", 1, 2, 600, 600, 8, dtype, mask="diagonal"),
            TorchCase("mask shapes", 3, 16, 1, 14, 128, dtype, mask="float", mask_shape=(3, 1, 1, 14), layout="shared"),
        ]
    return found


def _layouts() -> list[TorchCase]:
    sizes = [(32, 16, 64, 64), (16, 4, 8, 64), (4, 2, 4, 16)]
    sizes += [(b, h, s, d) for b, s, h, d in itertools.product((2, 12), (267, 1030), (1, 3), (8, 16))]
    layouts: tuple[Layout, ...] = ("packed", "bshd", "dense")
    return [
        TorchCase("layouts", b, h, s, s, d, dtype, is_causal=causal, layout=layout)
        for (b, h, s, d), dtype, causal, layout in itertools.product(sizes, DTYPES, (False, True), layouts)
    ]


def _variants() -> list[TorchCase]:
    sizes = ((16, 16, 128, 128, 16), (16, 16, 128, 256, 32), (16, 16, 256, 128, 32), (1, 1, 23, 56, 15))
    variants: tuple[Variant, ...] = ("upper_left", "lower_right")
    return [
        TorchCase("causal variants", *size, dtype, variant=variant)
        for size, variant, dtype in itertools.product(sizes, variants, DTYPES)
    ]


@functools.cache
def all_cases() -> tuple[TorchCase, ...]:
    """The whole space; no case twice."""
    cases = [*_fused(), *_masked(), *_mask_shapes(), *_layouts(), *_variants()]
    return tuple(dict.fromkeys(cases))


def sample(count: int, seed: int, largest_work: int | None = None) -> list[TorchCase]:
    """As many cases, chosen at random, from every family as evenly as its size allows."""
    families: dict[str, list[TorchCase]] = {}
    for case in all_cases():
        if largest_work is None or case.work <= largest_work:
            families.setdefault(case.family, []).append(case)
    chooser = random.Random(seed)
    chosen: list[TorchCase] = []
    for index, cases in enumerate(sorted(families.values(), key=len)):
        share = (count - len(chosen)) // (len(families) - index)
        chosen += chooser.sample(cases, min(share, len(cases)))
    return chosen


def _nested(device: str, dtype: torch.dtype, lengths: tuple[int, ...], layout: torch.layout) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(sum(lengths))
    parts = [torch.randn(n, 4, 16, generator=generator, device=device).to(dtype) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)


def corners(device: str) -> dict[str, Callable[[], Call]]:
    """Calls at the edges of what torch accepts, and beyond: name and a function that makes the arguments."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def alike(*shape: int, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, ...]:
        return normal(*shape, dtype=dtype), normal(*shape, dtype=dtype), normal(*shape, dtype=dtype)

    def jagged(lengths: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(_nested(device, torch.float32, lengths, torch.jagged) for _ in range(3))

    huge = torch.full((1, 1, 1, 64), 133120.0, dtype=torch.bfloat16, device=device)
    mask = torch.ones(12, 12, dtype=torch.bool, device=device)
    return {
        "float32": lambda: (alike(2, 4, 12, 16, dtype=torch.float32), {}),
        "float64": lambda: (alike(2, 4, 12, 16, dtype=torch.float64), {"is_causal": True}),
        "three dimensions": lambda: (alike(2, 3, 8), {}),
        "two dimensions": lambda: (alike(3, 8), {}),
        "five dimensions": lambda: (alike(2, 2, 2, 3, 8), {}),
        "one dimension": lambda: ((normal(4), *alike(1, 4)[:2]), {}),
        "a query of batch 1": lambda: ((normal(1, 4, 3, 8), *alike(2, 4, 3, 8)[:2]), {}),
        "another head dimension of V": lambda: ((*alike(2, 4, 12, 32)[:2], normal(2, 4, 12, 16)), {}),
        "a head dimension of 257": lambda: (alike(2, 2, 3, 257), {}),
        "a head dimension of 9": lambda: (alike(2, 2, 3, 9), {}),
        "a head dimension of 1": lambda: ((normal(1, 1, 1, 2).mT, normal(1, 1, 1, 1), normal(1, 1, 1, 1)), {}),
        "strides of 2 along D": lambda: ((normal(2, 2, 8, 16)[..., ::2], *alike(2, 2, 8, 8)[:2]), {}),
        "no queries": lambda: ((normal(2, 2, 0, 8), *alike(2, 2, 8, 8)[:2]), {}),
        "no keys": lambda: ((normal(2, 2, 8, 8), *alike(2, 2, 0, 8)[:2]), {}),
        "no sequences at all": lambda: (alike(2, 2, 0, 8), {}),
        "numbers as large as BF16 squares": lambda: ((huge, huge, huge), {}),
        "a negative scale": lambda: (alike(1, 3, 64, 64, dtype=torch.bfloat16), {"scale": -1.0 / 0.0001}),
        "a mask and is_causal": lambda: ((*alike(2, 4, 12, 16), mask), {"is_causal": True}),
        "a causal bias and is_causal": lambda: (
            (*alike(2, 4, 12, 16), _causal_bias("upper_left", 12, 12)),
            {"is_causal": True},
        ),
        "a mask of another type": lambda: ((*alike(2, 4, 12, 16), normal(12, 12).double()), {}),
        "a mask of another shape": lambda: ((*alike(2, 4, 12, 16), mask[:5]), {}),
        "grouped heads without enable_gqa": lambda: ((normal(2, 4, 8, 16), *alike(2, 2, 8, 16)[:2]), {}),
        "heads that do not divide": lambda: ((normal(2, 4, 8, 16), *alike(2, 3, 8, 16)[:2]), {"enable_gqa": True}),
        "different types": lambda: ((normal(1, 4, 8, 16).float(), *alike(1, 4, 8, 16)[:2]), {}),
        "dropout": lambda: (alike(2, 4, 12, 16), {"dropout_p": 0.22}),
        "dropout of everything": lambda: (alike(2, 4, 12, 16), {"dropout_p": 1.0}),
        "jagged lengths": lambda: (jagged((5, 9, 2)), {}),
        "jagged lengths of 1": lambda: (jagged((1, 7, 1)), {"is_causal": True}),
        "jagged lengths of 0": lambda: (jagged((3, 0, 4)), {}),
        "nested tensors": lambda: (
            tuple(_nested(device, torch.float32, (5, 1, 9), torch.strided).contiguous() for _ in range(3)),
            {},
        ),
        "a nested query and dense keys": lambda: (
            (_nested(device, torch.float32, (5, 1), torch.strided), *alike(2, 4, 6, 16, dtype=torch.float32)[:2]),
            {},
        ),
    }
