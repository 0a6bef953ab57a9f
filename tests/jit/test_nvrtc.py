"""NVRTC runs in a process of its own: what another library compiled before leaves no trace in a kernel."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from microsdpa.errors import CompileError
from microsdpa.jit import machine_code, nvrtc, nvrtc_program

SOURCE = """
template <int N>
__global__ void add(const float* in, float* out) {
  out[threadIdx.x] += in[N * threadIdx.x];
}
"""


def compiled(text: str = SOURCE) -> nvrtc.Cubin:
    return nvrtc.compile_cubin(text, "add.cu", "add<32>", "sm_89", ("-std=c++17", "-lineinfo"))


def test_what_a_process_compiled_before_changes_nothing(tmp_path: Path) -> None:
    """A compilation with options for a debugger changes what NVRTC makes of a kernel in that process afterwards."""
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        from microsdpa.jit import nvrtc, nvrtc_program
        from microsdpa.jit.source import expand
        from microsdpa.kernels import catalogue

        spec = next(spec for spec in catalogue("sm_89") if spec.name == "ladder/01_scalar")

        def made(name):
            text = expand(spec.source)
            made = nvrtc.compile_cubin(text, spec.source, spec.expression, "sm_89", spec.flags)
            Path(sys.argv[1], name).write_bytes(made.code)

        made("clean")
        options = ["--gpu-architecture=sm_89", "--device-debug"]
        reply = nvrtc_program.compile_kernel(nvrtc._library(), sys.stdin.read(), "add.cu", "add<32>", options, False)
        assert not reply.error
        made("apart")
        sys.frozen = True  # no process of its own
        made("here")
    """)
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], input=SOURCE, text=True, check=True, timeout=240)
    clean, apart, here = ((tmp_path / name).read_bytes() for name in ("clean", "apart", "here"))
    assert machine_code.differences(clean, apart) == []
    assert machine_code.differences(clean, here)  # what the process of its own is for


def test_a_program_with_its_own_interpreter_compiles_in_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = compiled()
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(subprocess, "run", None)
    here = compiled()
    assert machine_code.differences(apart.code, here.code) == []
    assert here.symbol == apart.symbol
    with pytest.raises(CompileError, match="NVRTC refused add<32> for sm_89") as caught:
        compiled("undeclared;")
    assert "add.cu(1): error" in caught.value.log


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", r"its process ended with status -9$"),
        ("raise SystemExit('out of memory')", "its process ended with status 1: out of memory"),
    ],
)
def test_a_compiler_that_ends_is_an_error(
    program: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "program.py"
    path.write_text(program)
    monkeypatch.setattr(nvrtc_program, "__file__", str(path))
    with pytest.raises(CompileError, match=said) as caught:
        compiled()
    assert "add.cu: NVRTC failed for sm_89" in str(caught.value)


def test_an_interpreter_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python3")
    with pytest.raises(CompileError, match=r"/nowhere/python3 cannot be started: .*No such file"):
        compiled()


@pytest.mark.parametrize(
    ("text", "target", "error"),
    [("undeclared;", "sm_89", "NVRTC_ERROR_COMPILATION"), (SOURCE, "sm_1", "NVRTC_ERROR_INVALID_OPTION")],
)
def test_a_reply_says_what_nvrtc_refused(text: str, target: str, error: str) -> None:
    nvrtc.version()
    options = [f"--gpu-architecture={target}"]
    reply = nvrtc_program.compile_kernel(nvrtc._library(), text, "add.cu", "add<32>", options, False)
    assert (reply.error, reply.refused, reply.symbol, reply.code) == (error, True, "", b"")
    assert reply.log


def test_an_expression_that_is_none_is_refused() -> None:
    with pytest.raises(CompileError, match="NVRTC refused add<two> for sm_89"):
        nvrtc.compile_cubin(SOURCE, "add.cu", "add<two>", "sm_89", ())
