"""Names that sdpa does not have: what the errors propose, and what its overloads promise to a type checker."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import microsdpa
from microsdpa.attention import api
from microsdpa.call.unknown import ELSEWHERE

TENSORS = [torch.randn(1, 2, 8, 32).half() for _ in range(3)]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("softmax_scale", "did you mean scale=?"),
        ("window_size", "did you mean window=?"),
        ("attention_mask", "did you mean attn_mask=?"),
        ("attn_bias", "did you mean attn_mask=?"),
        ("is_casual", "did you mean is_causal=?"),
        ("score_mod", "no function is applied to scores"),
        ("cu_seqlens_q", "microsdpa.sdpa_varlen"),
        ("zzz", "it has query, key, value, is_causal"),
    ],
)
def test_an_unknown_argument_proposes_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(microsdpa.UnknownArgument, match=f"^{name}: expected an argument of sdpa, got") as raised:
        microsdpa.sdpa(*TENSORS, **{name: 1.0})  # type: ignore[call-overload]
    assert hint in str(raised.value)
    assert isinstance(raised.value, (TypeError, microsdpa.InvalidArgument))


def test_every_name_of_another_library_leads_to_one_of_ours() -> None:
    known = inspect.signature(microsdpa.sdpa).parameters
    assert set(ELSEWHERE.values()) <= set(known)
    assert not set(ELSEWHERE) & set(known)


@pytest.mark.parametrize(
    ("impl", "meant"), [("hopper/latncy", "'hopper/latency'"), ("ampere", "'ampere/mma'"), ("atuo", "'auto'")]
)
def test_an_unknown_kernel_proposes_near_ones(impl: str, meant: str) -> None:
    with pytest.raises(microsdpa.InvalidArgument, match="did you mean") as raised:
        microsdpa.sdpa(*TENSORS, impl=impl)
    assert meant in raised.value.hint


def test_overloads_have_the_arguments_of_the_function() -> None:
    tree = ast.parse(Path(inspect.getfile(api)).read_text())
    *overloads, function = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == "sdpa"]
    assert len(overloads) == 3

    def arguments(one: ast.FunctionDef) -> list[tuple[str, str]]:
        given = [*one.args.args, *one.args.kwonlyargs]
        return [(a.arg, ast.unparse(a.annotation)) for a in given if a.annotation and a.arg != "return_lse"]

    assert all(arguments(one) == arguments(function) for one in overloads)


TORCH = """
from typing import Any
class Tensor: ...
def __getattr__(name: str) -> Any: ...
"""
"""The one type of torch's that the signatures of microsdpa name."""
SETTINGS = """
[mypy]
follow_imports = silent
[mypy-torch.*,numpy.*,matplotlib.*]
follow_imports = skip
[mypy-torch]
follow_imports = silent
"""
"""What no signature names is not read, which takes mypy ten seconds."""


def test_types_follow_return_lse(tmp_path: Path) -> None:
    (tmp_path / "torch.pyi").write_text(TORCH)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\nimport microsdpa\n\n\ndef f(q: torch.Tensor, lse: bool) -> None:\n"
        "    out: torch.Tensor = microsdpa.sdpa(q, q, q, is_causal=True)\n"
        "    out, found = microsdpa.sdpa(q, q, q, return_lse=True)\n"
        "    reveal_type(microsdpa.sdpa(q, q, q, return_lse=lse))\n"
        "    microsdpa.sdpa(q, q, q, softmax_scale=1.0)\n"
    )
    pytest.importorskip("mypy", reason="mypy is of the extra dev")
    command = [sys.executable, "-m", "mypy", "--strict", str(program)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    errors = [line for line in ended.stdout.splitlines() if "error:" in line]
    assert errors, ended.stdout
    assert all(":9: error:" in error for error in errors), ended.stdout
    assert "Tensor | tuple[" in ended.stdout
