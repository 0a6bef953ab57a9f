"""Building for the CPU: the runtime once, and every kernel as a library, with the host's C++ compiler.

What is built is kept in the cache: a kernel that lies there runs where there is no compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from microsdpa.emulate import abi
from microsdpa.errors import CompileError
from microsdpa.jit import cache, nvrtc
from microsdpa.jit.inspect import sections
from microsdpa.jit.source import KERNELS_DIR, expand, tokens
from microsdpa.kernels import KernelSpec

HERE = Path(__file__).resolve().parent
KIND = "emulate"
"""Folder of the cache that has what is built here."""
RUNTIME_SOURCES = tuple(sorted(path.name for path in (HERE / "runtime").glob("*.cc")))
RUNTIME_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-shared")
# -fsanitize=thread makes the compiler call the emulator before every access to memory (its own runtime is not linked);
# without vectorisation, and in GCC without scalar replacement, an access of the source stays one access of its width.
# Variables share no memory: what wgmma reads of one that is gone, a register still holds.
# Kernels throw nothing, and neither does what they call: without landing pads g++ has less to compile.
KERNEL_FLAGS = (
    *("-std=c++17", "-Og", "-g1", "-gdwarf-4", "-fPIC", "-fvisibility=hidden", "-w"),
    *("-fno-exceptions", "-fsanitize=thread", "-fno-omit-frame-pointer"),
)
# -fwhole-program: what several functions call is compiled once, and what has a single caller becomes a part of it.
# The last ones spare g++ a fifth to a third of its time. Where variables live is in no line table, and registers are
# given out when the calls to the emulator are in place.
GCC_FLAGS = (
    "-fwhole-program",
    *("-fno-tree-sra", "-fno-tree-vectorize", "-fstack-reuse=none", "--param=tsan-instrument-func-entry-exit=0"),
    *("-fno-var-tracking", "-fira-region=one", "-fno-ipa-ra"),
)
CLANG_FLAGS = (
    *("-fno-vectorize", "-fno-slp-vectorize", "-fno-sanitize=undefined"),
    *("-mllvm", "-tsan-instrument-func-entry-exit=0", "-mllvm", "-no-stack-coloring"),
)
# The C++ library, in which the linker would look for symbols, is in the process already: the runtime needs it.
LINK_FLAGS, LIBRARIES = ("-shared", "-nostdlib"), ("-lm", "-lgcc")

OPERANDS_OF_CALLERS = (
    *("hopper/latency/online.cuh", "hopper/latency/unrolled.cuh", "hopper/throughput_8bit/wide_promoting.cuh"),
)
"""Files of which functions return while a wgmma reads their variables, which are registers on a GPU: they are inlined.

