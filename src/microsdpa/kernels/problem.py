"""Problem: the frozen description of one attention call, all that kernel selection may depend on."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, get_args

DType = Literal["float16", "bfloat16"]
Causal = Literal["upper_left", "lower_right"]
MaskType = Literal["bool", "float16", "bfloat16", "float32", "int32", "uint8"]
PositionType = Literal["int32", "int64"]
Operands = Literal["fp8", "int8_fp8", "int8_fp16"]
"""What Q and K, and then V and P, are in 8 bits: E4M3; INT8 and E4M3; INT8 and the 16-bit type of the output."""
OPERANDS: tuple[Operands, ...] = get_args(Operands)
Precision = Literal["fp8", "fp8_fast", "int8_fp8", "int8_fp16"]
"""What sdpa(precision=) takes: operands, and how they are made (kernels/quantize/spec.py)."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

CacheType = Literal["e4m3", "int8"]
"""8-bit types of keys and values beside queries of 16 bits."""

ELEMENT = 2
"""Bytes of an element of operands in 16 bits."""
ELEMENT_BYTES: dict[str, int] = {"float16": ELEMENT, "bfloat16": ELEMENT}
VECTOR_BYTES = 16
"""Alignment, in bytes, at which every row of every tensor can be read with the widest loads."""
SMALLEST_FACTOR, LARGEST_FACTOR = 2.0**-126, 2.0**127
"""Least soft cap, and largest scale and soft cap: float32 holds them and log2(e) times them with full precision."""


@dataclass(frozen=True)
class MaskKind:
    """What decides about the scores of a call beside a causal mask; sizes and values are not part of it.

    Attributes:
        tensor: element type of a mask tensor; "bool" hides, "int32" are the ends of the keys that a row sees, "uint8"
            are booleans with a summary (call/blocks.py), the others are added to the scores.
        left: whether a window hides keys far before a query.
        right: whether a window hides keys far after a query.
        softcap: whether scores are soft-capped.
        alibi: whether there are ALiBi slopes.
        sinks: element type of the heads' sink logits.
        per_batch: whether batch entries have masks of their own.
        per_head: whether heads do.
        per_query: whether queries do.
        bulk: whether tensor maps can describe the mask tensor, whose rows then start on 16 bytes.
        unaligned: else, whether keys of a mask of numbers lie one after another at least.
    """

    tensor: MaskType | None = None
    left: bool = False
    right: bool = False
    softcap: bool = False
    alibi: bool = False
    sinks: MaskType | None = None
    per_batch: bool = False
    per_head: bool = False
    per_query: bool = False
    bulk: bool = False
    unaligned: bool = False

    def __str__(self) -> str:
        """What there is, for a message."""
        own = {"int32": "ranges of keys", "uint8": "a table of blocks"}
        parts = [own.get(self.tensor, f"a {self.tensor} mask")] if self.tensor else []
        parts += ["a window"] if self.left or self.right else []
        parts += ["softcap"] if self.softcap else []
        parts += ["ALiBi slopes"] if self.alibi else []
        parts += ["sinks"] if self.sinks else []
        return " and ".join(parts)


NormKind = Literal["rms", "layer"]
ROTARY_COLUMNS = 16
"""What the number of rotated columns is a multiple of."""


@dataclass(frozen=True)
class PrologueKind:
    """What is done to the rows of Q and K ahead of the products: a norm over D, and rotary embedding behind it.

    Attributes:
        rotary: columns of Q that are rotated; 0 for none.
        interleaved: whether pairs that are rotated are neighbours; else they are rotary / 2 apart.
        angles: type of cosines and sines.
        query_positions: type of the queries' positions in memory; None where they are counted.
        key_positions: the same of the keys.
        rotates_key: whether K is rotated as Q is.
        query_norm: norm of Q.
        key_norm: norm of K; the same as that of Q where both have one.
        weights: type of the norms' weights and biases.
        biased: whether the norms have biases.
    """

    rotary: int = 0
    interleaved: bool = False
    angles: MaskType | None = None
    query_positions: PositionType | None = None
    key_positions: PositionType | None = None
    rotates_key: bool = True
    query_norm: NormKind | None = None
    key_norm: NormKind | None = None
    weights: MaskType | None = None
    biased: bool = False

    @property
    def changes_query(self) -> bool:
        """Whether anything is done to Q."""
        return self.rotary > 0 or self.query_norm is not None

    @property
    def changes_key(self) -> bool:
        """Whether anything is done to K."""
        return (self.rotary > 0 and self.rotates_key) or self.key_norm is not None

    def __str__(self) -> str:
        """What there is, for a message."""
        norm = self.query_norm or self.key_norm
        parts = [f"{'an RMS norm' if norm == 'rms' else 'a LayerNorm'} of Q and K"] if norm else []
        parts += [f"rotary embedding of {self.rotary} columns"] if self.rotary else []
        return " and ".join(parts)


