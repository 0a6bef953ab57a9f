"""What `microsdpa evidence mutate` tries kernels for sequences of many lengths on, and how it judges them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from microsdpa.call.tensors import output_shape
from microsdpa.emulate.run import EmulationError, Schedule, scheduled
from microsdpa.errors import UnsupportedProblem
from microsdpa.evidence import fuzz_varlen
from microsdpa.evidence.fuzz_varlen import VarlenCall
from microsdpa.execution import varlen
from microsdpa.execution.choice import problem_of
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.select import select

PAGES = VarlenCall(storage="paged", causal=True)
DECODING = dataclasses.replace(PAGES, queries=(1, 1, 1), keys=(300, 0, 70), group=4)
PROMPTS = VarlenCall(queries=(70, 0, 33), keys=(70, 0, 33), packed=True, storage="packed", causal=True, group=2)


@dataclass(frozen=True)
class PackedCase:
    """A call with few CTAs, or with something in its tensors that no call should have.

    Attributes:
        ctas: of a launch, for each of the key heads: so each has several pieces of work, and shares some.
        spoiled: what is wrong with the last sequence: its first "page" is one that the cache does not have, or its
            "length" leaves no room for what is appended. The other sequences' results stay what they are.
    """

    call: VarlenCall
    ctas: int = 3
    spoiled: Literal["", "page", "length"] = ""

    def __str__(self) -> str:
        """The call, and what is particular."""
        more = f", a {self.spoiled} that is wrong" if self.spoiled else ""
        return f"{self.call} on {self.ctas} CTAs{more}"


CASES = (
    DECODING,
    dataclasses.replace(DECODING, heads_kv=2, head_dim=80, dtype="bfloat16"),
    dataclasses.replace(DECODING, queries=(1,), keys=(700,)),  # a sequence of all CTAs
    dataclasses.replace(DECODING, page=3, keys=(40, 90, 64)),  # rows with pages of their own
    dataclasses.replace(DECODING, queries=(5, 5, 5), window=(100, -1), softcap=5.0),
    dataclasses.replace(DECODING, append=True, rotary=32, norms=("q_norm", "k_norm")),
    dataclasses.replace(DECODING, append=True, cache="e4m3", scale_of="tokens"),
    dataclasses.replace(DECODING, invariant=True, keys=(900, 5, 70)),
    dataclasses.replace(DECODING, group=64, keys=(200, 130, 64)),
    PROMPTS,
    dataclasses.replace(PROMPTS, head_dim=128, heads_kv=2, sinks="inputs"),
    dataclasses.replace(PROMPTS, queries=(200, 3), keys=(260, 0), alibi="batch", causal=False),
    dataclasses.replace(PROMPTS, storage="dense", packed=False, queries=(70, 70), keys=(300, 64), scale=-0.3),
    dataclasses.replace(PROMPTS, storage="paged", page=64, window=(40, 5), causal=False, keys=(150, 64, 129)),
    dataclasses.replace(PROMPTS, queries=(32, 96, 5), keys=(32, 96, 5)),  # consumers without a row
    PackedCase(dataclasses.replace(PROMPTS, queries=(1300, 5), keys=(1300, 5), group=1), ctas=8),  # many tiles of rows
    # Some tiles of rows, and more, of which CTAs share the keys.
    PackedCase(dataclasses.replace(PROMPTS, queries=(700, 1100, 5), keys=(700, 1100, 6000), group=1), ctas=8),
    # Four parts of one sequence's keys, three of the other's.
    PackedCase(dataclasses.replace(PROMPTS, storage="dense", packed=False, queries=(70, 70), keys=(3000, 600)), ctas=8),
    # More tiles of keys than a ring has.
    dataclasses.replace(PROMPTS, storage="dense", packed=False, queries=(70, 70), keys=(3000, 64), heads_kv=2),
    dataclasses.replace(DECODING, group=64, keys=(3000, 130, 64)),
    dataclasses.replace(DECODING, group=64, keys=(2000, 130, 64), head_dim=128, dtype="bfloat16"),
    dataclasses.replace(DECODING, queries=(40, 40, 40), append=True),  # new keys in several tiles
    dataclasses.replace(DECODING, append=True, rotary=32, norms=("q_norm",), cache="int8", scale_of="heads"),
    PackedCase(dataclasses.replace(DECODING, queries=(1,), keys=(64 * 97 - 3,)), ctas=97),  # combined in two steps
    # The same where no cluster has the rows.
    PackedCase(dataclasses.replace(DECODING, queries=(1,), keys=(64 * 68 - 3,), head_dim=136), ctas=69),
    # A sequence of more tiles of rows than the mean has.
    dataclasses.replace(DECODING, packed=True, queries=(1, 0, 1, 1, 1, 1, 25), keys=(20, 7, 9, 3, 30, 70, 90)),
    PackedCase(dataclasses.replace(DECODING, keys=(90, 50, 70)), spoiled="page"),
    PackedCase(dataclasses.replace(DECODING, keys=(90, 50, 70), cache="int8", scale_of="tokens"), spoiled="page"),
    PackedCase(dataclasses.replace(DECODING, keys=(90, 50, 70), append=True, cache="e4m3"), spoiled="length"),
    PackedCase(dataclasses.replace(PROMPTS, storage="paged", append=True, keys=(150, 64, 129)), spoiled="length"),
)
TARGETS = "sm_90a", "sm_89"
"""On the first one clusters share the keys of few sequences."""
GUARD = 1 << 16
"""Elements behind the output and the LSE that no kernel may write to."""


def cases() -> list[PackedCase]:
    """All cases."""
    return [case if isinstance(case, PackedCase) else PackedCase(case) for case in CASES]


def of(case: PackedCase, kernel: str) -> list[tuple[KernelSpec, Problem]]:
    """How a kernel computes a case, on each of TARGETS, and the problem; none where it does not."""
    call = dataclasses.replace(case.call, impl=kernel)
    computed: dict[str, tuple[KernelSpec, Problem]] = {}
    for target in TARGETS:
        try:
            found = fuzz_varlen.checked(call, fuzz_varlen.tensors(call), "cpu")
            problem = dataclasses.replace(problem_of(found), target=target)
            spec = select(problem, kernel).spec
            few = dataclasses.replace(spec, max_ctas=case.ctas * problem.heads_kv)
            varlen.kernels_of(found, problem, few)
        except UnsupportedProblem:
            continue
        computed.setdefault(spec.expression, (few, problem))
    return list(computed.values())


def stages(case: PackedCase, spec: KernelSpec, problem: Problem) -> tuple[KernelSpec, ...]:
    """All kernels that a case runs."""
    found = fuzz_varlen.checked(case.call, fuzz_varlen.tensors(case.call), "cpu")
    return tuple(stage for kernel in varlen.kernels_of(found, problem, spec) for stage in kernel.stages)


def wrong(case: PackedCase, spec: KernelSpec, problem: Problem, root: Path, schedule: Schedule) -> str:
    """What is wrong with a case that a tree of sources computes; empty if nothing is."""
    before = fuzz_varlen.tensors(case.call)
    given = fuzz_varlen.moved(before, "cpu")
    try:
        with scheduled(schedule):
            out, lse = _computed(case.call, given, spec, problem, root)
            if not case.spoiled:
                return fuzz_varlen.judged(case.call, before, given, out, lse).failure
            spoiled = _spoiled(case, before)
            with_fault, _ = _computed(case.call, spoiled, spec, problem, root)
    except EmulationError as error:
        return error.problem
    except _Found as found:
        return str(found)
    first = sum(case.call.queries[:-1]) if case.call.packed else len(case.call.queries) - 1  # row of the last sequence
    if not torch.equal(out[:first], with_fault[:first]):
        return f"a wrong {case.spoiled} changes what other sequences give"
    if case.spoiled == "page" and not with_fault[first:].isnan().all():
        return "a page that the cache does not have gives numbers"
    return ""


class _Found(Exception):
    """Something that is wrong with memory after a launch."""


def _computed(
    call: VarlenCall, given: dict[str, Any], spec: KernelSpec, problem: Problem, root: Path
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE."""
    found = fuzz_varlen.checked(call, given, "cpu")
    shape = output_shape(given["query"], given["value"])
    memory = {
        "output": torch.full((math.prod(shape) + GUARD,), torch.nan, dtype=given["query"].dtype),
        "LSE": torch.full((math.prod(found.lse_shape) + GUARD,), torch.nan),
    }
    out, lse = memory["output"][:-GUARD].view(shape), memory["LSE"][:-GUARD].view(found.lse_shape)
    try:
        varlen.emulate(found, problem, spec, out, lse, root)
    except AssertionError as error:
        raise _Found(str(error)) from error
    for name, whole in memory.items():
        if not whole[-GUARD:].isnan().all():
            raise _Found(f"memory behind the {name} is written to")
    return out, lse


def _spoiled(case: PackedCase, before: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a case with what is wrong in them."""
    given = fuzz_varlen.moved(before, "cpu")
    if case.spoiled == "page":
        given["page_table"][-1, 0] = given["key"].shape[0]
    else:
        given["lengths"][-1] = given["page_table"].shape[1] * case.call.page
    return given