Where a file is missing here, the emulator says that registers were written while a wgmma was in flight.
"""

_FILE = re.compile(r'^#line \d+ "([^"]+)"$', re.MULTILINE)
_RETURNS_NUMBER = re.compile(
    r"__forceinline__(?= (?:(?:static|explicit|constexpr) )*"
    r"(?:(?:void|bool|int|float|double|unsigned|u?int(?:8|16|32|64)) \w+|[^(){};=]+[*&] ?\w+|\w+)\()"
)
"""Of a function that returns nothing, a number or an address, and of a constructor."""

_ENTRY = """
#line 1 "entry"
#define MICROSDPA_EXPORTED extern "C" __attribute__((visibility("default"), externally_visible))
MICROSDPA_EXPORTED void microsdpa_entry(const void* params) {{
  {expression}(*static_cast<const {params}*>(params){maps});
}}
static thread_local char microsdpa_anchor_byte;
MICROSDPA_EXPORTED void* microsdpa_anchor() {{ return &microsdpa_anchor_byte; }}
"""


@functools.cache
def compiler() -> str:
    """Path of the C++ compiler: what the environment variable CXX names, g++ or clang++.

    Raises:
        CompileError: there is none.
    """
    named = os.environ.get("CXX")
    for name in (named,) if named else ("g++", "clang++", "c++"):
        if path := shutil.which(name):
            return path
    missing = f"CXX={named}, which is not a program on the path" if named else "and finds neither g++ nor clang++"
    raise CompileError(
        f"the emulator needs a C++ compiler, {missing}: install g++ (Debian and Ubuntu: apt install g++)",
        log="",
        source=None,
    )


@functools.cache
def _compiler_version() -> str:
    return subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


def _kernel_flags() -> tuple[str, ...]:
    return KERNEL_FLAGS + (CLANG_FLAGS if "clang" in _compiler_version() else GCC_FLAGS)


@functools.cache
def _include_flags() -> tuple[str, ...]:
    places = [place for base in nvrtc.include_directories() for place in (Path(base), Path(base) / "cccl")]
    for needed in ("cuda_fp16.h", "crt/host_defines.h", "nv/target"):
        if not any((place / needed).is_file() for place in places):
            raise CompileError(
                f"the emulator needs CUDA's header {needed}: pip install 'microsdpa[emulate]'", log="", source=None
            )
    return (f"-I{HERE / 'include'}", *(flag for place in places for flag in ("-isystem", str(place))))


def expanded(source: str, root: Path = KERNELS_DIR) -> str:
    """A kernel's source with its headers, where the emulator's bodies of kernels/ptx replace those for a GPU."""
    return expand(source, root, overrides=HERE)


@functools.lru_cache(maxsize=64)
def _inlined(text: str) -> str:
    """An expanded source that says which functions become a part of whoever calls them, and which stay functions.

    Inlined are those of OPERANDS_OF_CALLERS, and what returns an object: where a call's result goes straight to memory,
    the compiler does not tell the emulator of the access.
    """
    first, *rest = _FILE.split(text)  # the text ahead of all directives, then a file's name and its text in turn
    parts = [first]
    for file, part in zip(rest[::2], rest[1::2], strict=True):
        parts.append(part if file in OPERANDS_OF_CALLERS else _RETURNS_NUMBER.sub("__function__", part))
    lines = _FILE.finditer(text)
    return parts[0] + "".join(line[0] + part for line, part in zip(lines, parts[1:], strict=True))


@dataclass(frozen=True)
class Library:
    """A kernel that is loaded into this process.

    Attributes:
        path: of the shared library, for its line table.
        image: address that it is loaded at.
        guards: offsets, in its thread-local segment, of the compiler's flags for arrays of class type.
    """

    name: str
    path: Path
    image: int
    entry: int
    anchor: int
    guards: tuple[int, ...]


_loaded: dict[str, Library] = {}
_lock = threading.Lock()
_building: dict[str, threading.Lock] = {}


def _store(binary: str) -> cache.KernelCache:
    return cache.KernelCache(cache.default_directory(), binary, KIND)


def _digest(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _headers() -> str:
    return _digest([p.read_text() for p in sorted((HERE / "include").iterdir())])


def _runtime_sources() -> str:
    files = [*sorted((HERE / "runtime").iterdir()), HERE / "include/emulator.h"]
    return _digest([file.read_text() for file in files])


def source_signature(spec: KernelSpec) -> str:
    """Identity of what the emulator runs for `spec`: the kernel, the instructions' bodies and the runtime.

    Comments and the names of files do not count.
    """
    return _digest([spec.expression, tokens(expanded(spec.source)), _headers(), _runtime_sources()])


def load(spec: KernelSpec, root: Path = KERNELS_DIR, params: str = "") -> Library:
    """Build and load the kernel of `spec`; built libraries are cached. `params` is its parameter, if not spec.params.

    Raises:
        CompileError: there is no compiler, or it refuses the kernel, for example because it uses an instruction that
            the emulator lacks; the compiler names it.
    """
    params = params or spec.params
    views = f"(static_cast<const microsdpa::TensorMap*>(params) + (sizeof({params}) + {abi.VIEW_ALIGNMENT - 1}) / "
    views += f"{abi.VIEW_ALIGNMENT} * {abi.VIEW_ALIGNMENT} / sizeof(microsdpa::TensorMap))"
    maps = "".join(f", {views}[{index}]" for index in range(len(spec.tensor_maps)))
    text = _inlined(expanded(spec.source, root)) + _ENTRY.format(expression=spec.expression, params=params, maps=maps)
    sources = _digest([cache_version(), text, _headers(), KERNEL_FLAGS, GCC_FLAGS, CLANG_FLAGS, _toolkit()])
    key = _key(sources)
    with _lock:
        _runtime()
        building = _building.setdefault(key, threading.Lock())
    with building:  # threads that want the same kernel build it once, others build theirs beside it
        if key not in _loaded:
            described = {"kernel": spec.name, "sources": sources}
            path = _materialize(key, lambda directory: _compile_kernel(spec.name, text, directory), text, described)
            _loaded[key] = _open(spec.name, path)
        return _loaded[key]


def _key(sources: str) -> str:
    """Signature of the library that the compiler here makes of sources with this digest.

    Where there is no compiler, it is that of a library in the cache, whichever compiler made it.

    Raises:
        CompileError: there is neither.
    """
    try:
        return _digest([sources, _compiler_version()])
    except CompileError as error:
        if found := _built().get(sources):
            return found
        raise CompileError(
            f"{error.summary}; the cache {cache.default_directory()} does not have this kernel",
            log=error.log,
            source=None,
        ) from None


@functools.cache
def _built() -> dict[str, str]:
    """Signatures of the libraries in the cache, by the digest of their sources."""
    store, found = _store(""), {}
    for entry in cache.stored(store.directory):
        if entry.kind == KIND and store.has(entry.path.name):
            with contextlib.suppress(OSError, ValueError):
                described = json.loads((entry.path / "metadata.json").read_text(encoding="utf-8"))
                found[described.get("sources", "")] = entry.path.name
    return found


def _toolkit() -> str:
    """Which CUDA headers there are: the version of their package, or their place."""
    try:
        return metadata.version("nvidia-cuda-runtime")
    except metadata.PackageNotFoundError:
        return ":".join(nvrtc.include_directories())


def cache_version() -> int:
    """Changes when libraries built before cannot be used any more."""
    return 3


def _open(name: str, path: Path) -> Library:
    library = ctypes.CDLL(str(path))

    def address(symbol: str) -> int:
        return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value or 0

    entry = address("microsdpa_entry")
    return Library(name, path, _image(entry), entry, address("microsdpa_anchor"), _guards(path))


def _guards(path: Path) -> tuple[int, ...]:
    """Values of the symbols of guards that the library defines."""
    found = {section.name: section for section in sections(path.read_bytes())}
    names = found[".strtab"].data
    return tuple(
        value
        for at, _, _, section, value, _ in struct.iter_unpack("<IBBHQQ", found[".symtab"].data)
        if section and names.startswith(b"_ZGV", at)
    )


def _image(address: int) -> int:
    """Load address of the library that holds `address`."""

    class DlInfo(ctypes.Structure):
        _fields_ = (
            ("file", ctypes.c_char_p),
            ("base", ctypes.c_void_p),
            ("symbol", ctypes.c_char_p),
            ("symbol_address", ctypes.c_void_p),
        )

    info = DlInfo()
    if not ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(info)):
        raise OSError(f"dladdr does not know {address:#x}")
    return info.base or 0


@functools.cache
def _runtime() -> ctypes.CDLL:
    sources = _digest([cache_version(), _runtime_sources(), RUNTIME_FLAGS])

    def build(directory: Path) -> Path:
        library = directory / "runtime.so"
        units = {HERE / "runtime" / name: directory / f"{name}.o" for name in RUNTIME_SOURCES}

        def compiled(source: Path) -> None:
            command = [compiler(), *RUNTIME_FLAGS, "-c", str(source), "-o", str(units[source])]
            _run(command, "the emulator's runtime", None)

        with ThreadPoolExecutor(os.cpu_count()) as executor:
            list(executor.map(compiled, units))
        _run(
            [compiler(), *RUNTIME_FLAGS, *map(str, units.values()), "-o", str(library)], "the emulator's runtime", None
        )
        return library

    path = _materialize(_key(sources), build, "", {"kernel": "runtime", "sources": sources})
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def runtime() -> ctypes.CDLL:
    """The emulator's runtime, loaded for kernels to link against."""
    with _lock:
        return _runtime()


