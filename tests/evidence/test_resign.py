"""Rows get new signatures where the machine code and the launch are the same, and only there."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import microsdpa
from microsdpa.evidence import recorded, resign, results
from microsdpa.evidence.inputs import Case
from microsdpa.jit.signature import code_signature
from microsdpa_cli import app as cli

TARGET = "sm_89"
CASE = Case(1, 2, 64, 64, 32)
TIMED = {"median_us": 2.0, "min_us": 2.0, "samples_us": [2.0, 2.5]}
OTHER = "0" * 32

CHANGES = {
    "renamed": (
        ("kernels/ladder/01_scalar.cu", "score_rows", "scores_of_rows"),
        ("kernels/ladder/01_scalar.cu", " attention(", " attend("),
        ("kernels/ladder/01_scalar.cu", "BLOCK_N", "KEYS_OF_A_TILE"),
        ("kernels/ladder/spec.py", "rung_01::attention", "rung_01::attend"),
    ),
    "other code": (("kernels/ladder/04_mma_sync.cu", "start_keys(0, 0)", "start_keys(BLOCK_N, 0)"),),
    "more shared memory": (("kernels/ladder/spec.py", "pitch + warps * scratch", "pitch + warps * scratch + 16"),),
    "more threads": (
        ("kernels/ladder/05_warp_roles.cu", "first_row", "row_of_the_tile"),
        ("kernels/ladder/spec.py", "threads=32 * warps,\n        block_m=block_m,\n        shared_bytes=shared_bytes,",
         "threads=32 * warps + 32 * bool(producers),\n        block_m=block_m,\n        shared_bytes=shared_bytes,"),
    ),
    "quantizer": (("kernels/quantize/fused.cu", "AHEAD", "CHUNKS_IN_FLIGHT"),),
    "comment": (("kernels/ladder/07_tuned.cu", "\nnamespace microsdpa::", "\n// A comment.\n\nnamespace microsdpa::"),),
}  # fmt: skip
"""(file, what it says, what it says then)"""
NAMES = {"ampere/general": "ampere/any_mask", "ampere/mma": "ampere/tensor"}
"""Kernels that have another name in the second commit: one in another folder, and one whose code changes too."""
CHANGES["another name and other code"] = (("kernels/ampere/mma/kernel.cu", "1e-30f", "1e-20f"),)


def rows() -> dict[str, results.Row]:
    """Rows as they are recorded by this version, by what becomes of their kernels."""
    timed: dict[str, Any] = {"version": microsdpa.__version__, "signature": OTHER, **TIMED}

    def of_kernel(name: str) -> results.Row:
        return results.row(CASE, **timed, requested=name)

    precise = results.row(Case(1, 2, 64, 64, 64), **(timed | {"dtype": "e4m3", "op": "quantize+sdpa"}))
    found = {
        "renamed": of_kernel("ladder/01_scalar"),
        "other code": of_kernel("ladder/04_mma_sync"),
        "more shared memory": of_kernel("ladder/02_wmma"),
        "more threads": of_kernel("ladder/05_warp_roles"),
        "quantizer": precise | {"inputs": "float16", "precision": "fp8", "quantiser_signature": ""},
        "comment": of_kernel("ladder/07_tuned"),
        "another name": of_kernel("ampere/general"),
        "another name and other code": of_kernel("ampere/mma"),
    }
    for row in found.values():
        for field, kernel in recorded.of_row(row, TARGET).items():
            row[field] = code_signature(kernel.spec, TARGET)
            if field == "code_signature":
                row["kernel"] = kernel.spec.name
    found["of another time"] = found["renamed"] | {"code_signature": OTHER}
    found["peer"] = results.row(CASE, impl="torch FLASH", **TIMED)
    return found


def sealed(members: dict[str, results.Row], gpu: str | None = "NVIDIA H200") -> results.Result:
    made = results.make("mission", "microsdpa bench", copy.deepcopy(list(members.values())))
    made["environment"] |= {"gpu": gpu, "target": TARGET}
    return made | {"checksum": results.checksum(made)}


def git(root: Path, *arguments: str) -> str:
    who = {f"GIT_{role}_{what}": "a@b.c" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    run = subprocess.run(
        ["git", "-C", str(root), *arguments], env=os.environ | who, capture_output=True, text=True, check=True
    )
    return run.stdout.strip()


@dataclass(frozen=True)
class Repository:
    """A checkout of this tree, and the same with CHANGES in its second commit."""

    root: Path
    old: str
    new: str

    @property
    def results(self) -> Path:
        return self.root / "benchmarks/results"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    root = tmp_path_factory.mktemp("repository")
    package = root / resign.PACKAGE
    shutil.copytree(Path(microsdpa.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "old")
    old = git(root, "rev-parse", "HEAD")
    for change in CHANGES.values():
        for name, before, after in change:
            text = (package / name).read_text()
            assert before in text, (name, before)
            (package / name).write_text(text.replace(before, after))
    rename_kernels(package)
    git(root, "add", "-A")
    git(root, "commit", "-qm", "new")
    return Repository(root, old, git(root, "rev-parse", "HEAD"))


def rename_kernels(package: Path) -> None:
    """What NAMES says; the first one's files move, too."""
    (package / "kernels/ampere/general").rename(package / "kernels/ampere/any_mask")
    for path in package.glob("kernels/**/*.py"):
        text = (
            path.read_text().replace("ampere.general", "ampere.any_mask").replace("ampere/general", "ampere/any_mask")
        )
        path.write_text(text.replace('"ampere/mma"', '"ampere/tensor"'))


