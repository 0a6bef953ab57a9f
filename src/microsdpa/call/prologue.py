"""Norms and rotary embedding of Q and K ahead of attention: what a call gives, and its checks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from microsdpa.call import tensors
from microsdpa.call.options import INTERLEAVED_BIT, LAYER_NORM_BIT, PROLOGUE_BIT, UNROTATED_KEY_BIT
from microsdpa.errors import InvalidArgument, UnsupportedProblem
from microsdpa.kernels.problem import ROTARY_COLUMNS, VECTOR_BYTES, MaskType, PositionType, PrologueKind

Rotary = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, [positions, R / 2] each."""
Positions = torch.Tensor | int
NormOf = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]
"""Weight of an RMS norm, [D], or weight and bias of a LayerNorm."""

_POSITION_TYPES: dict[torch.dtype, PositionType] = {torch.int32: "int32", torch.int64: "int64"}


class Prologue(NamedTuple):
    """Arguments of sdpa, not validated yet.

    Attributes:
        rotary: cos and sin, [positions, R / 2]: the first R columns of Q and K are rotated.
        interleaved: whether pairs that are rotated are neighbours; else they are R / 2 apart.
        positions: rows of the tables: None for those counted from 0, a first one, a tensor [S] or [B, S] for Q and K,
            or a pair of these, of Q and of K; the second may be None for keys that have been rotated.
        q_norm: weight [D] of an RMS norm of Q over D, or (weight, bias or None) of a LayerNorm.
        k_norm: the same of K.
        eps: of the norms.
    """

    rotary: Any = None
    interleaved: Any = False
    positions: Any = None
    q_norm: Any = None
    k_norm: Any = None
    eps: Any = 1e-6

    @property
    def norms(self) -> tuple[Any, Any, Any, Any]:
        """Weight and bias of the queries' norm, and those of the keys'; None for what there is not."""
        q_norm, k_norm = self.q_norm, self.k_norm
        return (
            *(tuple(q_norm) if isinstance(q_norm, (tuple, list)) else (q_norm, None)),
            *(tuple(k_norm) if isinstance(k_norm, (tuple, list)) else (k_norm, None)),
        )

    @property
    def is_layer_norm(self) -> bool:
        """Whether the norm is LayerNorm; else it is RMS norm."""
        return isinstance(self.q_norm, (tuple, list)) or isinstance(self.k_norm, (tuple, list))

    @property
    def pair(self) -> tuple[Any, Any]:
        """Positions of Q and of K."""
        return self.positions if isinstance(self.positions, (tuple, list)) else (self.positions, self.positions)  # type: ignore[return-value]

    @property
    def rotates_key(self) -> bool:
        """Whether keys are rotated."""
        return not (isinstance(self.positions, (tuple, list)) and self.positions[1] is None)

    @property
    def code(self) -> int:
        """Its part of the number of a call's options."""
        code = PROLOGUE_BIT | INTERLEAVED_BIT if self.interleaved else PROLOGUE_BIT
        if isinstance(self.q_norm, (tuple, list)) or isinstance(self.k_norm, (tuple, list)):
            code |= LAYER_NORM_BIT
        return code if self.positions is None or self.rotates_key else code | UNROTATED_KEY_BIT

    @property
    def is_plain(self) -> bool:
        """Whether a tuple and a bool are what they are to be, which a launch cannot see."""
        return (self.rotary is None or isinstance(self.rotary, (tuple, list))) and isinstance(self.interleaved, bool)

    def firsts(self, shift: int) -> tuple[int, int]:
        """Positions of the first query and key where they are counted; `shift` is S_k - S_q where masks align so."""
        of_query, of_key = self.pair
        if not isinstance(self.positions, (tuple, list)) and not isinstance(of_query, torch.Tensor):
            return (of_query or 0) + shift, of_key or 0
        numbers = (0 if one is None or isinstance(one, torch.Tensor) else one for one in (of_query, of_key))
        return next(numbers), next(numbers)

    def arguments(self, shift: int) -> tuple[Any, ...]:
        """What the launcher takes: cos, sin, positions of Q and K, weights and biases of the norms, numbers."""
        cos, sin = (None, None) if self.rotary is None else self.rotary
        weights = self.norms if self.is_layer_norm else (self.q_norm, None, self.k_norm, None)
        if self.positions is None:
            return cos, sin, None, None, *weights, shift, 0, self.eps
        in_memory = (one if isinstance(one, torch.Tensor) else None for one in self.pair)
        return cos, sin, *in_memory, *weights, *self.firsts(shift), self.eps

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors, by the names of sdpa's arguments."""
        cos, sin = (None, None) if self.rotary is None else self.rotary
        names = "q_norm", "q_norm's bias", "k_norm", "k_norm's bias"
        found = {"rotary's cos": cos, "rotary's sin": sin} | dict(zip(names, self.norms, strict=True))
        of_query, of_key = self.pair
        found |= {"rotary_positions": of_query, "rotary_positions of keys": None if of_key is of_query else of_key}
        return {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}

    def kind(self) -> PrologueKind:
        """What kernels are chosen for, of a group that check() has admitted."""
        cos, positions = (None if self.rotary is None else self.rotary[0]), self.pair
        weights = self.norms
        norm = ("layer" if self.is_layer_norm else "rms") if weights[0] is not None or weights[2] is not None else None
        given = next((weight for weight in weights if weight is not None), None)
        types = [_POSITION_TYPES[p.dtype] if isinstance(p, torch.Tensor) else None for p in positions]
        return PrologueKind(
            rotary=0 if cos is None else 2 * cos.shape[1],
            interleaved=bool(self.interleaved) and cos is not None,
            angles=None if cos is None else _name(cos),
            query_positions=types[0],
            key_positions=types[1],
            rotates_key=self.rotates_key,
            query_norm=norm if weights[0] is not None else None,  # type: ignore[arg-type]
            key_norm=norm if weights[2] is not None else None,  # type: ignore[arg-type]
            weights=None if given is None else _name(given),
            biased=weights[1] is not None or weights[3] is not None,
        )


