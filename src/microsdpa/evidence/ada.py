"""What a rung would be on the mission's GPU, which was not measured: its instructions, and what the roofline says."""

from __future__ import annotations

from dataclasses import dataclass

from microsdpa.evidence.devices import DEVICES
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.roofline import floor
from microsdpa.jit import compile_kernel
from microsdpa.jit.inspect import count_instructions, find_nvdisasm, tensor_instructions
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.problem import Problem

DEVICE = DEVICES["l4"]
TARGET = DEVICE.target
ARITHMETIC = {
    "01": "float32",
    "08": "float32",
    "09": "e4m3_fp16",
    "10": "e4m3",
    "11": "e4m3",
    "12": "e4m3",
}
"""What a rung's products are computed in, by its number, where that is not the inputs' type."""
NOT_COUNTED = "not counted"


@dataclass(frozen=True)
class Expectation:
    """A rung on an L4, by the compiler and by arithmetic.

    Attributes:
        tensor_instructions: of its machine code for sm_89.
        least_us: the roofline's warm floor in the rung's arithmetic, over the share of the SMs that its grid can use.
    """

    tensor_instructions: str
    least_us: float | None


def tensor_words(cubin: bytes) -> str:
    """The tensor-core instructions of machine code, such as "QMMA 32"."""
    if not find_nvdisasm():
        return NOT_COUNTED
    return (
        " ".join(f"{name} {count}" for name, count in tensor_instructions(count_instructions(cubin)).items()) or "none"
    )


def balance(spec: KernelSpec, problem: Problem) -> float:
    """Rows of an average SM over those of the busiest one, when an L4 divides the rows of `spec` among its SMs."""
    tiles = problem.batch * problem.heads * -(-problem.seqlen_q // spec.block_m)
    rows = problem.batch * problem.heads * problem.seqlen_q
    return rows / DEVICE.multiprocessors / (-(-tiles // DEVICE.multiprocessors) * spec.block_m)


def expectation(rung: str, spec: KernelSpec, problem: Problem, case: Case) -> Expectation:
    """Of a rung such as "ladder/11_8bit_cp_async", whose kernel for sm_89 is `spec`."""
    number = rung.split("/")[1][:2]
    limit = floor(case, DEVICE, ARITHMETIC.get(number, case.dtype))
    least = None if limit is None else limit.warm_us / balance(spec, problem)
    return Expectation(tensor_words(compile_kernel(spec, TARGET).cubin), least)
