"""`microsdpa evidence resign`: new code signatures for rows whose kernels are still the same machine code.

A code signature is made of the tokens of a kernel's sources, so a rename makes every row of the kernel stale. Here the
kernels of an old checkout and of this one are compiled by one compiler and compared. Rows of which nothing differs get
the new signature, and keep the old one beside it.

Rows of `microsdpa probe` are not looked at: they are of the emulator too, which runs no machine code.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from microsdpa.errors import MicrosdpaError
from microsdpa.evidence import results
from microsdpa.evidence.results import Result, Row
from microsdpa.evidence.step import Progress, Step, no_progress
from microsdpa.jit.cache import default_directory
from microsdpa.jit.machine_code import differences
from microsdpa.kernels.problem import virtual

PACKAGE = "src/microsdpa"
COMMAND = "microsdpa evidence resign"
PTX_SUITE = "verify_ptx_"
"""How suites begin whose kernels the driver made of PTX."""
CACHE = "resign"
"""Below the cache of kernels: those of other checkouts, kept for the run that follows a dry run."""
HEAD = ["file", "kernel", "rows", "outcome"]
RESIGNED, RESIGNABLE = "resigned", "can be resigned"
EMULATED = "it ran in the emulator, which runs no machine code; record it again"
_RUN = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
_NOT_SENT = ("samples_us", "metrics", "gates", "figures", "error")

Kernels = dict[str, dict[str, Any]]
"""By the field of a row: what resign_worker.describe() says of a kernel."""
Stage = tuple[int, str, int]
"""The number of a row, a field of it, and the number of a stage."""


class ResignError(MicrosdpaError, ValueError):
    """Rows cannot be resigned: a checkout is not there, was changed, or is laid out otherwise."""


@dataclass(frozen=True)
class Checkout:
    """The sources of one version.

    Attributes:
        package: directory of the package in it.
        commit: what it is of; "unknown" where there is no git.
    """

    package: Path
    commit: str

    def ask(self, jobs: list[dict[str, Any]], directory: Path, compiled: bool = False) -> tuple[Any, str]:
        """The answers of resign_worker, and the version of NVRTC; machine code comes below `directory`."""
        answer = directory / "answer.json"
        request: dict[str, Any] = {"package": str(self.package), "jobs": jobs, "answer": str(answer)}
        if compiled:
            request["directory"] = str(directory)
        worker = Path(__file__).with_name("resign_worker.py")
        environment = os.environ | {
            "MICROSDPA_CACHE_DIR": str(default_directory() / CACHE),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        run = subprocess.run(
            [sys.executable, "-c", _RUN, str(worker)],
            input=json.dumps(request),
            cwd=directory,  # nothing there can be imported by mistake
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            said = (run.stderr.strip().splitlines() or ["nothing"])[-1]
            raise ResignError(f"the sources of {self.commit}: expected an answer, the process failed: {said}")
        found = json.loads(answer.read_text(encoding="utf-8"))
        if "layout" in found:
            raise ResignError(
                f"the sources of {self.commit} are laid out otherwise than this command knows ({found['layout']}); "
                "name a later commit, or record the rows again"
            )
        return found["answers"], found["nvrtc"]


@dataclass
class Stale:
    """A row whose kernels are other sources now.

    Attributes:
        target: that its kernels were specified for.
        compiled_for: the same, or its PTX.
        reason: why it stays stale; empty where it does not.
        changed: its fields that get new signatures, and these.
    """

    file: Path
    row: Row
    target: str
    compiled_for: str
    reason: str = ""
    changed: dict[str, str] = field(default_factory=dict)

    @property
    def job(self) -> dict[str, Any]:
        """What resign_worker has to know of it."""
        row = {name: value for name, value in self.row.items() if name not in _NOT_SENT}
        return {"row": row, "target": self.target, "compiled_for": self.compiled_for}


def step(
    old_ref: str,
    root: Path,
    results_directory: Path,
    gpu: str | None = None,
    dry_run: bool = False,
    progress: Progress = no_progress,
) -> Step:
    """Resign the rows below `results_directory`, or of one GPU's folder, that were recorded with the code of `old_ref`.

    Raises:
        ResignError: a checkout cannot be used, or there is no such folder.
        ResultFileError: a result file is damaged or was edited; no file is written.
    """
    files = _read(results_directory, gpu)
    with tempfile.TemporaryDirectory(prefix="microsdpa-resign-") as scratch:
        new = _this(root, must_be_clean=not dry_run)
        with _old(old_ref, root, Path(scratch)) as old:
            rows, fresh, nvrtc = _compared(files, old, new, Path(scratch), progress)
    written: list[Path] = []
    resigned = [row for row in rows if not row.reason]
    if not dry_run:
        for row in resigned:
            _resign(row, old.commit, new.commit, nvrtc)
        changed = {row.file for row in resigned}
        for path in sorted(changed):
            result = files[path]
            written.append(results.write(result | {"checksum": results.checksum(result)}, results_directory))
    verb = RESIGNABLE if dry_run else RESIGNED
    summary = (
        f"{fresh} rows are fresh; of {len(rows)} stale ones {len(resigned)} {'can be ' * dry_run}resigned "
        f"from {old.commit[:10]} to {new.commit[:10]}, {len(rows) - len(resigned)} stay stale"
    )
    summary += f"; wrote {len(written)} files" if not dry_run else "; nothing was written"
    return Step("resign", "passed", summary, _table(rows, verb), data={"resigned": len(resigned), "stale": len(rows)})


def _read(directory: Path, gpu: str | None) -> dict[Path, Result]:
    """All files, each of them valid, before any is touched."""
    if gpu is not None and not (directory / gpu).is_dir():
        there = ", ".join(sorted(path.name for path in directory.glob("*") if path.is_dir())) or "none"
        raise ResignError(f"gpu: expected a folder of {directory} ({there}), got {gpu!r}")
    found = {path: results.read(path) for path in sorted(directory.glob(f"{gpu or '*'}/*.json"))}
    for path, result in found.items():
        if (expected := results.path_below(directory, result)) != path:
            raise ResignError(f"{path}: expected the result at {expected}, where its GPU and suite belong; move it")
    return found


def _git(root: Path, *arguments: str) -> bytes:
    run = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=False)
    if run.returncode:
        raise ResignError(f"git {arguments[0]} in {root} failed: {run.stderr.decode(errors='replace').strip()}")
    return run.stdout


def _this(root: Path, must_be_clean: bool) -> Checkout:
    """The new version: the checkout at `root`."""
    if not (root / PACKAGE).is_dir():
        raise ResignError(f"root: expected a checkout with {PACKAGE}, got {root}")
    changed = _git(root, "status", "--porcelain", "--", PACKAGE).decode().splitlines()
    if changed and must_be_clean:
        raise ResignError(
            f"root: expected {PACKAGE} as it is committed, got {len(changed)} changed files, such as {changed[0][3:]}; "
            "commit them first, or use --dry-run"
        )
    commit = _git(root, "rev-parse", "HEAD").decode().strip()
    return Checkout((root / PACKAGE).resolve(), commit + ("-dirty" if changed else ""))


@contextmanager
def _old(reference: str, root: Path, scratch: Path) -> Iterator[Checkout]:
    """The old version: a checkout at a path, or a commit of this one in a temporary directory."""
    if (Path(reference) / PACKAGE).is_dir():
        path = Path(reference).resolve()
        yield Checkout(path / PACKAGE, _commit_of(path))
        return
    try:
        commit = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{reference}^{{commit}}")
    except ResignError:
        raise ResignError(
            f"old_ref: expected a commit of {root}, or a directory with {PACKAGE}, got {reference!r}"
        ) from None
    archive = _git(root, "archive", commit.decode().strip(), PACKAGE)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(scratch / "old", filter="data")
    yield Checkout(scratch / "old" / PACKAGE, commit.decode().strip())


def _commit_of(path: Path) -> str:
    try:
        changed = _git(path, "status", "--porcelain", "--", PACKAGE)
        return _git(path, "rev-parse", "HEAD").decode().strip() + ("-dirty" if changed else "")
    except ResignError:
        return "unknown"


def _compared(
    files: dict[Path, Result], old: Checkout, new: Checkout, scratch: Path, progress: Progress
) -> tuple[list[Stale], int, str]:
    """The stale rows, each with the reason why it stays so or with new signatures; the number of others; NVRTC."""
    signed = [
        _signed(path, row, result)
        for path, result in files.items()
        for row in result["rows"]
        if row.get("code_signature") and not row.get("emulator_signature")
    ]
    advance = progress("resign", 4)
    now, nvrtc = new.ask([row.job for row in signed], scratch)
    advance("signatures of this checkout")
    stale = [(row, answer) for row, answer in zip(signed, now, strict=True) if _is_stale(row.row, answer)]
    rows = [row for row, _ in stale]
    then, nvrtc_then = old.ask([row.job for row in rows], scratch)
    advance("signatures of the old one")
    if nvrtc != nvrtc_then:
        raise ResignError(f"expected one NVRTC for both checkouts, got {nvrtc} and {nvrtc_then}")
    pairs = [(row, before, after) for (row, after), before in zip(stale, then, strict=True)]
    wanted: dict[str, Stage] = {}  # the first row that has a stage stands for all
    for number, (row, before, after) in enumerate(pairs):
        row.reason = _not_of(row, files[row.file], before, after)
        if row.reason:
            continue
        row.changed = _changed(row.row, after["kernels"])
        row.reason = _launched_otherwise(row, before["kernels"], after["kernels"])
        for name in row.changed if not row.reason else ():
            for index, (a, b) in enumerate(_stages(name, before, after)):
                if a["signature"] != b["signature"]:
                    wanted.setdefault(_pair(row, a, b), (number, name, index))
    found = _machine_code(rows, wanted, old, new, scratch)
    advance(f"{len(wanted)} kernels compiled by both")
    for row, before, after in pairs:
        if not row.reason:
            stages = [pair for name in row.changed for pair in _stages(name, before, after)]
            told = [found.get(_pair(row, a, b), "") for a, b in stages]
            row.reason = "; ".join(dict.fromkeys(filter(None, told)))
    advance("compared")
    return rows, len(signed) - len(rows), nvrtc


def _signed(path: Path, row: Row, result: Result) -> Stale:
    target = row.get("target") or result["environment"].get("target") or ""
    return Stale(path, row, target, virtual(target) if result["suite"].startswith(PTX_SUITE) else target)


def _pair(row: Stale, a: dict[str, Any], b: dict[str, Any]) -> str:
    """What an old and a new stage are called together."""
    return f"{row.compiled_for} {a['signature']} {b['signature']}"


def _stages(name: str, before: dict[str, Any], after: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Old and new of each stage of a row's kernel."""
    return list(zip(before["kernels"][name]["stages"], after["kernels"][name]["stages"], strict=True))


