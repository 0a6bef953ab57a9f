"""Shared fixtures: a cache of the run's own, and the skip of GPU tests where there is no GPU."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile

import pytest
import torch

import compiler_record
from microsdpa.runtime import launcher
from tiers import is_quick

KEPT = os.environ.get("MICROSDPA_TESTS_CACHE_DIR", "")
"""A cache that later runs find what they compile in, by its sources, flags and compiler; none where it is empty."""

# One cache for the whole run, its workers and subprocesses, and never the user's.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["MICROSDPA_CACHE_DIR"] = KEPT or tempfile.mkdtemp(prefix="microsdpa-tests-")
    compiler_record.begin()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what the compiler's record lacks, or writes it, once all workers have ended."""
    if "PYTEST_XDIST_WORKER" not in os.environ and (said := compiler_record.summary()):
        terminalreporter.write_line(said)


def pytest_unconfigure() -> None:
    """Removes the cache of this run alone, once all workers have ended."""
    if "PYTEST_XDIST_WORKER" not in os.environ and not KEPT:
        shutil.rmtree(os.environ["MICROSDPA_CACHE_DIR"], ignore_errors=True)


# Workers that each use every core spend their time waiting for one another.
torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = launcher.device_error()
    for item in items:
        if reason and "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))
        if is_quick(item.path):
            item.add_marker(pytest.mark.quick)


def pytest_collection_finish() -> None:
    """What was imported and collected stays until the end: the garbage collector need not look at it again."""
    gc.collect()
    gc.freeze()
