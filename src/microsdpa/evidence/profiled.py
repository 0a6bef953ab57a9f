"""The program that Nsight Compute runs: `python -m microsdpa.evidence.profiled`, its case as JSON on standard input."""

from __future__ import annotations

import json
import sys

from microsdpa.evidence.inputs import Case
from microsdpa.evidence.profile import make_call

if __name__ == "__main__":
    job = json.load(sys.stdin)
    make_call(Case(**job["case"]), job["impl"])
