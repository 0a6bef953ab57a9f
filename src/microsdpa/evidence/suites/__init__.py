"""Benchmark suites: the cases of each, as data."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any, NamedTuple, TypeVar

from microsdpa.errors import InvalidArgument
from microsdpa.evidence import environment
from microsdpa.evidence.inputs import Case


@dataclass(frozen=True)
class Suite:
    """A named list of cases.

    Attributes:
        processes: "case" measures each case in a process of its own, "head_dim" those of each head dimension, "suite"
            all of them in one.
        alone: whether this library is measured a second time, in a process without peers: a process that has used
            some seven streams launches plain nodes of graphs more slowly.
        modes: what `microsdpa bench` measures unless it is told otherwise.
        peers: whom it is measured beside unless it is told otherwise, as `microsdpa bench --peers` takes them. Most
            suites leave out those that would be compiled again for every case.
        eight_bit: the cases in which 8-bit implementations take part.
        variants: the ways of calling this library that take part; all of them if empty.
        energy: whether the energy of calls is measured too, and their time at the power that they draw.
        drawn: whether each commit has cases of its own, which are drawn at random.
        labels: what a case is, such as the model that it is from.
    """

    name: str
    title: str
    cases: tuple[Case, ...]
    processes: str = "suite"
    modes: tuple[str, ...] = ("graph",)
    peers: str = "all"
    eight_bit: frozenset[Case] = frozenset()
    variants: tuple[str, ...] = ()
    alone: bool = False
    energy: bool = False
    drawn: bool = False
    labels: dict[Case, str] = field(default_factory=dict, hash=False)


class Some(NamedTuple):
    """Which cells of a suite are measured, and beside whom.

    Attributes:
        peers: as choose() takes them; None for the suite's own.
        cells: texts with commas between them: cases whose name or label has one of them; empty for all.
        part: "2/3" is every third of these from the second on; empty for all.
        seconds: after which no further case is begun; None for no limit.
    """

    peers: str | None = None
    cells: str = ""
    part: str = ""
    seconds: float | None = None

    @property
    def is_all(self) -> bool:
        """Whether these are all cells, however long they take."""
        return not self.cells and not self.part and self.seconds is None


ALL = Some()
Cell = TypeVar("Cell")


def names() -> list[str]:
    """Names of the suites that exist."""
    files = resources.files(__name__).iterdir()
    return sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json"))


def load(name: str) -> Suite:
    """The suite called `name`.

    Raises:
        InvalidArgument: there is none; the message names those that exist.
    """
    if name not in names():
        raise InvalidArgument("suite", expected=f"one of {', '.join(names())}", got=repr(name), hint="name a suite")
    data = json.loads(resources.files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8"))
    return _parse(name, data)


def chosen(suite: Suite, some: Some) -> Suite:
    """The suite with some of its cases.

    Raises:
        InvalidArgument: no case is left, or a part is none.
    """
    kept = some_of(suite.cases, some, lambda case: f"{case} {suite.labels.get(case, '')}")
    return replace(suite, cases=tuple(kept))


def some_of(cells: Sequence[Cell], some: Some, name: Callable[[Cell], str]) -> Sequence[Cell]:
    """Those of the cells that are measured; `name` gives the text that `some.cells` are looked for in.

    Raises:
        InvalidArgument: no cell is left, or a part is none.
    """
    wanted = [text for text in some.cells.split(",") if text]
    kept = [cell for cell in cells if not wanted or any(text in name(cell) for text in wanted)]
    if some.part:
        index, _, count = some.part.partition("/")
        if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            hint = "1/3, 2/3 and 3/3 are all of a suite"
            raise InvalidArgument("part", expected="a part and their number, such as 1/3", got=some.part, hint=hint)
        kept = kept[int(index) - 1 :: int(count)]
    if not kept:
        hint = f"names are such as {name(cells[0]).strip()!r}"
        raise InvalidArgument("cells", expected="texts in names of the suite's cases", got=some.cells, hint=hint)
    return kept


def _parse(name: str, data: dict[str, Any]) -> Suite:
    cases, labels, eight_bit = [], {}, set()
    tables = _token_table(data.get("tokens")) + _random_table(data.get("random"))
    for fields in data.get("cases", []) + tables:
        label, chosen = fields.pop("label", ""), fields.pop("eight_bit", data.get("eight_bit", False))
        case = Case(**fields)
        cases.append(case)
        labels[case] = label
        if chosen:
            eight_bit.add(case)
    return Suite(
        name,
        data["title"],
        tuple(dict.fromkeys(cases)),
        processes=data.get("processes", "suite"),
        modes=tuple(data.get("modes", ("graph",))),
        peers=",".join(data["peers"]) if "peers" in data else "all",
        eight_bit=frozenset(eight_bit),
        variants=tuple(data.get("variants", ())),
        alone=data.get("alone", False),
        energy=data.get("energy", False),
        drawn="random" in data,
        labels={case: label for case, label in labels.items() if label},
    )


def _token_table(table: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The FlashAttention papers' protocol: a fixed number of tokens and hidden size, over S, D and the mask."""
    if table is None:
        return []
    return [
        {
            "batch": table["total"] // seqlen,
            "heads": table["hidden"] // head_dim,
            "seqlen_q": seqlen,
            "seqlen_k": seqlen,
            "head_dim": head_dim,
            "causal": causal,
            "kind": table.get("kind", "normal"),
        }
        for head_dim in table["head_dims"]
        for causal in (None, "upper_left")
        for seqlen in table["seqlens"]
    ]


def _random_table(table: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Random cases, the same ones as long as the commit is the same."""
    if table is None:
        return []
    commit = environment.commit().removesuffix("-dirty")
    return random_cases(table, int(commit[:12], 16) if environment.is_commit(commit) else 0)


def random_cases(table: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """Fields of cases between the limits of a table.

    Small batches and numbers of heads are drawn as often as large ones; lengths are drawn both this way and evenly.
    Half of the cases have as many keys as queries, two thirds of these a causal mask; a third has grouped heads.
    """
    choose = random.Random(seed)

    def between(least: int, most: int) -> int:
        return round(math.exp(choose.uniform(math.log(least), math.log(most))))

    def length() -> int:
        return between(*table["seqlen"]) if choose.random() < 0.5 else choose.randint(*table["seqlen"])

    found = []
    for _ in range(table["count"]):
        heads, seqlen_q = between(*table["heads"]), length()
        is_self = choose.random() < 0.5
        groups = [kv for kv in range(1, heads) if heads % kv == 0]
        grouped = choose.random() < 1 / 3 and len(groups) > 0
        found.append(
            {
                "batch": between(*table["batch"]),
                "heads": heads,
                "heads_kv": choose.choice(groups) if grouped else 0,
                "seqlen_q": seqlen_q,
                "seqlen_k": seqlen_q if is_self else length(),
                "head_dim": choose.choice(table["head_dims"]),
                "dtype": choose.choice(("float16", "bfloat16")),
                "layout": choose.choice(table["layouts"]),
                "causal": "upper_left" if is_self and choose.random() < 2 / 3 else None,
            }
        )
    return found
