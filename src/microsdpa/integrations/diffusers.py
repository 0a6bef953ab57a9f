"""Hugging Face diffusers: model.set_attention_backend("microsdpa").

diffusers has a registry of attention backends, and checks their names against an enumeration that it closes: register()
adds a member to it.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from microsdpa import distributed
from microsdpa.attention import api
from microsdpa.call.call import Inputs
from microsdpa.call.tensors import check_impl
from microsdpa.errors import UnsupportedProblem
from microsdpa.integrations import dropin, versions
from microsdpa.kernels.problem import Causal

NAME = "microsdpa"


def register(*, strict: bool = False, impl: str = "auto") -> None:
    """Make set_attention_backend("microsdpa") and attention_backend("microsdpa") work.

    What microsdpa does not compute goes to torch's own attention, which is diffusers' "native", with one logged line
    for each distinct reason; with `strict` it raises UnsupportedProblem. `impl` is that of microsdpa.sdpa.

    With context parallelism the backend is microsdpa.distributed.attention, forward and backward.

    With return_lse=True the backend gives (output [B, S_q, H, D], LSE [B, S_q, H] in FP32). "native" has no LSE, so
    what microsdpa does not compute raises then. So do attention_kwargs that are not known here, as they may change the
    meaning.

    Raises:
        ImportError: diffusers is not installed, or is of a version that this was not tested with.
        InvalidArgument: there is no such `impl`.
    """
    versions.check("diffusers")
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    check_impl(impl)

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
        **further: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """[B, S_q, H, D] from [B, S, H, D]; a mask of [B, S_k] hides keys, as diffusers' own backends read it."""
        unknown = [name for name, value in further.items() if value is not None]
        if unknown:
            raise UnsupportedProblem(
                f"the backend has no argument {' and '.join(unknown)}",
                nearest="one of diffusers' own backends, such as native",
            )
        if _parallel_config is not None and not hasattr(_parallel_config, "context_parallel_config"):
            raise UnsupportedProblem(
                f"context parallelism is not described by {type(_parallel_config).__name__}",
                nearest="diffusers' ParallelConfig",
            )
        parallel = getattr(_parallel_config, "context_parallel_config", None)
        if parallel is not None:
            if attn_mask is not None or dropout_p != 0.0 or impl != "auto":
                raise UnsupportedProblem(
                    "context parallelism has no attn_mask, no dropout and no choice of a kernel",
                    nearest="attn_mask=None, dropout_p=0.0 and impl='auto'",
                )
            return _spread(parallel, (query, key, value), is_causal, scale, enable_gqa, return_lse)
        if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        if return_lse:
            reason = dropin.why_not(query, key, value, attn_mask, dropout_p)
            if reason:
                raise UnsupportedProblem(reason, nearest="return_lse=False, which leaves it to torch's own attention")
            given: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa, "impl": impl, "attn_mask": attn_mask}
            result: tuple[torch.Tensor, torch.Tensor]
            result = api.sdpa(query, key, value, is_causal=is_causal, return_lse=True, dropout_p=dropout_p, **given)
            return result[0].transpose(1, 2), result[1].transpose(1, 2)
        call = query, key, value, attn_mask, dropout_p, is_causal
        out = dropin.attend(call, scale, enable_gqa, strict=strict, impl=impl)
        return out.transpose(1, 2)

    member = _member(AttentionBackendName)
    _AttentionBackendRegistry.register(member, supports_context_parallel=True)(attention)
    # Only what is named here reaches the function, and all shall: it is the function that refuses.
    _AttentionBackendRegistry._supported_arg_names[member] = _Every(
        _AttentionBackendRegistry._supported_arg_names[member]
    )


def _spread(
    config: Any, inputs: Inputs, is_causal: bool, scale: float | None, enable_gqa: bool, return_lse: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over the ranks of a ContextParallelConfig; tensors are [B, S_local, H, D], the LSE [B, S_local, H].

    A degree of "ring" alone gathers keys and values, one of "ulysses" alone exchanges heads, and with both the shortest
    estimate decides.
    """
    both = config.ring_degree > 1 and config.ulysses_degree > 1
    method: Any = "auto" if both else "all_gather" if config.ring_degree > 1 else "heads"
    query, key, value = (tensor.transpose(1, 2) for tensor in inputs)
    causal: Causal | None = "upper_left" if is_causal else None
    group = config._flattened_mesh
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa, "return_lse": return_lse}
    found = distributed.attention(
        query, key, value, group=group, order="contiguous", causal=causal, method=method, **options
    )
    if isinstance(found, tuple):
        return found[0].transpose(1, 2), found[1].transpose(1, 2)
    return found.transpose(1, 2)


class _Every(set[str]):
    """A set of names that has every other name, too."""

    def __contains__(self, name: object) -> bool:
        """Always."""
        return True


def _member(names: type[Enum]) -> Any:
    """The member NAME of an enumeration of strings, added to it if need be: there is no public way to do that."""
    if NAME not in names._value2member_map_:
        member = str.__new__(names, NAME)  # type: ignore[type-var]
        member._name_, member._value_ = NAME.upper(), NAME
        type.__setattr__(names, member._name_, member)
        names._member_names_.append(member._name_)
        names._member_map_[member._name_] = member
        names._value2member_map_[NAME] = member
    return names(NAME)
