"""Whether two compiled kernels are the same machine code, whatever their sources call things.

Names of symbols, line tables and other tables for debuggers do not count. Neither do named constants in global memory
that no instruction reads: the compiler leaves one for each `constexpr`. Every other byte of a cubin counts, and so do
the figures in its section headers: registers, barriers, shared memory, sizes of parameters.

From sm_100 on cubins hold the code in a second form, which is compared byte by byte: a rename may differ there.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator

from microsdpa.jit.inspect import Section, disassemble, sections

_FLAGS = slice(0x30, 0x34)  # of the ELF header: which GPU it is for
_MANGLED = re.compile(r"_Z\w+")
_UNSEEN = re.compile(r"\.(rela?\.)?(nv_)?debug_|\.strtab$|\.shstrtab$|\.note\.nv\.tkinfo$")
"""Tables for debuggers, names, and the compiler's command line; no GPU looks at them."""
_GLOBALS = re.compile(r"\.nv\.global(\.init)?$|\.(rela?\.)?nv\.constant4$")
"""Variables in global memory, and the constant bank that has their addresses."""
_READS_GLOBALS = re.compile(r"\bcx?\[0x4\]")
_INFO_IS_SECTION = 0x40  # a flag
_OF_SYMBOL = frozenset({0x0A, 0x0F, 0x11, 0x12, 0x23, 0x2F})
"""Attributes of .nv.info whose first number is a symbol's: parameters, externs, frame, stacks, registers."""

_PTX_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_PTX_DEBUG = re.compile(r"^\s*\.section\b.*?^\s*\}|^\s*\.(?:loc|file)\b[^\n]*", re.DOTALL | re.MULTILINE)
_PTX_NAME = re.compile(r"[\w$]*_Z[\w$]*")
_PTX_VARIABLE = re.compile(r"^\s*\.global\b[^;]*?(?P<name>[\w$]*_Z[\w$]*)[^;]*;", re.MULTILINE)

Contents = dict[str, object]


def differences(old: bytes, new: bytes) -> list[str]:
    """What differs between two cubins, or two texts of PTX; empty where a GPU cannot tell them apart.

    Raises:
        ValueError: one is neither.
        CompileError: nvdisasm is missing where it has to be asked.
    """
    if not old.startswith(b"\x7fELF") and not new.startswith(b"\x7fELF"):
        return [] if _plain_ptx(old) == _plain_ptx(new) else ["PTX"]
    found = [] if old[_FLAGS] == new[_FLAGS] else ["flags of the cubin"]
    (before, memory_before), (after, memory_after) = _contents(old), _contents(new)
    if before.keys() != after.keys():
        found.append("sections of the cubin")
    found += [name for name, contents in before.items() if name in after and after[name] != contents]
    if not found and memory_before != memory_after and (_reads_globals(old) or _reads_globals(new)):
        found.append("variables in global memory")
    return found


def _reads_globals(cubin: bytes) -> bool:
    relocated = any(re.match(r"\.rela?\.text", s.name) and s.data for s in sections(cubin))
    return relocated or bool(_READS_GLOBALS.search(disassemble(cubin)))


def _contents(cubin: bytes) -> tuple[Contents, Contents]:
    """All that matters of each section by its name without symbols, and apart from it the variables in memory."""
    found = list(sections(cubin))
    names = _unique([_MANGLED.sub("KERNEL", section.name) for section in found])
    symbols = list(_symbols(found, names))

    def symbol(index: int) -> object:
        return symbols[index] if 0 < index < len(symbols) else index

    seen: Contents = {}
    memory: Contents = {}
    for section, name in zip(found, names, strict=True):
        if _GLOBALS.match(name):
            memory[name] = section
        elif name == ".symtab":
            seen[name] = sorted(s for s in symbols if not _GLOBALS.match(s[0]) and not _UNSEEN.match(s[0]))
        elif not _UNSEEN.match(name):
            seen[name] = _figures(section, names, symbol), section.size, _data(section, symbol)
    return seen, memory


def _unique(names: list[str]) -> list[str]:
    """Names with a number where there are several: functions of a cubin keep their order."""
    return [f"{name} ({names[:i].count(name)})" if name in names[:i] else name for i, name in enumerate(names)]


def _symbols(found: list[Section], names: list[str]) -> Iterator[tuple[str, int, int, int, int]]:
    """(section, type and binding, other, value, size) of every symbol; its name is left out."""
    table = next(section.data for section in found if section.name == ".symtab")
    for _, info, other, at, value, size in struct.iter_unpack("<IBBHQQ", table):
        yield names[at] if at < len(names) else f"section {at}", info, other, value, size


def _figures(section: Section, names: list[str], symbol: Callable[[int], object]) -> tuple[object, ...]:
    kind, flags, link, info, alignment, entry_size = section.figures
    told: object = info
    if section.name.startswith(".text"):
        told = info >> 24, symbol(info & 0xFFFFFF)  # registers, and the kernel
    elif flags & _INFO_IS_SECTION:
        told = names[info]
    return kind, flags, names[link], told, alignment, entry_size


def _data(section: Section, symbol: Callable[[int], object]) -> object:
    """A section's contents, with symbols in the place of their numbers."""
    if section.name.startswith(".nv.info"):
        return list(_attributes(section.data, symbol))
    if section.name == ".nv.callgraph":
        return [symbol(number) for (number,) in struct.iter_unpack("<I", section.data)]
    if re.match(r"\.rela?\.", section.name) and section.figures[-1] in (16, 24):
        form = {16: "<QII", 24: "<QIIq"}[section.figures[-1]]  # at, type, symbol and perhaps a number to be added
        return [(at, kind, symbol(number), *rest) for at, kind, number, *rest in struct.iter_unpack(form, section.data)]
    return section.data


def _attributes(info: bytes, symbol: Callable[[int], object]) -> Iterator[tuple[object, ...]]:
    offset = 0
    while offset < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, offset)
        offset += 4
        if form != 4:
            yield form, attribute, size
            continue
        payload, offset = info[offset : offset + size], offset + size
        if attribute in _OF_SYMBOL and size >= 4:
            numbers = [number for (number,) in struct.iter_unpack("<I", payload[: size // 4 * 4])]
            several = len(numbers) if attribute == 0x0F else 1
            yield attribute, *map(symbol, numbers[:several]), *numbers[several:], payload[size // 4 * 4 :]
        else:
            yield attribute, payload


def _plain_ptx(ptx: bytes) -> str:
    """PTX without comments, debug information and unread variables, mangled names numbered as they appear."""
    text = ptx.rstrip(b"\0").decode()
    if ".version" not in text:
        raise ValueError("expected a cubin or PTX")
    text = _PTX_DEBUG.sub("", _PTX_COMMENT.sub("", text))
    uses: dict[str, int] = {}
    for name in _PTX_NAME.findall(text):
        uses[name] = uses.get(name, 0) + 1
    text = _PTX_VARIABLE.sub(lambda match: match[0] if uses[match["name"]] > 1 else "", text)
    numbers: dict[str, str] = {}
    text = _PTX_NAME.sub(lambda match: numbers.setdefault(match[0], f"name{len(numbers)}"), text)
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())
