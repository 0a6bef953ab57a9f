"""Result files that grow: which cells want to be measured again, and rows that another machine has measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from microsdpa.errors import InvalidArgument
from microsdpa.evidence import probes, results, suites
from microsdpa.evidence.signatures import is_stale
from microsdpa.evidence.step import Progress, Step, no_progress
from microsdpa.evidence.wording import case_name


def add(files: Sequence[Path], directory: Path) -> Step:
    """Add the rows of result files to those of their suites below `directory`; cells that both have get the new rows.

    Raises:
        InvalidArgument: a suite's rows below `directory` are of another GPU, driver or torch; nothing is written.
        ResultFileError: a file is none of results.
    """
    given = [results.read(path) for path in files]
    for path, result in zip(files, given, strict=True):
        place = results.path_below(directory, result)
        old = results.read(place)["environment"] if place.is_file() else result["environment"]
        for name in results.SAME:
            if old[name] != result["environment"][name]:
                raise InvalidArgument(
                    "files",
                    expected=f"rows of {name} {old[name]}, as {place} has them",
                    got=f"{path} with {name} {result['environment'][name]}",
                    hint="record the suite whole, and copy its file",
                )
    table = [["file", "cells added", "cells kept"]]
    for result in given:
        drawn = result["suite"] in suites.names() and suites.load(result["suite"]).drawn
        whole = results.completed(result, directory, case_name, not drawn)
        added, every = ({case_name(row) for row in one["rows"]} for one in (result, whole))
        table.append([str(results.write(whole, directory)), str(len(added)), str(len(every - added))])
    return Step("add", "passed", f"rows of {len(given)} files were added below {directory}", table)


def stale(directory: Path, gpu: str | None = None, progress: Progress = no_progress) -> Step:
    """Which cells have rows that were measured with code that has changed since; `gpu` names one folder."""
    paths = sorted(directory.glob(f"{gpu or '*'}/*.json"))
    if not paths:
        known = ", ".join(sorted(path.name for path in directory.iterdir() if path.is_dir()))
        raise InvalidArgument("gpu", expected=f"a folder of {directory}", got=str(gpu), hint=f"name one of {known}")
    advance = progress("stale", len(paths))
    table, cells = [["GPU", "suite", "cell"]], 0
    for path in paths:
        result = results.read(path)
        target = result["environment"].get("target")
        found: defaultdict[str, bool] = defaultdict(bool)
        for row in result["rows"]:
            if row.get("emulator_signature"):  # of an instruction, which has no problem
                found[row["kernel"]] |= probes.is_stale(row, target)
            elif row.get("code_signature") and "shape" in row and (row.get("target") or target):
                found[case_name(row)] |= is_stale(row, row.get("target") or target)
        names = [name for name, changed in found.items() if changed]
        table += [[path.parent.name, result["suite"], name] for name in names]
        cells += len(found)
        advance(f"{path.parent.name}/{path.name}")
    return Step("stale", "passed", f"{len(table) - 1} of {cells} cells have rows of code that has changed since", table)
