"""Which numbers of a kernel could outgrow 32 bits, read from its PTX with the source lines that they come from.

There are two kinds: products of two numbers that only the call knows, and multiples of such a number that are made in
32 bits and then become part of a 64-bit address. A number counts as small when it is the thread's, a constant, or a
remainder, quotient, minimum or sum of small ones; what goes round a loop does not.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

SMALL = 2**12
_LOCATION = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]+)"')
_INSTRUCTION = re.compile(r"(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+(.*);$")
_REGISTER = re.compile(r"%rd?\d+$")
_WORD = re.compile(r"%r\d+$")
_SMALL_REGISTERS = ("%tid", "%laneid", "%ntid", "%warpid")
_DEPTH = 8
"""Steps that an address is followed over."""

Place = tuple[str, int]
"""A source file, below the CUDA sources, and a line of it; 0 where the compiler merged several."""


@dataclass(frozen=True)
class Instruction:
    """One instruction of PTX: its first operand is what it writes."""

    name: str
    operands: tuple[str, ...]
    place: Place

    @property
    def base(self) -> str:
        """The name up to its first dot."""
        return self.name.split(".")[0]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Operands that it reads."""
        return self.operands[1:]


def _constant(operand: str) -> int | None:
    try:
        return int(operand, 0)
    except ValueError:
        return None


