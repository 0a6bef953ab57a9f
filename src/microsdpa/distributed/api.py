"""The public call, attention(): of sequences that are spread over the ranks of a group."""

from __future__ import annotations

import socket
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple, cast, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from microsdpa.call import documents
from microsdpa.call.call import Call
from microsdpa.call.options import Options
from microsdpa.call.validate import check
from microsdpa.distributed import agree, autograd, model, symmetric
from microsdpa.distributed.agreement import Agreement, Method, Transport
from microsdpa.distributed.layout import Layout, Order, even, put, take
from microsdpa.distributed.visible import UNBOUNDED, Visible
from microsdpa.errors import InvalidArgument, MicrosdpaError
from microsdpa.kernels.problem import Causal

Group = dist.ProcessGroup | DeviceMesh | None


class Signature(NamedTuple):
    """What a call is known by: the ranks compare it before data travels.

    Attributes:
        batch, heads, heads_kv, head_dim, dtype, device: of the tensors; these and the options are equal on all ranks.
        seqlen_q, seqlen_k, by_token: of this rank's tensors, as it likes; host, memory: its host, and bytes of its GPU.
    """

    batch: int
    heads: int
    heads_kv: int
    head_dim: int
    dtype: torch.dtype
    device: str
    order: Order
    causal: Causal | None
    window: tuple[int, int]
    documents: tuple[int, ...] | None
    softcap: float | None
    scale: float | None
    method: Method | Literal["auto"]
    transport: Transport | Literal["auto"]
    lengths: tuple[int, ...] | int | None
    graded: bool
    seqlen_q: int
    seqlen_k: int
    by_token: bool
    host: str
    memory: int


