"""Sentences of at most 25 words and lines of at most 120 characters, in README, CONTRIBUTING and docs.

Pages that were written before the rule have a number of long sentences each in LONG, which may only fall.

    python .ci/language.py          # fails with every long line, and the long sentences of pages that have too many
    python .ci/language.py PAGE     # every long sentence of a page
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_WORDS, MOST_CHARACTERS = 25, 120
LONG: dict[str, int] = {
    "docs/ada-8bit.md": 1,
    "docs/backward.md": 4,
    "docs/emulator.md": 6,
    "docs/hopper-8bit.md": 20,
    "docs/hopper-latency.md": 14,
    "docs/hopper-split.md": 3,
    "docs/hopper-throughput.md": 7,
    "docs/ladder/01_scalar.md": 1,
    "docs/ladder/02_wmma.md": 3,
    "docs/ladder/03_cp_async.md": 2,
    "docs/ladder/04_mma_sync.md": 1,
    "docs/ladder/05_warp_roles.md": 2,
    "docs/ladder/06_persistent.md": 1,
    "docs/ladder/07_tuned.md": 1,
    "docs/ladder/08_fp8_scalar.md": 2,
    "docs/ladder/09_fp8_mma.md": 2,
    "docs/ladder/10_fp8_probability.md": 1,
    "docs/ladder/11_8bit_cp_async.md": 1,
    "docs/ladder/12_8bit_persistent.md": 2,
    "docs/ladder/README.md": 1,
    "docs/measuring.md": 12,
    "docs/numerics-inside.md": 8,
    "docs/numerics.md": 2,
    "docs/results.md": 1,
    "docs/roofline-l4.md": 2,
    "docs/several-gpus.md": 1,
    "docs/transformers.md": 1,
    "docs/serving.md": 1,
    "docs/tuning-log.md": 54,
}
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
        found, allowed = long_sentences(text), 0 if arguments else LONG.get(name, 0)
        if len(found) > allowed:
            print(f"{name}: {len(found)} sentences of more than {MOST_WORDS} words, at most {allowed}:")
            print("\n".join(f"  {len(sentence.split())} words: {sentence}" for sentence in found))
            faults += 1
        if len(found) < allowed:
            print(print(f"{name}: {len(found)} long sentences, but {allowed} in LONG of {__file__}: lower that number"))
            faults += 1
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
