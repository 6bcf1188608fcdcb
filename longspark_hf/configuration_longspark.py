"""Configuration of a LongSpark drafter: the target's shapes, which target layers it reads, and the sizes of its views.

Knows: our own fields, how to derive them from a target's config, how to read the configs of the released checkpoints.
Does not know: weights, a live target, or how the views are filled.
"""

import copy
import hashlib
import json
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase


RELEASED_MODEL_TYPE = "draftfreekv"

# What a released config must say where it says anything; another value means another, unsupported drafter.
_RELEASED_FIXED = {
    "draft_mode": "parallel_shifted_qwen",
    "parallel_markov_head_type": "vanilla",
    "global16_raw256_enabled": True,
    "global_memory_source_window": "full",
    "target_kv_memory_layout": "direct",
    "target_kv_window_size": None,
}
# Released key -> our field, with the documented default (format file, section 1.4). `...` marks a required key.
_RELEASED_FIELDS = {
    "hidden_size": ("hidden_size", ...),
    "qwen_intermediate_size": ("intermediate_size", ...),
    "qwen_num_attention_heads": ("num_attention_heads", ...),
    "num_key_value_heads": ("num_key_value_heads", 8),
    "head_dim": ("head_dim", 128),
    "vocab_size": ("vocab_size", ...),
    "num_target_layers": ("num_target_layers", None),
    "block_size": ("block_size", 7),
    "raw_target_rows": ("window_size", 256),
    "global_memory_slots": ("num_summary_queries", 16),
    "parallel_markov_rank": ("markov_rank", 256),
    "mask_token_id": ("mask_token_id", ...),
    "qwen_rms_norm_eps": ("rms_norm_eps", 1e-6),
    "max_position_embeddings": ("max_position_embeddings", 40960),
    "target_model_name_or_path": ("target_name_or_path", None),
    "bos_token_id": ("bos_token_id", None),
    "eos_token_id": ("eos_token_id", None),
    "pad_token_id": ("pad_token_id", None),
    "dtype": ("dtype", None),
    "torch_dtype": ("dtype", None),
    "architectures": ("architectures", None),
}
# Keys that a released config may hold without a meaning here, next to those that any config of transformers has.
_RELEASED_IGNORED = {
    "model_type",
    "transformers_version",
    "_name_or_path",
    "auto_map",
    "use_cache",
    "tie_word_embeddings",
    "initializer_range",
    "target_layer_ids",
    "target_layer_policy",
    "parallel_mixer_layers",
    "parallel_mixer_rank",
    "parallel_mixer_alpha",
    "parallel_mixer_num_heads",
    "local_draft_rows",
    "max_accepted_tokens",
    "qwen_rope_theta",
    "qwen_gradient_checkpointing",
    "qwen_initialize_from_target",
    "global_checkpoint_compatibility",
    "global_query_mode",
    "global_query_equicorrelation",
    "global_query_slot_mass_mode",
    "memory_output_slots",
    "memory_source_window",
    "memory_query_mode",
    "memory_query_residual_rank",
    "memory_external_key_mode",
    "memory_anchor_policy",
    "memory_attention_backend",
    "target_kv_memory_query_rank",
    "adapter_rank",
    "adapter_alpha",
    "transition_rank",
    "transition_alpha",
    "xpress_num_refinement_steps",
    "xpress_early_stop",
    "xpress_activation",
    "training_objective",
}
# What a config file could use to make transformers read other files or patch code.
_NEVER_FOLLOWED = (
    "transformers_weights",
    "configuration_files",
    "fusion_config",
    "kernel_config",
    "distributed_config",
)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """
    What a tokenizer's ids mean, as a hash: equal for two tokenizers that give every token the same id.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Its vocabulary counts, added tokens included; chat template and settings do not.
    """
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(vocabulary.encode()).hexdigest()


def uniform_layer_ids(num_target_layers: int, num_layers: int = 5) -> list[int]:
    """
    Evenly spread target layers, first and last included (policy `uniform_k` of the released checkpoints).

    Args:
        num_target_layers (`int`): Number of decoder layers of the target.
        num_layers (`int`, *optional*, defaults to 5): How many to select; capped by `num_target_layers`.

    Returns:
        `list[int]`: Strictly increasing layer indices. Python's `round` is meant: 17.5 -> 18 and 19.5 -> 20.
    """
    num_layers = min(num_layers, num_target_layers)
    if num_layers == 1:
        return [num_target_layers - 1]
    return [round(i * (num_target_layers - 1) / (num_layers - 1)) for i in range(num_layers)]