def lend(directory: Path) -> None:
    """Copy what every kernel needs, the runtime and the headers that g++ has read, to another cache."""
    runtime()
    kernel_command()
    for entry in cache.stored(cache.default_directory()):
        if entry.kind != KIND:
            continue
        described = json.loads((entry.path / "metadata.json").read_text(encoding="utf-8"))
        if described.get("kernel") in ("runtime", "device.h"):
            shutil.copytree(entry.path, directory / entry.path.relative_to(cache.default_directory()))


def kernel_command() -> list[str]:
    """The compiler with the flags that a kernel's source is compiled with, and the headers of CUDA ahead of it."""
    with _lock:
        precompiled = _precompiled()
    first = () if precompiled is None else (f"-I{precompiled}",)
    return [compiler(), *_kernel_flags(), *first, *_include_flags(), "-include", "device.h"]


def _compile_kernel(name: str, text: str, directory: Path) -> Path:
    source, unit, library = (directory / file for file in ("kernel.cc", "kernel.o", "kernel.so"))
    source.write_text(text, encoding="utf-8")
    command = [*kernel_command(), "-include", "hooks.h", "-c", str(source), "-o", str(unit)]
    _run(command, f"{name} for the emulator", text)
    _run([compiler(), *LINK_FLAGS, str(unit), "-o", str(library), *LIBRARIES], f"{name} for the emulator", text)
    return library


