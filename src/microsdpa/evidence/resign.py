"""`microsdpa evidence resign`: new code signatures for rows whose kernels are still the same machine code.

A code signature is made of the tokens of a kernel's sources, so a rename makes every row of the kernel stale. Here the
kernels of an old checkout and of this one are compiled by one compiler and compared. Rows of which nothing differs get
the new signature, and keep the old one beside it.

Kernels that have another name now are told to it. Their rows get the new names, also those that stay stale, and keep
the old names beside them.

Rows of `microsdpa probe` are not looked at: they are of the emulator too, which runs no machine code.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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
NAMED = ("kernel", "requested", "variant")
"""Fields of a row that may have the name of a kernel."""
_KERNEL_NAME = re.compile(r"[a-z]\w*(/\w+)+")
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
        names: its fields that name a kernel by another name now, and these.
        reason: why it stays stale; empty where it does not.
        changed: its fields that get new signatures, and these.
    """

    file: Path
    row: Row
    names: dict[str, str]
    target: str
    compiled_for: str
    reason: str = ""
    changed: dict[str, str] = field(default_factory=dict)

    @property
    def kernel(self) -> str:
        """What its kernel is called now, or who else is timed."""
        return str(self.names.get("kernel") or self.row["kernel"] or self.row["impl"])

    def job(self, new: bool) -> dict[str, Any]:
        """What resign_worker has to know of it, by the names of the old checkout or of the new one."""
        row = {name: value for name, value in self.row.items() if name not in _NOT_SENT}
        if new:
            row |= self.names
        return {"row": row, "target": self.target, "compiled_for": self.compiled_for}


class Names:
    """The new names of kernels by the old ones."""

    def __init__(self, renamed: Mapping[str, str]) -> None:
        for old, new in renamed.items():
            if not _KERNEL_NAME.fullmatch(old) or not _KERNEL_NAME.fullmatch(new):
                raise ResignError(f"renamed: expected OLD=NEW with names such as ladder/01_scalar, got {old}={new}")
        news = list(renamed.values())
        if again := sorted({name for name in news if name in renamed or news.count(name) > 1}):
            raise ResignError(f"renamed: expected one old name for each new one, and no chains, got {', '.join(again)}")
        self.renamed = dict(renamed)
        any_of = "|".join(map(re.escape, renamed)) or "(?!)"
        self._pattern = re.compile(rf"(?<![\w/])(?:{any_of})(?![\w/])")

    def of(self, text: str) -> str:
        """A text with new names in the place of old ones."""
        return self._pattern.sub(lambda match: self.renamed[match[0]], text)

    def command(self, old_commit: str, texts: Iterable[str]) -> str:
        """The command that is noted where texts are renamed: with what it was told of the kernels in them."""
        found = dict.fromkeys(match[0] for text in texts for match in self._pattern.finditer(text))
        return f"{COMMAND} {old_commit}" + "".join(f" --renamed {old}={self.renamed[old]}" for old in found)

    def of_suite(self, suite: str) -> str:
        """The same of a suite, such as "profile_ladder_01_scalar"."""
        slugs = {f"profile_{_slug(old)}": f"profile_{_slug(new)}" for old, new in self.renamed.items()}
        return slugs.get(suite, suite)

    def of_row(self, row: Row) -> dict[str, str]:
        """Fields of a row that change, and what they become."""
        found = {field: self.of(row[field]) for field in NAMED if isinstance(row.get(field), str)}
        return {field: name for field, name in found.items() if name != row[field]}

    def put_into(self, result: Result, old_commit: str, commit: str) -> bool:
        """Rename in a result and its rows, and note in each what it was called; whether anything changed."""
        changed = False
        of_file = {"suite": self.of_suite(result["suite"]), "command": self.of(result["command"])}
        of_file = {field: name for field, name in of_file.items() if name != result[field]}
        for place, names in ((result, of_file), *((row, self.of_row(row)) for row in result["rows"])):
            if names:
                told = {"command": self.command(old_commit, (place[field] for field in names)), "commit": commit}
                entries = [{"field": field, "from": place[field], "to": name, **told} for field, name in names.items()]
                place["renamed"] = [*place.get("renamed", []), *entries]
                place.update(names)
                changed = True
        return changed


def _slug(kernel: str) -> str:
    return kernel.replace("/", "_")