class LongSparkConfig(PreTrainedConfig):
    r"""
    Configuration of a [`LongSparkDrafter`]. Use [`LongSparkConfig.from_target`] to get one that fits a target.

    Args:
        hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, head_dim, vocab_size (`int`):
            Shapes of the target's text decoder; `vocab_size` is the target *config's*, not the tokenizer's length.
        num_target_layers (`int`): Number of decoder layers of the target.
        target_layer_ids (`list[int]`):
            Target layers the drafter reads, one per draft layer, as indices of decoder layers. Draft layer `i` attends
            to the keys and values of target layer `target_layer_ids[i]`.
        block_size (`int`, *optional*, defaults to 7): Tokens drafted per round (B in the paper).
        window_size (`int`, *optional*, defaults to 256): Recent target rows kept per layer (W); 0 for none.
        num_summary_queries (`int`, *optional*, defaults to 16): Learned summary entries per query head (R); 0 for none.
        markov_rank (`int`, *optional*, defaults to 256): Rank of the Markov head.
        mask_token_id (`int`):
            Token that fills the block slots after the anchor. Required: an id the target never emits, such as a
            reserved special token or a padded row of the embedding table.
        qk_norm (`bool`, *optional*, defaults to `True`): RMSNorm on queries and keys of the draft layers.
        boundary_residual (`int`, *optional*):
            Index in `target_layer_ids` of the boundary state that is added to the block inputs. `None`, the paper's
            form, adds none; drafters trained on little data learn faster with one.
        draft_vocab_size (`int`, *optional*):
            Number of tokens the drafter can propose, stored in the checkpoint as `draft_token_ids`; all others have
            probability zero in a draft. `None`, the paper's form, proposes from the whole vocabulary.
        proposal (`str`, *optional*, defaults to `"sampled"`):
            What a drafter proposes when the target samples: `"sampled"` tokens of its own distribution, or the `"likeliest"`
            ones, which are then accepted as often as the target would have sampled them. Both are lossless. May be changed
            at any time; greedy generation proposes the likeliest tokens always.
        rms_norm_eps (`float`, *optional*, defaults to 1e-6): For the draft layers; the two fusion blocks keep 1e-6.
        rope_parameters (`dict`): Rotary parameters of the target. Serves the unbound drafter; a bound target's rotary
            module wins. Keyed by layer type where the target's is (Gemma 3), with `layer_types` naming each draft layer's.
        target_name_or_path (`str`, *optional*): The target this drafter was made for.
        target_model_type (`str`, *optional*): Its `model_type`. With the shapes above and the next field, its fingerprint.
        target_tokenizer (`str`, *optional*): [`tokenizer_fingerprint`] of its tokenizer.

    Raises:
        `ValueError`: for fields that contradict each other.

    Source: LongSpark (2026), section 3; values of the released checkpoints.
    """

    model_type = "longspark"

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int | None = None
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    num_target_layers: int = 36
    target_layer_ids: list[int] | None = None
    block_size: int = 7
    window_size: int = 256
    num_summary_queries: int = 16
    markov_rank: int = 256
    mask_token_id: int | None = None
    qk_norm: bool = True
    boundary_residual: int | None = None
    draft_vocab_size: int | None = None
    proposal: str = "sampled"
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    rope_parameters: dict | None = None
    layer_types: list[str] | None = None
    max_position_embeddings: int = 40960
    target_name_or_path: str | None = None
    target_model_type: str | None = None
    target_tokenizer: str | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        _check_harmless(kwargs)
        if self.target_layer_ids is None:
            self.target_layer_ids = uniform_layer_ids(self.num_target_layers)
        if self.num_hidden_layers is None:
            self.num_hidden_layers = len(self.target_layer_ids)
        super().__post_init__(**kwargs)
        self._check()

    def _check(self) -> None:
        ids = self.target_layer_ids
        if len(ids) != self.num_hidden_layers:
            raise ValueError(
                f"`target_layer_ids` names {len(ids)} layers but `num_hidden_layers` is {self.num_hidden_layers}. "
                "Every draft layer reads one target layer: make them equal, or leave `num_hidden_layers` out."
            )
        if not ids or len(set(ids)) != len(ids) or not all(0 <= i < self.num_target_layers for i in ids):
            raise ValueError(
                f"`target_layer_ids` must be distinct decoder layers of a target with {self.num_target_layers} layers "
                f"(0 to {self.num_target_layers - 1}), got {ids}."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` ({self.num_attention_heads}) must be a multiple of `num_key_value_heads` "
                f"({self.num_key_value_heads})."
            )
        for name, least in (("block_size", 1), ("window_size", 0), ("num_summary_queries", 0), ("markov_rank", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}, got {getattr(self, name)}.")
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` must be a row of the target's embedding table (0 to {self.vocab_size - 1}), "
                f"got {self.mask_token_id}."
            )
        if self.boundary_residual is not None and not -len(ids) <= self.boundary_residual < len(ids):
            raise ValueError(
                f"`boundary_residual` must index one of the {len(ids)} `target_layer_ids`, got {self.boundary_residual}."
            )
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"`draft_vocab_size` must lie between 1 and `vocab_size` ({self.vocab_size}), got {self.draft_vocab_size}."
            )
        if self.proposal not in ("sampled", "likeliest"):
            raise ValueError(f"`proposal` must be 'sampled' or 'likeliest', got {self.proposal!r}.")
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"`layer_types` has {len(self.layer_types)} entries for {self.num_hidden_layers} draft layers."
            )

    def state_bytes(self, dtype: torch.dtype = torch.bfloat16, batch_size: int = 1) -> int:
        """
        Size of the drafter's state, the same at any context length (format file, section 3.3).

        Args:
            dtype (`torch.dtype`): Of window and boundary; the summary is kept in at least fp32.
            batch_size (`int`): Number of sequences.

        Returns:
            `int`: bytes.
        """
        summary_dtype = torch.promote_types(dtype, torch.float32)
        window = 2 * self.window_size * self.num_key_value_heads * self.head_dim * dtype.itemsize
        summary = self.num_attention_heads * self.num_summary_queries * (self.head_dim + 1) * summary_dtype.itemsize
        boundary = self.hidden_size * dtype.itemsize
        return batch_size * self.num_hidden_layers * (window + summary + boundary)

    @classmethod
    def from_target(
        cls, target_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None = None, **overrides: Any
    ) -> "LongSparkConfig":
        r"""
        The configuration of a drafter that fits a target.

        Args:
            target_config (`PreTrainedConfig`):
                Config of a decoder-only target, or of a multimodal model with a text decoder.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): Of the target; its fingerprint is stored.
            overrides (`Any`):
                Any field of [`LongSparkConfig`]. `mask_token_id` must be given.

        Raises:
            `ValueError`: if the target is an encoder-decoder, has no rotary embedding, or `mask_token_id` is missing.

        Example:

        ```python
        config = LongSparkConfig.from_target(target.config, mask_token_id=151669)
        drafter = LongSparkDrafter(config)
        ```
        """
        if target_config.is_encoder_decoder:
            raise ValueError(
                f"`{type(target_config).__name__}` is an encoder-decoder; LongSpark drafts for decoder-only targets."
            )
        text = target_config.get_text_config(decoder=True)
        if overrides.get("mask_token_id") is None:
            raise ValueError(
                "`mask_token_id` is required: pass a token id that the target never emits, for instance a reserved "
                f"special token of its tokenizer or an unused row of its {text.vocab_size}-row embedding table."
            )
        rope_parameters = getattr(text, "rope_parameters", None)
        if not rope_parameters or getattr(text, "alibi", False):
            raise ValueError(
                f"The target config `{type(text).__name__}` has {'`alibi`' if rope_parameters else 'no `rope_parameters`'}; LongSpark "
                "needs a target with rotary position embeddings."
            )

        num_target_layers = text.num_hidden_layers
        ids = overrides.get("target_layer_ids") or uniform_layer_ids(num_target_layers)
        # Where rotary parameters are keyed by layer type, the drafter must know each paired layer's type.
        layer_types = getattr(text, "layer_types", None)
        keyed_by_type = layer_types is not None and any(kind in rope_parameters for kind in layer_types)
        fields = {
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "intermediate_size": _first(text, "intermediate_size", "ffn_hidden_size") or 4 * text.hidden_size,
            "num_attention_heads": text.num_attention_heads,
            "num_key_value_heads": _key_value_heads(text),
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            "num_target_layers": num_target_layers,
            "target_layer_ids": ids,
            "rms_norm_eps": _first(text, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon") or 1e-6,
            "rope_parameters": copy.deepcopy(rope_parameters),
            "layer_types": [layer_types[i] for i in ids if i < num_target_layers] if keyed_by_type else None,
            "max_position_embeddings": text.max_position_embeddings,
            "target_name_or_path": getattr(target_config, "_name_or_path", "") or None,
            "target_model_type": text.model_type or None,
            "target_tokenizer": None if tokenizer is None else tokenizer_fingerprint(tokenizer),
            "bos_token_id": getattr(text, "bos_token_id", None),
            "eos_token_id": getattr(text, "eos_token_id", None),
            "pad_token_id": getattr(text, "pad_token_id", None),
        }
        return cls(**(fields | overrides))

    @classmethod
    def from_released(cls, released: dict[str, Any]) -> "LongSparkConfig":
        """
        Translate the config of a released `draftfreekv` checkpoint (`Hehy/LongSpark-Qwen3-*`).

        Args:
            released (`dict`): Content of its config.json. Keys without a meaning at inference are ignored.

        Raises:
            `ValueError`: if a needed key is missing, or the keys describe another drafter or contradict each other.
        """
        return cls(**_translate_released(released))

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        config_dict, kwargs = super().get_config_dict(*args, **kwargs)
        if config_dict.get("model_type") == RELEASED_MODEL_TYPE:
            _check_released_keys(config_dict)
            config_dict = _translate_released(config_dict)
        return config_dict, kwargs


def _first(text: PreTrainedConfig, *names: str) -> Any:
    """The first of some fields that a config has, by the names that architectures give to it."""
    return next((value for name in names if (value := getattr(text, name, None))), None)


def _key_value_heads(text: PreTrainedConfig) -> int:
    """Heads of the target's K/V cache. Falcon's is special: one head in its first form, copies for all heads in the other."""
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        return 1
    return _first(text, "num_key_value_heads") or text.num_attention_heads


def _check_harmless(fields: dict[str, Any]) -> None:
    """Raise for what a config file has no business to ask for."""
    for key in _NEVER_FOLLOWED:
        if fields.get(key) is not None:
            raise ValueError(
                f"The drafter's config has `{key}` = {fields[key]!r}, which would lead to other files or code. That is never "
                "followed: remove it from config.json, and ask how it came there."
            )
    for key in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"):
        # Any other name can make transformers fetch a kernel from the Hub, by itself or for a part of the model.
        if fields.get(key) not in (None, "eager", "sdpa"):
            raise ValueError(
                f"The drafter's config has `{key}` = {fields[key]!r}, which may ask for an attention kernel from the Hub. A "
                "drafter computes its attention itself: leave it out."
            )


def _check_released_keys(released: dict[str, Any]) -> None:
    """Raise for a key of a released config.json that nobody described: it may mean another drafter."""
    generic = set(PreTrainedConfig().to_dict())
    unknown = sorted(set(released) - _RELEASED_IGNORED - set(_RELEASED_FIELDS) - set(_RELEASED_FIXED) - generic)
    if unknown:
        raise ValueError(
            f"The released config has keys that are not known: {', '.join(unknown)}. They may ask for another drafter than the one "
            "computed here. Update longspark_hf; if you know that they mean nothing at inference, remove them from config.json."
        )


def _translate_released(released: dict[str, Any]) -> dict[str, Any]:
    for key, expected in _RELEASED_FIXED.items():
        if key in released and released[key] != expected:
            raise ValueError(
                f"The released config has `{key}` = {released[key]!r}; only drafters with {expected!r} can be loaded."
            )
    ours: dict[str, Any] = {"model_type": LongSparkConfig.model_type}
    for key, (field, default) in _RELEASED_FIELDS.items():
        value = released.get(key)
        if value is None and default is ...:
            raise ValueError(f"The released config lacks `{key}`, which has no default. Fix its config.json.")
        if value is not None or field not in ours:
            ours[field] = default if value is None else value

    ids, policy = released.get("target_layer_ids"), released.get("target_layer_policy") or ""
    kind, _, count = policy.partition("_")
    if ids is not None and ours["num_target_layers"] is None:
        ours["num_target_layers"] = max(ids) + 1  # the published policy ends with the last layer
    elif ids is None and (ours["num_target_layers"] is None or kind not in ("uniform", "last") or not count.isdigit()):
        raise ValueError(
            "The released config lacks `target_layer_ids`, and does not imply them by `num_target_layers` "
            f"(got {ours['num_target_layers']}) and a `target_layer_policy` of 'uniform_K' or 'last_K' (got {policy!r}). "
            "Fix its config.json."
        )
    elif ids is None:
        layers = ours["num_target_layers"]
        ids = uniform_layer_ids(layers, int(count)) if kind == "uniform" else list(range(layers))[-int(count) :]
    ours["target_layer_ids"] = list(ids)
    ours["rope_parameters"] = {"rope_type": "default", "rope_theta": released.get("qwen_rope_theta") or 1_000_000.0}

    implied = {
        "parallel_mixer_layers": len(ids),
        "local_draft_rows": ours["block_size"],
        "max_accepted_tokens": ours["block_size"] + 1,
    }
    for key, expected in implied.items():
        if released.get(key) not in (None, expected):
            raise ValueError(
                f"The released config contradicts itself: `{key}` is {released[key]}, but its other keys imply {expected}."
            )
    return ours


__all__ = ["LongSparkConfig", "tokenizer_fingerprint"]
