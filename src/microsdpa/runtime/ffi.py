"""tvm_ffi, imported without initialising CUDA.

tvm_ffi asks torch.cuda.is_available() when it is imported. By default that initialises the driver, after which a forked
child can no longer use CUDA; with PYTORCH_NVML_BASED_CUDA_CHECK set, torch answers through NVML instead.
"""

from __future__ import annotations

import os
from types import ModuleType

_VARIABLE = "PYTORCH_NVML_BASED_CUDA_CHECK"


def _import() -> ModuleType:
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        import tvm_ffi
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
    module: ModuleType = tvm_ffi
    return module


tvm_ffi = _import()