def _is_stale(row: Row, answer: dict[str, Any]) -> bool:
    return "error" in answer or bool(_changed(row, answer["kernels"]))


def _changed(row: Row, now: Kernels) -> dict[str, str]:
    """Fields of a row that have another signature now, and these."""
    return {name: kernel["signature"] for name, kernel in now.items() if row[name] != kernel["signature"]}


def _not_of(row: Stale, result: Result, before: dict[str, Any], after: dict[str, Any]) -> str:
    """Why machine code does not decide about a row; empty where it does."""
    if result["environment"]["gpu"] is None:
        return EMULATED
    if "error" in after:
        return f"no kernel computes it now: {after['error']}"
    if "error" in before:
        return "it was recorded with other code than the old checkout's"
    for name in _changed(row.row, after["kernels"]):
        if before["kernels"][name]["signature"] != row.row[name]:
            return "it was recorded with other code than the old checkout's"
    return ""


def _launched_otherwise(row: Stale, before: Kernels, after: Kernels) -> str:
    """How the kernels' names and launches differ; empty where they do not."""
    for name in row.changed:
        a, b = before[name], after[name]
        if a["name"] != b["name"]:
            return f"another kernel runs now: {b['name']}, not {a['name']}"
        if len(a["stages"]) != len(b["stages"]):
            return f"launch: {len(a['stages'])} kernels, now {len(b['stages'])}"
        if a["numbers"] != b["numbers"]:
            return f"launch: workspace or parts {a['numbers']}, now {b['numbers']}"
        for x, y in zip(a["stages"], b["stages"], strict=True):
            x, y = x["launch"], y["launch"]
            differing = [key for key in sorted(x | y) if x.get(key) != y.get(key)]
            if differing:
                told = (f"{key} {x.get(key, 'plain')}, now {y.get(key, 'plain')}" for key in differing)
                return f"launch: {'; '.join(told)}"
    return ""