@dataclass(frozen=True)
class Done:
    """What one run made of rows(): the file before and after, its rows by their names, and the outcomes by kernels."""

    before: str
    path: Path
    rows: dict[str, results.Row]
    outcomes: list[list[str]]
    summary: str


@pytest.fixture(scope="module")
def done(repository: Repository) -> Done:
    members = rows()
    path = results.write(sealed(members), repository.results)
    before = path.read_text()
    step = resign.step(repository.old, repository.root, repository.results, renamed=NAMES)
    now = dict(zip(members, results.read(path)["rows"], strict=True))  # read() checks schema and checksum
    return Done(before, path, now, step.table[1:], step.summary)


def outcome(done: Done, kernel: str) -> list[str]:
    return [line[3] for line in done.outcomes if line[1] == kernel]


def test_a_row_of_renamed_code_is_resigned_and_says_so(done: Done, repository: Repository) -> None:
    before, after = rows()["renamed"], done.rows["renamed"]
    assert after["code_signature"] != before["code_signature"]
    (entry,) = after.pop("resigned")
    assert entry.pop("nvrtc") == results.read(done.path)["environment"]["nvrtc"]
    assert entry == {
        "field": "code_signature",
        "from": before["code_signature"],
        "to": after["code_signature"],
        "command": f"microsdpa evidence resign {repository.old}",
        "commit": repository.new,
    }
    assert after == json.loads(json.dumps(before | {"code_signature": after["code_signature"]}))
    assert outcome(done, "ladder/01_scalar") == [
        "resigned",
        "it was recorded with other code than the old checkout's",
    ]


def test_the_new_signature_is_the_new_trees(done: Done, repository: Repository) -> None:
    row = {key: value for key, value in done.rows["renamed"].items() if key != "resigned"}
    checkout = resign.Checkout(repository.root / resign.PACKAGE, repository.new)
    (answer,), _ = checkout.ask([{"row": row, "target": TARGET}], repository.root)
    assert answer["kernels"]["code_signature"]["signature"] == row["code_signature"]


def renamed_by(old: str, repository: Repository) -> dict[str, str]:
    new = NAMES[old]
    command = f"microsdpa evidence resign {repository.old} --renamed {old}={new}"
    return {"from": old, "to": new, "command": command, "commit": repository.new}


def test_a_row_of_a_kernel_with_another_name_is_resigned_and_keeps_the_old_name(
    done: Done, repository: Repository
) -> None:
    before, after = rows()["another name"], done.rows["another name"]
    (signed,), named = after.pop("resigned"), after.pop("renamed")
    told = renamed_by("ampere/general", repository)
    assert named == [{"field": field, **told} for field in ("kernel", "requested")]
    assert (signed["from"], signed["to"]) == (before["code_signature"], after["code_signature"])
    assert signed["command"] == told["command"]
    changed = {"kernel": "ampere/any_mask", "requested": "ampere/any_mask", "code_signature": after["code_signature"]}
    assert after["code_signature"] != before["code_signature"]
    assert after == json.loads(json.dumps(before | changed))
    assert outcome(done, "ampere/any_mask") == ["resigned"]


def test_a_changed_constant_is_not_resigned_whatever_the_kernel_is_called(done: Done, repository: Repository) -> None:
    before, after = rows()["another name and other code"], done.rows["another name and other code"]
    assert "resigned" not in after
    assert after["code_signature"] == before["code_signature"]
    told = renamed_by("ampere/mma", repository)
    assert after["renamed"] == [{"field": field, **told} for field in ("kernel", "requested")]
    assert (after["kernel"], after["requested"]) == ("ampere/tensor", "ampere/tensor")
    (reason,) = outcome(done, "ampere/tensor")
    assert reason.startswith("machine code: ")


