"""The specification: attention in FP64, and the same in the inputs' own dtype, which tolerances are derived from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

MAX_CHUNK_SCORES = 2**25
_WORD = 2**32 - 1


def kept_of(dropout_p: float) -> tuple[int, float]:
    """How many of 65,536 probabilities are kept, and their factor, which is 0 where none is.

    `dropout_p`, from 0 to 1, is rounded to a multiple of 2**-16; one below 1 keeps some.
    """
    kept = 0 if dropout_p == 1.0 else max(1, round((1.0 - dropout_p) * 65536))
    return kept, 65536 / kept if kept else 0.0


def philox(counter: list[torch.Tensor], key: tuple[int, int]) -> list[torch.Tensor]:
    """Philox 4x32-10 (Salmon et al., SC 2011): four int64 tensors of 32 bits for four such tensors, any shapes."""
    a, b, c, d = counter
    first, second = key
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57  # of their 64 bits the sign is one
        a, b = (right >> 32 & _WORD) ^ b ^ first, right & _WORD
        c, d = (left >> 32 & _WORD) ^ d ^ second, left & _WORD
        first, second = first + 0x9E3779B9 & _WORD, second + 0xBB67AE85 & _WORD
    return [a, b, c, d]


def kept(dropout_p: float, rng_state: torch.Tensor, heads: torch.Tensor, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """Which probabilities a call with dropout keeps, bool [heads, S_q, S_k].

    rng_state has the call's seed and offset, [2] int64; heads are numbers of heads, batch entry times H plus head.

    A square of 16 queries and 16 keys has 32 turns of the generator: one for every query i and even key j below 8.
    Its words are of keys j, j + 8, j + 1 and j + 9; the low half of each is of query i, the high half of i + 8.
    """
    seed, offset = (int(number) for number in rng_state.tolist())
    position = offset // 4
    key = seed & _WORD, seed >> 32 & _WORD ^ position >> 32 & _WORD
    rows, columns, device = -(-seqlen_q // 16), -(-seqlen_k // 16), heads.device
    column = torch.arange(columns * 4, device=device)
    row = torch.arange(rows * 8, device=device)[:, None].expand(-1, columns * 4)
    counter = [column.expand_as(row), row, heads[:, None, None], torch.full_like(row, position & _WORD)]
    words = torch.stack([word.expand(len(heads), *row.shape) for word in philox(counter, key)], dim=-1)
    numbers = torch.stack([words & 0xFFFF, words >> 16], dim=-1).view(len(heads), rows, 8, columns, 4, 2, 2, 2)
    # [head, square, query, square, pair, odd key, upper keys, upper queries] in the order of queries and keys
    numbers = numbers.permute(0, 1, 7, 2, 3, 6, 4, 5).reshape(len(heads), rows * 16, columns * 16)
    return numbers[:, :seqlen_q, :seqlen_k] < kept_of(dropout_p)[0]


@dataclass(frozen=True)
class _Options:
    """The keyword arguments of `oracle`."""

    causal: str | None = None
    scale: float | None = None
    attn_mask: torch.Tensor | None = None
    window: tuple[int, int] | None = None
    softcap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    document_ids: Any = None
    block_mask: Any = None
    dropout_p: float = 0.0
    rng_state: torch.Tensor | None = None


def oracle(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: str | None = None,
    scale: float | None = None,
    attn_mask: torch.Tensor | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    document_ids: Any = None,
    block_mask: Any = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in FP64: output [B, H, S_q, D] and LSE [B, H, S_q].

    query is [B, H, S_q, D]; key and value are [B, H_kv, S_k, D] and query head h reads key head h // (H / H_kv).
    causal is None, "upper_left" (query i sees keys j <= i) or "lower_right" (j <= i + S_k - S_q). A row that sees no
    key gives zeros and LSE -inf.

    The score of query i and key j is x = scale * q k; with softcap, softcap * tanh(x / softcap); with alibi_slopes ([H]
    or [B, H]) less slope * |p - j|, where p is i, or i + S_k - S_q under "lower_right"; plus attn_mask where it holds
    numbers. A key is hidden where attn_mask is False or -inf, and outside window: p - left <= j <= p + right, where -1
    is no end. An attn_mask [..., 2] of int32 shows query i the keys attn_mask[..., i, 0] <= j < attn_mask[..., i, 1].
    document_ids ([S], [B, S] or a pair of those of queries and keys) hide keys of other documents. block_mask (a
    BlockMask of flex_attention, or what has such lists) hides keys of blocks that are not listed, and in those of
    kv_indices what mask_mod hides. sinks ([H]) are one more score of each row, without a value; LSE counts them.

    With dropout_p over 0 the probabilities that `kept` gives for rng_state are multiplied by its factor, and the others
    by 0; LSE stays as it is.
    """
    masks = attn_mask, window, softcap, alibi_slopes, sinks, document_ids, block_mask
    return _attention(query, key, value, torch.float64, _Options(causal, scale, *masks, dropout_p, rng_state))


