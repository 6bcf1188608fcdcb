"""What a drafter borrows from its target, and whether the two fit.

Knows: where a target keeps its decoder layers, embedding, final norm, head and rotary module, whatever their names.
Does not know: what the drafter computes with them (modeling_longspark) or when (generation_longspark).
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging

from .configuration_longspark import LongSparkConfig


logger = logging.get_logger(__name__)


def call_borrowed(module: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Run a borrowed module where it lives and in its dtype; a module under offloading moves its inputs itself."""
    parameter = next(module.parameters(), None)
    if parameter is not None and parameter.device.type != "meta":
        states = states.to(parameter.device)
    if parameter is not None and parameter.is_floating_point() and states.is_floating_point():
        states = states.to(parameter.dtype)
    return module(states)


Rotary = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


@dataclass
class BorrowedTarget:
    r"""
    Modules of a target that a drafter uses for the duration of a call. Plain references: never submodules of the drafter.

    Args:
        embed_tokens (`nn.Module`): Token ids `(batch_size, n)` to embeddings `(batch_size, n, hidden_size)`.
        final_norm (`nn.Module`): The norm in front of the head.
        lm_head (`nn.Module`): Normed hidden states to logits over the vocabulary.
        rotary (`Callable`, *optional*):
            `(hidden_states, position_ids, draft_layer) -> (cos, sin)`, each `(batch_size, n, rotary_dim)`. `None` for
            a target that is not bound: the drafter then follows its config's `rope_parameters`.
        layers (`nn.ModuleList`, *optional*): The decoder layers; only the tap reads them.
    """

    embed_tokens: nn.Module
    final_norm: nn.Module
    lm_head: nn.Module
    rotary: Rotary | None = None
    layers: nn.ModuleList | None = None
    _head_rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None

    def logits(self, hidden_states: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """
        Logits of normed hidden states, over the whole vocabulary or over a draft vocabulary.

        Args:
            hidden_states (`torch.Tensor` of shape `(..., hidden_size)`): After the final norm.
            token_ids (`torch.LongTensor` of shape `(draft_vocab_size,)`, *optional*):
                Compute these columns only. The head's rows are selected at the first call with these ids and kept.
        """
        if token_ids is None:
            return call_borrowed(self.lm_head, hidden_states)
        weight = getattr(self.lm_head, "weight", None)
        if type(self.lm_head) is not nn.Linear or not weight.is_floating_point() or weight.device.type == "meta":
            logits = call_borrowed(self.lm_head, hidden_states)  # quantized or offloaded: only the module knows how
            return logits[..., token_ids.to(logits.device)]
        if self._head_rows is None or self._head_rows[0] is not token_ids:
            index, bias = token_ids.to(weight.device), self.lm_head.bias
            self._head_rows = (token_ids, weight.detach()[index], None if bias is None else bias.detach()[index])
        return F.linear(hidden_states.to(weight), *self._head_rows[1:])

    @classmethod
    def of(cls, target: PreTrainedModel, config: LongSparkConfig) -> "BorrowedTarget":
        """
        Find the modules of a target, by accessor where transformers has one and by role otherwise.

        Args:
            target (`PreTrainedModel`): A decoder-only model with a language modeling head.
            config ([`LongSparkConfig`]): Of the drafter.

        Raises:
            `ValueError`: if the target lacks one of them.
        """
        decoder = target.get_decoder()
        text = target.config.get_text_config(decoder=True)
        layers = _only_child(
            decoder, lambda _, m: isinstance(m, nn.ModuleList) and len(m) == text.num_hidden_layers, "decoder layers"
        )
        final_norm = _only_child(
            decoder, lambda n, m: "norm" in type(m).__name__.lower() and "emb" not in n.lower(), "final norm"
        )
        rotary_module = _only_child(decoder, lambda _, m: "rotary" in type(m).__name__.lower(), "rotary embedding")
        embed_tokens, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
        if embed_tokens is None or lm_head is None:
            raise ValueError(f"`{type(target).__name__}` offers no input embeddings or no language modeling head.")
        rotary = _target_rotary(rotary_module, getattr(text, "layer_types", None), config)
        return cls(embed_tokens, final_norm, lm_head, rotary, layers)


def _only_child(decoder: nn.Module, fits: Callable[[str, nn.Module], bool], role: str) -> nn.Module:
    found = {name: module for name, module in decoder.named_children() if fits(name, module)}
    if len(found) != 1:
        raise ValueError(
            f"LongSpark cannot tell the {role} of `{type(decoder).__name__}`: expected one module of that role directly "
            f"in the decoder, found {sorted(found) or 'none'}. This architecture is not supported."
        )
    return next(iter(found.values()))


def _target_rotary(module: nn.Module, layer_types: list[str] | None, config: LongSparkConfig) -> Rotary:
    # The undecorated forward: the decorated one of `longrope` swaps frequencies by the positions it sees, and looking
    # up angles must not change the target's state. What the target's own last pass set is what its keys were made with.
    forward = inspect.unwrap(type(module).forward)
    by_layer_type = "layer_type" in inspect.signature(forward).parameters

    @torch.no_grad()
    def rotary(hidden_states: torch.Tensor, position_ids: torch.Tensor, draft_layer: int):
        extra = {"layer_type": layer_types[config.target_layer_ids[draft_layer]]} if by_layer_type else {}
        if hasattr(module, "mrope_section"):  # text has the same position on all three axes
            position_ids = position_ids.expand(3, *position_ids.shape)
        cos, sin = forward(module, hidden_states, position_ids, **extra)
        if cos.ndim == 4:  # one copy per axis of a multimodal rotary
            cos, sin = cos[0], sin[0]
        if each_angle_once:
            cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)
        return cos, sin

    # Some targets (gpt-oss) give each angle once and use it for both halves.
    each_angle_once = False
    probe = module.inv_freq if isinstance(getattr(module, "inv_freq", None), torch.Tensor) else None
    if probe is not None and not by_layer_type:
        position = torch.ones(1, 1, dtype=torch.long, device=probe.device)
        each_angle_once = rotary(torch.zeros(1, 1, 1, device=probe.device), position, 0)[0].shape[-1] == len(probe)
    return rotary