MEMORY_PART = 4
"""Gathered keys and values may take this part of a GPU's memory."""
OWN = "seqlen_q", "seqlen_k", "by_token", "host", "memory"
"""What may differ from rank to rank."""
ARGUMENTS = {"batch": "query", "heads": "query", "heads_kv": "key", "head_dim": "query", "dtype": "query"}
"""Arguments that a part of a signature is of; others have its name."""


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: Group = None,
    order: Order = "balanced",
    causal: Causal | None = None,
    window: tuple[int, int] | None = None,
    document_ids: documents.Ids | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    method: Method | Literal["auto"] = "auto",
    transport: Transport | Literal["auto"] = "auto",
    lengths: int | Sequence[int] | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of sequences that are spread over the ranks of a group: softmax(scale * Q K^T + mask) V, exact.

    Every rank of the group calls it with its own shard, and gets the outputs of its own queries. Tensors are on CUDA
    devices, one for each rank, or on the CPU.

    Ranks tell each other their shapes ahead of every call, on the host, so that all of them raise the same error. With
    `lengths` they do so at the first call of every kind only.

    Args:
        query: [B, H, S_local, D], float16 or bfloat16: this rank's shard of the queries.
        key: [B, H_kv, S_local, D], this rank's shard of the keys; another S_local than the query's is one of a
            sequence of its own. A rank may have no token.
        value: like key.
        group: a process group, a DeviceMesh of one dimension such as mesh["cp"], or None for all ranks.
        order: "balanced" or "contiguous", as shard() was told.
        causal: "upper_left" or "lower_right", as sdpa has them, over the whole sequences.
        window: (left, right), as sdpa has it, over the whole sequences. Only keys that a rank sees are sent to it
            between GPUs of one host.
        document_ids: this rank's shard of the ids, [S_local] or [B, S_local], or a pair of them, of queries and keys.
        softcap: as sdpa has it.
        scale: as sdpa has it.
        enable_gqa: as sdpa has it.
        method: "all_gather", "ring" or "heads"; "auto" takes the one of the shortest estimate, which explain() prints.
        transport: "symmetric", the copy engines of the GPUs of one host, or "collective", NCCL or gloo; "auto" takes
            the first where it can.
        lengths: what saves the exchange of shapes: tokens of the whole sequence, or of every rank's shard. It is of
            queries and keys both, and the same on all ranks, as everything else of the call has to be then.
        return_lse: also return the natural logarithm of the softmax's denominator, [B, H, S_local] in FP32.

    Returns:
        The output, like query, or (output, LSE) with return_lse.

    Raises:
        InvalidArgument: an argument that no call could accept, on any rank: every rank raises it, and it names the
            rank.
        UnsupportedProblem: a call that no kernel computes.
    """
    options = Options(False, causal, scale, enable_gqa, window, softcap)
    known = tuple(lengths) if isinstance(lengths, Sequence) else lengths
    agreed = agree_upon((query, key, value), group, order, options, document_ids, method, transport, known)
    mask = mask_of(agreed, document_ids, query, key)
    out, lse = autograd.attend(agreed, query, key, value, mask, return_lse)
    if return_lse:
        assert lse is not None
        return out, lse
    return out


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: Group = None,
    order: Order = "balanced",
    causal: Causal | None = None,
    window: tuple[int, int] | None = None,
    document_ids: documents.Ids | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    method: Method | Literal["auto"] = "auto",
    transport: Transport | Literal["auto"] = "auto",
    lengths: int | Sequence[int] | None = None,
) -> Agreement:
    """How attention() would compute a call: method, transport, and the estimates that chose them; print() shows them.

    Arguments and errors are those of attention(). Every rank of the group has to call it.
    """
    options = Options(False, causal, scale, enable_gqa, window, softcap)
    known = tuple(lengths) if isinstance(lengths, Sequence) else lengths
    return agree_upon((query, key, value), group, order, options, document_ids, method, transport, known)


def agree_upon(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    group: Group,
    order: Order,
    options: Options,
    document_ids: documents.Ids | None,
    method: Method | Literal["auto"],
    transport: Transport | Literal["auto"],
    lengths: tuple[int, ...] | int | None = None,
) -> Agreement:
    """What the ranks agree upon for a call; a collective call of the group if it is one of a new kind.

    Raises:
        MicrosdpaError: an argument is wrong on some rank, or not the same on all.
    """
    process_group = agree.resolve(group)
    peers = agree.peers(process_group)
    known = described(inputs, order, options, method, transport, lengths) if document_ids is None else None
    if known is not None and (quick := peers.agreements.get(known)) is not None:
        return cast(Agreement, quick)
    try:
        mine = signature(inputs, order, options, document_ids, method, transport, lengths)
    except MicrosdpaError as error:
        peers.exchange(error)
        raise
    if lengths is not None:
        found: Agreement | None = peers.agreements.get(mine)
        if found is not None:
            return found
    said = tuple(peers.exchange(mine))
    found = peers.agreements.get(said)
    if found is None:
        found = compare(said, process_group, inputs[0].device)
        peers.remember(said, found)
    if lengths is not None:
        peers.remember(mine, found)
        if known is not None:
            peers.remember(known, found)
    return found


def described(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    order: Order,
    options: Options,
    method: str,
    transport: str,
    lengths: tuple[int, ...] | int | None,
) -> object:
    """What finds the agreement of a call that was made before without looking at its arguments; None without one."""
    if lengths is None or not all(isinstance(tensor, torch.Tensor) and not tensor.is_nested for tensor in inputs):
        return None
    tensors = [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in inputs]
    found = (*tensors, torch.is_grad_enabled(), order, options, method, transport, lengths)
    try:
        hash(found)
    except TypeError:
        return None  # the checks say which argument is no such thing
    return found


def signature(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    order: Order,
    options: Options,
    document_ids: documents.Ids | None,
    method: Method | Literal["auto"],
    transport: Transport | Literal["auto"],
    lengths: tuple[int, ...] | int | None,
) -> Signature:
    """The signature of this rank's part of a call, whose arguments are checked as far as one rank can."""
    for name, given, known in (
        ("order", order, get_args(Order)),
        ("method", method, ("auto", *get_args(Method))),
        ("transport", transport, ("auto", *get_args(Transport))),
    ):
        if given not in known:
            raise InvalidArgument(name, expected=f"one of {known}", got=repr(given), hint="see the documentation")
    checked = check(Call(inputs, options=options))
    query, key, value = inputs
    if value.shape[3] != query.shape[3]:
        raise InvalidArgument(
            "value",
            expected=f"{query.shape[3]} columns, as query and key have",
            got=str(value.shape[3]),
            hint="only sdpa on one GPU takes another number",
        )
    ids = None
    if document_ids is not None:
        pair = tuple(document_ids) if isinstance(document_ids, (tuple, list)) else (document_ids,)
        ids = tuple(one.shape[0] for one in documents.check(pair, query, key))
    (batch, heads, seqlen_q, head_dim), (_, heads_kv, seqlen_k, _) = query.shape, key.shape
    graded = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    by_token = symmetric.is_by_token(key) and symmetric.is_by_token(value)
    return Signature(
        *(batch, heads, heads_kv, head_dim, query.dtype, query.device.type, order, checked.causal),
        *(
            options.window or (UNBOUNDED, UNBOUNDED),
            ids,
            options.softcap,
            checked.scale,
            method,
            transport,
            lengths,
            graded,
        ),
        *(seqlen_q, seqlen_k, by_token, *place_of(query.device)),
    )


