"""What fresh processes of suite start run. None imports anything of the library before the clock does.

start.py passes this text to `python -c`. The process imports torch, whose CUDA it leaves alone, and forks itself for
each line that it reads: a JSON object with `impl`, `door`, `device`, `environment`, the files `inputs` (query, key,
value and the gradient of the output) and `option` (a further argument), and the files `output` for results, `timed`
and `errors`. The child writes to `timed` a JSON object: `first_us`, `backward_us` where there is a backward pass, and
`imported`, those of SLOW that the calls imported. The parent prints the child's exit status.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F

SLOW = ("torch._dynamo", "sympy")
"""Packages that take seconds to import, and that no eager call needs."""


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Make the first call of a door, and time it."""
    graded = "requires grad" in job["door"]
    *tensors, weight = [tensor.to(job["device"]) for tensor in torch.load(job["inputs"])]
    tensors = [tensor.requires_grad_(graded) for tensor in tensors]
    known = set(sys.modules)
    given = torch.load(job["option"])
    given = given.to(job["device"]) if isinstance(given, torch.Tensor) else given
    call = _import if job["door"] == "import microsdpa" else _call(job["impl"], job["door"], given, job["device"])
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


def _call(impl: str, door: str, given: Any, device: str) -> Callable[..., list[torch.Tensor]]:
    """The call of a door, which nobody has made yet."""
    function: Callable[..., torch.Tensor] = _torchs
    if impl == "microsdpa":
        import microsdpa

        if door == "enable()":
            microsdpa.enable()
        elif door == "sdpa_varlen":
            function = _varlen
        else:
            function = cast("Callable[..., torch.Tensor]", microsdpa.sdpa)
        if "(" in door and door != "enable()":
            return lambda *tensors: [function(*tensors, **_option(door, given, device))]
    made = torch.compile(function) if door == "torch.compile" else function
    return lambda *tensors: [made(*tensors)]


def _option(door: str, given: Any, device: str) -> dict[str, Any]:
    """The further argument that a door has, of what the job's file `option` has."""
    if "precision" in door:
        return {"precision": "int8_fp8"}
    if "document_ids" in door:
        return {"document_ids": given}
    if "block_mask" in door:
        import microsdpa

        table, block, *seqlens = given
        return {"block_mask": microsdpa.BlockTable(table.to(device), block, *seqlens)}
    return {"window": given}


def _varlen(*tensors: torch.Tensor) -> torch.Tensor:
    import microsdpa

    found = microsdpa.sdpa_varlen(*(tensor.transpose(1, 2) for tensor in tensors))
    return cast(torch.Tensor, found).transpose(1, 2)


def _torchs(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _since(start: float) -> float:
    return (time.perf_counter() - start) * 1e6


def _child(job: dict[str, Any]) -> NoReturn:
    """Run one job in this process, and end it."""
    status = 1
    with open(job["errors"], "w", encoding="utf-8") as errors:
        os.dup2(errors.fileno(), 2)
        os.dup2(errors.fileno(), 1)
        try:
            os.environ.update(job["environment"])
            Path(job["timed"]).write_text(json.dumps(main(job)), encoding="utf-8")
            status = 0
        except BaseException:  # whatever it is, the parent's loop is not this process's
            traceback.print_exc(file=errors)
    os._exit(status)


def serve() -> None:
    """Fork a process for each job of the standard input."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _child(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