def config_rotary(config: LongSparkConfig) -> Rotary:
    """
    Rotary angles from `config.rope_parameters`, for a drafter without a bound target.

    Frequencies are computed from the config each time, in at least fp32: no buffer that loading or casting could spoil.

    Args:
        config ([`LongSparkConfig`]): Of the drafter.

    Returns:
        `Callable`: as `BorrowedTarget.rotary`; cos and sin come in the dtype of `hidden_states`.
    """

    def rotary(hidden_states: torch.Tensor, position_ids: torch.Tensor, draft_layer: int):
        layer_type = config.layer_types[draft_layer] if config.layer_types else None
        parameters = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        device = position_ids.device
        if parameters.get("rope_type", "default") == "default":
            dim = int(config.head_dim * parameters.get("partial_rotary_factor", 1.0))
            exponent = torch.arange(0, dim, 2, dtype=dtype, device=device) / dim
            inv_freq, scaling = 1.0 / (parameters["rope_theta"] ** exponent), 1.0
        else:
            init = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
            inv_freq, scaling = init(config, device, **({"layer_type": layer_type} if layer_type else {}))
        angles = position_ids[..., None].to(dtype) * inv_freq.to(dtype)
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * scaling).to(hidden_states.dtype), (angles.sin() * scaling).to(hidden_states.dtype)

    return rotary


def check_fit(config: LongSparkConfig, target: PreTrainedModel) -> None:
    r"""
    Raise if a drafter cannot draft for a target, warn if it may draft badly.

    Args:
        config ([`LongSparkConfig`]): Of the drafter.
        target (`PreTrainedModel`): The target.

    Raises:
        `ValueError`: naming both values and the fix.
    """
    check_config_fit(config, target.config, list(getattr(target, "peft_config", None) or ()))
    borrowed = BorrowedTarget.of(target, config)

    head_rows = getattr(borrowed.lm_head, "out_features", config.vocab_size)
    if head_rows != config.vocab_size:
        raise ValueError(
            f"The target's head has {head_rows} rows but its config's `vocab_size` is {config.vocab_size}. Make them agree, "
            f"for instance by `target.resize_token_embeddings({config.vocab_size})`."
        )
    # Layouts other than half-split angles would silently ruin acceptance.
    probe = torch.zeros(1, 1, config.hidden_size, device=next(target.parameters()).device)
    try:
        cos, _ = borrowed.rotary(probe, torch.arange(1, 2, device=probe.device)[None], 0)
        half_split = torch.equal(*cos.float().chunk(2, dim=-1))
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ValueError(
            f"LongSpark cannot read the rotary embedding of `{type(target).__name__}` ({error}). This architecture is "
            "not supported."
        ) from error
    rotate_half = getattr(sys.modules[type(borrowed.layers[0]).__module__], "rotate_half", None)
    if rotate_half is not None:
        half_split &= torch.equal(rotate_half(torch.arange(4.0)), torch.tensor([-2.0, -3.0, 0.0, 1.0]))
    if not half_split:
        raise ValueError(
            f"`{type(target).__name__}` rotates interleaved pairs; LongSpark drafters rotate halves. This architecture "
            "is not supported."
        )
    rotary_dim = _rotary_dim(config)
    if cos.shape[-1] != rotary_dim:
        raise ValueError(
            f"The target rotates {cos.shape[-1]} of {config.head_dim} head dimensions, the drafter {rotary_dim}. Load "
            "the drafter made for this target, or build one with `LongSparkConfig.from_target(target.config, ...)`."
        )


