"""Tensors that say they are on a CUDA device, and the stub driver's records, for stubbed_launcher.py."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import tvm_ffi
from tvm_ffi import libinfo

from microsdpa.jit.inspect import Resources
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.params import MaskedParams, Params

KDL_CUDA, KDL_FLOAT, KDL_BFLOAT = 2, 2, 4


HISTORY, MAX_MAPS = 8, 8

NO_SPILL = Resources(registers=64, shared_bytes=0, stack_bytes=0, spill_store_bytes=0, spill_load_bytes=0)


def compiled(spec: KernelSpec, target: str) -> SimpleNamespace:
    """What the launcher looks at of a compiled kernel; the stub driver loads its cubin."""
    signature = f"{spec.name} {spec.expression}"
    return SimpleNamespace(
        spec=spec, target=target, signature=signature, cubin=b"cubin", symbol="kernel", resources=NO_SPILL
    )


class Launch(ctypes.Structure):
    """StubLaunch of stub_driver.cc."""

    _fields_ = [
        ("grid", ctypes.c_int64 * 3),
        *((name, ctypes.c_int64) for name in ("threads", "shared_bytes", "stream", "function", "context", "depth")),
        ("cluster", ctypes.c_int64 * 3),
        ("programmatic", ctypes.c_int64),
        ("attributes", ctypes.c_int64),
        ("tensor_maps", ctypes.c_uint64 * 16 * MAX_MAPS),
        ("raw", ctypes.c_uint8 * 640),
        ("params", Params),
        *MaskedParams._fields_[1:],
    ]


class Record(ctypes.Structure):
    """StubRecord of stub_driver.cc."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                "launches",
                "pushes",
                "pops",
                "capture_mode",
                "max_shared_bytes",
                "large_clusters",
                "encoded",
                "moved",
                "torn",
            )
        ),
        ("history", Launch * HISTORY),
    ]


MAX_OPERATIONS = 512
COPY, WRITE, AWAIT_VALUE, RECORD, AWAIT_EVENT, LAUNCH = range(6)


class Operation(ctypes.Structure):
    """StubOperation of stub_driver.cc."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("code", "stream", "context")),
        ("numbers", ctypes.c_int64 * 6),
    ]


class Operations(ctypes.Structure):
    """StubOperations of stub_driver.cc."""

    _fields_ = [("count", ctypes.c_int64), ("each", Operation * MAX_OPERATIONS)]


stub = ctypes.CDLL("libcuda.so.1")
record = Record.in_dll(stub, "stub_record")
_operations = Operations.in_dll(stub, "stub_operations")


def operations() -> list[tuple[int, int, tuple[int, ...]]]:
    """Code, stream and numbers of what was put on streams since the last look, launches among them."""
    assert _operations.count <= MAX_OPERATIONS
    found = [(each.code, each.stream, tuple(each.numbers)) for each in _operations.each[: _operations.count]]
    forget_operations()
    return found


def forget_operations() -> None:
    _operations.count = 0


def last(back: int = 0) -> Launch:
    """The latest launch, or one `back` launches before it."""
    launch: Launch = record.history[(record.launches - 1 - back) % HISTORY]
    return launch


def set_integer(name: str, value: int) -> None:
    ctypes.c_int.in_dll(stub, name).value = value


def integer(name: str) -> int:
    return ctypes.c_int.in_dll(stub, name).value


def set_context(context: int) -> None:
    stub.stub_set_context(ctypes.c_int64(context))


def install_allocator() -> None:
    library = ctypes.CDLL(libinfo.find_libtvm_ffi())
    allocate = ctypes.cast(stub.stub_allocate, ctypes.c_void_p)
    assert library.TVMFFIEnvSetDLPackManagedTensorAllocator(allocate, 1, None) == 0


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class FakeCuda:
    """A [B, H, S, D] tensor at `address` that claims to be on a CUDA device; nothing reads its memory."""

    def __init__(
        self,
        shape: Sequence[int],
        address: int,
        strides: Sequence[int] | None = None,
        code: int = KDL_FLOAT,
        device: int = 0,
        bits: int = 16,
    ) -> None:
        if strides is None:
            strides = [1] * len(shape)
            for i in reversed(range(len(shape) - 1)):
                strides[i] = strides[i + 1] * shape[i + 1]
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        self.strides = (ctypes.c_int64 * len(shape))(*strides)
        self.managed = _DLManagedTensor(
            _DLTensor(
                address,
                KDL_CUDA,
                device,
                len(shape),
                code,
                bits,
                1,
                ctypes.addressof(self.shape),
                ctypes.addressof(self.strides),
                0,
            ),
            None,
            None,
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return KDL_CUDA, self.managed.tensor.device_id

    def __dlpack__(self, **_: object) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.managed), b"dltensor", None)


_alive: list[FakeCuda] = []


def tensor(shape: Sequence[int], address: int, **options: Any) -> Any:
    """A tvm_ffi tensor over a FakeCuda, which is kept alive for the rest of the process."""
    fake = FakeCuda(shape, address, **options)
    _alive.append(fake)
    return tvm_ffi.from_dlpack(fake)
