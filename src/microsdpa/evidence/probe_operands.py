"""What the probes read, and the magnitudes of the sums that they make: what rounding errors are relative to."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

Words = torch.Tensor
"""int32 tensor: the bits of 32-bit words."""
Make = Callable[[int, torch.Generator], Words]
"""Of a number of threads: what they read, [threads, words]."""
Scale = Callable[[Words], torch.Tensor]
"""Of what the threads read: the magnitudes that are added up, [threads, words]."""


def _bits(x: torch.Tensor) -> Words:
    return x.contiguous().view(torch.int32)


def random_bits(words: int) -> Make:
    """Any words."""

    def make(threads: int, generator: torch.Generator) -> Words:
        return torch.randint(-(2**31), 2**31, (threads, words), generator=generator, dtype=torch.int64).to(torch.int32)

    return make


def floats(low: float, high: float, words: int) -> Make:
    """Uniform floats, with every special value among the first."""
    special = [
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        1e-40,
        -1e-40,
        448.0,
        464.0,
        480.0,
        -1e9,
        0.001953125,
        2.0**-10,
    ]

    def make(threads: int, generator: torch.Generator) -> Words:
        x = torch.rand(threads * words, generator=generator) * (high - low) + low
        x[: len(special)] = torch.tensor(special)
        return _bits(x.view(threads, words))

    return make


def half_pairs(threads: int, generator: torch.Generator) -> Words:
    """Two FP16 numbers a thread, with special values among the first."""
    x = (torch.rand(threads, 2, generator=generator) * 40 - 25).half()
    x[:4] = torch.tensor([[0.0, -0.0], [math.inf, -math.inf], [math.nan, 1.0], [-24.5, 16.0]]).half()
    return _bits(x)


def mma(dtype: torch.dtype) -> Make:
    """Operands of one mma per warp: A in 4 words, B in 2, D in 4 floats."""

    def make(threads: int, generator: torch.Generator) -> Words:
        per_word = 4 // dtype.itemsize
        if dtype == torch.int8:
            operands = torch.randint(-128, 128, (threads, 6 * per_word), generator=generator).to(dtype)
            d = torch.randint(-(2**20), 2**20, (threads, 4), generator=generator).to(torch.int32)
        else:
            operands = torch.randn(threads, 6 * per_word, generator=generator).to(dtype)
            d = _bits(torch.randn(threads, 4, generator=generator))
        return torch.cat([_bits(operands), d], dim=1)

    return make


def mma_magnitude(dtype: torch.dtype) -> Scale:
    """Sum of the magnitudes that each element of D adds up, |A| |B| + |D|: what its rounding errors are relative to."""
    per_word = 4 // dtype.itemsize
    depth = 8 * per_word

    def scale(words: Words) -> torch.Tensor:
        warps = words.view(-1, 32, 10)
        elements = warps[:, :, :6].contiguous().view(dtype).double().abs()
        start = warps[:, :, 6:].contiguous().view(torch.float32).double().abs()
        a = torch.zeros(len(warps), 16, depth, dtype=torch.float64)
        b = torch.zeros(len(warps), depth, 8, dtype=torch.float64)
        for lane in range(32):  # the fragments of kernels/ptx/mma.cuh
            group, t = divmod(lane, 4)
            for i in range(4):
                row, column = group + 8 * (i % 2), per_word * t + 4 * per_word * (i // 2)
                a[:, row, column : column + per_word] = elements[:, lane, per_word * i : per_word * (i + 1)]
            for i in range(2):
                row = per_word * t + 4 * per_word * i
                b[:, row : row + per_word, group] = elements[:, lane, per_word * (4 + i) : per_word * (5 + i)]
        products = a @ b
        lanes = torch.arange(32)[:, None]
        part = torch.arange(4)
        return (products[:, lanes // 4 + 8 * (part // 2), 2 * (lanes % 4) + part % 2] + start).view(-1, 4)

    return scale


def wmma(dtype: torch.dtype) -> Make:
    """Operands of one product per warp: A and B in 8 words of each lane, C in 8."""

    def make(threads: int, generator: torch.Generator) -> Words:
        warps = threads // 32
        operands = _bits(torch.randn(warps, 512, generator=generator).to(dtype))
        c = _bits(torch.randn(warps, 256, generator=generator))
        return torch.cat([operands, c], dim=1).view(threads, 16)

    return make


def wmma_magnitude(dtype: torch.dtype, layout: str) -> Scale:
    """The same for wmma; the probe halves its result."""

    def scale(words: Words) -> torch.Tensor:
        warps = words.view(-1, 512)
        a, b = warps[:, :256].contiguous().view(dtype).double().abs().view(-1, 2, 16, 16).unbind(1)
        c = warps[:, 256:].contiguous().view(torch.float32).double().abs().view(-1, 16, 16).mT
        products = a @ b.mT if layout == "row" else a.mT @ b
        return ((products + c) / 2).reshape(-1, 8)

    return scale


def rows(threads: int, generator: torch.Generator) -> Words:
    """A row of four words, and a number."""
    return torch.cat(
        [random_bits(4)(threads, generator), torch.randint(0, 2**30, (threads, 1), generator=generator)], 1
    ).to(torch.int32)


def aligned_rows(threads: int, generator: torch.Generator) -> Words:
    """Rows of eight words, so that a row's first four can be copied 16 bytes at a time."""
    return torch.cat([rows(threads, generator), random_bits(3)(threads, generator)], dim=1)


def wgmma(dtype: torch.dtype, n: int) -> Make:
    """Operands of one wgmma per warpgroup: A [64][32 bytes] in 4 words of a thread, B [n][32 bytes], D in n / 2."""

    def make(threads: int, generator: torch.Generator) -> Words:
        words = 4 + n // 16
        if dtype == torch.int8:
            operands = torch.randint(-128, 128, (threads, 4 * words), generator=generator).to(dtype)
            d = torch.randint(-(2**20), 2**20, (threads, n // 2), generator=generator).to(torch.int32)
        else:
            operands = torch.randn(threads, words * 4 // dtype.itemsize, generator=generator).to(dtype)
            d = _bits(torch.randn(threads, n // 2, generator=generator))
        return torch.cat([_bits(operands), d], dim=1)

    return make


def wgmma_magnitude(dtype: torch.dtype, widths: tuple[int, ...], added: bool) -> Scale:
    """The same for wgmma: of the first columns, as many as each width has; without the start when it is not added."""
    n = max(widths)

    def scale(words: Words) -> torch.Tensor:
        groups = words.view(-1, 128, words.shape[1])

        def matrix(first: int, last: int, rows: int) -> torch.Tensor:
            return groups[:, :, first:last].contiguous().view(dtype).double().abs().view(len(groups), rows, -1)

        products = matrix(0, 4, 64) @ matrix(4, 4 + n // 16, n).mT
        thread, i = torch.arange(128)[:, None], torch.arange(n // 2)
        row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2 % 2)
        start = groups[:, :, 4 + n // 16 :].contiguous().view(torch.float32).double().abs() * added
        sums = (products[:, row, i // 4 * 8 + 2 * (thread % 4) + i % 2] + start).view(-1, n // 2)
        return torch.cat([sums[:, : width // 2] for width in widths], dim=1)

    return scale