@cache
def place_of(device: torch.device) -> tuple[str, int]:
    """The host's name, and the bytes of a GPU's memory; 0 for a CPU."""
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return socket.gethostname(), memory


def compare(found: tuple[Signature | MicrosdpaError, ...], group: dist.ProcessGroup, device: torch.device) -> Agreement:
    """The agreement of the signatures of all ranks.

    Raises:
        MicrosdpaError: a rank has an error, or signatures do not fit; the same on every rank.
    """
    signatures = []
    for rank, one in enumerate(found):
        if isinstance(one, MicrosdpaError):
            if rank == group.rank():
                raise one
            raise of_rank(one, rank)
        signatures.append(one)
    first, order = signatures[0], signatures[0].order
    for rank, one in enumerate(signatures):
        for name in Signature._fields:
            wanted, got = getattr(first, name), getattr(one, name)
            if name not in OWN and wanted != got:
                raise InvalidArgument(
                    ARGUMENTS.get(name, name),
                    expected=f"{name} = {wanted}, as on rank 0",
                    got=f"{got} on rank {rank}",
                    hint="all ranks of the group pass the same, but for the length of their shards",
                )
    layouts = []
    for argument in ("query", "key"):
        lengths = tuple(getattr(one, "seqlen_q" if argument == "query" else "seqlen_k") for one in signatures)
        layout = Layout(order, lengths)
        check_lengths(argument, lengths, first.lengths, order)
        for rank, (length, wanted) in enumerate(zip(lengths, layout.expected, strict=True)):
            if length != wanted:
                raise InvalidArgument(
                    argument,
                    expected=f"{wanted} of the {layout.total} tokens on rank {rank}, as order={order!r} spreads them",
                    got=f"{length}",
                    hint="use shard(), or order='contiguous', which leaves lengths open",
                )
        layouts.append(layout)
    visible = Visible(layouts[0], layouts[1], first.causal, first.window, first.documents is not None)
    if first.method == "heads" and (first.heads_kv % group.size()):
        raise InvalidArgument(
            "method",
            expected=f"another one with H_kv = {first.heads_kv} and {group.size()} ranks",
            got="'heads'",
            hint="it gives every rank H_kv / W whole key heads; use 'all_gather', 'ring' or 'auto'",
        )
    return choose(signatures, visible, group, device)


def choose(signatures: list[Signature], visible: Visible, group: dist.ProcessGroup, device: torch.device) -> Agreement:
    """How data travels in a call that all ranks have agreed upon; the same on every rank."""
    first = signatures[0]
    one_host = first.device == "cuda" and len({one.host for one in signatures}) == 1
    transport: Transport = "symmetric" if one_host else "collective"
    if first.transport != "auto":
        transport = first.transport
        if transport == "symmetric" and not one_host:
            raise InvalidArgument(
                "transport",
                expected="'collective' or 'auto' for tensors on CPUs or on several hosts",
                got="'symmetric'",
                hint="memory can be written to by GPUs of the same host only",
            )
    sizes = first.batch, first.heads, first.heads_kv, first.head_dim, first.dtype.itemsize
    problem = model.Problem(*sizes, visible)
    found = tuple(model.estimates(problem, transport == "symmetric"))
    gathered_bytes, memory = problem.token_bytes * visible.keys.total, min(one.memory for one in signatures)
    method: str
    if first.method != "auto":
        method, because = first.method, "method names it"
    elif memory and gathered_bytes > memory // MEMORY_PART:
        method, because = "ring", f"all keys and values would take {gathered_bytes / 1e9:.1f} GB of every GPU"
    else:
        method, because = found[0].method, "it has the shortest estimate"
    by_token = all(one.by_token for one in signatures)
    chosen = cast(Method, method), transport, by_token, problem.is_short
    return Agreement(
        *(weakref.ref(group), group.rank(), visible, *chosen, device, model.head_groups(problem)),
        *(found, because, first.softcap, first.scale),
    )


