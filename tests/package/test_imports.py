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

# microsdpa_cli -> evidence -> integrations -> attention -> execution -> runtime -> {call, jit} -> kernels.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "reference": set(),
    "kernels": {"errors"},
    "jit": {"errors", "kernels"},
    "call": {"errors", "kernels"},
    "runtime": {"call", "errors", "jit", "kernels"},
    "emulate": {"call", "errors", "jit", "kernels"},
    "execution": {"call", "emulate", "errors", "kernels", "reference", "runtime"},
    "attention": {"call", "errors", "execution", "jit", "kernels", "runtime"},
    "distributed": {"attention", "call", "errors", "execution", "kernels", "runtime"},
    "integrations": {"", "attention", "call", "distributed", "errors", "execution", "kernels", "runtime"},
    "flash_attn": {"attention", "errors"},
    "": {"attention", "call", "errors", "flash_attn", "integrations"},
    "evidence": {
        *(
            "",
            "attention",
            "call",
            "distributed",
            "emulate",
            "errors",
            "execution",
            "flash_attn",
            "integrations",
            "jit",
            "kernels",
            "reference",
        ),
        "runtime",
    },
    "__main__": set(),
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


def test_the_command_line_lies_outside_and_imports_the_package_in_functions_alone() -> None:
    files = [*(SOURCE.parent / "microsdpa_cli").glob("*.py")]
    assert len(files) >= 3
    for path in files:
        tree = ast.parse(path.read_text())
        top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        assert not any(ast.unparse(node).split()[1].split(".")[0] in ("microsdpa", "torch") for node in top)


def test_the_checker_sees_imports() -> None:
    assert "runtime" in imported_rooms(SOURCE / "attention/api.py")
    assert "" in imported_rooms(SOURCE / "evidence/verify.py")


KERNELS = SOURCE / "kernels"
ROOMS = {"prelude.cuh": 0, "ptx": 1, "common": 2, "hopper/common": 3}
"""What several kernels share, each of which includes only what is before it; a kernel's own folder comes last."""


def cuda_room(path: Path) -> str:
    """The folder of a CUDA file, where it says who may include it."""
    inner = path.relative_to(KERNELS)
    return str(inner if len(inner.parts) == 1 else inner.parent)


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.cu*")), ids=lambda p: str(p.relative_to(KERNELS)))
def test_cuda_includes_go_one_way(path: Path) -> None:
    mine, text = cuda_room(path), path.read_text()
    for include in re.findall(r'#include "([^"]+)"', text):
        target = cuda_room((path.parent / include).resolve())
        assert target == mine or ROOMS[target] < ROOMS.get(mine, len(ROOMS)), f"{path.name} includes {include}"
    if mine != "ptx":
        assert "asm" not in re.findall(r"\basm\b", text), "inline assembly lives in kernels/ptx"


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
        "late = ('microsdpa.evidence', 'microsdpa.emulate', 'cuda.bindings', 'typer', 'rich', 'transformers', "
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