def names_of(options: Iterable[str]) -> dict[str, str]:
    """The new names of kernels by the old ones, from options such as "ladder/01_scalar=ladder/01_plain".

    Raises:
        ResignError: an option is none of these, or a kernel has two new names.
    """
    pairs = [option.split("=") for option in options]
    for pair in pairs:
        if len(pair) != 2:
            raise ResignError(f"renamed: expected OLD=NEW, got {'='.join(pair)!r}")
    if twice := sorted({old for old, _ in pairs if [a for a, _ in pairs].count(old) > 1}):
        raise ResignError(f"renamed: expected one new name for each old one, got several for {', '.join(twice)}")
    return {old: new for old, new in pairs}


def step(
    old_ref: str,
    root: Path,
    results_directory: Path,
    gpu: str | None = None,
    dry_run: bool = False,
    renamed: Mapping[str, str] | None = None,
    progress: Progress = no_progress,
) -> Step:
    """Resign the rows below `results_directory`, or of one GPU's folder, that were recorded with the code of `old_ref`.

    `renamed` has the new names of kernels by the old ones.

    Raises:
        ResignError: a checkout cannot be used, there is no such folder, or the names are not those of two kernels.
        ResultFileError: a result file is damaged or was edited; no file is written.
    """
    names = Names(renamed or {})
    files = _read(results_directory, gpu)
    with tempfile.TemporaryDirectory(prefix="microsdpa-resign-") as scratch:
        new = _this(root, must_be_clean=not dry_run)
        with _old(old_ref, root, Path(scratch)) as old:
            rows, fresh, nvrtc = _compared(files, old, new, names, Path(scratch), progress)
    written: list[Path] = []
    resigned = [row for row in rows if not row.reason]
    if not dry_run:
        for row in resigned:
            command = names.command(old.commit, (row.row[field] for field in row.names))
            _resign(row, {"command": command, "commit": new.commit, "nvrtc": nvrtc})
        named = {path for path, result in files.items() if names.put_into(result, old.commit, new.commit)}
        for path in sorted(named | {row.file for row in resigned}):
            result = files[path]
            written.append(results.write(result | {"checksum": results.checksum(result)}, results_directory))
            if written[-1] != path:
                path.unlink()
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
    files: dict[Path, Result], old: Checkout, new: Checkout, names: Names, scratch: Path, progress: Progress
) -> tuple[list[Stale], int, str]:
    """The stale rows, each with the reason why it stays so or with new signatures; the number of others; NVRTC."""
    signed = [
        _signed(path, row, result, names)
        for path, result in files.items()
        for row in result["rows"]
        if row.get("code_signature") and not row.get("emulator_signature")
    ]
    advance = progress("resign", 4)
    now, nvrtc = new.ask([row.job(new=True) for row in signed], scratch)
    advance("signatures of this checkout")
    stale = [(row, answer) for row, answer in zip(signed, now, strict=True) if _is_stale(row.row, answer)]
    rows = [row for row, _ in stale]
    then, nvrtc_then = old.ask([row.job(new=False) for row in rows], scratch)
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
        row.reason = _launched_otherwise(row, before["kernels"], after["kernels"], names)
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


def _signed(path: Path, row: Row, result: Result, names: Names) -> Stale:
    target = row.get("target") or result["environment"].get("target") or ""
    return Stale(
        path, row, names.of_row(row), target, virtual(target) if result["suite"].startswith(PTX_SUITE) else target
    )


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


def _launched_otherwise(row: Stale, before: Kernels, after: Kernels, names: Names) -> str:
    """How the kernels' names and launches differ; empty where they do not."""
    for name in row.changed:
        a, b = before[name], after[name]
        if names.of(a["name"]) != b["name"]:
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
    if not wanted:
        return {}

    def made(checkout: Checkout) -> dict[str, Any]:
        of_new = checkout is new
        jobs = [rows[n].job(of_new) | {"field": name, "stage": stage} for n, name, stage in wanted.values()]
        answers: dict[str, Any] = checkout.ask(jobs, scratch, compiled=True)[0]
        return answers

    before, after = made(old), made(new)
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


def _resign(row: Stale, told: dict[str, str]) -> None:
    """Put the new signatures into a row, and what they stand for."""
    row.row["resigned"] = [
        *row.row.get("resigned", []),
        *({"field": name, "from": row.row[name], "to": signature, **told} for name, signature in row.changed.items()),
    ]
    row.row |= row.changed


def _table(rows: list[Stale], verb: str) -> list[list[str]]:
    """A line for each file, kernel and outcome."""
    counted = Counter((f"{row.file.parent.name}/{row.file.name}", row.kernel, row.reason or verb) for row in rows)
    return [HEAD, *([file, kernel, str(n), outcome] for (file, kernel, outcome), n in counted.items())]