def _name(tensor: torch.Tensor) -> MaskType:
    return tensors.DTYPES.get(tensor.dtype, "float32")


def prologue_of(rotary: Any, interleaved: Any, positions: Any, q_norm: Any, k_norm: Any, eps: Any) -> Prologue | None:
    """These arguments of sdpa, or None where there are none.

    Raises:
        InvalidArgument: rotary_positions without rotary.
    """
    if rotary is None:
        if positions is not None:
            raise InvalidArgument(
                "rotary_positions",
                expected="None without rotary",
                got=f"a tensor of shape {list(positions.shape)}"
                if isinstance(positions, torch.Tensor)
                else repr(positions),
                hint="pass the tables as rotary=(cos, sin)",
            )
        if q_norm is None and k_norm is None:
            return None
        interleaved = False
    return Prologue(rotary, interleaved, positions, q_norm, k_norm, eps)


def check(prologue: Prologue, query: torch.Tensor, key: torch.Tensor, shift: int) -> None:
    """Check the arguments against query [B, H, S_q, D] and key [B, H_kv, S_k, D], all but addresses.

    Raises:
        InvalidArgument: one that no call could accept.
        UnsupportedProblem: a head dimension that has no chunks of 8.
    """
    _check_structure(prologue)
    for name, tensor in prologue.tensors.items():
        _check_tensor(name, tensor, query)
    if prologue.rotary is not None:
        _check_rotary(prologue, query, key, shift)
    _check_norms(prologue, query)
    if query.shape[-1] % 8:
        raise UnsupportedProblem(
            f"norms and rotary embedding need a head_dim that is a multiple of 8, not {query.shape[-1]}",
            nearest=f"head_dim {-(-query.shape[-1] // 8) * 8}",
        )


