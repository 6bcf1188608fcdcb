"""What differs between versions of transformers, outside the remote code. Does not know: what it is used for."""

import inspect

from torch import nn
from transformers import TrainingArguments


def cache_argument(module: nn.Module) -> str:
    """Name of the argument that takes the K/V cache of a target, or of its decoder: another one before transformers 5.24."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def checkpointing_argument() -> str:
    """Name of the `TrainingArguments` switch for gradient checkpointing: another one from transformers 5.24 on."""
    name = "activation_checkpointing"
    return name if name in TrainingArguments.__dataclass_fields__ else "gradient_checkpointing"
