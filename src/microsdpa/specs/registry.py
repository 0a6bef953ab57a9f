"""The families of kernels, in the order in which impl="auto" tries them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from microsdpa.problem import ELEMENT_BYTES, VECTOR_BYTES, Causal, DType, Problem
from microsdpa.specs import ladder
from microsdpa.specs.spec import KernelSpec, Rejection


@dataclass(frozen=True)
class Family:
    """Kernels of one design: `specify` gives the configuration for a problem, or says why there is none."""

    name: str
    summary: str
    specify: Callable[[Problem], KernelSpec | Rejection]

    @property
    def short_name(self) -> str:
        """The name up to the rung's number: "ladder/01" for "ladder/01_scalar"."""
        return self.name.split("_")[0] if self.name.startswith("ladder/") else self.name


FAMILIES: tuple[Family, ...] = (
    Family("ladder/01_scalar", "FP32 arithmetic on the CUDA cores; no tensor cores", ladder.scalar),
)


def family_named(name: str) -> Family | None:
    """The family called `name`, by its full or its short name; None when there is none."""
    return next((f for f in FAMILIES if name in (f.name, f.short_name)), None)


def catalogue(target: str) -> list[KernelSpec]:
    """Every configuration that the families make for `target`, over dtypes, head dimensions, masks and alignments."""
    specs: dict[KernelSpec, None] = {}
    dtypes: tuple[DType, ...] = ("float16", "bfloat16")
    masks: tuple[Causal | None, ...] = (None, "upper_left")
    for family, dtype, head_dim, causal in product(FAMILIES, dtypes, range(16, 257, 16), masks):
        for alignment in (VECTOR_BYTES, ELEMENT_BYTES[dtype]):
            result = family.specify(
                Problem(1, 8, 8, 512, 512, head_dim, dtype, causal=causal, alignment=alignment, target=target)
            )
            if isinstance(result, KernelSpec):
                specs |= dict.fromkeys(result.stages)
    return list(specs)