def _machine_code(
    rows: list[Stale], wanted: dict[str, Stage], old: Checkout, new: Checkout, scratch: Path
) -> dict[str, str]:
    """How the machine code of each pair of stages differs; empty where it does not."""
    jobs = [rows[n].job | {"field": name, "stage": stage} for n, name, stage in wanted.values()]
    if not jobs:
        return {}
    before, after = (checkout.ask(jobs, scratch, compiled=True)[0] for checkout in (old, new))
    found = {}
    for pair in wanted:
        target, *signatures = pair.split()
        a, b = before[f"{signatures[0]}.{target}"], after[f"{signatures[1]}.{target}"]
        if failed := a.get("error") or b.get("error"):
            found[pair] = f"it does not compile: {failed}"
            continue
        told = [
            f"{name.replace('_', ' ')} {a['resources'][name]}, now {b['resources'].get(name)}"
            for name in a["resources"]
            if a["resources"][name] != b["resources"].get(name)
        ]
        told += differences(Path(a["file"]).read_bytes(), Path(b["file"]).read_bytes())
        found[pair] = f"machine code: {', '.join(told)}" if told else ""
    return found


def _resign(row: Stale, old_commit: str, commit: str, nvrtc: str) -> None:
    """Put the new signatures into a row, and what they stand for."""
    row.row["resigned"] = [
        *row.row.get("resigned", []),
        *(
            {
                "field": name,
                "from": row.row[name],
                "to": signature,
                "command": f"{COMMAND} {old_commit}",
                "commit": commit,
                "nvrtc": nvrtc,
            }
            for name, signature in row.changed.items()
        ),
    ]
    row.row |= row.changed


def _table(rows: list[Stale], verb: str) -> list[list[str]]:
    """A line for each file, kernel and outcome."""
    counted = Counter(
        (f"{row.file.parent.name}/{row.file.name}", row.row["kernel"] or row.row["impl"], row.reason or verb)
        for row in rows
    )
    return [HEAD, *([file, kernel, str(n), outcome] for (file, kernel, outcome), n in counted.items())]