def test_a_kernel_with_another_name_that_nobody_told_stays_stale(repository: Repository) -> None:
    path = written(repository, {"another name": rows()["another name"]})
    before = path.read_bytes()
    step = resign.step(repository.old, repository.root, repository.results)
    ((*_, reason),) = step.table[1:]
    assert reason.startswith("no kernel computes it now: ")
    assert path.read_bytes() == before


def test_a_profile_moves_to_a_file_of_the_new_name(repository: Repository) -> None:
    made = sealed({"another name": rows()["another name"] | {"mode": "profile"}})
    made |= {"suite": "profile_ampere_general", "command": "microsdpa profile ampere/general --shape 1,2,64,64,32"}
    shutil.rmtree(repository.results, ignore_errors=True)
    old = results.write(made | {"checksum": results.checksum(made)}, repository.results)
    resign.step(repository.old, repository.root, repository.results, renamed=NAMES)
    assert not old.exists()
    found = results.read(old.with_name("profile_ampere_any_mask.json"))
    assert (found["suite"], found["rows"][0]["kernel"]) == ("profile_ampere_any_mask", "ampere/any_mask")
    assert found["command"] == "microsdpa profile ampere/any_mask --shape 1,2,64,64,32"
    assert [entry["from"] for entry in found["renamed"]] == ["profile_ampere_general", made["command"]]
    assert "resigned" in found["rows"][0]


def test_names_are_found_as_whole_words() -> None:
    names = resign.Names({"hopper/fast": "hopper/quick", "hopper/fast_8bit": "hopper/quick_8bit"})
    row = {"kernel": "hopper/fast_8bit", "requested": None, "variant": "hopper/fast, 64 x 32"}
    assert names.of_row(row) == {"kernel": "hopper/quick_8bit", "variant": "hopper/quick, 64 x 32"}
    assert names.of("a/hopper/fast hopper/fast/b hopper/faster") == "a/hopper/fast hopper/fast/b hopper/faster"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["ampere/mma"], "expected OLD=NEW, got 'ampere/mma'"),
        (["ampere/mma=a=b"], "expected OLD=NEW, got 'ampere/mma=a=b'"),
        (["ampere/mma=mma"], "names such as ladder/01_scalar, got ampere/mma=mma"),
        (["a/b=a/c", "a/b=a/d"], "one new name for each old one, got several for a/b"),
        (["a/b=a/c", "a/d=a/c"], "one old name for each new one, and no chains, got a/c"),
        (["a/b=a/c", "a/c=a/d"], "one old name for each new one, and no chains, got a/c"),
    ],
)
def test_names_that_are_none_are_refused(options: list[str], said: str) -> None:
    with pytest.raises(resign.ResignError, match=said):
        resign.Names(resign.names_of(options))


def test_other_machine_code_stays_stale(done: Done) -> None:
    assert done.rows["other code"] == json.loads(json.dumps(rows()["other code"]))
    (reason,) = outcome(done, "ladder/04_mma_sync")
    assert reason.startswith("machine code: ")
    assert ".text.KERNEL" in reason


@pytest.mark.parametrize(
    ("name", "kernel", "what"),
    [("more shared memory", "ladder/02_wmma", "shared_bytes"), ("more threads", "ladder/05_warp_roles", "threads")],
)
def test_another_launch_of_the_same_code_stays_stale(done: Done, name: str, kernel: str, what: str) -> None:
    assert done.rows[name] == json.loads(json.dumps(rows()[name]))
    (reason,) = outcome(done, kernel)
    assert reason.startswith(f"launch: {what} ")


def test_the_kernel_that_quantizes_is_compared_too(done: Done) -> None:
    before, after = rows()["quantizer"], done.rows["quantizer"]
    assert after["code_signature"] == before["code_signature"]
    assert after["quantiser_signature"] != before["quantiser_signature"]
    assert [entry["field"] for entry in after["resigned"]] == ["quantiser_signature"]


@pytest.mark.parametrize("name", ["of another time", "peer", "comment"])
def test_every_other_row_is_left_alone(done: Done, name: str) -> None:
    assert done.rows[name] == json.loads(json.dumps(rows()[name]))
    assert outcome(done, "ladder/07_tuned") == []
    assert "3 resigned" in done.summary
    assert "wrote 1 files" in done.summary


def written(repository: Repository, members: dict[str, results.Row], gpu: str | None = "NVIDIA H200") -> Path:
    shutil.rmtree(repository.results, ignore_errors=True)
    return results.write(sealed(members, gpu), repository.results)


