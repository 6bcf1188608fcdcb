"""What one `generate` call asks for, and whether assisted decoding can give it. Refuses before anything is touched.

Knows: combinations of arguments that the loop of transformers gets wrong or cannot serve.
Does not know: whether drafter and target fit (target_longspark).
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor

from .target_longspark import flat_rope


# They change state of their own whenever they are called, and verifying calls them for tokens that are then rejected.
STATEFUL_PROCESSORS = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)


@dataclass
class Call:
    r"""
    The prompt of a call in relation to the target's cache.

    Args:
        target_cache (`Cache`): Empty, or filled by earlier calls.
        past (`int`): Rows in it.
        start (`int`): Tokens of prompt and cache together.
        has_all_ids (`bool`): Whether `input_ids` repeats what is cached.
    """

    target_cache: Cache
    past: int
    start: int
    has_all_ids: bool


def check_call(
    target: PreTrainedModel,
    input_ids: torch.LongTensor,
    generation_config: GenerationConfig,
    logits_processor: LogitsProcessorList,
    kwargs: dict[str, Any],
    stock: str | None = None,
) -> Call:
    r"""
    Args:
        target (`PreTrainedModel`): The target.
        input_ids (`torch.LongTensor` of shape `(batch_size, length)`): May be empty with `inputs_embeds`.
        generation_config, logits_processor, kwargs: As prepared by `generate`.
        stock (`str`, *optional*): Why the loop of transformers serves the call, where it does.

    Returns:
        [`Call`]

    Raises:
        `ValueError`: saying what cannot be supported, why, and what to do instead.
    """
    for processor in logits_processor:
        if isinstance(processor, STATEFUL_PROCESSORS):
            raise ValueError(
                f"`{type(processor).__name__}` keeps state from call to call and would see rejected draft tokens. "
                "Generate without `assistant_model`, or without this processor."
            )
    if getattr(target.config.get_text_config(decoder=True), "use_bidirectional_attention", None) is True:
        raise ValueError(
            f"`{type(target).__name__}` attends in both directions (`use_bidirectional_attention=True` in its config), so it "
            "cannot verify several tokens in one pass. Generate without `assistant_model`."
        )
    target_cache = kwargs.get("cache", kwargs.get("past_key_values"))  # its name before transformers 5.24
    if not isinstance(target_cache, Cache):
        raise ValueError(
            f"Assisted generation needs a `Cache` for the target, got {type(target_cache).__name__}. Do not pass "
            "`use_cache=False`."
        )
    stuck = {
        type(layer).__name__
        for layer, is_linear in zip(target_cache.layers, target_cache.is_linear)
        if not is_linear and not layer.is_croppable
    }
    if stuck:
        raise ValueError(
            f"The target's cache has layers that cannot take back rejected tokens ({', '.join(sorted(stuck))}). Use a "
            "`DynamicCache`, the default; a static cache needs full-attention layers and transformers 5.24."
        )

    attention_mask, inputs_embeds = kwargs.get("attention_mask"), kwargs.get("inputs_embeds")
    if stock and attention_mask is not None and attention_mask.shape[1] != input_ids.shape[1]:
        raise ValueError(
            f"The `attention_mask` has padding and covers {attention_mask.shape[1]} tokens, but `input_ids` has "
            f"{input_ids.shape[1]}: the assisted loop of transformers would cut the mask. Pass the ids of the whole "
            "conversation (cached tokens are not processed again), or drop the padded positions."
        )
    _check_outputs(target, input_ids, generation_config, stock)

    past = int(target_cache.get_seq_length())
    # `generate` drops a mask of ones, having noted its length.
    mask_length = getattr(generation_config, "_mask_length", -1) if attention_mask is None else attention_mask.shape[1]
    has_all_ids = input_ids.shape[1] > 0 and mask_length in (-1, input_ids.shape[1])
    has_full_prompt = has_all_ids or inputs_embeds is not None
    length = input_ids.shape[1] if inputs_embeds is None else inputs_embeds.shape[1]
    if past and has_full_prompt and length <= past:
        raise ValueError(
            f"The cache already holds {past} tokens but the prompt has {length}: nothing is left to process. Pass the "
            "whole conversation with new tokens at its end, or an empty cache."
        )
    start = length if has_full_prompt else past + length
    _check_rotary(target, start, start + generation_config.max_length - input_ids.shape[1])
    return Call(target_cache, past, start, has_all_ids)


def _check_outputs(
    target: PreTrainedModel, input_ids: torch.LongTensor, generation_config: GenerationConfig, stock: str | None
) -> None:
    if not generation_config.return_dict_in_generate:
        return
    wanted = [name for name in ("output_hidden_states", "output_attentions") if getattr(generation_config, name)]
    if stock and wanted and input_ids.shape[1] == 0:
        raise ValueError(
            f"`{wanted[0]}` with `inputs_embeds` and `assistant_model`: the assisted loop of transformers returns none for "
            "the prompt. Pass `input_ids`, or leave out one of them."
        )
    implementation = target.config.get_text_config(decoder=True)._attn_implementation
    if generation_config.output_attentions and len(input_ids) > 1:
        raise ValueError(
            "`output_attentions` of a batch with `assistant_model` is not supported: its sequences have rows of different "
            "length. Pass one sequence at a time, or leave out one of the two."
        )
    if generation_config.output_attentions and implementation != "eager":
        raise ValueError(
            f"`output_attentions` needs a target with `attn_implementation='eager'`, got '{implementation}'. Call "
            "`target.set_attn_implementation('eager')` first."
        )


def _check_rotary(target: PreTrainedModel, start: int, end: int) -> None:
    for parameters in flat_rope(target.config.get_text_config(decoder=True).rope_parameters):
        original = parameters.get("original_max_position_embeddings")
        if parameters.get("rope_type") == "longrope" and original and start <= original < end:
            raise ValueError(
                f"The target uses `longrope` with an original length of {original} and this run goes from {start} to "
                f"{end} tokens: its frequencies switch on the way, so no speculative decoding is exact there. Keep "
                f"`max_length` at or below {original}, or generate without `assistant_model`."
            )
