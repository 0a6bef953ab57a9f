"""What a compiled kernel uses: registers, shared memory and spills from the log, instructions from the SASS."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from microsdpa.errors import CompileError
from microsdpa.kernels.chip import RESERVED_SHARED
from microsdpa.kernels.problem import capability_of

TENSOR_OPCODES = frozenset({"HMMA", "QMMA", "IMMA", "DMMA", "OMMA", "HGMMA", "QGMMA", "IGMMA", "UTCHMMA", "UTCQMMA"})

_FRAME_SIZE, _REGISTER_COUNT = 0x11, 0x2F  # attributes of .nv.info
_NO_BITS = 8  # type of a section without contents in the file
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


def resources_from_cubin(cubin: bytes, target: str) -> Resources:
    """Read the same from the cubin of one kernel; what it spills is not recorded there, only the stack that it takes.

    Raises:
        ValueError: the bytes are no cubin of one kernel.
    """
    registers = stack = shared = None
    for section in sections(cubin):
        if section.name == ".nv.info":
            for attribute, values in _attributes(section.data):
                if attribute == _REGISTER_COUNT:
                    registers = values[1]
                elif attribute == _FRAME_SIZE:
                    stack = max(stack or 0, values[1])
        elif section.name.startswith(".nv.shared.") and not section.name.startswith(".nv.shared.reserved"):
            shared = section.size - (RESERVED_SHARED if capability_of(target) >= (9, 0) else 0)
    if registers is None or stack is None:
        raise ValueError("cubin: expected the machine code of one kernel, got an object without its figures")
    return Resources(registers, shared or 0, stack, 0, 0)


@dataclass(frozen=True)
class Section:
    """A section of an ELF file.

    Attributes:
        figures: type, flags, link, info, alignment and size of an entry; ptxas has registers and barriers in them.
        data: empty where it takes no room in the file.
        size: in memory.
    """

    name: str
    figures: tuple[int, ...]
    data: bytes
    size: int


def sections(elf: bytes) -> Iterator[Section]:
    """The sections of a 64-bit ELF file.

    Raises:
        ValueError: it is none.
    """
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError("cubin: expected a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name, kind, flags, _, offset, size, *rest in headers:
        start = names + name
        data = b"" if kind == _NO_BITS else elf[offset : offset + size]
        yield Section(elf[start : elf.index(b"\0", start)].decode(), (kind, flags, *rest), data, size)


def _attributes(info: bytes) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(attribute, 32-bit values) of a .nv.info section; attributes without a payload are passed over."""
    offset = 0
    while offset < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, offset)
        offset += 4
        if form == 4:
            yield attribute, struct.unpack_from(f"<{size // 4}I", info, offset)
            offset += size


def find_nvdisasm() -> str | None:
    """Path of nvdisasm: the PyPI wheel's, a CUDA toolkit's, or PATH's; None when there is none."""
    from cuda.pathfinder import find_nvidia_binary_utility

    return find_nvidia_binary_utility("nvdisasm") or shutil.which("nvdisasm")


def disassemble(cubin: bytes) -> str:
    """The SASS of a cubin, without what an analysis of its data flow would add, which takes a quarter of the time.

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
        run = subprocess.run([tool, "-c", "-ndf", str(path)], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise CompileError("nvdisasm refused the cubin", log=run.stderr, source=None)
    return run.stdout


def count_instructions(cubin: bytes) -> Counter[str]:
    """SASS instructions of a cubin by opcode, without modifiers: {"HMMA": 64, "LDSM": 32, ...}."""
    return Counter(_INSTRUCTION.findall(disassemble(cubin)))


def tensor_instructions(counts: Counter[str]) -> dict[str, int]:
    """The tensor-core instructions among `counts`."""
    return {opcode: count for opcode, count in sorted(counts.items()) if opcode in TENSOR_OPCODES}
