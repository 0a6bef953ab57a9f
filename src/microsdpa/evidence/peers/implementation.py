"""What a benchmark compares: one way to compute attention, bound to tensors before it is timed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch

from microsdpa.evidence.inputs import Case

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Call = Callable[[], Any]
"""A bound call, without arguments: what is timed. Its result goes to `Implementation.decode`."""


class Implementation:
    """One way to compute attention. A peer says why it is unavailable instead of failing.

    Attributes:
        name: "microsdpa", or the peer's name, as results and tables have it.
        variant: what is special about the call, such as writing to a given output; empty otherwise.
        where: "host" for variants that do on the device what another does too, "device" for calls whose time on the
            host is no user's; else empty.
        op: what one call does: "sdpa", or "quantize+sdpa" when it quantizes its 16-bit inputs itself.
        arithmetic: type of the matrix products, "e4m3" for example; empty for that of the inputs.
        rounding: what its tolerance is derived from, as quantized.eager has it, where that is not its arithmetic.
        module: the module that the peer is imported from; empty when it comes with torch.
        package: what pip installs it as.
        configuration: one line for docs/measuring.md: how the peer is called.
        takes_masks: whether it takes part in cases with masks beside the causal one.
    """

    name: ClassVar[str]
    variant: str = ""
    where: Literal["", "host", "device"] = ""
    op: str = "sdpa"
    arithmetic: str = ""
    rounding: str = ""
    module: ClassVar[str] = ""
    package: ClassVar[str] = ""
    configuration: ClassVar[str] = ""
    takes_masks: ClassVar[bool] = False

    @property
    def version(self) -> str:
        """Version of the package that provides it; empty when it is not installed."""
        if not self.package:
            return torch.__version__
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return ""

    @functools.cached_property
    def absence(self) -> str:
        """What `unavailable` says, asked once: a second import of a package that failed can end differently."""
        return self.unavailable()

    def unavailable(self) -> str:
        """Why it cannot run on this machine; empty when it can."""
        return import_failure(self.module, self.package) if self.module else ""

    def refuses(self, case: Case) -> str:
        """Why a case cannot be asked of it; empty when it can."""
        return ""

    def stands_for(self, case: Case, tensors: Tensors) -> Tensors | None:
        """The FP32 tensors that its operands stand for, where the caller has quantized ones; else None.

        The output is then held against attention on these: quantizing is no part of the call.
        """
        return None

    def context(self) -> contextlib.AbstractContextManager[object]:
        """Entered around every use of the bound calls."""
        return contextlib.nullcontext()

    def bind(self, case: Case, tensors: Tensors, out: torch.Tensor) -> Call:
        """The call for these tensors: Q [B, H, S_q, D], K and V [B, H_kv, S_k, D].

        What a user does once, such as building a graph or a view, happens here. `out` is for variants that write to it.
        """
        raise NotImplementedError

    def identity(self, case: Case, tensors: Tensors) -> dict[str, object]:
        """Further fields of the rows: which kernels of this library answer."""
        return {}

    def decode(self, result: Any) -> torch.Tensor:
        """The output as [B, H, S_q, D] numbers, from what a bound call gave; it is not timed."""
        assert isinstance(result, torch.Tensor)
        return result


def import_failure(module: str, package: str) -> str:
    """Why `module` cannot be imported, in one line; empty when it can."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.startswith(error.name):
            return f"{module} is not installed: pip install {package}"
        return f"{module} cannot be imported: {error}"
    except Exception as error:  # a package built for another torch or CUDA fails in its own ways
        return f"{module} cannot be imported: {type(error).__name__}: {first_line(error)}"
    return ""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type's name."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def is_plain(case: Case) -> bool:
    """Whether a call needs no argument but the tensors."""
    return case.causal is None and case.scale is None and case.kv_heads == case.heads and not case.masks


def misaligned(case: Case, alignment: str) -> str:
    """Why a library that aligns causal masks by `alignment` cannot compute a case; empty when it can."""
    if case.causal not in (None, alignment) and case.seqlen_q != case.seqlen_k:
        return f"it aligns causal masks by {alignment}, and the case by {case.causal}"
    return ""
