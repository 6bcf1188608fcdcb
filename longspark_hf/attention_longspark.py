"""The target's attention over a few new tokens and many cached ones: what a verification pass does.

Knows: query heads that share keys and values, folded into rows of one product; the function of transformers behind "sdpa".
Does not know: what is masked (transformers says), or which passes verify a draft (generation_longspark).
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from .patching_longspark import marks, patched


# Beyond it a pass is a prefill, where copies of keys and values are small beside the rest.
MOST_QUERIES = 32


def folds(
    query: torch.Tensor, key: torch.Tensor, attention_mask: torch.Tensor | None, dropout: float = 0.0, **kwargs: Any
) -> bool:
    """Whether [`folded_attention`] serves a call: a short pass over heads that share keys, with a mask of all heads."""
    return (
        1 < query.shape[2] <= MOST_QUERIES
        and query.shape[1] > key.shape[1]
        and not dropout
        and attention_mask is not None
        and attention_mask.dtype == torch.bool
        and attention_mask.shape[1] == 1
        and all(kwargs.get(name) is None for name in ("softcap", "position_bias"))
    )


def folded_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    r"""
    Attention as `sdpa` computes it, without its copy of keys and values for every query head of a group.

    Args:
        query (`torch.Tensor` of shape `(batch_size, num_heads, num_new, head_dim)`): Of the new tokens.
        key, value (`torch.Tensor` of shape `(batch_size, num_key_value_heads, length, head_dim)`): Of all tokens.
        attention_mask (`torch.Tensor` of shape `(batch_size, 1, num_new, length)`): True where it attends.
        scaling (`float`, *optional*): Of the scores.

    Returns:
        `torch.Tensor` of shape `(batch_size, num_new, num_heads, head_dim)`
    """
    batch_size, num_heads, num_new, _ = query.shape
    shared = num_heads // key.shape[1]
    folded = query.reshape(batch_size, key.shape[1], shared * num_new, query.shape[3])
    mask = attention_mask.repeat(1, 1, shared, 1)
    output = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return output.view(batch_size, num_heads, num_new, value.shape[3]).transpose(1, 2).contiguous()


def _folding(sdpa: Callable[..., Any]) -> Callable[..., Any]:
    """`sdpa` of transformers, which folds what it can in passes of targets that are inside a call of ours on this thread."""

    @functools.wraps(sdpa)
    def attention(module, query, key, value, attention_mask, *args, **kwargs):
        # By its config: a plain `generate` of another model within ours, or of this one elsewhere, stays as it is.
        ours = any(id(getattr(module, "config", None)) in configs for configs in marks(attention))
        if ours and not args and folds(query, key, attention_mask, **kwargs):
            return folded_attention(query, key, value, attention_mask, kwargs.get("scaling")), None
        return sdpa(module, query, key, value, attention_mask, *args, **kwargs)

    return attention


def grouped_attention(target: PreTrainedModel) -> contextlib.AbstractContextManager[None]:
    """
    Within it, on this thread, a target with `sdpa` attention verifies by [`folded_attention`]. Nothing of the target is
    changed: the function that transformers has behind "sdpa" is another one while a call is inside.

    Args:
        target (`PreTrainedModel`): The target; nothing happens with any other attention.
    """
    configs = {id(module.config) for module in target.modules() if hasattr(module, "config")}
    register = functools.partial(AttentionInterface.register, "sdpa")
    return patched(lambda: AttentionInterface()["sdpa"], register, _folding, configs)
