"""Hugging Face transformers: attn_implementation="microsdpa", with its masks."""

from __future__ import annotations

from typing import Any

import torch

from microsdpa import api, dropin
from microsdpa.errors import UnsupportedProblem

NAME = "microsdpa"


def register(*, strict: bool = False, impl: str = "auto") -> None:
    """Make attn_implementation="microsdpa" work, for attention and masks both: a mask is never lost.

    What microsdpa does not compute goes to transformers' own "sdpa", with one logged line for each distinct reason.
    With `strict` it raises UnsupportedProblem instead, as it always does where there is a soft cap or sinks: "sdpa"
    would leave them out. `impl` is that of microsdpa.sdpa.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: torch.Tensor | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **further: Any,
    ) -> tuple[torch.Tensor, None]:
        """[B, S_q, H, D] from [B, H, S_q, D]; `s_aux` are the heads' sinks."""
        reason = dropin.why_not(query, key, value, attention_mask, dropout)
        reason = reason or ("there is a position bias" if position_bias is not None else "")
        if reason:
            if strict or softcap is not None or s_aux is not None:
                raise UnsupportedProblem(reason, nearest="attn_implementation='eager'")
            dropin.note_fallback(reason)
            options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, "position_bias": position_bias}
            found: tuple[torch.Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, **options, **further
            )
            return found
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        result = api.sdpa(
            query,
            key,
            value,
            # Without a mask, a single query sees every key of the cache, and others are aligned as torch's are.
            causal="upper_left" if causal and attention_mask is None and query.shape[2] > 1 else None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
            impl=impl,
            attn_mask=attention_mask,
            softcap=softcap,
            sinks=s_aux,
        )
        assert isinstance(result, torch.Tensor)
        return result.transpose(1, 2).contiguous(), None

    AttentionInterface.register(NAME, forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