@dataclass(frozen=True)
class Sequence:
    """One sequence of a call with packed or paged tensors.

    Attributes:
        tensors: query [1, H, S_q, D], key and value [1, H_kv, S_k, D]; keys are gathered from their pages.
        first: its first query, of packed ones; None where query is [B, S_q, H, D].
        index: its place in the batch.
        lacking: keys on pages that the cache does not have, [S_k], which are zeros here; None where there are none.
    """

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    index: int
    first: int | None
    lacking: torch.Tensor | None = None

    def undefined(self, bias: torch.Tensor | None) -> torch.Tensor:
        """Queries that see a key which the cache lacks, [S_q]: their outputs are NaN. bias is of lower_right_bias."""
        query, key, _ = self.tensors
        if self.lacking is None:
            return torch.zeros(query.shape[2], dtype=torch.bool, device=query.device)
        seen = self.lacking.expand(query.shape[2], key.shape[2])
        return (seen if bias is None else seen & (bias[0] != -torch.inf)).any(-1)

    def rows(self, out: torch.Tensor) -> torch.Tensor:
        """The part of an output, [S_q, H, D]."""
        return out[self.index] if self.first is None else out[self.first : self.first + self.tensors[0].shape[2]]

    def lse_rows(self, lse: torch.Tensor) -> torch.Tensor:
        """The part of an LSE, [H, S_q]."""
        return lse[self.index] if self.first is None else lse[:, self.first : self.first + self.tensors[0].shape[2]]