@functools.cache
def _precompiled() -> Path | None:
    """Directory of device.h as g++ has read it: CUDA's headers take it as long as the kernel. None where there is none.

    A compiler that does not accept the file reads the header instead.
    """
    if "clang" in _compiler_version():
        return None

    def build(directory: Path) -> Path:
        header = directory / "device.h.gch"
        command = [compiler(), *_kernel_flags(), *_include_flags(), "-x", "c++-header", str(HERE / "include/device.h")]
        _run([*command, "-o", str(header)], "the emulator's headers", None)
        return header

    try:
        made = _digest([cache_version(), _headers(), _kernel_flags(), _compiler_version(), _toolkit()])
        return _materialize(made, build, "", {"kernel": "device.h"}, "device.h.gch").parent
    except CompileError:
        return None


def _run(command: Iterable[str], what: str, source: str | None) -> None:
    run = subprocess.run(list(command), capture_output=True, text=True, check=False)
    if run.returncode != 0:
        kept = cache.keep_failed_source(source) if source else None
        raise CompileError(f"{compiler()} refused {what}", log=run.stderr, source=kept)


def _materialize(key: str, build: object, source: str, described: dict[str, Any], binary: str = "kernel.so") -> Path:
    """Path of a built library: in the cache, or where the cache cannot be written in a directory of this process."""
    assert callable(build)

    def make() -> cache.Entry:
        with tempfile.TemporaryDirectory() as directory:
            return cache.Entry(build(Path(directory)).read_bytes(), source, described)

    store = _store(binary)
    entry, _ = store.get_or_build(key, make)
    path = store.path(key) / store.binary
    if store.has(key) and path.is_file():
        return path
    directory = Path(_process_directory().name) / key
    directory.mkdir(exist_ok=True)
    path = directory / store.binary
    staged = directory / f"{store.binary}-{threading.get_ident()}"
    staged.write_bytes(entry.cubin)
    return staged.replace(path)


@functools.cache
def _process_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="microsdpa-emulate-")
