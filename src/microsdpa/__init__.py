"""microsdpa: exact fused attention (SDPA, forward) for PyTorch on NVIDIA GPUs at the lowest latency the chip allows.

Importing it initialises no CUDA and creates no file.
"""

from microsdpa import flash_attn, integrations
from microsdpa.attention.api import sdpa
from microsdpa.attention.explain import Explanation, explain, explain_varlen
from microsdpa.attention.plan import Plan, plan
from microsdpa.attention.quantize import Quantized, quantize
from microsdpa.attention.varlen import sdpa_varlen
from microsdpa.call.blocks import BlockTable
from microsdpa.call.documents import document_ranges
from microsdpa.errors import CompileError, InvalidArgument, MicrosdpaError, UnknownArgument, UnsupportedProblem
from microsdpa.integrations import block_ops, eight_bit_ops, torch_ops, varlen_ops
from microsdpa.integrations.dropin import disable, enable, enabled
from microsdpa.integrations.flash_backend import register

__version__ = "0.1.0"

__all__ = [
    "BlockTable",
    "CompileError",
    "Explanation",
    "InvalidArgument",
    "MicrosdpaError",
    "Plan",
    "Quantized",
    "UnknownArgument",
    "UnsupportedProblem",
    "__version__",
    "block_ops",
    "disable",
    "document_ranges",
    "eight_bit_ops",
    "enable",
    "enabled",
    "explain",
    "explain_varlen",
    "flash_attn",
    "integrations",
    "plan",
    "quantize",
    "register",
    "sdpa",
    "sdpa_varlen",
    "torch_ops",
    "varlen_ops",
]