def test_a_dry_run_writes_nothing(repository: Repository) -> None:
    members = {name: rows()[name] for name in ("renamed", "more threads")}
    members["more threads"]["kernel"] = None  # as of calls through another door
    path = written(repository, members)
    before = path.read_bytes()
    run = CliRunner().invoke(
        cli.app, ["evidence", "resign", repository.old, "--root", str(repository.root), "--gpu", "h200", "--dry-run"]
    )
    assert run.exit_code == 0, run.output
    assert "can be resigned" in run.output
    assert "nothing was written" in run.output
    assert path.read_bytes() == before


def test_what_ran_from_ptx_is_compared_as_ptx(repository: Repository) -> None:
    members = {name: rows()[name] | {"target": TARGET} for name in ("renamed", "other code")}
    shutil.rmtree(repository.results, ignore_errors=True)
    result = sealed(members) | {"suite": f"{resign.PTX_SUITE}sm_89"}
    results.write(result | {"checksum": results.checksum(result)}, repository.results)
    step = resign.step(repository.old, repository.root, repository.results, dry_run=True)
    assert [line[3] for line in step.table[1:]] == ["can be resigned", "machine code: PTX"]


def test_rows_that_ran_in_the_emulator_stay_stale(repository: Repository) -> None:
    path = written(repository, {"renamed": rows()["renamed"]}, gpu=None)
    before = path.read_bytes()
    step = resign.step(repository.old, repository.root, repository.results)
    assert [line[3] for line in step.table[1:]] == [resign.EMULATED]
    assert path.read_bytes() == before


def edited(path: Path) -> None:
    path.write_text(path.read_text().replace('"median_us": 2.0', '"median_us": 1.0', 1))


def damaged(path: Path) -> None:
    path.write_text(path.read_text()[:-20])


def moved(path: Path) -> None:
    path.rename(path.with_name("small.json"))


@pytest.mark.parametrize(("spoil", "said"), [(edited, "checksum"), (damaged, "JSON"), (moved, "move it")])
def test_a_spoiled_file_is_refused_and_no_file_is_written(
    repository: Repository, spoil: Callable[[Path], None], said: str
) -> None:
    path = written(repository, {"renamed": rows()["renamed"]})
    whole = results.write(results.read(path) | {"suite": "small"} | _checksum(path, "small"), repository.results)
    if spoil is moved:
        whole.unlink()
    spoil(path)
    before = {file: file.read_bytes() for file in repository.results.rglob("*.json")}
    with pytest.raises((results.ResultFileError, resign.ResignError), match=said):
        resign.step(repository.old, repository.root, repository.results)
    assert {file: file.read_bytes() for file in repository.results.rglob("*.json")} == before


def _checksum(path: Path, suite: str) -> dict[str, str]:
    return {"checksum": results.checksum(results.read(path) | {"suite": suite})}


def test_sources_that_are_not_committed_are_refused_but_by_a_dry_run(repository: Repository) -> None:
    written(repository, {"peer": rows()["peer"]})
    header = repository.root / resign.PACKAGE / "kernels/common/new.cuh"
    header.write_text("")
    try:
        with pytest.raises(resign.ResignError, match="as it is committed, got 1 changed files"):
            resign.step(repository.old, repository.root, repository.results)
        assert "-dirty" in resign._this(repository.root, must_be_clean=False).commit
    finally:
        header.unlink()


@pytest.mark.parametrize("reference", ["no-such-commit", "--output=x", "/nowhere"])
def test_an_unknown_reference_is_refused(repository: Repository, reference: str) -> None:
    written(repository, {"peer": rows()["peer"]})
    with pytest.raises(resign.ResignError, match="old_ref: expected a commit"):
        resign.step(reference, repository.root, repository.results)


def test_an_unknown_gpu_is_refused(repository: Repository) -> None:
    written(repository, {"peer": rows()["peer"]})
    with pytest.raises(resign.ResignError, match=r"gpu: expected a folder of .* \(h200\), got 'l4'"):
        resign.step(repository.old, repository.root, repository.results, gpu="l4")


def test_a_tree_that_is_laid_out_otherwise_is_refused(repository: Repository, tmp_path: Path) -> None:
    written(repository, {"renamed": rows()["renamed"]})
    package = tmp_path / resign.PACKAGE
    shutil.copytree(repository.root / resign.PACKAGE, package)
    (package / "kernels/select.py").unlink()  # the modules of this process must not stand in for it
    with pytest.raises(resign.ResignError, match=r"laid out otherwise .*no module microsdpa\.kernels\.select"):
        resign.step(str(tmp_path), repository.root, repository.results)
