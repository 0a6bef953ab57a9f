"""What a benchmark compares: microsdpa and its peers, each as a call on prepared tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import microsdpa
from microsdpa.evidence.inputs import Case

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention.

    Attributes:
        name: "microsdpa", or the peer's name.
        version: of the package that provides it.
        variant: what is special about the call, such as writing to a given output; empty otherwise.
        context: entered once around all calls of a measurement.
        run: the call: (case, (query, key, value), out) to an output; `out` is for variants that write to it.
        refuses: the reason why a case cannot be asked of it, or empty.
    """

    name: str
    version: str
    context: Callable[[], contextlib.AbstractContextManager[object]]
    run: Callable[[Case, Tensors, torch.Tensor], torch.Tensor]
    refuses: Callable[[Case], str] = lambda case: ""
    variant: str = ""


def _run_microsdpa(impl: str, write_out: bool) -> Callable[[Case, Tensors, torch.Tensor], torch.Tensor]:
    def run(case: Case, tensors: Tensors, out: torch.Tensor) -> torch.Tensor:
        # The plain spelling of each call: a timed call carries no argument that it does not need.
        query, key, value = tensors
        destination = out if write_out else None
        if case.causal is None and case.scale is None and case.kv_heads == case.heads:
            result = microsdpa.sdpa(query, key, value, out=destination, impl=impl)
        else:
            result = microsdpa.sdpa(
                query,
                key,
                value,
                causal=case.causal,
                scale=case.scale,
                enable_gqa=case.kv_heads != case.heads,
                out=destination,
                impl=impl,
            )
        assert isinstance(result, torch.Tensor)
        return result

    return run


def _run_torch(case: Case, tensors: Tensors, out: torch.Tensor) -> torch.Tensor:
    query, key, value = tensors
    if case.causal is None and case.scale is None and case.kv_heads == case.heads:
        return F.scaled_dot_product_attention(query, key, value)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        is_causal=case.causal == "upper_left",
        scale=case.scale,
        enable_gqa=case.kv_heads != case.heads,
    )


def _torch_refuses(case: Case) -> str:
    if case.causal == "lower_right" and case.seqlen_q != case.seqlen_k:
        return "F.scaled_dot_product_attention aligns causal masks to the upper left"
    return ""


def microsdpa_implementations(impl: str = "auto") -> list[Implementation]:
    """This library, allocating its output and writing to a given one."""
    return [
        Implementation(
            "microsdpa",
            microsdpa.__version__,
            contextlib.nullcontext,
            _run_microsdpa(impl, write_out),
            variant="out=" if write_out else "",
        )
        for write_out in (False, True)
    ]


def torch_peers() -> list[Implementation]:
    """torch's own choice of backend, and each backend by name."""
    backends = {
        "torch FLASH": SDPBackend.FLASH_ATTENTION,
        "torch CUDNN": SDPBackend.CUDNN_ATTENTION,
        "torch EFFICIENT": SDPBackend.EFFICIENT_ATTENTION,
        "torch MATH": SDPBackend.MATH,
    }
    peers = [Implementation("torch", torch.__version__, contextlib.nullcontext, _run_torch, _torch_refuses)]
    for name, backend in backends.items():
        peers.append(
            Implementation(
                name,
                torch.__version__,
                functools.partial(sdpa_kernel, backend),
                _run_torch,
                _torch_refuses,
            )
        )
    return peers
