"""The process in which cases are measured: `python -m microsdpa.evidence.measuring FD`.

Its job is a line of JSON on standard input. It imports its peers and rehearses the cases, which compiles what peers
compile; then it says that it is ready, and measures at the next line. What it finds goes to the file descriptor FD,
one JSON object a line: {"running": implementation}, {"ready": true}, {"case": index, "rows": [...]}. A case that comes
after the time that the job has for all of them is not measured, and has no rows. Standard output belongs to
the peers, some of which write to it.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch

from microsdpa.evidence.bench import CaseBench
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.peers import Implementation, choose, ours


def main() -> None:
    """Measure the job's cases, one after another."""
    report = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")

    def tell(message: dict[str, object]) -> None:
        report.write(json.dumps(message) + "\n")
        report.flush()

    job = json.loads(sys.stdin.readline())
    cases = {int(index): Case(**fields) for index, fields in job["cases"].items()}
    own = [one for one in ours(job["impl"]) if not job["variants"] or one.variant in job["variants"]]
    implementations = [*own, *choose(job["peers"], bool(job["eight_bit"]))]

    def of(index: int) -> tuple[CaseBench, list[Implementation]]:
        taking_part = [one for one in implementations if index in job["eight_bit"] or not one.arithmetic]
        bench = CaseBench(
            cases[index],
            seed=index,
            judge=job["judge"],
            energy=job["energy"],
            excluded=job["excluded"],
            announce=lambda name: tell({"running": name}),
        )
        return bench, taking_part

    for index in to_rehearse(cases):
        bench, taking_part = of(index)
        bench.rehearse(taking_part)
        del bench
        torch.cuda.empty_cache()
    tell({"ready": True})
    if not sys.stdin.readline():  # nobody waits for it any longer
        return
    for index in cases:
        if job["until"] is not None and time.time() > job["until"]:
            tell({"case": index, "rows": []})
            continue
        bench, taking_part = of(index)
        tell({"case": index, "rows": bench.run(taking_part, job["modes"])})
        del bench
        torch.cuda.empty_cache()


def to_rehearse(cases: dict[int, Case]) -> list[int]:
    """The cheapest case of each kind that compilers tell apart; what they make of the lengths is left to `run`."""
    chosen: dict[tuple[object, ...], int] = {}
    by_work = sorted(cases, key=lambda index: cases[index].batch * cases[index].seqlen_q * cases[index].seqlen_k)
    for index in by_work:
        case = cases[index]
        group = case.heads // case.kv_heads
        kind = (case.dtype, case.head_dim, case.causal, case.masks, group, case.seqlen_q == 1, case.layout)
        chosen.setdefault(kind, index)
    return sorted(chosen.values())


if __name__ == "__main__":
    main()
