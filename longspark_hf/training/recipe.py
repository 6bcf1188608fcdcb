"""Good settings for a target: what suits a small budget for small targets, the paper's form for large ones.

Knows: defaults by target size, and the learning rate schedule that belongs to them.
Does not know: how a run with these settings goes (run) or what it costs (plan).
"""

import math
from typing import Any

from transformers import PreTrainedModel


# Parameters of a target from which on the paper's form is the default.
LARGE_TARGET = 1_000_000_000
DRAFT_VOCAB_SIZE = 8192


def late_layer_ids(num_target_layers: int, num_layers: int = 4) -> list[int]:
    """The last target layers: 26, 27, 28 and 29 of 30."""
    return list(range(num_target_layers))[-num_layers:]


def recipe(target: PreTrainedModel) -> dict[str, Any]:
    r"""
    Settings for a target.

    Args:
        target (`PreTrainedModel`): May be on the meta device.

    Returns:
        `dict`: arguments of [`~longspark_hf.training.run.prepare`]. In place of those that depend on the data there are
        `epochs` over it, and `batch_size`, the conversations of an optimizer step over all processes; `None` leaves it
        to [`batch_size`].
    """
    text = target.config.get_text_config(decoder=True)
    if target.num_parameters() >= LARGE_TARGET:
        return {
            "config": {},
            "draft_vocab_size": None,
            "from_target": False,
            "num_eval_prompts": 12,
            "eval_new_tokens": 128,
            "num_simulated": 32,
            "num_anchors": 512,
            "steps_per_batch": 1,
            "markov_lr_scale": 1.0,
            "boundary_lr_scale": 1.0,
            "epochs": 10.0,
            "batch_size": None,
            "learning_rate": 6e-4,
        }
    # The draft layers start as the target's, so they have its query and key norms, or none.
    qk_norm = any("q_norm" in name for name, _ in target.named_parameters())
    return {
        "config": {
            "target_layer_ids": late_layer_ids(text.num_hidden_layers),
            "block_size": 4,  # trained briefly, a drafter is rarely right for longer
            "qk_norm": qk_norm,
            "boundary_residual": -1,
            "markov_rank": 64,
        },
        "draft_vocab_size": DRAFT_VOCAB_SIZE if text.vocab_size > DRAFT_VOCAB_SIZE else None,
        "from_target": True,
        "num_eval_prompts": 8,
        "eval_new_tokens": 64,
        "num_simulated": 8,
        "num_anchors": 512,
        "steps_per_batch": 6,
        # Block inputs start fitted to the target's layers: large steps would spoil more than they teach.
        "learning_rate": 2e-4,
        "markov_lr_scale": 10.0,
        "boundary_lr_scale": 0.0,
        "epochs": 3.0,
        "batch_size": 1,
        "adam_beta2": 0.95,
    }


def batch_size(num_conversations: int, epochs: float) -> int:
    """The paper's 512 conversations a step; less, by powers of two, where that would leave under 1,000 steps."""
    most = max(num_conversations * epochs / 1000, 1)
    return min(512, 2 ** int(math.log2(most)))


def num_steps(num_conversations: int, epochs: float, batch_size: int, steps_per_batch: int) -> int:
    """Optimizer steps in which every conversation is met `epochs` times, on average."""
    return math.ceil(num_conversations * epochs / batch_size) * steps_per_batch


def schedule(steps: int, steps_per_batch: int) -> dict[str, Any]:
    """
    `TrainingArguments` of the learning rate schedule: the paper's cosine, or for several steps per batch a constant rate
    with a linear decay at the end, which can still be shortened when a run is under way.
    """
    if steps_per_batch == 1:
        return {"lr_scheduler_type": "cosine", "warmup_steps": math.ceil(0.04 * steps)}
    return {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": max(3 * steps // 10, 1), "decay_type": "linear"},
        "warmup_steps": min(100, steps // 10),
    }
