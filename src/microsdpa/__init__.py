"""microsdpa: exact fused attention (SDPA, forward) for PyTorch on NVIDIA GPUs at the lowest latency the chip allows.

Importing it initialises no CUDA and creates no file.
"""

from microsdpa import integrations, torch_ops
from microsdpa.api import sdpa
from microsdpa.dropin import disable, enable, enabled
from microsdpa.errors import CompileError, InvalidArgument, MicrosdpaError, UnsupportedProblem
from microsdpa.explaining import explain
from microsdpa.explanation import Explanation
from microsdpa.flash_backend import register
from microsdpa.prepared import Plan, plan
from microsdpa.quantize import Quantized, quantize

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "Explanation",
    "InvalidArgument",
    "MicrosdpaError",
    "Plan",
    "Quantized",
    "UnsupportedProblem",
    "__version__",
    "disable",
    "enable",
    "enabled",
    "explain",
    "integrations",
    "plan",
    "quantize",
    "register",
    "sdpa",
    "torch_ops",
]