class Widths:
    """The numbers of one kernel."""

    def __init__(self, ptx: str, root: str) -> None:
        """`root` is what the names of the source files begin with."""
        files = {int(number): name.removeprefix(root).lstrip("/") for number, name in _FILE.findall(ptx)}
        self._instructions: list[Instruction] = []
        self._writers: dict[str, list[Instruction]] = defaultdict(list)
        self._readers: dict[str, list[Instruction]] = defaultdict(list)
        self._known: dict[str, bool] = {}
        place = ("", 0)
        for line in map(str.strip, ptx.splitlines()):
            if found := _LOCATION.match(line):
                place = files[int(found[1])], int(found[2])
            elif found := _INSTRUCTION.match(line):
                operands = tuple(operand.strip().split("|")[0] for operand in found[2].split(","))
                self._add(Instruction(found[1], operands, place))

    def _add(self, instruction: Instruction) -> None:
        self._instructions.append(instruction)
        writes = bool(_REGISTER.match(instruction.operands[0]))
        if writes:
            self._writers[instruction.operands[0]].append(instruction)
        for operand in instruction.inputs if writes else instruction.operands:
            self._readers[operand].append(instruction)

    def places(self) -> set[Place]:
        """Where numbers come from that could outgrow 32 bits."""
        found = set()
        for one in self._instructions:
            if re.match(r"(mul|mad)\.lo\.[su]32", one.name) and self._grows(one):
                a, b = one.inputs[:2]
                if _constant(b) is None and not self._small(a) and not self._small(b):
                    found.add(one.place)
            widens = one.name in ("cvt.s64.s32", "cvt.u64.u32") or one.name.startswith(("mul.wide", "mad.wide"))
            if widens and not self._only_shared(one.operands[0]):
                for operand in one.inputs:
                    found |= self._multiples(operand, set())
        return found

    def _small(self, operand: str) -> bool:
        if not operand.startswith("%"):
            value = _constant(operand)
            return value is None or abs(value) < SMALL
        if operand.startswith(_SMALL_REGISTERS):
            return True
        if not _WORD.match(operand):
            return False
        if operand not in self._known:
            self._known[operand] = False  # for what goes round a loop
            writers = self._writers[operand]
            self._known[operand] = bool(writers) and all(map(self._writes_small, writers))
        return self._known[operand]

    def _writes_small(self, one: Instruction) -> bool:
        inputs = one.inputs
        if one.base in ("clz", "popc", "set"):
            return True
        if one.base == "and":
            return any(self._small(i) and (_constant(i) is None or int(i, 0) >= 0) for i in inputs)
        if one.base == "rem":
            return self._small(inputs[1])
        if one.base == "min" and one.name.endswith("u32"):
            return any(map(self._small, inputs))
        if one.base in ("mov", "shfl", "bfe", "div", "shr"):
            return self._small(inputs[0])
        if one.base == "selp":
            return all(map(self._small, inputs[:2]))
        if one.base == "sub" and (divisor := self._divisor(one)) is not None and self._small(divisor):
            return True
        kept = ("add", "sub", "or", "xor", "max", "min", "mul", "shl", "mad", "not", "neg")
        return one.base in kept and all(map(self._small, inputs))

    def _is_quotient(self, operand: str, of: str, depth: int = 0) -> bool:
        """Whether a register is made by dividing another, as compilers do by constants."""
        if operand == of:
            return True
        for one in self._writers.get(operand, []):
            if one.base in ("div", "shr") and one.inputs[0] == of:
                return True
            if one.name.startswith(("mul.hi", "mul.wide")) and of in one.inputs:
                return True
            steps = one.base in ("shr", "mov", "add", "sub", "cvt") and depth < 6
            if steps and any(self._is_quotient(i, of, depth + 1) for i in one.inputs if i.startswith("%")):
                return True
        return False

    def _divisor(self, one: Instruction) -> str | None:
        """b of a - a / b * b; None for another subtraction."""
        a, taken = one.inputs[:2]
        for product in self._writers.get(taken, []):
            inputs = product.inputs
            if product.name.startswith("mul.lo"):
                for quotient, divisor in (inputs[:2], inputs[1::-1]):
                    if self._is_quotient(quotient, a):
                        return divisor
            if product.base == "shl" and self._is_quotient(inputs[0], a):
                return str(1 << (_constant(inputs[1]) or 0))
            mask = _constant(inputs[-1])
            if product.base == "and" and inputs[0] == a and mask is not None and mask < 0:
                return str(-mask)
        return None

    def _grows(self, one: Instruction) -> bool:
        """Whether it makes a multiple; that of a quotient and its divisor is what was divided, or less."""
        if one.base not in ("mul", "mad") or "hi" in one.name:
            return one.base == "shl"
        a, b = one.inputs[:2]
        for quotient, divisor in ((a, b), (b, a)):
            for writer in self._writers.get(quotient, []):
                if writer.base == "div" and writer.inputs[1] == divisor:
                    return False
        return True

    def _multiples(self, operand: str, seen: set[str]) -> set[Place]:
        """Where the multiples come from that a 32-bit number is a sum of."""
        if operand in seen or not _WORD.match(operand) or self._small(operand):
            return set()
        seen.add(operand)
        found: set[Place] = set()
        for one in self._writers[operand]:
            if one.base == "sub" and self._divisor(one) is not None:
                continue
            if one.base in ("mul", "mad", "shl"):
                found |= {one.place} if self._grows(one) else set()
                found |= self._multiples(one.inputs[2], seen) if one.base == "mad" else set()
            elif one.base in ("add", "sub", "or", "mov", "selp", "max", "neg"):
                for each in one.inputs:
                    found |= self._multiples(each, seen)
        return found

    def _is_shared(self, operand: str, depth: int = 0) -> bool:
        """Whether an address is one of shared memory, whose symbols begin it."""
        if depth > _DEPTH:
            return False
        if not operand.startswith("%"):
            return _constant(operand) is None
        for one in self._writers.get(operand, []):
            if one.name.startswith("cvta.shared") or (one.base == "mov" and not one.inputs[0].startswith("%")):
                return True
            if one.base in ("add", "mov") and any(self._is_shared(i, depth + 1) for i in one.inputs):
                return True
        return False

    def _only_shared(self, operand: str, depth: int = 0) -> bool:
        """Whether a 64-bit number is only ever added to addresses of shared memory."""
        readers = self._readers.get(operand, [])
        for one in readers:
            if one.base == "add" and any(self._is_shared(i) for i in one.inputs if i != operand):
                continue
            passes_on = one.base in ("add", "mul", "shl", "mov", "or", "sub") and one.operands[0] != operand
            if depth < _DEPTH and passes_on and self._only_shared(one.operands[0], depth + 1):
                continue
            return False
        return bool(readers)
