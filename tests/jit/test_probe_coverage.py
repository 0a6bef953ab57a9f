"""Every instruction of kernels/ptx/ has a probe: what `microsdpa probe` compares, it compares of all of them."""

from __future__ import annotations

import re
import subprocess
from collections import Counter

from cuda.bindings import nvrtc as bindings

from microsdpa.emulate import build
from microsdpa.evidence.probe_list import PROBES
from microsdpa.jit import nvrtc
from microsdpa.jit.source import KERNELS_DIR, expand

HEADERS = sorted((KERNELS_DIR / "ptx").glob("*.cuh"))
PROBED = sorted({probe.source for probe in PROBES})
_LITERALS = r'(?:"(?:[^"\\]|\\.)*"\s*)+'


def instructions(assembly: str) -> set[str]:
    """The statements of inline assembly, whatever their registers, addresses and numbers are."""
    statements = (re.sub(r"\s+", " ", statement).strip() for statement in re.split(r";|\{(?=\s*\.reg)|\}$", assembly))
    operand = r"%%?[\w.]+|(?<=[ \[{(,])[-+]?(?:0x[0-9a-fA-F]+|\d+|[pr]\d*)\b"
    return {re.sub(operand, "#", s) for s in statements if s and not s.startswith(".reg")}


def written(text: str) -> set[str]:
    """The instructions that C++ source spells out."""
    found = re.findall(rf"\basm\s*(?:volatile\s*)?\(\s*({_LITERALS})", text)
    return set().union(*(instructions("".join(re.findall(r'"((?:[^"\\]|\\.)*)"', literal))) for literal in found))


def compiled(source: str) -> set[str]:
    """The instructions that reach PTX from the inline assembly of every probe of one file."""
    expressions = [probe.spec.expression for probe in PROBES if probe.source == source]
    _, program = bindings.nvrtcCreateProgram(expand(source).encode(), source.encode(), 0, [], [])
    for expression in expressions:
        bindings.nvrtcAddNameExpression(program, expression.encode())
    options = ["--gpu-architecture=compute_90a", "-std=c++17"]
    options += [f"--include-path={directory}" for directory in nvrtc.include_directories()]
    (failed,) = bindings.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    assert failed == bindings.nvrtcResult.NVRTC_SUCCESS
    text = b" " * bindings.nvrtcGetPTXSize(program)[1]
    bindings.nvrtcGetPTX(program, text)
    bindings.nvrtcDestroyProgram(program)
    blocks = re.findall(r"// begin inline asm\n(.*?)// end inline asm", text.decode(), re.DOTALL)
    return set().union(*(instructions(re.sub(r"//.*", "", block).strip()) for block in blocks))


def test_every_instruction_of_every_header_is_in_a_probe() -> None:
    text = "\n".join(re.sub(r"#\s*(include|pragma).*", "", header.read_text()) for header in HEADERS)
    command = [build.compiler(), "-E", "-P", "-x", "c++", "-"]
    expanded = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    wanted = written(expanded)
    assert len(wanted) > 100  # 56 of them wgmma's
    probed = set().union(*(compiled(source) for source in PROBED))
    assert wanted - probed == set()


def test_every_function_of_every_header_is_called_by_a_probe() -> None:
    """Those without assembly, too: functions that probes call, or that other functions of the headers do."""
    defined = Counter[str]()
    for header in HEADERS:
        defined.update(
            re.findall(r"^__device__ __forceinline__ .*?(\w+|operator.)\(", header.read_text(), re.MULTILINE)
        )
    texts = [path.read_text() for path in [*HEADERS, *(KERNELS_DIR / source for source in PROBED)]]
    code = re.sub(r"//.*", "", "\n".join(texts))
    assert len(defined) > 50
    for name, definitions in defined.items():
        if name.startswith("operator"):
            continue
        uses = len(re.findall(rf"\b{name}(?:<[^;{{}}]*?>)?\(", code))
        assert uses > definitions, f"no probe calls {name}"


def test_every_header_has_its_second_body() -> None:
    assert [header.name for header in HEADERS] == sorted(path.name for path in (build.HERE / "ptx").iterdir())
