"""Functions of the library as built-in functions of Python, for which torch describes its tensors (direct.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

_NAME = b"microsdpa.runtime.direct"
_METH_FASTCALL = 0x80


class _Method(ctypes.Structure):
    """PyMethodDef of Python's C interface."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


_method = _Method(b"launch", None, _METH_FASTCALL, None)
"""Of all these functions, as long as the process lives: they differ in what their capsules hold."""


def _exchange_api() -> int:
    """The address of the functions by which torch hands its tensors on; 0 where it has none."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return 0
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(pointer(capsule, b"dlpack_exchange_api") or 0)


def direct(library: Any, function: Any) -> Callable[..., Any]:
    """A function of tvm_ffi's as a built-in one, which takes a third of the time to call with tensors of torch's.

    It does what `function` does, and is `function` itself where Python or torch lacks what it needs.
    """
    classes = id(torch.Tensor), id(torch.nn.Parameter)
    addresses = library.direct_function(function, id(function), _exchange_api(), *classes)
    if not len(addresses):
        return function  # type: ignore[no-any-return]
    call, held, forget = addresses
    python = ctypes.pythonapi
    python.Py_IncRef.argtypes, python.Py_IncRef.restype = [ctypes.py_object], None
    python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    python.PyCFunction_NewEx.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
    python.PyCapsule_New.restype = python.PyCFunction_NewEx.restype = ctypes.py_object
    python.Py_IncRef(function)
    capsule = python.PyCapsule_New(held, _NAME, forget)
    _method.function = call
    made: Callable[..., Any] = python.PyCFunction_NewEx(ctypes.addressof(_method), capsule, None)
    return made
