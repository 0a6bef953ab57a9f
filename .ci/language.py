"""Sentences of at most 25 words and lines of at most 120 characters, in README, CONTRIBUTING and docs.

python .ci/language.py          # fails with every long line and every long sentence
python .ci/language.py PAGE     # those of a page
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_WORDS, MOST_CHARACTERS = 25, 120
GENERATED = re.compile(r"<!-- microsdpa:(?!end).*?<!-- microsdpa:end -->\n?", re.DOTALL)
_NEXT = r"(?=microsdpa|code |torch|ptxas|cuDNN|[A-Z`\"*\[(0-9])"
ENDS = re.compile(rf"(?<=[.!?])\s+{_NEXT}|\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|(?<=[:;])\s")


def pages() -> list[Path]:
    """What is read."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page; code, tables, headings and what is rendered from results have none."""
    text = GENERATED.sub("\n\n", text)
    text = re.sub(r"^```.*?^```$", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(?:\||#|:::|!\[).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    for sentence in ENDS.split(text):
        yield " ".join((sentence or "").split())


def long_sentences(text: str) -> list[str]:
    """Those of more than MOST_WORDS words."""
    return [sentence for sentence in sentences(text) if len(re.findall(r"[A-Za-z][\w'-]*", sentence)) > MOST_WORDS]


def long_lines(text: str) -> list[str]:
    """Lines of prose of more than MOST_CHARACTERS characters."""
    prose = re.sub(r"^```.*?^```$", "", GENERATED.sub("", text), flags=re.DOTALL | re.MULTILINE)
    return [line for line in prose.splitlines() if len(line) > MOST_CHARACTERS and not line.startswith("|")]


def main(arguments: list[str]) -> int:
    """What was found, on standard output; 1 if there is a fault."""
    faults = 0
    for path in [Path(argument).resolve() for argument in arguments] or pages():
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        for line in long_lines(text):
            print(f"{name}: line of {len(line)} characters, at most {MOST_CHARACTERS}: {line[:60]}...")
            faults += 1
        for sentence in long_sentences(text):
            print(f"{name}: sentence of more than {MOST_WORDS} words: {sentence}")
            faults += 1
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
