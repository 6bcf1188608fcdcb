"""What training a drafter takes, from shapes alone: parameters by part, and peak memory.

Knows: which tensors a step holds at its peak.
Does not know: the run (plan) or the time it takes, which is measured.
"""

import math

import torch
from transformers import PreTrainedConfig

from longspark_hf import LongSparkConfig, LongSparkDrafter
from longspark_hf.loss_longspark import KEPT_LOGITS


# As in the trainer's and the loss's defaults.
ANCHORS_PER_GROUP, ROWS_PER_CHUNK = 32, 256


def count_parameters(config: LongSparkConfig) -> dict[str, int]:
    """
    Parameters of a drafter by part.

    Returns:
        `dict`: `boundary_fusion`, `input_mapping` (with the slots' positions), `layers`, `summary_queries`, `markov_head`.
    """
    counts: dict[str, int] = {}
    for name, parameter in LongSparkDrafter.without_weights(config).named_parameters():
        part = name.partition(".")[0].replace("position_embedding", "input_mapping")
        counts[part] = counts.get(part, 0) + parameter.numel()
    return counts


def training_memory(
    config: LongSparkConfig,
    target_config: PreTrainedConfig,
    target_bytes: int,
    *,
    length: int,
    num_anchors: int,
    steps_per_batch: int,
    target_dtype: torch.dtype,
    start_tokens: int = 0,
    checkpointing: bool = False,
) -> dict[str, int]:
    r"""
    Estimated peak memory of training on one device, one conversation at a time, in bytes.

    Args:
        config ([`LongSparkConfig`]), target_config (`PreTrainedConfig`): Of drafter and target.
        target_bytes (`int`): Of the target's weights.
        length (`int`): Tokens of the longest conversation, all taken as response.
        num_anchors, steps_per_batch (`int`): See [`LongSparkTrainer`].
        target_dtype (`torch.dtype`): Of the target's weights and rows.
        start_tokens (`int`, *optional*, defaults to 0): Tokens that block inputs are fitted to before training.
        checkpointing (`bool`, *optional*, defaults to `False`): Layers are computed again in the backward pass.

    Returns:
        `dict`: `target`, `drafter`, `gradients` and `optimizer` (AdamW) in fp32; `target_rows`, what one pass of the
        target leaves for all anchors; `activations` kept for the backward pass of one group of anchors and of the scan over
        the sequence; `logits` of a chunk; `start`, which fitting the block inputs takes beside the weights before any of
        the others are there; and the `total` of the larger of both. What depends on `length` is an upper bound: anchors
        spread over the whole conversation, no activation in bf16.
    """
    n, hidden, heads, dim = config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.head_dim
    kv_heads, block, summary = config.num_key_value_heads, config.block_size, config.num_summary_queries
    proposed = config.draft_vocab_size or config.vocab_size
    parameters = sum(count_parameters(config).values())

    # The views of a group of anchors are masks over the union of their windows, copied for each by the products.
    anchors = math.ceil(min(num_anchors, length) / steps_per_batch)
    group = min(ANCHORS_PER_GROUP, anchors)
    num_groups = math.ceil(anchors / group)
    span = math.ceil(length / num_groups)
    window = min(config.window_size, length) + span
    slots = group * block
    own_rows = (
        2 * group * kv_heads * dim * span + 3 * group * heads * summary * span + 4 * group * heads * summary * dim
    )
    windows = 2 * group * kv_heads * dim * window
    scores = 2 * slots * heads * (summary + window + block)
    layer = slots * (6 * hidden + 4 * config.intermediate_size + 4 * heads * dim) + windows + scores
    # The loss keeps the logits of its slots where they are few, else it makes them again chunk by chunk.
    kept_logits = 3 * slots * proposed if slots * proposed <= KEPT_LOGITS else 0
    layers = n * slots * hidden + layer if checkpointing else n * layer
    scan = n * length * (3 * heads * summary + 2 * kv_heads * dim)
    activations = layers + n * own_rows + slots * 8 * hidden + kept_logits + scan

    text = target_config.get_text_config(decoder=True)
    widest = max(3 * text.intermediate_size, 2 * heads * dim + 4 * hidden)
    rows = length * (2 * n * kv_heads * dim + (n + 1) * hidden + widest) * target_dtype.itemsize
    shared = length * proposed * 4 if steps_per_batch > 1 else 0
    parts = {
        "target": target_bytes,
        "drafter": 4 * parameters,
        "gradients": 4 * parameters,
        "optimizer": 8 * parameters,
        "target_rows": rows + shared,
        "activations": 4 * activations,
        "logits": 4 * 4 * min(ROWS_PER_CHUNK, max(slots, length)) * config.vocab_size,
    }
    features = (n + 1) * hidden
    start = 8 * (4 * start_tokens * features + 4 * features**2) if start_tokens else 0
    total = max(sum(parts.values()), parts["target"] + parts["drafter"] + start)
    return parts | {"start": start, "total": total}
