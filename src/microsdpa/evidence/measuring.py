"""The process in which cases are measured: `python -m microsdpa.evidence.measuring FD PEERS EIGHT_BIT`.

It imports its peers, says that it is ready, and waits for its job: JSON on standard input. What it finds goes to
the file descriptor FD, one JSON object a line: {"ready": true}, {"running": implementation}, {"case": index,
"rows": [...]}. Standard output belongs to the peers, some of which write to it.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from microsdpa.evidence.bench import CaseBench
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.peers import choose, ours


def main() -> None:
    """Measure the job's cases, one after another."""
    report = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")

    def tell(message: dict[str, object]) -> None:
        report.write(json.dumps(message) + "\n")
        report.flush()

    peers = choose(sys.argv[2], sys.argv[3] == "True")
    for peer in peers:
        _ = peer.absence  # imports it
    tell({"ready": True})
    job = json.load(sys.stdin)
    implementations = [*ours(job["impl"]), *peers]
    for index, fields in job["cases"].items():
        bench = CaseBench(
            Case(**fields), seed=int(index), excluded=job["excluded"], announce=lambda name: tell({"running": name})
        )
        taking_part = [one for one in implementations if int(index) in job["eight_bit"] or not one.arithmetic]
        tell({"case": int(index), "rows": bench.run(taking_part, job["modes"])})
        del bench
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
