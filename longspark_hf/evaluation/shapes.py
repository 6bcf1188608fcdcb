"""Targets of a known shape with random weights: what a pass costs does not depend on what the weights are.

Knows: the shapes of SmolLM2 and Qwen3, how to make a target of any config on a device, whether it fits there.
Does not know: what is measured with it.
"""

import torch
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers.models.auto import AutoModelForCausalLM

from .targets import load_target_config, meta_target


def _qwen3(hidden_size: int, intermediate_size: int, layers: int, heads: int, tied: bool = False) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=tied,
    )


SHAPES: dict[str, PreTrainedConfig] = {
    "smollm2": LlamaConfig(  # SmolLM2-135M
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
    ),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40),
}


def shape_config(shape: str, layers: int | None = None) -> PreTrainedConfig:
    """
    The config of a target shape, perhaps with fewer decoder layers.

    Args:
        shape (`str`): One of `SHAPES`, or a Hub id or folder with a config.json.
        layers (`int`, *optional*): Keep this many decoder layers.

    Raises:
        `ValueError`: if there is no such shape, or it has fewer layers.
    """
    if shape in SHAPES:
        config = SHAPES[shape]
    else:
        try:
            config = load_target_config(shape)
        except ValueError as error:
            raise ValueError(
                f"'{shape}' is none of the shapes {', '.join(SHAPES)}, and no config can be read under that name ({error})"
            ) from error
    fields = config.get_text_config(decoder=True).to_dict()
    total = fields["num_hidden_layers"]
    if layers is not None and not 1 <= layers <= total:
        raise ValueError(f"--layers takes 1 to {total}, the decoder layers of {shape}; got {layers}.")
    if layers is not None:
        fields["num_hidden_layers"] = layers
        if fields.get("layer_types"):
            fields["layer_types"] = fields["layer_types"][:layers]
    fields.pop("quantization_config", None)
    return type(config.get_text_config(decoder=True)).from_dict(fields)


def row_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes a token takes in the K/V cache of a target."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * dtype.itemsize


def free_memory(device: torch.device) -> int | None:
    """Memory that is left on a GPU, or else of the machine; `None` where that cannot be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        import psutil
    except ImportError:  # comes with the extras
        return None
    return psutil.virtual_memory().available


def parameter_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of the weights of a target, before it is made."""
    return dtype.itemsize * meta_target(config).num_parameters()


def random_target(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A target with random weights, made where it will run."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None  # random weights must not end an answer
    return model.to(device).eval()
