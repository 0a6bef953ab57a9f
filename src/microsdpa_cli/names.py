"""Names that help texts have. They stand here, so that --help loads neither torch nor a kernel.

A test compares them with where they come from.
"""

from __future__ import annotations

from pathlib import Path

MODES = ("graph", "graph_nopdl", "cold", "eager", "host")
PRECISIONS = ("fp8", "fp8_fast", "int8_fp8", "int8_fp16")
DEVICES = ("h200", "h100", "a100", "l4", "rtx4090")
SUITES = tuple(sorted(path.stem for path in Path(__file__).parents[1].glob("microsdpa/evidence/suites/*.json")))
TARGETS = ("sm_80", "sm_89", "sm_90a", "sm_120")
RESULTS, GPU = Path("benchmarks/results"), "h200"
"""Where a checkout has recorded results, and whose the report shows where there is no GPU."""
