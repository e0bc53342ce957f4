"""Attention of one new token in models with grouped keys and values, without copies of these."""

from typing import Any

import torch
from torch.nn import functional

GROUPED = "grouped_sdpa"


def grouped_sdpa(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Replaces transformers' attention "sdpa", which in 5.17 copies keys and values for every head of a group if there is a mask.

    transformers 5.24 does the same as this function. A decoding step has one query per head. Here the heads of a group become
    queries of one head, with the same products.

    Args:
        query: [B, H, Q, D].
        key, value: [B, H / groups, S, D].
        attention_mask: [B, 1, Q, S], or None.
        module, dropout, scaling, options: as transformers passes them.

    Returns:
        [B, Q, H, D], and None for the attention weights.
    """
    groups = getattr(module, "num_key_value_groups", 1)
    is_step = query.shape[2] == 1 and attention_mask is not None and attention_mask.shape[1] == 1
    if groups == 1 or not is_step or options.get("position_bias") is not None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    assert attention_mask is not None
    batch, heads, _, width = query.shape
    queries = query.reshape(batch, heads // groups, groups, width)
    mask = attention_mask[..., : key.shape[2]].expand(-1, 1, groups, -1)
    y = functional.scaled_dot_product_attention(
        queries, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    return y.reshape(batch, 1, heads, width), None