def sequences(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], given: dict[str, torch.Tensor]
) -> Iterator[Sequence]:
    """The sequences of a call of sdpa_varlen, whose tensors of offsets, lengths, pages and scales are `given` by name.

    Keys and values with scales come as the numbers that they stand for, in FP64.
    """
    query, key, value = inputs
    offsets, key_offsets = given.get("query_offsets"), given.get("key_offsets")
    lengths, table = given.get("lengths"), given.get("page_table")
    k_scale, v_scale = given.get("k_scale"), given.get("v_scale")
    cached = {"key": key, "value": value}
    for name, scale in (("key_scale", k_scale), ("value_scale", v_scale)):
        if scale is not None and scale.shape == key.shape[:-1]:  # one of every token
            cached[name] = scale
    batch = query.shape[0] if offsets is None else offsets.shape[0] - 1
    for b in range(batch):
        first, end = (0, query.shape[1]) if offsets is None else _range(offsets, b, query.shape[0])
        own_query = query[b] if offsets is None else query[first:end]
        first_key, lacking = 0, None
        if table is not None:
            most = table.shape[1] * key.shape[1]
        elif key_offsets is not None:
            first_key, end_key = _range(key_offsets, b, key.shape[0])
            most = end_key - first_key
        else:
            most = key.shape[1]
        count = most if lengths is None else max(0, min(most, int(lengths[b])))
        if table is not None:
            pages = table[b, : -(-count // max(1, key.shape[1]))].long()
            exists = (pages >= 0) & (pages < key.shape[0])
            if not exists.all():
                lacking = ~exists.repeat_interleave(key.shape[1])[:count]
            gathered = {name: _on_pages(tensor, pages, exists).flatten(0, 1)[:count] for name, tensor in cached.items()}
        elif key_offsets is not None:
            gathered = {name: tensor[first_key:][:count] for name, tensor in cached.items()}
        else:
            gathered = {name: tensor[b, :count] for name, tensor in cached.items()}
        own = [_numbers(gathered, name, scale, b) for name, scale in (("key", k_scale), ("value", v_scale))]
        yield Sequence(
            tuple(tensor.transpose(0, 1)[None] for tensor in (own_query, *own)),  # type: ignore[arg-type]
            b,
            None if offsets is None else first,
            lacking,
        )


def _range(offsets: torch.Tensor, b: int, most: int) -> tuple[int, int]:
    """The first row of sequence b and one past the last, within the rows that there are, as kernels take them."""
    first = min(max(int(offsets[b]), 0), most)
    return first, max(min(int(offsets[b + 1]), most), first)


def _on_pages(tensor: torch.Tensor, pages: torch.Tensor, exists: torch.Tensor) -> torch.Tensor:
    """These pages of a cache; zeros for those that it does not have."""
    if exists.all():
        return tensor[pages]
    found = torch.zeros(len(pages), *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
    found[exists] = tensor[pages[exists]]
    return found


def _numbers(gathered: dict[str, torch.Tensor], name: str, scale: torch.Tensor | None, b: int) -> torch.Tensor:
    """Keys or values of a sequence, [S_k, H_kv, D]; with a scale, the numbers that they stand for."""
    if scale is None:
        return gathered[name]
    of_tokens = gathered.get(f"{name}_scale")
    if of_tokens is None:
        of_tokens = scale[b] if scale.dim() == 2 else scale
    return gathered[name].float().double() * of_tokens.double()[..., None]


def lower_right_bias(
    query: torch.Tensor,
    key: torch.Tensor,
    causal: bool,
    window: tuple[int, int] | None,
    slopes: torch.Tensor | None,
) -> torch.Tensor | None:
    """What is added to scores, [1 or H, S_q, S_k] in FP64, where query i stands at key i + S_k - S_q; None for nothing.

    query is [1, H, S_q, D], key [1, H_kv, S_k, D], slopes [H]; the window is that of `oracle`.
    """
    if not causal and window is None and slopes is None:
        return None
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    device = query.device
    distance = torch.arange(seqlen_k, device=device) - torch.arange(seqlen_q, device=device)[:, None]
    distance = distance - (seqlen_k - seqlen_q)
    left, right = window or (-1, -1)
    hidden = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if causal:
        hidden |= distance > 0
    if left != -1:
        hidden |= distance < -left
    if right != -1:
        hidden |= distance > right
    bias = torch.zeros(1, seqlen_q, seqlen_k, dtype=torch.float64, device=device)
    if slopes is not None:
        bias = bias - slopes.double()[:, None, None] * distance.abs()
    return bias.masked_fill(hidden, -torch.inf)


def varlen(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    given: dict[str, torch.Tensor],
    *,
    exact: bool = True,
    causal: bool = False,
    scale: float | None = None,
    masks: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[torch.Tensor, torch.Tensor]:
    """What sdpa_varlen gives, and its LSE: by `oracle`, or without `exact` by `eager`, a sequence at a time.

    `given` are the tensors of offsets, lengths and pages by name; `masks` are window, softcap, alibi_slopes and sinks.
    """
    query = inputs[0]
    dtype = torch.float64 if exact else query.dtype
    out = query.new_zeros(*query.shape[:-1], inputs[2].shape[-1], dtype=dtype)
    packed = "query_offsets" in given
    shape = (query.shape[1], query.shape[0]) if packed else (query.shape[0], query.shape[2], query.shape[1])
    lse = torch.full(shape, -torch.inf, dtype=torch.promote_types(dtype, torch.float32), device=query.device)
    slopes, sinks = masks.get("alibi_slopes"), masks.get("sinks")
    for one in sequences(inputs, given):
        own_query, key, value = one.tensors
        own_slopes = slopes if slopes is None or slopes.dim() == 1 else slopes[one.index]
        bias = lower_right_bias(own_query, key, causal, masks.get("window"), own_slopes)
        got, got_lse = (oracle if exact else eager)(
            own_query,
            key,
            value,
            scale=scale,
            attn_mask=None if bias is None else bias[None],
            softcap=masks.get("softcap"),
            sinks=sinks,
        )
        undefined = one.undefined(bias)
        one.rows(out).copy_(got[0].transpose(0, 1).masked_fill(undefined[:, None, None], torch.nan))
        one.lse_rows(lse).copy_(got_lse[0].masked_fill(undefined, torch.nan))
    return out, lse


def eager(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in the inputs' dtype: products, final scores, probabilities and output are each rounded to it.

    `options` are those of `oracle`. The error against it is what an ordinary implementation costs. LSE is taken in FP32
    from the rounded scores.
    """
    return _attention(query, key, value, query.dtype, _Options(**options))


def _with_hidden(query: torch.Tensor, key: torch.Tensor, options: _Options) -> torch.Tensor | None:
    """An attn_mask of booleans or numbers that also hides what ranges, documents and blocks hide."""
    keys, device = torch.arange(key.shape[2], device=query.device), query.device
    attn_mask, document_ids, block_mask = options.attn_mask, options.document_ids, options.block_mask
    shown = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    if attn_mask is not None and attn_mask.dtype == torch.int32:
        first, last = (end[..., None] for end in attn_mask.unbind(dim=-1))
        shown = shown & (first <= keys) & (keys < last)
        attn_mask = None
    if document_ids is not None:
        of_query, of_key = document_ids if isinstance(document_ids, (tuple, list)) else (document_ids, document_ids)
        of_query, of_key = (ids if ids.dim() == 2 else ids[None] for ids in (of_query, of_key))
        shown = shown & (of_query[:, None, :, None] == of_key[:, None, None])
    if block_mask is not None:
        shown = shown & _shown_by_blocks(block_mask, query.shape[2], key.shape[2])
    if attn_mask is None:
        return shown
    return attn_mask & shown if attn_mask.dtype == torch.bool else attn_mask.where(shown, -torch.inf)


def _shown_by_blocks(block_mask: Any, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """What a BlockMask shows, bool [B | 1, H | 1, S_q, S_k], one entry after the other; or the mask of a BlockTable."""
    if not hasattr(block_mask, "kv_indices"):
        mask: torch.Tensor = block_mask.mask
        return mask
    counts = block_mask.kv_num_blocks
    (batch, heads, rows), device = counts.shape, counts.device
    size_q, size_k = block_mask.BLOCK_SIZE
    b, h = torch.arange(batch, device=device)[:, None, None, None], torch.arange(heads, device=device)[:, None, None]
    i, j = torch.arange(seqlen_q, device=device)[:, None], torch.arange(seqlen_k, device=device)
    asked = block_mask.mask_mod(b, h, i, j).expand(batch, heads, seqlen_q, seqlen_k)
    shown = torch.zeros(batch, heads, seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    for kind, among in (("kv", asked), ("full_kv", torch.ones_like(asked))):
        counts, indices = getattr(block_mask, f"{kind}_num_blocks"), getattr(block_mask, f"{kind}_indices")
        if counts is None:
            continue
        for entry in torch.cartesian_prod(*(torch.arange(size) for size in (batch, heads, rows))).tolist():
            row = slice(entry[2] * size_q, (entry[2] + 1) * size_q)
            for block in indices[tuple(entry)][: int(counts[tuple(entry)])].tolist():
                place = entry[0], entry[1], row, slice(block * size_k, (block + 1) * size_k)
                shown[place] = among[place]
    return shown


def changed_rows(
    rows: torch.Tensor,
    norm: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    eps: float = 1e-6,
    angles: tuple[torch.Tensor, torch.Tensor] | None = None,
    positions: torch.Tensor | None = None,
    *,
    layer: bool = False,
    interleaved: bool = False,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Rows of Q or K [B, H, S, D] behind a norm over D and rotary embedding, computed and given in `dtype`.

    The norm is x / sqrt(mean(x^2) + eps) * weight with norm = (weight [D], None); with `layer`, LayerNorm with weight
    and bias. angles = (cos, sin), [positions, R / 2]: a pair (a, b) of the first R elements becomes
    (a cos - b sin, a sin + b cos), with the angles of row positions [S] or [B, S] of the tables. Pairs are neighbours
    where `interleaved`, else R / 2 apart.
    """
    found, (weight, bias) = rows.to(dtype), norm
    if weight is not None:
        if layer:
            found = found - found.mean(dim=-1, keepdim=True)
        found = found * (found.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * weight.to(dtype)
        if bias is not None:
            found = found + bias.to(dtype)
    if angles is not None and positions is not None:
        at = positions.clamp(0, angles[0].shape[0] - 1).long()
        cos, sin = (table.to(dtype)[at].unsqueeze(-3) for table in angles)
        columns = 2 * angles[0].shape[1]
        turned, rest = found[..., :columns], found[..., columns:]
        if interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
        else:
            a, b = turned.chunk(2, dim=-1)
            turned = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
        found = torch.cat([turned, rest], dim=-1)
    return found


LARGE_PRODUCT = 2**22
"""Multiplications from which on a product of FP16 matrices goes by way of FP32 on a CPU."""


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Product of two stacks of matrices.

    Both ways of a CPU's FP16 product sum in FP32 and round once, in another order; torch's own takes up to 80 times as
    long. Over 150 products the errors were the same, in the root mean square, to four digits.
    """
    if a.dtype == torch.float16 and a.device.type == "cpu" and a.numel() * b.shape[-1] >= LARGE_PRODUCT:
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype, options: _Options
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, seqlen_q, head_dim = query.shape
    seqlen_k, columns = value.shape[2:]
    factor = head_dim**-0.5 if options.scale is None else options.scale
    device = query.device
    out = torch.zeros(batch * heads, seqlen_q, columns, dtype=dtype, device=device)
    wide = torch.promote_types(dtype, torch.float32)
    lse = torch.full((batch * heads, seqlen_q), -torch.inf, dtype=wide, device=device)
    position = seqlen_k - seqlen_q if options.causal == "lower_right" else 0
    distance = torch.arange(seqlen_k, device=device) - torch.arange(seqlen_q, device=device)[:, None] - position
    left, right = options.window or (-1, -1)
    hidden = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if options.causal is not None:
        hidden |= distance > 0
    if left != -1:
        hidden |= distance < -left
    if right != -1:
        hidden |= distance > right
    attn_mask, softcap = _with_hidden(query, key, options), options.softcap
    if attn_mask is not None:
        attn_mask = attn_mask.expand(batch, heads, seqlen_q, seqlen_k)
    slopes = None if options.alibi_slopes is None else options.alibi_slopes.expand(batch, heads)
    heads_at_once = max(1, MAX_CHUNK_SCORES // max(1, seqlen_q * seqlen_k))
    for first in range(0, batch * heads, heads_at_once):
        index = torch.arange(first, min(first + heads_at_once, batch * heads), device=device)
        b, h = index // heads, index % heads
        h_kv = h // (heads // key.shape[1])
        scores = _product(query[b, h].to(dtype), key[b, h_kv].to(dtype).mT) * factor
        exact = scores.to(wide)
        if softcap is not None:
            exact = softcap * (exact / softcap).tanh()
        if slopes is not None:
            exact = exact - slopes[b, h].to(wide)[:, None, None] * distance.abs()
        unseen = hidden.expand_as(exact)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            unseen = unseen | ~attn_mask[b, h]
        elif attn_mask is not None:
            bias = attn_mask[b, h].to(wide)
            unseen = unseen | (bias == -torch.inf)
            exact = exact + bias
        # A finite score stays finite when it is rounded: what is lowest of all in one type is so in another.
        limit = torch.finfo(dtype).max
        scores = exact.where(exact.isinf(), exact.clamp(-limit, limit)).to(dtype).masked_fill(unseen, -torch.inf)
        if options.sinks is not None:
            column = options.sinks[h].to(dtype)[:, None, None].expand(-1, seqlen_q, 1)
            scores = torch.cat([scores, column], dim=-1)
        probabilities = scores.softmax(dim=-1)[..., :seqlen_k].masked_fill(unseen, 0.0)
        if options.dropout_p and options.rng_state is not None:
            some = kept(options.dropout_p, options.rng_state, index, seqlen_q, seqlen_k)
            probabilities = (probabilities * kept_of(options.dropout_p)[1]).masked_fill(~some, 0.0)
        out[index] = _product(probabilities, value[b, h_kv].to(dtype))
        lse[index] = scores.to(wide).logsumexp(dim=-1)
    return out.view(batch, heads, seqlen_q, columns), lse.view(batch, heads, seqlen_q)
