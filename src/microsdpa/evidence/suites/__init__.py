"""Benchmark suites: the cases of each, as data."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from microsdpa.errors import InvalidArgument
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
    labels: dict[Case, str] = field(default_factory=dict, hash=False)


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


def _parse(name: str, data: dict[str, Any]) -> Suite:
    cases, labels, eight_bit = [], {}, set()
    for fields in data.get("cases", []) + _token_table(data.get("tokens")):
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
        }
        for head_dim in table["head_dims"]
        for causal in (None, "upper_left")
        for seqlen in table["seqlens"]
    ]
