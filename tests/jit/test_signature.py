from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from microsdpa.jit import nvrtc
from microsdpa.jit.signature import code_signature, signature
from microsdpa.jit.source import expand, tokens, toolkit_headers
from microsdpa.kernels import KernelSpec, TensorMap


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "common").mkdir()
    (tmp_path / "kernel.cu").write_text('#include "common/a.cuh"\n#include "common/b.cuh"\nint main_line;\n')
    (tmp_path / "common/a.cuh").write_text('#pragma once\n#include "b.cuh"\nint a;\n')
    (tmp_path / "common/b.cuh").write_text("#pragma once\n#include <toolkit.h>\nint b;\n")
    return tmp_path


def test_expansion_includes_each_header_once_and_keeps_lines(tree: Path) -> None:
    text = expand("kernel.cu", tree)
    assert text.count("int a;") == text.count("int b;") == 1
    assert "#pragma once" not in text
    assert '#include "' not in text
    lines = text.splitlines()
    assert lines[lines.index("int main_line;") - 2] == '#line 2 "kernel.cu"'  # line 3 is two lines below
    assert text.index("int b;") < text.index("int a;") < text.index("int main_line;")


def test_a_missing_header_is_named_with_its_place(tree: Path) -> None:
    (tree / "common/a.cuh").write_text('\n#include "gone.cuh"\n')
    with pytest.raises(FileNotFoundError, match=r"common/a\.cuh:2: no file 'gone\.cuh'"):
        expand("kernel.cu", tree)


def test_a_changed_file_is_expanded_again(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microsdpa.jit.source.SETTLED_NS", -(10**15))  # kept at once
    assert expand("kernel.cu", tree) is expand("kernel.cu", tree)
    (tree / "common/b.cuh").write_text("int other;\n")
    text = expand("kernel.cu", tree)
    assert "int other;" in text
    assert "int b;" not in text
    (tree / "common/b.cuh").unlink()
    with pytest.raises(FileNotFoundError, match=r"common/a\.cuh:2: no file 'b\.cuh'"):
        expand("kernel.cu", tree)


def test_a_file_that_has_just_changed_is_read_again(tree: Path) -> None:
    assert expand("kernel.cu", tree) is not expand("kernel.cu", tree)


def test_toolkit_headers_are_hashed_transitively(tree: Path, tmp_path: Path) -> None:
    toolkit = tmp_path / "toolkit"
    toolkit.mkdir()
    (toolkit / "toolkit.h").write_text("#include <inner.h>\n")
    (toolkit / "inner.h").write_text("int inner;\n")
    found = dict(toolkit_headers(expand("kernel.cu", tree), (str(toolkit),)))
    assert set(found) == {"toolkit.h", "inner.h"}


def test_real_kernels_depend_on_the_toolkits_headers(spec: KernelSpec) -> None:
    names = {name for name, _ in toolkit_headers(expand(spec.source), nvrtc.include_directories())}
    assert {"cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h"} <= names


def test_every_part_of_a_configuration_changes_the_signature(spec: KernelSpec) -> None:
    changes = [
        {"name": "other"},
        {"template": "microsdpa::other"},
        {"template_args": (*spec.template_args[:-1], ("LOAD_BYTES", "2"))},
        {"flags": ("-std=c++17",)},
        {"cluster": 2},
        {"programmatic": True},
        {"tensor_maps": (TensorMap("key", 64, 64),)},
        {"tensor_maps": (TensorMap("key", 64, 64, 0),)},
        {"next_kernel": spec},
        {"next_kernel": dataclasses.replace(spec, split=2)},
    ]
    variants = [spec, *(dataclasses.replace(spec, **change) for change in changes)]  # type: ignore[arg-type]
    for make in (code_signature, signature):
        assert len({make(variant, target) for variant in variants for target in ("sm_80", "sm_89")}) == 22


def test_a_changed_header_changes_both_signatures(
    spec: KernelSpec, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("microsdpa.jit.signature.expand", lambda source: expand("kernel.cu", tree))
    before = code_signature(spec, "sm_89"), signature(spec, "sm_89")
    (tree / "common/b.cuh").write_text("#pragma once\n#include <toolkit.h>\nint b = 1;\n")
    after = code_signature(spec, "sm_89"), signature(spec, "sm_89")
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_the_compiler_changes_only_the_cubins_signature(spec: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_signature(spec, "sm_89"), signature(spec, "sm_89")
    monkeypatch.setattr(nvrtc, "version", lambda: "99.0")
    after = code_signature(spec, "sm_89"), signature(spec, "sm_89")
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_comments_and_layout_do_not_change_what_is_measured(tree: Path) -> None:
    source = '#define A(x) \\\n  x + 1  // c\nfloat(&p)[4] = "a // b"; /* z */ int y;\n'
    same = '#line 7 "f"\n#define A(x) x+1\n\nfloat (&p)[4]="a // b";\nint y;'
    assert tokens(source) == tokens(same) == '# define A ( x ) x + 1\nfloat ( & p ) [ 4 ] = "a // b" ; int y ;'
    assert tokens("a + +b") != tokens("a ++b")
    assert tokens("#if A\nint x;\n#endif") != tokens("#if A int x;\n#endif")
