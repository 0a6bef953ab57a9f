"""Benchmarks: every implementation on every case of a suite, compared with the oracle before it is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from microsdpa import reference
from microsdpa.api import explain
from microsdpa.evidence import compare, results, timing
from microsdpa.evidence.implementations import Implementation
from microsdpa.evidence.inputs import Case, make
from microsdpa.evidence.suites import Suite
from microsdpa.jit.signature import code_signature
from microsdpa.problem import ELEMENT_BYTES, target_of

Advance = Callable[[str], None]


def run(
    suite: Suite,
    implementations: Iterable[Implementation],
    modes: Iterable[str],
    impl: str = "auto",
    advance: Advance = lambda message: None,
) -> list[results.Row]:
    """Rows of every implementation, case and mode, on the current CUDA device.

    `impl` is what microsdpa is asked for; `advance` is told what was just finished.
    """
    rows: list[results.Row] = []
    modes = list(modes)
    implementations = list(implementations)
    for case in suite.cases:
        bench = _CaseBench(case, impl)
        for implementation in implementations:
            rows += bench.run(implementation, modes)
            advance(f"{case} {implementation.name}")
        del bench
        torch.cuda.empty_cache()
    return rows


class _CaseBench:
    """One case: its inputs, what the oracle says of them, and the measurements."""

    def __init__(self, case: Case, impl: str) -> None:
        self.case = case
        self.impl = impl
        self.tensors = make(case, "cuda")
        self.expected, _ = reference.oracle(*self.tensors, causal=case.causal, scale=case.scale)
        eager, _ = reference.eager(*self.tensors, causal=case.causal, scale=case.scale)
        self.allowed = compare.tolerance(eager, self.expected, self.tensors[0].dtype)
        query_elements = case.batch * case.heads * case.seqlen_q * case.head_dim
        key_elements = case.batch * case.kv_heads * case.seqlen_k * case.head_dim
        self.tensor_bytes = 2 * (query_elements + key_elements) * ELEMENT_BYTES[case.dtype]
        flops = 4 * query_elements * case.seqlen_k
        self.flops = flops // 2 if case.causal else flops

    def run(self, implementation: Implementation, modes: list[str]) -> list[results.Row]:
        """Rows of one implementation, one per mode; a refusal, a failure or a wrong answer is a row too."""
        fields = self._identity(implementation)
        if reason := implementation.refuses(self.case):
            return [self._row(mode, fields, status="unavailable", reason=reason) for mode in modes]
        try:
            with torch.no_grad(), implementation.context():
                out = torch.full_like(self.tensors[0], torch.nan)
                errors = compare.measure(implementation.run(self.case, self.tensors, out), self.expected)
                record = compare.as_record(errors, self.allowed)
                if not self.allowed.admits(errors):
                    reason = f"differs from the oracle by {errors.max_abs:.3g} at {list(errors.worst)}"
                    return [self._row(m, fields, error=record, status="wrong", reason=reason) for m in modes]
                return [self._timed(implementation, mode, fields, record) for mode in modes]
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            return [self._row(mode, fields, status="unavailable", reason=reason) for mode in modes]

    def _timed(
        self, implementation: Implementation, mode: str, fields: dict[str, object], record: dict[str, object]
    ) -> results.Row:
        sets = timing.cold_sets(self.tensor_bytes, self.tensors[0].device) if mode == "cold" else 1
        inputs = [self.tensors] + [make(self.case, "cuda", salt) for salt in range(1, sets)]
        outs = [torch.empty_like(query) for query, _, _ in inputs]
        call = implementation.run
        timed = timing.measure(mode, lambda i: call(self.case, inputs[i], outs[i]), sets)
        return self._row(
            mode,
            fields,
            error=record,
            median_us=timed.median_us,
            min_us=timed.min_us,
            samples_us=[round(sample, 4) for sample in timed.samples_us],
            tflops=self.flops / timed.median_us / 1e6 if mode in ("graph", "cold") else None,
        )

    def _row(self, mode: str, fields: dict[str, object], **measured: object) -> results.Row:
        return results.row(self.case, **(fields | {"mode": mode} | measured))

    def _identity(self, implementation: Implementation) -> dict[str, object]:
        fields: dict[str, object] = {
            "impl": implementation.name,
            "version": implementation.version,
            "variant": implementation.variant,
        }
        if implementation.name != "microsdpa":
            return fields
        case = self.case
        found = explain(
            *self.tensors,
            causal=case.causal,
            scale=case.scale,
            enable_gqa=case.kv_heads != case.heads,
            impl=self.impl,
        )
        assert found.spec is not None
        target = target_of(torch.cuda.get_device_capability())
        return fields | {
            "kernel": found.spec.name,
            "signature": found.signature,
            "code_signature": code_signature(found.spec, target),
            "requested": self.impl,
        }
