"""What a call does on its second turn, seen from outside: foreign calls, operators, files, signatures.

The launcher's functions have stand-ins that find a plan for CPU tensors, so no GPU is needed and nothing is computed.
"""

from __future__ import annotations

import io
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.autograd.profiler import profile

from microsdpa.attention import api
from microsdpa.call import visibility
from microsdpa.jit import signature as signatures
from microsdpa.runtime.launcher import NO_MASKS

BATCH, HEADS, HEADS_KV, SEQLEN_Q, SEQLEN_K, HEAD_DIM = 2, 4, 2, 16, 24, 32
KERNEL = "ladder/01_scalar"
"""A kernel by name. With impl="auto" the drop-in leaves CPU tensors to torch; with a name it does as on a GPU."""

OUTPUT = Counter({"aten::empty_like": 1})
NOTHING: Counter[str] = Counter()
CASTS = OUTPUT + Counter({"aten::_to_copy": 3})
VIEWS = {"aten::transpose", "aten::alias", "aten::detach", "aten::view", "aten::view_as"}
"""Operators that allocate no memory, and launch nothing."""

FILES = {"open", "os.listdir", "os.scandir", "import", "subprocess.Popen"}
"""Events of Python's audit that reading a file raises, however it is done."""


@dataclass
class Seen:
    """What a call did."""

    foreign: int = 0
    operators: Counter[str] = field(default_factory=Counter)
    signatures: list[str] = field(default_factory=list)
    masks: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


_watching: list[Seen] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event in FILES:
        _watching[-1].files.append(f"{event} {arguments[:1]}")


sys.addaudithook(_audit)  # there is no way to remove it: it looks at nothing unless a call is watched


class Launcher:
    """Stands for the foreign functions: they find a plan for tensors that have memory, and count their calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.found: list[Any] = []
        # Memory that C++ allocates is no operator of torch's: it is there before a call is watched.
        self.memory = [torch.empty(BATCH, HEADS, SEQLEN_Q) for _ in range(20)]

    def __call__(self, query: Any, key: Any, value: Any, out: Any, lse: Any, *rest: Any) -> Any:
        self.calls.append((query, key, value, out, lse, *rest))
        for tensor in (query, key, value, out):
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                return None  # a tracer's
        self.found.append(self.memory.pop() if lse is True else True)
        return self.found[-1]

    def with_scales(self, *call: Any) -> Any:
        given, scales = call[:-3], call[-3:]
        return self(*given, *NO_MASKS, *scales)

    def with_a_known_mask(self, seqlen_k: int, _: bool, *call: Any) -> Any:
        return self(*call) if call[1].shape[2] == seqlen_k else None


def watch(call: Callable[[], Any], launcher: Launcher) -> tuple[Any, Seen]:
    """What `call` gives, and what it did."""
    seen, before = Seen(), len(launcher.calls)
    with profile() as events, pytest.MonkeyPatch.context() as patch:
        _refuse_signatures(patch, seen)
        _note_masks(patch, seen)
        _note_files(patch, seen)
        _watching.append(seen)
        try:
            result = call()
        finally:
            _watching.pop()
    seen.foreign = len(launcher.calls) - before
    for event in events.function_events:
        if _counts(event.name) and not (event.cpu_parent is not None and _counts(event.cpu_parent.name)):
            seen.operators[event.name] += event.name not in VIEWS
    seen.operators = +seen.operators
    return result, seen


def _counts(name: str) -> bool:
    """Whether an operator counts, and not those that it calls.

    Operators of other libraries, as microsdpa::attention, are looked into, and aten::to, which often does nothing.
    """
    return name.startswith("aten::") and name != "aten::to"


def _refuse_signatures(patch: pytest.MonkeyPatch, seen: Seen) -> None:
    def refuse(*given: Any, **_: Any) -> Any:
        seen.signatures.append(repr(given))
        raise AssertionError("a signature is computed")

    functions = signatures.signature, signatures.code_signature
    for name, module in list(sys.modules.items()):
        if name.startswith("microsdpa"):
            for attribute, value in list(vars(module).items()):
                if any(value is function for function in functions):
                    patch.setattr(module, attribute, refuse)


def _note_masks(patch: pytest.MonkeyPatch, seen: Seen) -> None:
    """What documents and blocks hide is found once, and then looked up by the tensors that say it."""
    real = visibility.combined

    def noted(*given: Any) -> torch.Tensor:
        seen.masks.append(f"{len(given)} arguments")
        return real(*given)

    patch.setattr(api, "combined", noted)


def _note_files(patch: pytest.MonkeyPatch, seen: Seen) -> None:
    """The audit tells of all that is opened; what is only asked for has no event."""
    for module, name in ((os, "stat"), (os, "lstat"), (io, "open_code")):
        real = getattr(module, name)

        def noted(*given: Any, _real: Any = real, _name: str = name, **options: Any) -> Any:
            seen.files.append(f"{_name} {given[:1]}")
            return _real(*given, **options)

        patch.setattr(module, name, noted)


class Setting(ExitStack):
    """Where a door is opened: contexts that hold until the test's end, and what stands for the foreign functions."""

    def __init__(self, launcher: Launcher) -> None:
        super().__init__()
        self.launcher = launcher


Opening = Callable[[Setting], Callable[[], Any]]


@dataclass(frozen=True)
class Door:
    """A way to call attention.

    Attributes:
        open: makes the call.
        operators: what it asks torch for on a second turn.
        lse: whether the launch has to give one.
        gives_lse: whether the caller gets it.
        dtype: of the output.
        shape: of the output.
    """

    name: str
    open: Opening
    operators: Counter[str] = field(default_factory=lambda: OUTPUT)
    lse: bool = False
    gives_lse: bool = False
    dtype: torch.dtype = torch.float16
    shape: tuple[int, ...] = (BATCH, HEADS, SEQLEN_Q, HEAD_DIM)