def _check_structure(prologue: Prologue) -> None:
    """Refuse what are not the tuples and numbers that the arguments are made of."""
    rotary, positions = prologue.rotary, prologue.positions
    if not isinstance(prologue.interleaved, bool):
        hint = "True for neighbouring pairs"
        raise InvalidArgument("rotary_interleaved", expected="a bool", got=repr(prologue.interleaved), hint=hint)
    if rotary is not None:
        pair = isinstance(rotary, (tuple, list)) and len(rotary) == 2
        if not pair or not all(isinstance(one, torch.Tensor) for one in rotary):
            expected, hint = "None or a pair (cos, sin) of tensors", "both are [positions, R / 2]"
            raise InvalidArgument("rotary", expected=expected, got=type(rotary).__name__, hint=hint)
    if isinstance(positions, (tuple, list)) and (len(positions) != 2 or positions[0] is None):
        raise InvalidArgument(
            "rotary_positions",
            expected="positions of the queries, and of the keys or None",
            got=f"{len(positions)} items" if len(positions) != 2 else "None for the queries",
            hint="None for the keys stands for keys that have been rotated",
        )
    for one in prologue.pair:
        if (
            one is not None
            and not isinstance(one, torch.Tensor)
            and (isinstance(one, bool) or not isinstance(one, int))
        ):
            expected = "None, an integer, a tensor of integers, or a pair of these"
            hint = "an integer is the position of the first row"
            raise InvalidArgument("rotary_positions", expected=expected, got=type(one).__name__, hint=hint)
    norms = {"q_norm": prologue.q_norm, "k_norm": prologue.k_norm}
    for name, norm in norms.items():
        layer = isinstance(norm, (tuple, list))
        valid = norm is None or isinstance(norm, torch.Tensor)
        if layer:
            valid = len(norm) == 2 and isinstance(norm[0], torch.Tensor)
            valid = valid and (norm[1] is None or isinstance(norm[1], torch.Tensor))
        if not valid:
            raise InvalidArgument(
                name,
                expected="None, the weight [D] of an RMS norm, or (weight, bias or None) of a LayerNorm",
                got=type(norm).__name__,
                hint="pass torch.ones(D) for a norm without weights",
            )
    kinds = {isinstance(norm, (tuple, list)) for norm in norms.values() if norm is not None}
    if len(kinds) > 1:
        expected, hint = "the kind of norm that q_norm has", "pass a tensor for both, or a tuple for both"
        raise InvalidArgument("k_norm", expected=expected, got="RMS norm beside LayerNorm", hint=hint)
    check_eps(prologue.eps)


def check_eps(eps: object) -> None:
    """Refuse an epsilon of norms that is none.

    Raises:
        InvalidArgument: it is not.
    """
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0.0 <= eps < 3e38:
        hint = "1e-6 is usual"
        raise InvalidArgument("norm_eps", expected="a finite number of at least 0", got=repr(eps), hint=hint)


def _check_tensor(name: str, tensor: torch.Tensor, query: torch.Tensor) -> None:
    tensors.check_not_nested(**{name: tensor})
    if tensor.layout != torch.strided:
        raise InvalidArgument(name, expected="a dense tensor", got=str(tensor.layout), hint="call .to_dense()")
    if tensor.device != query.device:
        expected = f"a tensor on {query.device}, as query is"
        raise InvalidArgument(name, expected=expected, got=str(tensor.device), hint="move it there")
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        expected, got = "a stride of 1 along the last dimension", f"strides {tensor.stride()}"
        raise InvalidArgument(name, expected=expected, got=got, hint="call .contiguous()")


def check_addresses(prologue: Prologue) -> None:
    """Refuse angles and weights that kernels cannot read 16 bytes at a time.

    Raises:
        InvalidArgument: a row does not start on 16 bytes.
    """
    for name, tensor in prologue.tensors.items():
        if not name.startswith("rotary_positions"):
            _check_vectors(name, tensor)