def check_lengths(argument: str, got: tuple[int, ...], given: tuple[int, ...] | int | None, order: Order) -> None:
    """Refuse shards that are not as long as `lengths` says."""
    if given is None:
        return
    wanted = even(given, len(got), order).lengths if isinstance(given, int) else given
    if wanted != got:
        raise InvalidArgument(
            "lengths",
            expected=f"{got}, the tokens of {argument} on the ranks",
            got=f"{given}" if wanted == given else f"{given}, which are {wanted}",
            hint="pass lengths=None where queries and keys are not of one length",
        )


def of_rank(error: MicrosdpaError, rank: int) -> MicrosdpaError:
    """An error of another rank, which it names."""
    error.args = (f"rank {rank}: {error}",)
    return error


def mask_of(
    agreed: Agreement, document_ids: documents.Ids | None, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor | None:
    """What this rank's queries see where slices of keys do not say it; None where they do."""
    visible, rank = agreed.visible, None if agreed.method == "heads" else agreed.rank
    if document_ids is None:
        captured = query.is_cuda and torch.cuda.is_current_stream_capturing() and "ranges" not in vars(agreed)
        return agreed.new_ranges() if captured else agreed.ranges
    pair = tuple(document_ids) if isinstance(document_ids, (tuple, list)) else (document_ids,)
    of_query, of_key = documents.check(pair, query, key)
    whole = []
    for ids, layout in ((of_query, visible.queries), (of_key, visible.keys)):
        whole.append(gathered(ids, layout, agreed.group, 1))
    return visible.mask(rank, (whole[0], whole[1]))


def gathered(shard: torch.Tensor, layout: Layout, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """The whole sequence of a tensor from the shards of all ranks: a collective call."""
    shape = list(shard.shape)
    shape[dim] = layout.longest
    padded = shard.new_zeros(shape)
    padded.narrow(dim, 0, shard.shape[dim]).copy_(shard)
    found = shard.new_empty((layout.world, *shape))
    dist.all_gather_into_tensor(found.flatten(0, 1), padded, group=group)
    shape[dim] = layout.total
    whole = shard.new_empty(shape)
    for rank in range(layout.world):
        put(found[rank], whole, layout, rank, dim)
    return whole


def shard(tensor: torch.Tensor, group: Group = None, *, dim: int = 2, order: Order = "balanced") -> torch.Tensor:
    """This rank's shard of a tensor that all ranks have: the tokens in dimension `dim` that `order` gives it.

    Raises:
        InvalidArgument: there is no such dimension, order or group.
    """
    process_group = agree.resolve(group)
    _check_dim(tensor, dim, order)
    layout = even(tensor.shape[dim], process_group.size(), order)
    return take(tensor, layout, process_group.rank(), dim)


def unshard(tensor: torch.Tensor, group: Group = None, *, dim: int = 2, order: Order = "balanced") -> torch.Tensor:
    """The whole tensor on every rank, from the shards that shard() or attention() gave: a collective call.

    Raises:
        InvalidArgument: there is no such dimension, order or group, or shapes of ranks do not fit.
    """
    process_group = agree.resolve(group)
    _check_dim(tensor, dim, order)
    dim %= tensor.dim()
    shapes = agree.peers(process_group).exchange((*tensor.shape, tensor.dtype))
    for rank, one in enumerate(shapes):
        if one[:dim] + one[dim + 1 :] != shapes[0][:dim] + shapes[0][dim + 1 :]:
            raise InvalidArgument(
                "tensor",
                expected=f"{shapes[0]} but for dimension {dim}, as on rank 0",
                got=f"{one} on rank {rank}",
                hint="all ranks pass shards of one tensor",
            )
    layout = Layout(order, tuple(one[dim] for one in shapes))
    if layout.expected != layout.lengths:
        raise InvalidArgument(
            "tensor",
            expected=f"lengths {layout.expected} of the ranks, as order={order!r} spreads {layout.total} tokens",
            got=f"{layout.lengths}",
            hint="use shard(), or order='contiguous', which leaves lengths open",
        )
    return gathered(tensor, layout, process_group, dim)


def _check_dim(tensor: torch.Tensor, dim: int, order: str) -> None:
    if not -tensor.dim() <= dim < tensor.dim():
        raise InvalidArgument(
            "dim", expected=f"a dimension of a tensor of {tensor.dim()}", got=str(dim), hint="2 for [B, H, S, D]"
        )
    if order not in get_args(Order):
        raise InvalidArgument("order", expected=f"one of {get_args(Order)}", got=repr(order), hint="'balanced'")
