"""What a fresh process of suite start runs. It imports nothing of the library before the clock does.

start.py passes this text to `python -c` with a JSON object: `impl`, `door`, `device`, `inputs` (a file with query, key,
value and the gradient of the output) and `output` (the file for results). The process prints a JSON object: `first_us`,
`backward_us` where there is a backward pass, and `imported`, those of SLOW that the calls imported.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F

SLOW = ("torch._dynamo", "sympy")
"""Packages that take seconds to import, and that no eager call needs."""


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Make the first call of a door, and time it."""
    graded = job["door"] == "requires grad"
    *tensors, weight = [tensor.to(job["device"]) for tensor in torch.load(job["inputs"])]
    tensors = [tensor.requires_grad_(graded) for tensor in tensors]
    known = set(sys.modules)
    call = _import if job["door"] == "import microsdpa" else _call(job["impl"], job["door"])
    _wait(job["device"])
    start = time.perf_counter()
    results = call(*tensors)
    _wait(job["device"])
    found: dict[str, Any] = {"first_us": _since(start)}
    if graded:
        start = time.perf_counter()
        # Of a sum: to be given the gradient of an output, torch itself imports sympy.
        results += torch.autograd.grad((results[0] * weight).sum(), tensors)
        _wait(job["device"])
        found["backward_us"] = _since(start)
    found["imported"] = [name for name in SLOW if name in sys.modules and name not in known]
    torch.save([result.detach().cpu() for result in results], job["output"])
    return found


def _import(*_: torch.Tensor) -> list[torch.Tensor]:
    import microsdpa  # noqa: F401

    return []


def _call(impl: str, door: str) -> Callable[..., list[torch.Tensor]]:
    """The call of a door, which nobody has made yet."""
    function: Callable[..., torch.Tensor] = _torchs
    if impl == "microsdpa":
        import microsdpa

        if door == "enable()":
            microsdpa.enable()
        elif "precision" in door:
            function = cast("Callable[..., torch.Tensor]", functools.partial(microsdpa.sdpa, precision="int8_fp8"))
        else:
            function = cast("Callable[..., torch.Tensor]", microsdpa.sdpa)
    made = torch.compile(function) if door == "torch.compile" else function
    return lambda *tensors: [made(*tensors)]


def _torchs(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _since(start: float) -> float:
    return (time.perf_counter() - start) * 1e6


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
