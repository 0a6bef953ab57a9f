"""The import direction of the house, and what importing the package must not do."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import microsdpa

SOURCE = Path(__file__).parents[2] / "src/microsdpa"

# cli -> evidence -> api -> {select, runtime}; runtime -> jit -> specs; select -> specs -> problem.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "problem": set(),
    "reference": set(),
    "specs": {"problem"},
    "select": {"errors", "problem", "specs"},
    "jit": {"errors", "problem", "specs"},
    "masks": {"errors", "problem"},
    "runtime": {"errors", "jit", "masks", "problem", "specs"},
    "torch_cpu": {"masks", "problem"},
    "arguments": {"errors", "problem", "specs"},
    "emulate": {"errors", "jit", "masks", "problem", "specs"},
    "explanation": {"specs"},
    "options": {"specs"},
    "problems": {"arguments", "errors", "masks", "problem", "runtime", "specs"},
    "validation": {"arguments", "errors", "masks", "problem"},
    "forward": {
        *("emulate", "masks", "options", "problem", "problems", "runtime", "select", "torch_cpu", "validation"),
    },
    "nodes": {"arguments", "forward", "masks", "problem", "runtime"},
    "backward": {"forward", "masks", "nodes", "problem", "torch_cpu"},
    "autograd": {"arguments", "backward", "forward", "masks", "nodes"},
    "api": {
        *("autograd", "eight_bit", "errors", "forward", "masks", "options", "problem", "runtime", "specs"),
        *("transforms", "validation"),
    },
    "transforms": {"arguments", "errors", "forward", "masks"},
    "explaining": {
        *("eight_bit", "explanation", "jit", "masks", "problem", "problems", "select", "specs", "validation"),
    },
    "quantize": {"errors"},
    "eight_bit_arguments": {"arguments", "errors", "specs"},
    "eight_bit_launches": {
        *("arguments", "eight_bit_arguments", "emulate", "errors", "problem", "quantize", "runtime", "specs"),
    },
    "eight_bit": {
        *("arguments", "eight_bit_arguments", "eight_bit_launches", "errors", "explanation", "forward", "jit"),
        *("options", "problem", "runtime", "select", "specs"),
    },
    "prepared": {
        "",
        "api",
        "arguments",
        "eight_bit",
        "errors",
        "explaining",
        "explanation",
        "forward",
        "problem",
        "runtime",
        "specs",
        "masks",
        "validation",
    },
    "": {
        "api",
        "dropin",
        "errors",
        "explaining",
        "explanation",
        "flash_backend",
        "integrations",
        "prepared",
        "quantize",
        "torch_ops",
    },
    "evidence": {
        *(
            "",
            "api",
            "arguments",
            "dropin",
            "integrations",
            "eight_bit",
            "eight_bit_arguments",
            "eight_bit_launches",
            "emulate",
            "errors",
            "explanation",
            "jit",
            "masks",
            "options",
            "problem",
            "quantize",
            "reference",
            "runtime",
            "select",
            "specs",
        )
    },
    "torch_ops": {"", "autograd", "backward", "errors", "forward", "masks", "transforms"},
    "dropin": {
        *("", "api", "arguments", "autograd", "errors", "forward", "options", "problem", "runtime"),
        *("specs", "torch_cpu", "validation"),
    },
    "flash_backend": {"", "errors", "forward", "nodes", "problem"},
    "integrations": {"api", "arguments", "dropin", "errors", "problem"},
    "console": set(),
    "cli": {"", "arguments", "console", "emulate", "errors", "evidence", "problem", "runtime", "specs"},
    "__main__": {"cli"},
}


def room(path: Path) -> str:
    """The top-level room of a module: "jit" for jit/cache.py, "" for the package itself."""
    top = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "" if top == "__init__" else top


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "microsdpa":
                inner = parts[1] if len(parts) > 1 else ""
                exists = (SOURCE / inner).is_dir() or (SOURCE / f"{inner}.py").is_file()
                rooms.add(inner if exists else "")
    return rooms - {room(path)}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_one_way(path: Path) -> None:
    assert imported_rooms(path) <= ALLOWED[room(path)]


def test_the_checker_sees_imports() -> None:
    assert "runtime" in imported_rooms(SOURCE / "api.py")
    assert "" in imported_rooms(SOURCE / "evidence/verify.py")


@pytest.mark.parametrize("path", sorted((SOURCE / "cuda").rglob("*.cu*")), ids=lambda p: p.name)
def test_cuda_includes_go_one_way(path: Path) -> None:
    order = {"prelude.cuh": 0, "ptx": 1, "core": 2, "ladder": 3, "probes": 3, "quantize": 3, "ampere": 3, "hopper": 3}
    mine = path.relative_to(SOURCE / "cuda").parts[0]
    text = path.read_text()
    for include in re.findall(r'#include "([^"]+)"', text):
        target = (path.parent / include).resolve().relative_to(SOURCE / "cuda").parts[0]
        assert target == mine or order[target] < order[mine], f"{path.name} includes {include}"
    if mine != "ptx":
        assert "asm" not in re.findall(r"\basm\b", text), "inline assembly lives in cuda/ptx"


def files_created_by(code: str, home: Path) -> set[str]:
    """Run Python code in an empty home; gives the paths that it left there."""
    home.mkdir()
    environment = os.environ | {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "MICROSDPA_CACHE_DIR": str(home / "kernels"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    run = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=home, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return {str(path.relative_to(home)) for path in home.rglob("*")}


def test_importing_initialises_no_cuda_and_creates_no_file(tmp_path: Path) -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import microsdpa; assert not torch.cuda.is_initialized(); "
        "new = set(sys.modules) - before; "
        "late = ('microsdpa.evidence', 'microsdpa.emulate', 'cuda.core', 'typer', 'rich', 'transformers', "
        "'diffusers', 'torch._dynamo'); "
        "assert not [m for m in new if m.startswith(late)], new"
    )
    # What torch's own import leaves (some CUDA builds make ~/.nv) is not ours.
    assert files_created_by(code, tmp_path / "ours") == files_created_by("import torch", tmp_path / "torch")


def test_importing_asks_for_gpus_only_through_nvml(tmp_path: Path) -> None:
    """torch.cuda.is_available() initialises the driver, which poisons forks, unless this variable is set."""
    code = (
        "import os, torch; asked = []; name = 'PYTORCH_NVML_BASED_CUDA_CHECK'; "
        "torch.cuda.is_available = lambda: bool(asked.append(os.environ.get(name))); "
        "import microsdpa; assert asked and set(asked) == {'1'}, asked; assert name not in os.environ"
    )
    files_created_by(code, tmp_path / "home")


def test_the_version_is_the_projects() -> None:
    pyproject = (SOURCE.parents[1] / "pyproject.toml").read_text()
    assert f'version = "{microsdpa.__version__}"' in pyproject
