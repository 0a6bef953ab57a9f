"""From a checked call to the problem that it poses."""

from __future__ import annotations

import torch

from microsdpa.call import tensors
from microsdpa.call.cache import kind_of
from microsdpa.call.scales import key_block
from microsdpa.call.validate import Checked
from microsdpa.errors import UnsupportedProblem
from microsdpa.kernels import emulated_target
from microsdpa.kernels.problem import ELEMENT_BYTES, VECTOR_BYTES, Problem
from microsdpa.runtime import launcher


def sizes_of(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int, int, int, int, int]:
    """B, H, H_kv, S_q, S_k and D, in the order of a Problem."""
    return query.shape[0], query.shape[1], key.shape[1], query.shape[2], key.shape[2], query.shape[3]


def problem_of(checked: Checked, out: torch.Tensor | None = None) -> Problem:
    """The problem that a call on a GPU, or in the emulator, poses.

    `out` is the tensor to write to, if it is there already; else it is the call's, or one like query.

    Raises:
        UnsupportedProblem: the machine's driver or GPU cannot run a kernel.
    """
    call, (query, key, _) = checked.call, checked.call.inputs
    if out is None:
        out = call.out if call.previous is None else call.previous[0]
    if call.sequences is not None:
        return _varlen(checked, out)
    given = call.inputs if out is None else (*call.inputs, out)
    dtype = tensors.DTYPES[checked.dtype]
    scheme = checked.scheme
    return Problem(
        *sizes_of(query, key),
        dtype=dtype,
        causal=checked.causal,
        mask=checked.masks.kind_in_memory,
        target=_target(checked),  # ahead of the alignment, which asks the driver
        alignment=VECTOR_BYTES if _is_aligned(checked, out) else ELEMENT_BYTES[dtype],
        bulk=all(map(tensors.is_bulk_addressable, given)),
        operands=checked.operands,
        query_terms=scheme.query_terms if scheme else 1,
        key_block=key_block(key, checked.scales.k_scale) if call.has_values else scheme.key_block if scheme else 1,
        dropout=call.options.dropout_p > 0.0,
        prologue=None if call.prologue is None else call.prologue.kind(),
        value_dim=checked.value_dim,
        continued=call.previous is not None,
    )


def _varlen(checked: Checked, out: torch.Tensor | None) -> Problem:
    """The problem of a call with sequences of many lengths: sizes are what a sequence has at most."""
    call, sequences = checked.call, checked.call.sequences
    assert sequences is not None
    query, key, _ = call.inputs
    dtype = tensors.DTYPES[checked.dtype]
    new = (t for t in (sequences.new_key, sequences.new_value) if t is not None)
    given = *call.inputs, *new, *(() if out is None else (out,))
    return Problem(
        batch=sequences.batch(query),
        heads=query.shape[-2],
        heads_kv=key.shape[-2],
        seqlen_q=sequences.most_queries(query),
        seqlen_k=sequences.most_keys(key),
        head_dim=query.shape[-1],
        dtype=dtype,
        causal=checked.causal,
        mask=checked.masks.kind,
        value_dim=checked.value_dim,
        target=_target(checked),
        alignment=VECTOR_BYTES if all(map(tensors.is_aligned, given)) else ELEMENT_BYTES[dtype],
        varlen=sequences.granularity(key),
        packed_queries=sequences.query_offsets is not None,
        cache=kind_of(key, checked.scales),
    )


def _target(checked: Checked) -> str:
    query = checked.call.inputs[0]
    if checked.emulated:
        if query.device.type != "cpu":
            raise UnsupportedProblem(
                f"impl 'emulate' runs on CPU tensors and query is on {query.device}",
                nearest="query.cpu(), or impl='auto'",
            )
        return emulated_target(checked.kernel)
    if reason := launcher.device_error():
        impl = "auto" if checked.operands is None else "emulate"
        raise UnsupportedProblem(reason, nearest=f"CPU tensors with impl={impl!r}")
    return launcher.target_of_device(query.device)


def _is_aligned(checked: Checked, out: torch.Tensor | None) -> bool:
    """Whether every row of the inputs and the output starts on 16 bytes."""
    if checked.operands is not None:
        return True  # check() refuses others
    inputs = checked.call.inputs
    if checked.emulated:
        return all(map(tensors.is_aligned, inputs if out is None else (*inputs, out)))
    if out is None:
        return all(map(tensors.is_aligned, inputs)) and tensors.allocation_is_aligned(inputs[0])
    return launcher.alignment(*inputs, out) == VECTOR_BYTES
