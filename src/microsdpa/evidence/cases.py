"""The cases that `verify` covers."""

from __future__ import annotations

from itertools import product

from microsdpa.evidence.inputs import Case, Kind, Layout, Masking
from microsdpa.kernels.problem import Causal, DType

DTYPES: tuple[DType, ...] = ("float16", "bfloat16")
ALIGNMENTS: tuple[Causal, ...] = ("upper_left", "lower_right")
LAYOUTS: tuple[Layout, ...] = ("bshd", "unaligned")
KINDS: tuple[Kind, ...] = ("mean", "outliers")
NOTE_SHAPES = ((1, 2, 64, 64), (1, 4, 128, 64), (1, 8, 512, 64), (2, 2, 64, 64))
LENGTHS = (1, 7, 63, 65, 127, 513, 1000)
MAX_GRID_Y = 65_535
MASKINGS: tuple[tuple[Causal | None, tuple[Masking, ...]], ...] = (
    (None, ("bool",)),
    ("lower_right", ("padding",)),
    (None, ("additive",)),
    ("upper_left", ("float32",)),
    (None, ("window",)),
    ("lower_right", ("window", "sinks")),
    ("upper_left", ("softcap",)),
    ("lower_right", ("alibi",)),
    ("lower_right", ("bool", "window", "softcap", "alibi", "sinks")),
)
SPARSE: tuple[tuple[Causal | None, tuple[Masking, ...]], ...] = (
    ("upper_left", ("documents",)),
    (None, ("documents", "window", "softcap", "alibi", "sinks")),
    ("lower_right", ("blocks 10%",)),
    (None, ("blocks 30%", "softcap")),
    ("upper_left", ("blocks 50%", "window", "sinks")),
    (None, ("window as a mask",)),
    ("lower_right", ("window 1024",)),
    (None, ("window 4096",)),
)
DECODING: tuple[tuple[DType, Causal | None, tuple[Masking, ...]], ...] = (
    ("float16", None, ("left padding",)),
    ("bfloat16", None, ("left padding, numbers",)),
    ("float16", "lower_right", ("padding", "window", "softcap", "alibi", "sinks")),
)
CROSS_LENGTHS = ((1, 777), (7, 512), (333, 65), (512, 1), (129, 1000))


def needs_gpu(case: Case) -> str:
    """Why a case says nothing in the emulator; empty when it does."""
    if case.batch * case.heads > MAX_GRID_Y:
        return f"more than {MAX_GRID_Y:,} heads try the limits of a GPU's grid, which the emulator has not"
    return ""


def emulated_cases() -> list[tuple[str, Case]]:
    """Kernels of Ampere and Hopper, each with a few small cases: what a machine without a GPU runs in two minutes."""
    causal, ragged = Case(1, 2, 65, 130, 64, causal="lower_right"), Case(1, 1, 63, 97, 64, seed=1)
    small = (Case(1, 2, 64, 64, 64), causal, ragged)
    masked = Case(1, 2, 65, 70, 64, causal="lower_right", masks=("bool", "softcap"))
    return [
        *(("hopper/latency", case) for case in small),
        *(("hopper/throughput", case) for case in (Case(1, 1, 200, 150, 64), Case(1, 2, 130, 140, 64, seed=1))),
        ("hopper/split", Case(1, 1, 130, 200, 64)),
        *(("ampere/mma", case) for case in (*small, Case(2, 4, 5, 200, 64, heads_kv=2))),
        ("ampere/general", Case(1, 2, 20, 33, 40)),
        ("ampere/general", masked),
    ]


