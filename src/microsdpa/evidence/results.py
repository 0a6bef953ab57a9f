"""Result files: written with a checksum, read only when the schema and the checksum hold."""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema

from microsdpa.errors import MicrosdpaError
from microsdpa.evidence import environment
from microsdpa.evidence.inputs import Case
from microsdpa.kernels.problem import PRECISIONS

SCHEMA_VERSION = 1
VARIANTS = {f"{one} codes": f"{one} quantized" for one in PRECISIONS} | {"e4m3, one code": "e4m3, one term"}
"""Variants as older files have them, and what they are called now."""
AND = " && "
"""Between the commands that measured parts of a result."""

Result = dict[str, Any]
Row = dict[str, Any]


class ResultFileError(MicrosdpaError, ValueError):
    """A result file that is of another schema, damaged, or edited by hand."""


@functools.cache
def schema() -> dict[str, Any]:
    """The JSON schema of a result file."""
    text = resources.files("microsdpa.evidence").joinpath("result.schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def checksum(result: Result) -> str:
    """SHA-256 of the canonical JSON of everything but the checksum itself."""
    rest = {key: value for key, value in result.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def make(suite: str, command: str, rows: list[Row]) -> Result:
    """A result of this machine and commit, now."""
    result: Result = {
        "schema": SCHEMA_VERSION,
        "suite": suite,
        "command": command,
        "created": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": environment.commit(),
        "environment": environment.describe(),
        "rows": rows,
    }
    return result | {"checksum": checksum(result)}


def path_below(directory: Path, result: Result) -> Path:
    """Where a result belongs below a results directory: <gpu>/<suite>.json."""
    return directory / environment.gpu_slug(result["environment"]["gpu"]) / f"{result['suite']}.json"


def write(result: Result, directory: Path) -> Path:
    """Write a result below `directory` and give its path."""
    validate(result, "the result to be written")
    path = path_below(directory, result)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result | {"rows": []}, indent=1)
    rows = ",\n".join("  " + json.dumps(row) for row in result["rows"])
    path.write_text(text.replace('"rows": []', f'"rows": [\n{rows}\n ]' if rows else '"rows": []') + "\n")
    return path


SAME = "gpu", "driver", "torch"
"""What rows of one file were all measured with."""


def completed(result: Result, directory: Path, cell: Callable[[Row], str], of_any_commit: bool = True) -> Result:
    """A result of some cells, with the rows of the others that lie below `directory`.

    These stay if they are of the same GPU, driver and torch. Those of another commit get a field `recorded`, which says
    of which one, and when they were measured.

    Args:
        result: of the cells that were measured now.
        directory: of result files.
        cell: names the cell of a row.
        of_any_commit: whether rows of other commits stay; not where each commit has cells of its own.
    """
    path = path_below(directory, result)
    if not path.is_file():
        return result
    old = read(path)
    same = all(old["environment"][name] == result["environment"][name] for name in SAME)
    is_of_commit = old["commit"] == result["commit"]
    measured = {cell(row) for row in result["rows"]}
    kept = [row for row in old["rows"] if same and (of_any_commit or is_of_commit) and cell(row) not in measured]
    if not kept:
        return result
    if not is_of_commit:
        measured_with = {"commit": old["commit"], "created": old["created"]}
        kept = [{"recorded": measured_with} | row for row in kept]
    commands = dict.fromkeys([*old["command"].split(AND), result["command"]])
    whole = result | {"rows": kept + result["rows"], "command": AND.join(commands)}
    return whole | {"checksum": checksum(whole)}


def read(path: Path) -> Result:
    """Read and validate a result file; variants have their names of today.

    Raises:
        ResultFileError: the file is no result of this schema version, or was changed after it was written.
    """
    try:
        text = path.read_text(encoding="utf-8")
        result: Result = json.loads(text)
    except (OSError, ValueError) as error:
        raise ResultFileError(f"{path}: expected a JSON result file; {error}") from error
    _validate_text(text, str(path))
    rows = [
        row | {"variant": VARIANTS.get(row["variant"], row["variant"])} if "variant" in row else row
        for row in result["rows"]
    ]
    return result | {"rows": rows}


@functools.lru_cache(maxsize=128)
def _validate_text(text: str, name: str) -> None:
    """Once for each text: a page may have many tables and plots of one file."""
    validate(json.loads(text), name)


def validate(result: object, name: str) -> None:
    """Check a result against the schema and its own checksum.

    Raises:
        ResultFileError: it fails either check.
    """
    found = result.get("schema") if isinstance(result, dict) else None
    if found != SCHEMA_VERSION:
        raise ResultFileError(
            f"{name}: expected schema version {SCHEMA_VERSION}, got {found!r}; record it again with this version"
        )
    assert isinstance(result, dict)
    errors = sorted(jsonschema.Draft202012Validator(schema()).iter_errors(result), key=lambda e: list(e.path))
    if errors:
        place = "/".join(map(str, errors[0].path)) or "(root)"
        raise ResultFileError(f"{name}: {place}: {errors[0].message} ({len(errors)} schema errors)")
    if result["checksum"] != checksum(result):
        raise ResultFileError(f"{name}: its checksum does not match: it was edited after it was written")


def gathered(
    found: Iterable[tuple[list[Row], str]], advance: Callable[[str], None], keep: Callable[[list[Row]], None]
) -> list[Row]:
    """Rows of what is measured one after another, with a text for each.

    After each `keep` is given the rows so far, so that a run which is ended early has not been for nothing, and
    `advance` the text.
    """
    rows: list[Row] = []
    for some, text in found:
        rows += some
        keep(rows)
        advance(text)
    return rows


def row(case: Case, /, **fields: object) -> Row:
    """A row for `case`; `fields` complete and override."""
    base: Row = {
        "impl": "microsdpa",
        "version": "",
        "kernel": None,
        "signature": None,
        "op": "sdpa",
        "dtype": case.dtype,
        "shape": {
            "b": case.batch,
            "h": case.heads,
            "h_kv": case.kv_heads,
            "s_q": case.seqlen_q,
            "s_k": case.seqlen_k,
            "d": case.head_dim,
        },
        "mask": case.causal or "none",
        **({"masks": list(case.masks)} if case.masks else {}),
        "mode": "graph",
        "median_us": None,
        "min_us": None,
        "samples_us": [],
        "tflops": None,
        "error": None,
        "status": "ok",
        "reason": "",
    }
    return base | fields