def _check_vectors(name: str, tensor: torch.Tensor) -> None:
    outer = (stride for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1)
    if tensor.data_ptr() % VECTOR_BYTES or any(s * tensor.element_size() % VECTOR_BYTES for s in outer):
        raise InvalidArgument(
            name,
            expected=f"rows that start on {VECTOR_BYTES} bytes",
            got=f"address {tensor.data_ptr():#x}, strides {tensor.stride()}",
            hint="call .clone(memory_format=torch.contiguous_format)",
        )


def check_table(name: str, table: torch.Tensor, shape: torch.Size, query: torch.Tensor) -> None:
    """Refuse a table of angles that does not have the shape of the other one, or one that the query has no columns for.

    Raises:
        InvalidArgument: the table `name` is none of [positions, R / 2].
    """
    columns = 2 * table.shape[-1] if table.dim() else 0
    fits = table.dim() == 2 and table.shape == shape and table.shape[0] > 0
    if not fits or columns % ROTARY_COLUMNS or not 0 < columns <= query.shape[-1]:
        raise InvalidArgument(
            name,
            expected=f"shape [positions, R / 2], where R is a multiple of {ROTARY_COLUMNS} up to D",
            got=f"shape {list(table.shape)}",
            hint="one row for each position, one column for each pair",
        )


def _check_rotary(prologue: Prologue, query: torch.Tensor, key: torch.Tensor, shift: int) -> None:
    cos, sin = prologue.rotary
    for name, tensor in (("rotary's cos", cos), ("rotary's sin", sin)):
        check_table(name, tensor, cos.shape, query)
        if tensor.dtype not in (query.dtype, torch.float32) or tensor.dtype != cos.dtype:
            raise InvalidArgument(
                name,
                expected=f"{query.dtype} or torch.float32, one type for both",
                got=str(tensor.dtype),
                hint="convert it once with .to(torch.float32).contiguous()",
            )
    of_query, of_key = prologue.pair
    first_query, first_key = prologue.firsts(shift)
    rows = [("queries", of_query, query.shape, first_query)]
    if prologue.rotates_key:
        rows.append(("keys", of_key, key.shape, first_key))
    for what, positions, (batch, _, length, _), first in rows:
        if isinstance(positions, torch.Tensor):
            shapes = [length], [1, length], [batch, length]
            if positions.dtype not in _POSITION_TYPES or list(positions.shape) not in shapes:
                raise InvalidArgument(
                    "rotary_positions",
                    expected=f"int32 or int64, [{length}] or [{batch}, {length}] for the {what}",
                    got=f"{positions.dtype}, shape {list(positions.shape)}",
                    hint="pass a pair where queries and keys stand at other positions",
                )
        elif first < 0 or first + length > cos.shape[0]:
            raise InvalidArgument(
                "rotary",
                expected=f"angles for positions {first} to {first + length - 1} of the {what}",
                got=f"tables of {cos.shape[0]} positions",
                hint="pass longer tables, or rotary_positions",
            )


def _check_norms(prologue: Prologue, query: torch.Tensor) -> None:
    names = "q_norm", "q_norm's bias", "k_norm", "k_norm's bias"
    norms = prologue.norms
    first = next((norm for norm in norms if norm is not None), None)
    for name, norm in zip(names, norms, strict=True):
        if norm is None or first is None:
            continue
        if list(norm.shape) != [query.shape[-1]]:
            expected, hint = f"shape [{query.shape[-1]}], which is [D]", "all heads share the weights of a norm"
            raise InvalidArgument(name, expected=expected, got=f"shape {list(norm.shape)}", hint=hint)
        if norm.dtype not in (query.dtype, torch.float32) or norm.dtype != first.dtype:
            expected = f"{query.dtype} or torch.float32, one type for all weights and biases"
            raise InvalidArgument(name, expected=expected, got=str(norm.dtype), hint="convert it once")
    biases = {norms[i + 1] is not None for i in (0, 2) if norms[i] is not None}
    if len(biases) > 1:
        expected, hint = "a bias for both norms, or for none", "pass zeros for the one without"
        raise InvalidArgument("k_norm", expected=expected, got="one of them", hint=hint)