def verify_cases() -> list[Case]:
    """Every case, by what it is there for; no case twice."""
    cases: list[Case] = []
    plain_and_causal: tuple[Causal | None, ...] = (None, "upper_left")
    dtype_and_causal: tuple[tuple[DType, Causal | None], ...] = (
        ("float16", None),
        ("float16", "upper_left"),
        ("bfloat16", "lower_right"),
    )
    # Mission and small shapes.
    cases += [
        Case(b, h, s, s, d, dtype=dtype, seed=seed)
        for b, h, s, d in NOTE_SHAPES
        for dtype in DTYPES
        for seed in (0, 1, 2)
    ]
    # Ragged lengths, shorter than a tile and across tiles.
    cases += [Case(1, 2, s, s, 64, causal=causal) for s in LENGTHS for causal in plain_and_causal]
    # S_q != S_k both ways, both alignments: lower_right with S_q > S_k has rows that see no key.
    cases += [
        Case(1, 2, sq, sk, 64, dtype=dtype, causal=causal)
        for sq, sk in CROSS_LENGTHS
        for dtype, causal in dtype_and_causal
    ]
    # Head dimensions.
    cases += [
        Case(2, 3, 130, 97, d, dtype=dtype, causal=causal)
        for d in (32, 64, 128)
        for dtype in DTYPES
        for causal in (None, *ALIGNMENTS)
    ]
    # Grouped and multi-query attention.
    cases += [
        Case(2, 8, 100, 130, 64, heads_kv=h_kv, causal=causal) for h_kv in (2, 1) for causal in (None, "lower_right")
    ]
    # Layouts.
    for layout in LAYOUTS:
        cases.append(Case(2, 4, 77, 90, 64, heads_kv=2, layout=layout))
        cases.append(Case(2, 4, 77, 90, 128, heads_kv=2, dtype="bfloat16", layout=layout))
    # Distributions and logits that a careless softmax loses.
    cases += [Case(1, 4, 200, 300, 64, dtype=dtype, kind=kind) for kind in KINDS for dtype in DTYPES]
    cases += [Case(1, 4, 200, 300, d, dtype=dtype, scale=100.0) for d in (64, 128) for dtype in DTYPES]
    cases += [Case(1, 3, 64, 64, 64, dtype=dtype, scale=-300.0) for dtype in DTYPES]
    cases += [Case(1, 3, 64, keys, d, scale=8.0) for keys in (128, 256) for d in (64, 128)]
    # More heads than a grid has along y.
    cases += [Case(4096, 17, 5, 9, 32), Case(66_000, 1, 2, 3, 64, causal="lower_right")]
    # Rows without any key.
    cases += [Case(1, 2, 100, sk, 64, dtype=dtype, causal="lower_right") for sk in (1, 40) for dtype in DTYPES]
    # Masks, alone and together, also with rows that see no key.
    cases += [
        Case(2, 4, 100, 130, 64, heads_kv=2, dtype=dtype, causal=causal, masks=masks)
        for dtype in DTYPES
        for causal, masks in MASKINGS
    ]
    cases += [
        Case(1, 2, 70, 150, d, dtype=dtype, causal="lower_right", masks=("bool", "softcap"))
        for d in (40, 128, 256)
        for dtype in DTYPES
    ]
    # Documents, blocks and windows, in tiles of few queries and of many.
    cases += [
        Case(2, 4, s_q, s_k, d, heads_kv=2, dtype=dtype, causal=causal, masks=masks)
        for (s_q, s_k, d), dtype in zip(
            ((300, 300, 64), (150, 520, 40), (5, 700, 64)), (*DTYPES, DTYPES[0]), strict=True
        )
        for causal, masks in SPARSE
    ]
    # Masks in decoding, where heads share tiles and the keys are divided.
    cases += [
        Case(2, 8, s_q, s_k, d, heads_kv=2, dtype=dtype, causal=causal, masks=masks)
        for (s_q, s_k, d), (dtype, causal, masks) in product(((1, 700, 64), (5, 333, 128)), DECODING)
    ]
    cases += [Case(1, 2, 16, 200, 256, masks=("left padding",)), Case(3, 4, 40, 90, 64, masks=("text",))]
    cases.append(Case(1, 2, 70, 301, 64, masks=("slice",)))
    cases.append(Case(2, 4, 77, 90, 64, heads_kv=2, layout="unaligned", masks=("additive", "window", "alibi", "sinks")))
    return list(dict.fromkeys(cases))
