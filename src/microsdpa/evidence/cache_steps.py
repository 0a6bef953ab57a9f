"""`microsdpa cache`: what the cache of compiled kernels has, and removing what was not used lately."""

from __future__ import annotations

import time

from microsdpa.evidence.step import Step
from microsdpa.jit import cache

DAY = 86_400.0


def show() -> Step:
    """The entries of the cache, by kind."""
    directory, now = cache.default_directory(), time.time()
    entries = cache.stored(directory)
    table = [["kind", "entries", "MiB", "used last, days ago"]]
    for kind in sorted({entry.kind for entry in entries}):
        some = [entry for entry in entries if entry.kind == kind]
        last = (now - max(entry.used for entry in some)) / DAY
        table.append([kind or "kernels", str(len(some)), f"{_mib(some):.1f}", f"{last:.1f}"])
    summary = f"{len(entries)} entries of {_mib(entries):.1f} MiB in {directory}"
    data = {"directory": str(directory), "entries": len(entries), "bytes": sum(entry.bytes for entry in entries)}
    return Step("cache", "passed", summary, table if entries else [], data=data)


def prune(days: float, dry_run: bool = False) -> Step:
    """Remove entries that were not used within so many days."""
    directory, oldest = cache.default_directory(), time.time() - days * DAY
    entries = cache.stored(directory)
    old = [entry for entry in entries if days == 0 or entry.used < oldest]
    failed = [] if dry_run else [entry for entry in old if not cache.remove(entry)]
    gone = [entry for entry in old if entry not in failed]
    verb = "would remove" if dry_run else "removed"
    summary = f"{verb} {len(gone)} of {len(entries)} entries, {_mib(gone):.1f} MiB, from {directory}"
    if failed:
        summary += f"; {len(failed)} could not be removed, such as {failed[0].path}"
    data = {"removed": len(gone), "bytes": sum(entry.bytes for entry in gone), "failed": len(failed)}
    return Step("cache", "failed" if failed else "passed", summary, data=data)


def _mib(entries: list[cache.Stored]) -> float:
    return sum(entry.bytes for entry in entries) / 2**20
