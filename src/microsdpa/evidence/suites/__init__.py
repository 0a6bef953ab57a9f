"""Benchmark suites: the cases of each, as data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

from microsdpa.errors import InvalidArgument
from microsdpa.evidence.inputs import Case


@dataclass(frozen=True)
class Suite:
    """A named list of cases."""

    name: str
    title: str
    cases: tuple[Case, ...]


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
    return Suite(name, data["title"], tuple(Case(**case) for case in data["cases"]))
