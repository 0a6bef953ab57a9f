"""What is supported, asked of the specifications: GPU, type, head dimension, feature, and the kernel of impl="auto"."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from microsdpa.errors import UnsupportedProblem
from microsdpa.evidence.survey import TARGETS
from microsdpa.kernels.backward import spec as backward_spec
from microsdpa.kernels.hopper.backward import spec as hopper_backward
from microsdpa.kernels.problem import CacheKind, DType, MaskKind, Problem
from microsdpa.kernels.quantize.spec import SCHEMES
from microsdpa.kernels.select import select

GPUS = {"sm_80": "A100", "sm_89": "L4, RTX 4090", "sm_90a": "H100, H200", "sm_120": "RTX 5090"}
DTYPES: tuple[DType, ...] = ("float16", "bfloat16")
SIZES = ((1, 8, 1, 4096), (1, 8, 512, 512), (4, 32, 4096, 4096))
"""(B, H, S_q, S_k) that are asked for: decoding, few queries, many."""
LARGEST = 256
STEPS = (16, 8)
MOST_NAMED = 12
"""Head dimensions that are named at most where nearly all are there."""
FEATURES: dict[str, dict[str, Any]] = {
    "no mask": {},
    "causal, upper left": {"causal": "upper_left"},
    "causal, lower right": {"causal": "lower_right"},
    "grouped heads": {"heads_kv": 1},
    "rows off 16 bytes": {"alignment": 2},
    "bool `attn_mask`": {"mask": MaskKind("bool")},
    "`attn_mask` of numbers": {"mask": MaskKind("float32", bulk=True)},
    "`document_ids`, and other ranges of keys": {"mask": MaskKind("int32", per_query=True)},
    "`window`": {"mask": MaskKind(left=True, right=True)},
    "`softcap`": {"mask": MaskKind(softcap=True)},
    "`alibi_slopes`": {"mask": MaskKind(alibi=True)},
    "`sinks`": {"mask": MaskKind(sinks="float32")},
    "all of the masks, causal": {
        "mask": MaskKind("bool", True, True, True, True, "float32"),
        "causal": "lower_right",
    },
    "`dropout_p`": {"dropout": True},
    "`continue_from`": {"continued": True},
}
CACHES = {
    "`key` and `value` of float8_e4m3fn": CacheKind("e4m3"),
    "`key` and `value` of int8": CacheKind("int8"),
}


MASKS_OF_EIGHT_BITS = {
    "a mask in memory": MaskKind("float32", bulk=True),
    "ranges and all other masks": MaskKind("int32", True, True, True, True, "float32", per_query=True),
}


def dimensions(found: Iterable[int]) -> str:
    """Head dimensions in words: "1 to 256", "multiples of 16 to 256", "1 to 256 but 96", "17 to 32, 49 to 64"."""
    dims, every = set(found), set(range(1, LARGEST + 1))
    for step in (1, *STEPS):
        multiples = set(range(step, max(dims) + 1, step))
        if dims == multiples and len(dims) > 2:
            return f"1 to {max(dims)}" if step == 1 else f"multiples of {step} to {max(dims)}"
        if dims == every - set(range(step, LARGEST + 1, step)):
            return f"all others to {LARGEST}"
    missing = sorted(every - dims)
    for step in STEPS:
        if len(missing) > 2 and missing == list(range(step, missing[-1] + 1, step)):
            return f"1 to {LARGEST} but multiples of {step} to {missing[-1]}"
    if len(missing) <= MOST_NAMED:
        return f"1 to {LARGEST} but {', '.join(map(str, missing))}"
    return ", ".join(_runs(sorted(dims)))


def _runs(dims: list[int]) -> list[str]:
    """Numbers that follow each other as one text, "17 to 32"."""
    runs: list[list[int]] = []
    for dim in dims:
        if runs and dim == runs[-1][-1] + 1:
            runs[-1].append(dim)
        else:
            runs.append([dim])
    return [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]


def _kernel(problem: Problem) -> str | None:
    """What impl="auto" runs; None when nothing does."""
    try:
        return select(problem).spec.name
    except UnsupportedProblem:
        return None


def _cell(dtype: DType, target: str, **feature: Any) -> str:
    kernels: dict[str, set[int]] = {}
    for batch, heads, seqlen_q, seqlen_k in SIZES:
        for head_dim in range(1, LARGEST + 1):
            sizes = {"batch": batch, "heads": heads, "heads_kv": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
            problem = Problem(**(sizes | {"head_dim": head_dim, "dtype": dtype, "target": target} | feature))
            if name := _kernel(problem):
                kernels.setdefault(name, set()).add(head_dim)
    order = sorted(kernels, key=lambda name: len(kernels[name]))  # "other" and "all others" come last
    return "<br>".join(f"{name}: {dimensions(kernels[name])}" for name in order) or "no"


def _gradients_cell(target: str) -> str:
    """What multiplies in the gradients' kernel."""
    found: dict[str, set[int]] = {}
    for head_dim in range(1, LARGEST + 1):
        problem = Problem(1, 8, 8, 512, 512, head_dim, "float16", target=target)
        if isinstance(hopper_backward.choose(problem), hopper_backward.Tiling):
            found.setdefault("hopper/backward", set()).add(head_dim)
        elif not backward_spec.refusal(problem, tiling := backward_spec.choose(problem)):
            found.setdefault(f"backward, {'wgmma' if tiling.wgmma else 'mma.sync'}", set()).add(head_dim)
    order = sorted(found, key=lambda name: len(found[name]))
    return "<br>".join(f"{name}: {dimensions(found[name])}" for name in order) or "no"


@functools.cache
def matrix() -> list[list[str]]:
    """A header, then a line a feature and type, a column a GPU; cells have the kernels, each with head dimensions.

    A kernel stands in a cell when impl="auto" takes it for one of SIZES.
    """
    lines = [["", "type", *(f"{GPUS[target]} ({target})" for target in TARGETS)]]
    for label, feature in FEATURES.items():
        by_type = {dtype: [_cell(dtype, target, **feature) for target in TARGETS] for dtype in DTYPES}
        same = by_type[DTYPES[0]] == by_type[DTYPES[1]]
        lines += [
            [label, " and ".join(DTYPES) if same else dtype, *by_type[dtype]]
            for dtype in (DTYPES[:1] if same else DTYPES)
        ]
    lines.append(["gradients by own kernels", " and ".join(DTYPES), *map(_gradients_cell, TARGETS)])
    for label, cache in CACHES.items():
        cells = [_cell("float16", target, cache=cache, varlen=0) for target in TARGETS]
        lines.append([label, "a query of either", *cells])
    for precision, scheme in SCHEMES.items():
        cells = [
            _cell("float16", target, operands=scheme.operands, query_terms=scheme.query_terms) for target in TARGETS
        ]
        lines.append([f'`precision="{precision}"`', "quantized from either", *cells])
    for label, mask in MASKS_OF_EIGHT_BITS.items():
        cells = [_cell("float16", target, operands="int8_fp8", mask=mask) for target in TARGETS]
        lines.append([f'{label} beside `precision="int8_fp8"`', "quantized from either", *cells])
    shared: dict[str, Any] = {"operands": "int8_fp16", "query_terms": SCHEMES["int8_fp16"].query_terms}
    label, mask = list(MASKS_OF_EIGHT_BITS.items())[-1]
    cells = [_cell("float16", target, mask=mask, **shared) for target in TARGETS]
    lines.append([f'{label} beside `precision="int8_fp16"`', "quantized from either", *cells])
    return lines


def markdown() -> str:
    """The matrix as a table."""
    lines = matrix()
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
