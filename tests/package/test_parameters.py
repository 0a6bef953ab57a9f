"""No function of the host side has more than eight parameters: what belongs together travels together."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src/microsdpa"
COMMANDS = SOURCE.parent / "microsdpa_cli"
MOST = 8
SIGNATURES = {
    # What users call: the arguments of sdpa.
    ("attention/api.py", "sdpa"),
    ("attention/explain.py", "explain"),
    ("attention/explain.py", "explain_varlen"),
    ("attention/plan.py", "plan"),
    ("attention/varlen.py", "sdpa_varlen"),
    ("distributed/api.py", "attention"),
    ("distributed/api.py", "explain"),
    ("attention/plan.py", "make_masked_plan.prepared"),
    ("attention/plan.py", "make_scaled_plan.prepared"),
    # Signatures that a framework prescribes: an autograd function, operators' schemas, attention and mask functions.
    ("execution/autograd.py", "_Attention.forward"),
    ("integrations/torch_ops.py", "_call"),
    ("integrations/torch_ops.py", "attention_backward"),
    ("integrations/flash_packed.py", "attend"),
    ("integrations/diffusers.py", "register.attention"),
    ("integrations/transformers.py", "register.forward"),
    ("integrations/transformers.py", "mask_function"),
    ("flash_attn/__init__.py", "flash_attn_func"),
    ("flash_attn/__init__.py", "flash_attn_varlen_func"),
    ("flash_attn/__init__.py", "flash_attn_with_kvcache"),
    ("flash_attn/interface.py", "flash_attn_func"),
    ("flash_attn/interface.py", "flash_attn_varlen_func"),
    ("flash_attn/interface.py", "flash_attn_with_kvcache"),
    # Options of the command line.
    ("../microsdpa_cli/checks.py", "verify"),
    ("../microsdpa_cli/measures.py", "bench"),
    # The oracle has the arguments of sdpa, and a kernel in Triton's language those of a kernel.
    ("reference.py", "oracle"),
    ("evidence/peers/triton_kernel.py", "fused_attention"),
}
"""Functions that have more, by file and name."""


def functions(node: ast.AST, name: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function below a node, by its qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{name}.{child.name}".lstrip(".")
            if not isinstance(child, ast.ClassDef):
                yield inner, child
            yield from functions(child, inner)
        else:
            yield from functions(child, name)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many parameters a function has; *args and **kwargs are one each."""
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return len(named) + (given.vararg is not None) + (given.kwarg is not None)


def crowded() -> set[tuple[str, str]]:
    """Functions of the package with more than MOST parameters."""
    found = set()
    for path in (*SOURCE.rglob("*.py"), *COMMANDS.rglob("*.py")):
        for name, function in functions(ast.parse(path.read_text(encoding="utf-8"))):
            if parameters(function) > MOST:
                found.add((os.path.relpath(path, SOURCE), name))
    return found


def test_no_function_but_the_named_has_more_than_eight_parameters() -> None:
    assert crowded() == SIGNATURES


def test_every_kind_of_parameter_counts() -> None:
    text = "class C:\n  def f(self, a, /, b, *args, c, **rest):\n    def g(x): ..."
    assert [(name, parameters(function)) for name, function in functions(ast.parse(text))] == [("C.f", 6), ("C.f.g", 1)]
