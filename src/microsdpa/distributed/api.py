"""The public call, attention(): of sequences that are spread over the ranks of a group."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from microsdpa.call import documents
from microsdpa.call.call import Call
from microsdpa.call.options import Options
from microsdpa.call.validate import check
from microsdpa.distributed import agree, all_gather, model, symmetric
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
        seqlen_q, seqlen_k, by_token: of this rank's tensors, as it likes.
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
    method: str
    transport: str
    seqlen_q: int
    seqlen_k: int
    by_token: bool


OWN = "seqlen_q", "seqlen_k", "by_token"
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
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of sequences that are spread over the ranks of a group: softmax(scale * Q K^T + mask) V, exact.

    Every rank of the group calls it with its own shard, and gets the outputs of its own queries. Tensors are on CUDA
    devices, one for each rank, or on the CPU.

    What ranks have to know of one another is exchanged at the first call of every kind and remembered. Where shapes of
    some ranks alone change from then on, call forget(group) on every rank.

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
        softcap, scale, enable_gqa: as sdpa has them.
        method: "all_gather", "ring" or "heads"; "auto" takes the one of the shortest estimate, which explain() prints.
        transport: "symmetric", the copy engines of the GPUs of one host, or "collective", NCCL or gloo; "auto" takes
            the first where it can.
        return_lse: also return the natural logarithm of the softmax's denominator, [B, H, S_local] in FP32.

    Returns:
        The output, like query, or (output, LSE) with return_lse.

    Raises:
        InvalidArgument: an argument that no call could accept, on any rank: every rank raises it, and it names the
            rank.
        UnsupportedProblem: a call that no kernel computes.
    """
    options = Options(False, causal, scale, enable_gqa, window, softcap)
    agreed = agree_upon((query, key, value), group, order, options, document_ids, method, transport)
    mask = mask_of(agreed, document_ids, query, key)
    out, lse = all_gather.forward(agreed, query, key, value, mask, return_lse)
    if return_lse:
        assert lse is not None
        return out, lse
    return out


def agree_upon(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    group: Group,
    order: Order,
    options: Options,
    document_ids: documents.Ids | None,
    method: str,
    transport: str,
) -> Agreement:
    """What the ranks agree upon for a call; a collective call of the group if it is one of a new kind.

    Raises:
        MicrosdpaError: an argument is wrong on some rank, or not the same on all.
    """
    process_group = agree.resolve(group)
    try:
        mine = signature(inputs, order, options, document_ids, method, transport)
    except MicrosdpaError as error:
        agree.exchange(error, process_group)
        raise
    remembered = agree.known(process_group)
    found: Agreement | None = remembered.get(mine)
    if found is not None:
        return found
    agreed = compare(agree.exchange(mine, process_group), process_group)
    remembered[mine] = agreed
    return agreed


def signature(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    order: Order,
    options: Options,
    document_ids: documents.Ids | None,
    method: str,
    transport: str,
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
    ids = None
    if document_ids is not None:
        pair = tuple(document_ids) if isinstance(document_ids, (tuple, list)) else (document_ids,)
        ids = tuple(one.shape[0] for one in documents.check(pair, query, key))
    (batch, heads, seqlen_q, head_dim), (_, heads_kv, seqlen_k, _) = query.shape, key.shape
    by_token = symmetric.is_by_token(key) and symmetric.is_by_token(value)
    return Signature(
        *(batch, heads, heads_kv, head_dim, query.dtype, query.device.type, order, checked.causal),
        *(options.window or (UNBOUNDED, UNBOUNDED), ids, options.softcap, checked.scale, method, transport),
        *(seqlen_q, seqlen_k, by_token),
    )


def compare(found: list[Signature | MicrosdpaError], group: dist.ProcessGroup) -> Agreement:
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
    method, chosen = model.choose(first, visible, group)
    by_token = all(one.by_token for one in signatures)
    ratio = model.ratio(first, visible)
    return Agreement(group, group.rank(), visible, method, chosen, by_token, ratio, first.softcap, first.scale)


def of_rank(error: MicrosdpaError, rank: int) -> MicrosdpaError:
    """An error of another rank, which it names."""
    error.args = (f"rank {rank}: {error}",)
    return error


def mask_of(
    agreed: Agreement, document_ids: documents.Ids | None, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor | None:
    """What this rank's queries see where slices of keys do not say it; None where they do."""
    visible = agreed.visible
    if document_ids is None:
        if not any(piece.ranged for piece in visible.pieces[agreed.rank]):
            return None
        return visible.ranges(agreed.rank, query.device)
    pair = tuple(document_ids) if isinstance(document_ids, (tuple, list)) else (document_ids,)
    of_query, of_key = documents.check(pair, query, key)
    whole = []
    for ids, layout in ((of_query, visible.queries), (of_key, visible.keys)):
        whole.append(gathered(ids, layout, agreed.group, 1))
    return visible.mask(agreed.rank, (whole[0], whole[1]))


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
    shapes = agree.exchange((*tensor.shape, tensor.dtype), process_group)
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