@dataclass(frozen=True)
class CacheKind:
    """Keys and values of 8 bits beside queries of 16 bits.

    Attributes:
        dtype: of both.
        each_token: whether each token of a key head has a scale of K and one of V; else all of a head have.
    """

    dtype: CacheType
    each_token: bool = False

    def __str__(self) -> str:
        """What there is, for a message."""
        name = "INT8" if self.dtype == "int8" else "E4M3"
        return f"{name} keys and values beside 16-bit queries"


@dataclass(frozen=True)
class Problem:
    """One call of attention: O = softmax(scale * Q K^T + mask) V.

    Q and O are [batch, heads, seqlen_q, head_dim]; K and V are [batch, heads_kv, seqlen_k, head_dim]; query
    head h reads key head h // (heads / heads_kv).

    Attributes:
        causal: None; "upper_left" lets query i see keys j <= i; "lower_right" lets it see
            j <= i + seqlen_k - seqlen_q.
        mask: what else decides about the scores; None for nothing.
        alignment: bytes that divide every base pointer and every row, head and batch stride: 16, or else the
            size of one element.
        bulk: whether tensor maps can describe every tensor: no stride reaches 2**40 bytes.
        target: compilation target of the device, such as "sm_90a".
        operands: types of Q, K, V and P where they have 8 bits, and `dtype` is the output's; None for 16 bits.
        query_terms: 8-bit values whose sum an element of Q is, side by side in its rows.
        key_block: keys of a head that share a scale of 8-bit values, a power of two; 0 when all do.
        varlen: for sequences with lengths of their own, which the device alone knows: the largest power of two, up to
            64, that divides the keys of a page; 0 where the keys of a sequence follow one another. Then seqlen_q and
            seqlen_k are what a sequence has at most, and a causal mask is "lower_right". None for one length.
        packed_queries: whether such sequences share one tensor of queries. Of several ones seqlen_q is a hint then, and
            no bound, but at least their mean.
        dropout: whether probabilities are dropped.
        prologue: what is done to Q and K before; None for nothing.
        cache: 8-bit keys and values beside queries of 16 bits; None for one type of all.
        value_dim: columns of V and O; 0 where they have head_dim, as Q and K.
        continued: whether O and the LSE go on from those of other keys, which lie where they are written.
    """

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: DType
    causal: Causal | None = None
    mask: MaskKind | None = None
    alignment: int = VECTOR_BYTES
    bulk: bool = True
    target: str = "sm_90a"
    operands: Operands | None = None
    query_terms: int = 1
    key_block: int = 1
    varlen: int | None = None
    packed_queries: bool = False
    dropout: bool = False
    prologue: PrologueKind | None = None
    cache: CacheKind | None = None
    value_dim: int = 0
    continued: bool = False

    def __hash__(self) -> int:
        """Of what most problems differ in: the hash of all fields takes three times as long."""
        return hash((self.batch, self.seqlen_q, self.seqlen_k, self.heads, self.head_dim, self.dtype, self.causal))

    @functools.cached_property
    def any_size(self) -> Problem:
        """What many problems have in common: this one with one batch entry, query and key, and a group of heads."""
        further = self.cache, self.prologue, self.dropout, self.continued, self.value_dim
        group = self.heads // self.heads_kv
        return _of_any_size(
            group, self.head_dim, self.dtype, self.causal, self.mask, self.alignment, self.target, further
        )

    def with_sizes(self, batch: int, seqlen_q: int, seqlen_k: int) -> Problem:
        """The same problem of other sizes, in an eighth of the time of dataclasses.replace(); it keeps `any_size`."""
        found, fields = object.__new__(Problem), self.__dict__.copy()
        fields["batch"], fields["seqlen_q"], fields["seqlen_k"] = batch, seqlen_q, seqlen_k
        object.__setattr__(found, "__dict__", fields)
        return found

    def with_keys(self, seqlen_k: int) -> Problem:
        """The same problem with another number of keys."""
        return self.with_sizes(self.batch, self.seqlen_q, seqlen_k)

    @property
    def heads_as_queries(self) -> Problem:
        """The query heads of a key head as the queries of one head: a problem of one query that sees all keys."""
        found, fields = object.__new__(Problem), self.__dict__.copy()
        fields.pop("any_size", None)
        fields |= {"heads": self.heads_kv, "seqlen_q": self.heads // self.heads_kv, "causal": None}
        object.__setattr__(found, "__dict__", fields)
        return found

    @property
    def as_sequences(self) -> Problem:
        """The same problem as one of sequences whose lengths are all of one number, each with rows of its own."""
        found, fields = object.__new__(Problem), self.__dict__.copy()
        fields["varlen"] = 0
        object.__setattr__(found, "__dict__", fields)
        return found

    @property
    def flops(self) -> int:
        """Floating-point operations of both matrix products, halved when causal (the usual convention)."""
        columns = self.head_dim + (self.value_dim or self.head_dim)
        total = 2 * self.batch * self.heads * self.seqlen_q * self.seqlen_k * columns
        return total // 2 if self.causal else total

    @property
    def tensor_bytes(self) -> int:
        """Bytes of Q, K, V and O, each counted once."""
        element, cached = ELEMENT_BYTES[self.dtype], 1 if self.cache else ELEMENT_BYTES[self.dtype]
        rows = 2 * self.heads * self.seqlen_q * element + 2 * self.heads_kv * self.seqlen_k * cached
        return self.batch * rows * (self.head_dim + (self.value_dim or self.head_dim)) // 2


@functools.lru_cache(maxsize=1024)
def _of_any_size(
    heads: int,
    head_dim: int,
    dtype: DType,
    causal: Causal | None,
    mask: MaskKind | None,
    alignment: int,
    target: str,
    further: tuple[CacheKind | None, PrologueKind | None, bool, bool, int],
) -> Problem:
    sizes, (cache, prologue, dropout, continued, columns) = (1, heads, 1, 1, 1, head_dim), further
    more = {"cache": cache, "prologue": prologue, "dropout": dropout, "continued": continued, "value_dim": columns}
    return Problem(*sizes, dtype, causal, mask, alignment, target=target, **more)  # type: ignore[arg-type]


VIRTUAL = "compute_"
"""How targets begin that name PTX, which a driver compiles for the GPU at hand, and not machine code."""


def virtual(target: str) -> str:
    """The PTX of a target: "sm_89" gives "compute_89".

    Raises:
        ValueError: the target has features of its own, as sm_90a does: its PTX runs nowhere else.
    """
    if not target.removeprefix("sm_").isdecimal():
        raise ValueError(f"target: expected one whose PTX runs on later GPUs, such as 'sm_89', got {target!r}")
    return target.replace("sm_", VIRTUAL)


def target_of(capability: tuple[int, int]) -> str:
    """Compilation target of a compute capability: (9, 0) gives "sm_90a", since wgmma needs the "a" features."""
    major, minor = capability
    return f"sm_{major}{minor}{'a' if (major, minor) == (9, 0) else ''}"


@functools.lru_cache
def capability_of(target: str) -> tuple[int, int]:
    """Compute capability of a target: "sm_90a" gives (9, 0), and "compute_89", its PTX, (8, 9).

    Raises:
        ValueError: `target` is not of the form sm_NN, sm_NNa or compute_NN.
    """
    digits = target.removeprefix(VIRTUAL).removeprefix("sm_").rstrip("af")
    if not target.startswith(("sm_", VIRTUAL)) or not digits.isdecimal() or len(digits) < 2:
        raise ValueError(f"target: expected a name such as 'sm_89' or 'sm_90a', got {target!r}")
    return int(digits[:-1]), int(digits[-1])
