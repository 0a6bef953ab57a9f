"""A program that compiles one kernel, so that NVRTC has a process of its own; jit/nvrtc.py runs it.

NVRTC keeps state from one compilation to the next: after another library has compiled something with options of its
own, cuDNN for one, the same source gives other machine code. In a new process it is always the same.

Its argument is the path of NVRTC's library, its input a request as JSON. It writes the reply as a line of JSON, then
the code. Nothing but the standard library is imported, so that it starts within milliseconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any, NamedTuple


class Reply(NamedTuple):
    """What became of a request.

    Attributes:
        error: what NVRTC calls its failure; empty without one.
        refused: whether it is the source, or an option, that NVRTC refused, which `log` then says more of.
        symbol: the kernel's mangled name.
        log: NVRTC's, with the lines of ptxas.
        code: a cubin, or PTX with the zero at its end.
    """

    error: str
    refused: bool
    symbol: str
    log: str
    code: bytes


class _Refused(Exception):
    """A function of NVRTC failed; the argument is the error's name."""


def _loaded(library: str) -> ctypes.CDLL:
    """NVRTC with its second library, which it looks for by name, and not where it lies itself."""
    nvrtc = ctypes.CDLL(library)
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    name = f"libnvrtc-builtins.so.{major.value}.{minor.value}"
    beside = os.path.join(os.path.dirname(os.path.realpath(library)), name)
    if os.path.exists(beside):
        ctypes.CDLL(beside)
    return nvrtc


def compile_kernel(library: str, text: str, name: str, expression: str, options: list[str], ptx: bool) -> Reply:
    """Compile what `expression` instantiates in the source `text` with the NVRTC at the path `library`."""
    nvrtc = _loaded(library)

    def call(function: str, *arguments: Any) -> None:
        if error := getattr(nvrtc, function)(*arguments):
            raise _Refused(nvrtc.nvrtcGetErrorString(error).decode())

    program, size, symbol = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_char_p()

    def bytes_of(kind: str) -> bytes:
        call(f"nvrtcGet{kind}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        call(f"nvrtcGet{kind}", program, buffer)
        return buffer.raw

    log, refused = "", False
    try:
        call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
        call("nvrtcAddNameExpression", program, expression.encode())
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        try:
            call("nvrtcCompileProgram", program, len(options), given)
        except _Refused:
            refused = True
            raise
        finally:
            log = bytes_of("ProgramLog").rstrip(b"\0").decode(errors="replace")
        code = bytes_of("PTX" if ptx else "CUBIN")
        call("nvrtcGetLoweredName", program, expression.encode(), ctypes.byref(symbol))
        return Reply("", False, (symbol.value or b"").decode(), log, code)
    except _Refused as error:
        return Reply(str(error), refused, "", log, b"")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def main() -> None:
    """Read a request, write the reply."""
    reply = compile_kernel(sys.argv[1], **json.load(sys.stdin.buffer))
    sys.stdout.buffer.write(json.dumps(reply[:-1]).encode() + b"\n" + reply.code)


if __name__ == "__main__":
    main()
