"""Explanation: what sdpa would run for a call, and why."""

from __future__ import annotations

from dataclasses import dataclass

from microsdpa.kernels import KernelSpec


@dataclass(frozen=True)
class Explanation:
    """What sdpa would run for a call, and why.

    Attributes:
        runs: the kernel's name, or "torch" for torch's own attention.
        reason: why.
        spec: the kernel's configuration; None for torch.
        signature: the compiled kernel's identity; None for torch and in the emulator.
        compiled: whether the kernel is in memory or in the cache; None where there is no signature.
        rejected: (kernel, reason) of every candidate tried before.
        faster: (kernel, what the call would have to be) of the same candidates: those come first because they are
            faster where they run.
        quantizer: the configuration of the kernel that quantises the tensors before; None where none does.
    """

    runs: str
    reason: str
    spec: KernelSpec | None = None
    signature: str | None = None
    compiled: bool | None = None
    rejected: tuple[tuple[str, str], ...] = ()
    faster: tuple[tuple[str, str], ...] = ()
    quantizer: KernelSpec | None = None

    def __str__(self) -> str:
        """A few lines for a person."""
        lines = [f"runs       {self.runs}", f"because    {self.reason}"]
        if self.quantizer:
            lines.append(f"quantizes  {self.quantizer.expression}")
        if self.spec:
            lines.append(f"kernel     {self.spec.expression}")
        if self.signature:
            lines.append(f"signature  {self.signature} ({'compiled' if self.compiled else 'not compiled yet'})")
        lines += [f"rejected   {name}: {reason}" for name, reason in self.rejected]
        lines += [f"faster     {name}, for {nearest}" for name, nearest in self.faster]
        return "\n".join(lines)


NOTHING_TO_COMPUTE = Explanation(
    "torch", "there is nothing to compute: the output is empty, or zeros where there are no keys"
)
