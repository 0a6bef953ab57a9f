"""What an output is held against: the FP64 oracle, and a tolerance derived for each arithmetic."""

from __future__ import annotations

import torch

from microsdpa import reference
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import TORCH_DTYPE, Case, make_masks
from microsdpa.evidence.peers import Tensors, quantized


class Expectation:
    """Oracle and tolerances of one case, computed once for all implementations of it."""

    def __init__(self, case: Case, tensors: Tensors) -> None:
        self._case = case
        self._tensors = tensors
        self._masks = make_masks(case, tensors[0].device.type)
        self.output, _ = reference.oracle(*tensors, causal=case.causal, scale=case.scale, **self._masks)
        self._allowed: dict[str, compare.Tolerance] = {}

    def tolerance(self, arithmetic: str) -> compare.Tolerance:
        """Twice the error of plain operations in the same arithmetic, plus one rounding of the output.

        As in quantized.eager, "quantized, e4m3" rounds P alone.
        """
        if arithmetic not in self._allowed:
            self._allowed[arithmetic] = self._derive(arithmetic)
        return self._allowed[arithmetic]

    def _derive(self, arithmetic: str) -> compare.Tolerance:
        case, tensors = self._case, self._tensors
        if not arithmetic:
            eager, _ = reference.eager(*tensors, causal=case.causal, scale=case.scale, **self._masks)
            return compare.tolerance(eager, self.output, tensors[0].dtype)
        eager = quantized.eager(*tensors, case.causal, case.scale, arithmetic, self._masks)
        dtype = torch.float8_e4m3fn if arithmetic == "e4m3" else TORCH_DTYPE[case.dtype]
        return compare.tolerance(eager, self.output, dtype)

    def check(self, actual: torch.Tensor, arithmetic: str) -> tuple[dict[str, object], str]:
        """(the `error` object of a row, why the output is wrong or empty)."""
        errors, allowed = compare.measure(actual, self.output), self.tolerance(arithmetic)
        wrong = (
            "" if allowed.admits(errors) else f"differs from the oracle by {errors.max_abs:.3g} at {list(errors.worst)}"
        )
        return compare.as_record(errors, allowed), wrong
