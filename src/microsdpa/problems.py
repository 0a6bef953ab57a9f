"""From validated tensors and masks to the Problem that they pose."""

from __future__ import annotations

import torch

from microsdpa import arguments
from microsdpa.errors import UnsupportedProblem
from microsdpa.kernels import emulated_target
from microsdpa.kernels.problem import ELEMENT_BYTES, VECTOR_BYTES, Causal, Problem
from microsdpa.masks import Masks
from microsdpa.runtime import launcher


def of_cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor | None,
    causal: Causal | None,
    masks: Masks,
) -> Problem:
    """The problem that validated CUDA tensors pose; without `out`, that of an output like torch.empty_like(query).

    Raises:
        UnsupportedProblem: the machine's driver or GPU cannot run a kernel.
    """
    if reason := launcher.device_error():
        raise UnsupportedProblem(reason, nearest="CPU tensors with impl='auto'")
    if out is None:
        aligned = all(map(arguments.is_aligned, (query, key, value))) and arguments.allocation_is_aligned(query)
        alignment = VECTOR_BYTES if aligned else 0
    else:
        alignment = launcher.alignment(query, key, value, out)
    target = launcher.target_of_device(query.device)
    return _problem(query, key, value, out, causal, masks, alignment, target)


def _problem(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor | None,
    causal: Causal | None,
    masks: Masks,
    alignment: int,
    target: str,
) -> Problem:
    dtype = arguments.DTYPES[query.dtype]
    return Problem(
        batch=query.shape[0],
        heads=query.shape[1],
        heads_kv=key.shape[1],
        seqlen_q=query.shape[2],
        seqlen_k=key.shape[2],
        head_dim=query.shape[3],
        dtype=dtype,
        causal=causal,
        mask=masks.kind,
        alignment=alignment or ELEMENT_BYTES[dtype],
        bulk=all(arguments.is_bulk_addressable(t) for t in (query, key, value, out) if t is not None),
        target=target,
    )


def of_emulated(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor | None,
    causal: Causal | None,
    masks: Masks,
    kernel: str,
) -> Problem:
    """The problem that validated CPU tensors pose to the emulator's GPU.

    Raises:
        UnsupportedProblem: the tensors are not on the CPU.
    """
    if query.device.type != "cpu":
        raise UnsupportedProblem(
            f"impl 'emulate' runs on CPU tensors and query is on {query.device}", nearest="query.cpu(), or impl='auto'"
        )
    tensors = [tensor for tensor in (query, key, value, out) if tensor is not None]
    alignment = VECTOR_BYTES if all(map(arguments.is_aligned, tensors)) else 0
    return _problem(query, key, value, out, causal, masks, alignment, emulated_target(kernel))
