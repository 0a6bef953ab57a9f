"""Hugging Face diffusers: model.set_attention_backend("microsdpa").

diffusers has a registry of attention backends, and checks their names against an enumeration that it closes: register()
adds a member to it.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from microsdpa import dropin
from microsdpa.arguments import check_impl
from microsdpa.errors import UnsupportedProblem

NAME = "microsdpa"


def register(*, strict: bool = False, impl: str = "auto") -> None:
    """Make set_attention_backend("microsdpa") and attention_backend("microsdpa") work.

    What microsdpa does not compute goes to torch's own attention, which is diffusers' "native", with one logged line
    for each distinct reason; with `strict` it raises UnsupportedProblem. `impl` is that of microsdpa.sdpa.

    Raises:
        ImportError: diffusers is not installed, or has no registry of attention backends; 0.35 and newer have.
        InvalidArgument: there is no such `impl`.
    """
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
    ) -> torch.Tensor:
        """[B, S_q, H, D] from [B, S, H, D]; a mask of [B, S_k] hides keys, as diffusers' own backends read it."""
        if return_lse or _parallel_config is not None:
            what = "context parallelism" if _parallel_config is not None else "return_lse=True"
            raise UnsupportedProblem(
                f"the backend has no {what}", nearest="one of diffusers' own backends, such as native"
            )
        if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        options: dict[str, Any] = {"strict": strict, "impl": impl}
        out = dropin.attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, **options)
        return out.transpose(1, 2)

    _AttentionBackendRegistry.register(_member(AttentionBackendName))(attention)


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
