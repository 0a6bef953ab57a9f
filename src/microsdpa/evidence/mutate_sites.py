"""Where `microsdpa evidence mutate` changes a kernel: calls that order memory, and comparisons with a length."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from microsdpa.jit.source import expand

EXPLAINED = "mutation:"
"""What a comment begins with that says why a mutation changes nothing: on its line, or alone on the line before."""

ORDERING = re.compile(r"(?<=[;{}):])\s*((?:\w+(?:\.|->|::)|this->template |template )*(?P<name>\w+)(?:<[^;<>()]*>)?)\(")
_ORDERS = re.compile(r"fence|wait|arrive|commit|(?<!a)sync")
_COMPARISON = re.compile(r" (?P<operator><=|>=|<|>) ")
_LENGTH = re.compile(r"seqlen|valid|keys|rows|count|tiles|last|seen|visible")
_FILE = re.compile(r'^#line \d+ "(?P<name>[^"]+)"$', re.MULTILINE)
_NOT_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|^[ \t]*#[^\n]*$", re.DOTALL | re.MULTILINE)
_SHIFTED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
_ENDS = re.compile(r";|\?|&&|\|\|| = |,")
"""What ends the operand of a comparison within its line."""


@dataclass(frozen=True)
class Site:
    """One mutation of one file.

    Attributes:
        kind: "removed", of a call, or "shifted", of a comparison.
        start: where the text begins that is replaced; `end` likewise.
        text: the line, without its indentation, for a person.
        explained: why it changes nothing, by the comment beside it; empty if there is none.
    """

    file: str
    line: int
    kind: str
    start: int
    end: int
    new: str
    text: str
    explained: str = ""

    def apply(self, root: Path) -> None:
        """Write the mutation into a copy of the sources."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        path.write_text(text[: self.start] + self.new + text[self.end :], encoding="utf-8")


def sites(source: str, root: Path) -> list[Site]:
    """All sites of a kernel's source and of what it includes, but for the bodies of instructions."""
    names = dict.fromkeys(match["name"] for match in _FILE.finditer(expand(source, root)))
    found: list[Site] = []
    for name in names:
        if "ptx" not in Path(name).parts:
            found += of_text(name, (root / name).read_text(encoding="utf-8"))
    return found


def of_text(name: str, text: str) -> list[Site]:
    """The sites of one file, in their order."""
    code = _NOT_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)  # places stay what they are
    found = [*_removed(code), *_shifted(code)]
    lines = text.splitlines()
    made = []
    for start, end, kind, new in sorted(found):
        line = text.count("\n", 0, start)
        above = lines[line - 1].lstrip() if line else ""
        beside = [lines[line], above if above.startswith("//") else ""]  # a comment behind code is that line's alone
        explained = next((one.partition(EXPLAINED)[2].strip() for one in beside if EXPLAINED in one), "")
        made.append(Site(name, line + 1, kind, start, end, new, lines[line].strip(), explained))
    return made


def _removed(code: str) -> Iterator[tuple[int, int, str, str]]:
    """Statements that are nothing but a call which orders memory: without them an empty statement is left."""
    for match in ORDERING.finditer(code):
        if not _ORDERS.search(match["name"]):
            continue
        end = _behind_parentheses(code, match.end() - 1)
        if code[end : end + 1] == ";":
            # Lines stay where they are: the emulator has their numbers in its instructions.
            yield match.start(1), end, "removed", "\n" * code.count("\n", match.start(1), end)


def _behind_parentheses(code: str, at: int) -> int:
    depth = 0
    for place in range(at, len(code)):
        depth += (code[place] == "(") - (code[place] == ")")
        if depth == 0:
            return place + 1
    return len(code)


def _shifted(code: str) -> Iterator[tuple[int, int, str, str]]:
    for match in _COMPARISON.finditer(code):
        start, end = match.span("operator")
        begin, stop = code.rfind("\n", 0, start) + 1, code.find("\n", end)
        line = code[begin : stop if stop >= 0 else len(code)]
        stop = begin + len(line)
        compared = _ENDS.split(code[begin:start])[-1] + _ENDS.split(code[end:stop])[0]
        if _LENGTH.search(compared) and not re.search(
            r"static_assert|requires|template <|if constexpr|constexpr", line
        ):
            yield start, end, "shifted", _SHIFTED[match["operator"]]
