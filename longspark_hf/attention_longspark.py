"""The target's attention over a few new tokens and many cached ones: what a verification pass does.

Knows: query heads that share keys and values, folded into rows of one product.
Does not know: what is masked (transformers says), or which passes verify a draft (generation_longspark).
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask


GROUPED = "longspark_grouped"
# Beyond it a pass is a prefill, where copies of keys and values are small beside the rest.
MOST_QUERIES = 32
_inside = threading.local()


def grouped_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    r"""
    Attention as `sdpa` computes it, without its copy of keys and values for every query head of a group.

    Args:
        module (`torch.nn.Module`): The attention layer.
        query (`torch.Tensor` of shape `(batch_size, num_heads, num_new, head_dim)`): Of the new tokens.
        key, value (`torch.Tensor` of shape `(batch_size, num_key_value_heads, length, head_dim)`): Of all tokens.
        attention_mask (`torch.Tensor` of shape `(batch_size, 1, num_new, length)`, *optional*): True where it attends.
        dropout, scaling, kwargs: As for `sdpa`, which also computes whatever is not a short pass over grouped heads.

    Returns:
        `tuple(torch.Tensor, None)`: of shape `(batch_size, num_new, num_heads, head_dim)`; no weights.
    """
    batch_size, num_heads, num_new, _ = query.shape
    shared = num_heads // key.shape[1]
    # Only inside a call of ours: another thread's plain `generate` on this target stays what it was, to the last bit.
    applies = getattr(_inside, "calls", 0) and 1 < num_new <= MOST_QUERIES and shared > 1 and not dropout
    masked = attention_mask is not None and attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1
    if not (applies and masked) or any(kwargs.get(name) is not None for name in ("softcap", "position_bias")):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    folded = query.reshape(batch_size, key.shape[1], shared * num_new, query.shape[3])
    mask = attention_mask.repeat(1, 1, shared, 1)
    output = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return output.view(batch_size, num_heads, num_new, value.shape[3]).transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def grouped_attention(target: PreTrainedModel) -> Iterator[None]:
    """
    Within it, on this thread, a target with `sdpa` attention verifies by [`grouped_attention_forward`].

    Args:
        target (`PreTrainedModel`): The target; left as it is with any other attention.
    """
    config = target.config.get_text_config(decoder=True)
    if config._attn_implementation not in ("sdpa", GROUPED):  # ours: of a call on another thread
        yield
        return
    config._attn_implementation = GROUPED
    _inside.calls = getattr(_inside, "calls", 0) + 1
    try:
        yield
    finally:
        _inside.calls -= 1
        config._attn_implementation = "sdpa"


AttentionInterface.register(GROUPED, grouped_attention_forward)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