def check_config_fit(config: LongSparkConfig, target_config: PreTrainedConfig, adapters: Sequence[str] = ()) -> None:
    """
    The part of [`check_fit`] that needs only the target's config. Warns once per process, in one line.

    Args:
        config ([`LongSparkConfig`]): Of the drafter.
        target_config (`PreTrainedConfig`): Of the target.
        adapters (`Sequence[str]`): Names of the adapters (PEFT) in the target.

    Raises:
        `ValueError`: naming both values and the fix.
    """
    expected = LongSparkConfig.from_target(target_config, mask_token_id=config.mask_token_id or 0)
    shapes = {
        "vocab_size": "vocabulary size",
        "hidden_size": "hidden size",
        "num_attention_heads": "attention heads",
        "num_key_value_heads": "key/value heads",
        "head_dim": "head_dim",
        "num_target_layers": "target layers",
    }
    wrong = [
        f"{label} {getattr(config, name)} (target: {getattr(expected, name)})"
        for name, label in shapes.items()
        if getattr(config, name) != getattr(expected, name)
    ]
    made_for = config.target_name_or_path or "another target"
    if wrong:
        raise ValueError(
            f"This drafter does not fit the target `{expected.target_name_or_path or type(target_config).__name__}`. It was "
            f"built for {made_for} with {', '.join(wrong)}. Load the drafter that was trained for this target, or build "
            "one with `LongSparkConfig.from_target(target.config, mask_token_id=...)`."
        )
    text = target_config.get_text_config(decoder=True)
    if any(parameters.get("rope_type") == "dynamic" for parameters in flat_rope(text.rope_parameters)):
        raise ValueError(
            "The target uses `dynamic` rotary scaling: verifying a block changes the frequencies of tokens already "
            "written, so no speculative decoding is exact there. Set another `rope_type` (a fixed `rope_theta`, "
            "`linear`, `yarn`) in the target's `rope_parameters`, or generate without `assistant_model`."
        )

    differences = []
    # A local copy of the same model differs in its directory only.
    names = {name.rstrip("/").rpartition("/")[2] for name in (made_for, expected.target_name_or_path or "")} - {""}
    if config.target_name_or_path and len(names) > 1:
        differences.append(f"made for {made_for}, the target is {expected.target_name_or_path}")
    if config.target_model_type and config.target_model_type != expected.target_model_type:
        differences.append(f"made for a `{config.target_model_type}`, the target is a `{expected.target_model_type}`")
    if adapters:
        differences.append(f"made for {made_for} without adapters, the target has {', '.join(adapters)}")
    if config.rope_parameters and flat_rope(config.rope_parameters) != flat_rope(text.rope_parameters):
        differences.append(
            f"made with the rotary parameters {config.rope_parameters}, the target has {text.rope_parameters}, which are used"
        )
    if differences:
        logger.warning_once(
            f"This drafter was {'; it was '.join(differences)}. Output stays the target's; a fine-tune of the same base is "
            "usually still drafted well, any other target is not."
        )


def _rotary_dim(config: LongSparkConfig) -> int:
    """Rotated dimensions of a head of draft layer 0, by the drafter's own config."""
    hidden_states = torch.zeros(1, 1, 1)
    return config_rotary(config)(hidden_states, torch.zeros(1, 1, dtype=torch.long), 0)[0].shape[-1]


def flat_rope(rope_parameters: dict) -> list[dict]:
    """The parameter dicts of a `rope_parameters`, keyed by layer type or not."""
    nested = [value for value in rope_parameters.values() if isinstance(value, dict)]
    return nested or [rope_parameters]
