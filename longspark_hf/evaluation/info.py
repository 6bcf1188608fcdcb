"""What a drafter for a target costs, from configs alone: `longspark info`."""

from typing import Any

import torch
from transformers import PreTrainedConfig

from longspark_hf import LongSparkConfig, LongSparkDrafter
from longspark_hf.target_longspark import check_config_fit


PEER_LENGTHS = {"32K": 32 * 1024, "128K": 128 * 1024}


def describe(target_config: PreTrainedConfig, drafter_config: LongSparkConfig) -> dict[str, Any]:
    """
    Fit, parameter count and state of a drafter. No weights are loaded.

    Args:
        target_config (`PreTrainedConfig`): Of the target.
        drafter_config ([`LongSparkConfig`]): Of the drafter.

    Returns:
        `dict`: plain values, sizes in bytes for bf16.
    """
    try:
        check_config_fit(drafter_config, target_config)
        misfit = None
    except ValueError as error:
        misfit = " ".join(str(error).split())
    return {
        "target": target_config._name_or_path,
        "fits": misfit is None,
        "misfit": misfit,
        "num_target_layers": drafter_config.num_target_layers,
        "target_layer_ids": list(drafter_config.target_layer_ids),
        "block_size": drafter_config.block_size,
        "window_size": drafter_config.window_size,
        "num_summary_queries": drafter_config.num_summary_queries,
        "parameters": LongSparkDrafter.without_weights(drafter_config).num_parameters(),
        "dtype": "bfloat16",
        "state_bytes": drafter_config.state_bytes(torch.bfloat16),
        "peer_state_bytes": {
            label: peer_state_bytes(drafter_config, tokens) for label, tokens in PEER_LENGTHS.items()
        },
    }


def peer_state_bytes(config: LongSparkConfig, num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """
    KV cache of a DFlash-like drafter of the same shape, which keeps a row per context token in each of its layers.

    Args:
        config ([`LongSparkConfig`]): Gives layers, key/value heads and head_dim.
        num_tokens (`int`): Context length.
        dtype (`torch.dtype`, *optional*, defaults to `torch.bfloat16`): Of the cache.
    """
    row = 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize
    return len(config.target_layer_ids) * row * num_tokens
