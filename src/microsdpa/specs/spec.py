"""KernelSpec: one compile-time configuration of one kernel, the unit that is compiled, cached and measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from microsdpa.problem import Problem

Grid = tuple[int, int, int]

MAX_GRID_X = 2**31 - 1


@dataclass(frozen=True)
class Rejection:
    """Why a family does not compute a problem, and the nearest thing that it would compute."""

    reason: str
    nearest: str


@dataclass(frozen=True)
class KernelSpec:
    """A kernel template and the arguments that make it one kernel.

    Attributes:
        name: family name, such as "ladder/01_scalar".
        source: path of the .cu file below microsdpa/cuda.
        template: qualified name of the __global__ function template.
        template_args: (parameter name, C++ spelling) in the template's order.
        threads: threads per CTA.
        block_m: query rows that a CTA computes.
        shared_bytes: dynamic shared memory, in bytes (static shared memory is the compiler's to report).
        local_memory: why this kernel may spill or use local memory; empty means that it may not.
    """

    name: str
    source: str
    template: str
    template_args: tuple[tuple[str, str], ...]
    threads: int
    block_m: int
    shared_bytes: int = 0
    local_memory: str = ""
    flags: tuple[str, ...] = field(default=("-std=c++17", "-lineinfo"))

    @property
    def expression(self) -> str:
        """The C++ name of the instantiated kernel, as NVRTC's name expressions want it."""
        return f"{self.template}<{', '.join(value for _, value in self.template_args)}>"

    def grid(self, problem: Problem) -> Grid:
        """CTAs of the launch: query tiles times batch times heads, along x because only x goes past 65,535."""
        tiles = -(-problem.seqlen_q // self.block_m)
        return tiles * problem.batch * problem.heads, 1, 1
