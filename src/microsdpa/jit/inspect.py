"""What a compiled kernel uses: registers, shared memory and spills from the log, instructions from the SASS."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from microsdpa.errors import CompileError

TENSOR_OPCODES = frozenset({"HMMA", "QMMA", "IMMA", "DMMA", "OMMA", "HGMMA", "QGMMA", "IGMMA", "UTCHMMA", "UTCQMMA"})

_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)


@dataclass(frozen=True)
class Resources:
    """What ptxas gave a kernel: registers a thread, and bytes of static shared memory, stack and spills."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int

    @property
    def uses_local_memory(self) -> bool:
        """Whether anything lives in local memory, which is off chip."""
        return bool(self.stack_bytes or self.spill_store_bytes or self.spill_load_bytes)

    def as_dict(self) -> dict[str, int]:
        """The fields, for JSON."""
        return asdict(self)


def resources_from_log(log: str) -> Resources:
    """Read the resources of the one kernel that a `ptxas -v` log speaks of.

    Raises:
        ValueError: the log has no such lines.
    """
    used, stack, shared = _USED.search(log), _STACK.search(log), _SHARED.search(log)
    if not used or not stack:
        raise ValueError(f"expected a 'ptxas -v' log of one kernel, got {log[:200]!r}")
    frame, stores, loads = map(int, stack.groups())
    return Resources(int(used[1]), int(shared[1]) if shared else 0, frame, stores, loads)


def find_nvdisasm() -> str | None:
    """Path of nvdisasm: the PyPI wheel's, a CUDA toolkit's, or PATH's; None when there is none."""
    from cuda.pathfinder import find_nvidia_binary_utility

    return find_nvidia_binary_utility("nvdisasm") or shutil.which("nvdisasm")


def disassemble(cubin: bytes) -> str:
    """The SASS of a cubin.

    Raises:
        CompileError: nvdisasm is missing or refuses the cubin.
    """
    tool = find_nvdisasm()
    if tool is None:
        raise CompileError(
            "nvdisasm not found: install it with 'pip install nvidia-cuda-nvdisasm'", log="", source=None
        )
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.cubin"
        path.write_bytes(cubin)
        run = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise CompileError("nvdisasm refused the cubin", log=run.stderr, source=None)
    return run.stdout


def count_instructions(cubin: bytes) -> Counter[str]:
    """SASS instructions of a cubin by opcode, without modifiers: {"HMMA": 64, "LDSM": 32, ...}."""
    return Counter(_INSTRUCTION.findall(disassemble(cubin)))


def tensor_instructions(counts: Counter[str]) -> dict[str, int]:
    """The tensor-core instructions among `counts`."""
    return {opcode: count for opcode, count in sorted(counts.items()) if opcode in TENSOR_OPCODES}
