"""When a draft happens: the seam into `generate`, the candidate generator of one call, and its statistics.

Knows: the stock assisted-decoding loop of transformers and what it asks of a candidate generator.
Does not know: what is computed in a draft (modeling_longspark) or how views are taken (tap_longspark).
"""

import contextlib
import copy
import functools
import inspect
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import CandidateGenerator, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from .attention_longspark import grouped_attention
from .cache_longspark import LongSparkCache
from .checks_longspark import Call, check_call
from .configuration_longspark import tokenizer_fingerprint
from .decoding_longspark import AssistedDecoding
from .inplace_longspark import appending_in_place
from .rows_longspark import check_rows
from .schedule_longspark import DraftSchedule
from .stats_longspark import LongSparkStats
from .stopping_longspark import StoppingRules
from .tap_longspark import TargetTap, absorb_held_rows, holds_rows_from, leave_state, take_state
from .target_longspark import BorrowedTarget, check_fit
from .verification_longspark import NOT_FINITE, UNDEMANDING_PROCESSORS, VALUE_PROCESSORS


if TYPE_CHECKING:
    from .modeling_longspark import LongSparkDrafter

logger = logging.get_logger(__name__)


class LongSparkCandidateGenerator(CandidateGenerator):
    r"""
    Candidates for the stock assisted-decoding loop, for one `generate` call. A context manager: it taps the target inside.

    Args:
        drafter ([`LongSparkDrafter`]): Drafts.
        borrowed ([`BorrowedTarget`]): The target's modules.
        tap ([`TargetTap`]): Over the cache of this call.
        generation_config (`GenerationConfig`): Prepared by `generate`; `num_assistant_tokens` caps the draft.
        logits_processor (`LogitsProcessorList`): Prepared by `generate`; applied to the draft as to the target.
        stopping_rules ([`StoppingRules`]): Where a draft must end.
    """

    requires_model_outputs = True
    model_kwargs_overrides: dict[str, Any] = {}

    def __init__(
        self,
        drafter: "LongSparkDrafter",
        borrowed: BorrowedTarget,
        tap: TargetTap,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        stopping_rules: StoppingRules,
    ):
        self.drafter, self.borrowed, self.tap = drafter, borrowed, tap
        self.generation_config = generation_config
        self.logits_processor = logits_processor
        self.stopping_rules = stopping_rules
        self.stats = LongSparkStats(accepted_by_position=[0] * drafter.config.block_size)
        self.schedule = DraftSchedule(drafter.config.block_size, generation_config.num_assistant_tokens)
        self._length: int | None = None
        self._rows = 0  # of the target's cache, padding included
        self._clock = 0.0
        self._drafting = True
        self._samples = generation_config.do_sample and drafter.config.proposal == "sampled"
        self._demanding = any(type(p) not in UNDEMANDING_PROCESSORS for p in logits_processor)

    def get_candidate_generator(self, **_: Any) -> "LongSparkCandidateGenerator":
        """The seam asks the loop's `assistant_model`, which is this object, for its candidate generator."""
        return self

    def get_candidates(
        self, input_ids: torch.LongTensor, model_kwargs: dict[str, Any] | None = None, **_: Any
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        r"""
        Draft after `input_ids`. The first call drafts nothing, so that the target prefills.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, length)`): All tokens so far.
            model_kwargs (`dict`, *optional*): Of the loop; `position_ids` are read.

        Returns:
            `tuple(torch.LongTensor, torch.Tensor)`: `input_ids` with the draft appended, and the logits whose softmax is
            the draft's distribution, of shape `(1, draft_length, vocab_size)`; `None` when nothing was sampled.
        """
        model_kwargs = model_kwargs or {}
        if self._length is None:
            self._length, self._clock = input_ids.shape[1], time.perf_counter()
            return input_ids, None
        self._commit(input_ids.shape[1] - self._length)
        self._length = input_ids.shape[1]
        model_kwargs.pop("inputs_embeds", None)  # the prompt's; the loop reads them in its first pass only

        candidates = self._draft(input_ids, model_kwargs.get("position_ids"))
        now = time.perf_counter()
        self.stats.draft_seconds += now - self._clock
        self._clock = now
        return candidates

    def _commit(self, committed: int) -> None:
        now = time.perf_counter()
        if self.tap.prefilling:
            self.stats.prefill_seconds = now - self._clock
            self.tap.commit()
        else:
            self.stats.verify_seconds += now - self._clock
            self.stats.count_round(committed)
            self.tap.commit([committed])
        self._rows = int(self.tap.target_cache.get_seq_length())
        self._clock = now

    def _draft(
        self, input_ids: torch.LongTensor, position_ids: torch.LongTensor | None
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        config = self.generation_config
        budget = config.max_length - input_ids.shape[1] - 1
        num_tokens = min(self.schedule.length(), budget)
        if num_tokens <= 0 or not self._drafting or not self.stopping_rules.allow_drafts:
            return input_ids, None
        ends_before = self._ends_before() if self._demanding or self.stopping_rules else None
        # A draft that ends before some sampled tokens is no sample: the likeliest are then proposed.
        samples = self._samples and (ends_before is None or config.assistant_ensemble_weight is not None)
        if not self.stopping_rules.allow_drafts:
            return input_ids, None

        state = self.tap.state
        if position_ids is None:
            anchor_position = state.layers[0].num_rows
        else:  # a multimodal target has one row of positions per axis, equal for text
            anchor_position = position_ids[..., -1] if position_ids.ndim == 2 else position_ids[0, :, -1]
        draft = self.drafter.draft(
            input_ids[:, -1],
            anchor_position,
            state,
            self.borrowed,
            num_tokens=num_tokens,
            do_sample=samples,
            logits_processor=self.logits_processor,
            input_ids=input_ids,
            ends_before=ends_before,
            by_value=all(type(processor) in VALUE_PROCESSORS for processor in self.logits_processor),
        )
        # The one look at the device of this round.
        finite, *possible = torch.cat([draft.finite[:, None], draft.possible], dim=1)[0].tolist()
        if not finite:
            self._drafting = False
            logger.warning(NOT_FINITE)
            return input_ids, None
        num_tokens = possible.index(False) if False in possible else len(possible)
        candidates = torch.cat([input_ids, draft.token_ids[:, :num_tokens].to(input_ids.device)], dim=1)
        # Without logits the loop compares with its own samples, which is right for the likeliest tokens.
        with_logits = num_tokens > 0 and (samples or config.assistant_ensemble_weight is not None)
        return candidates, draft.logits[:, :num_tokens] if with_logits else None

    def _ends_before(self) -> Callable[[torch.LongTensor], bool]:
        """Whether a draft must end before its newest token: an EOS, after which nothing can follow, or one that stops."""
        eos, fires = getattr(self.generation_config, "_eos_token_tensor", None), self.stopping_rules.begin_draft()

        def ends_before(prefix: torch.LongTensor) -> bool:
            is_eos = eos is not None and bool(torch.isin(prefix[:, -1], eos.to(prefix.device)).any())
            return is_eos or fires(prefix)

        return ends_before

    def finish(self) -> None:
        """Commit the last round after the loop ended well; the target cache tells how much of it was kept."""
        self._commit(int(self.tap.target_cache.get_seq_length()) - self._rows)
        self.stats.state_bytes = self.tap.state.nbytes

    def update_candidate_strategy(self, *_: Any, **__: Any) -> None:
        """Nothing to adapt."""


class LongSparkAssistant:
    """The part of a drafter that `generate` talks to."""

    def check_target(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """
        Raise if this drafter cannot draft for a target, warn if it may draft badly. `generate` calls it by itself.

        Args:
            target (`PreTrainedModel`): The target.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): Of the target, to be compared with the one of training.

        Raises:
            `ValueError`: naming both values and the fix.
        """
        check_fit(self.config, target)
        known = self.config.target_tokenizer
        if known and tokenizer is not None and tokenizer_fingerprint(tokenizer) != known:
            logger.warning_once(
                f"The tokenizer differs from the one this drafter was made with ({tokenizer_fingerprint(tokenizer)}, not {known}). "
                "Output stays the target's; drafts are good only as far as token ids mean the same."
            )

    def assisted_decoding(
        self,
        loop: Callable[..., Any],
        target: PreTrainedModel,
        input_ids: torch.LongTensor,
        *,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        **kwargs: Any,
    ) -> Any:
        r"""
        One `generate` call with this drafter. The seam calls it in place of the stock loop, which it runs in the end.

        Args:
            loop (`Callable`): `GenerationMixin._assisted_decoding` as it was.
            target (`PreTrainedModel`): The model whose `generate` was called.
            input_ids (`torch.LongTensor` of shape `(1, length)`): The prompt; may be empty with `inputs_embeds`.
            generation_config, logits_processor, stopping_criteria, kwargs: As prepared by `generate`.

        Returns:
            What the loop returns.

        Raises:
            `ValueError`: before any token is generated, if drafter and target do not fit or the call asks for something
            that cannot be supported.
        """
        stock = needs_stock_loop(target, generation_config, kwargs)
        call = check_call(target, input_ids, generation_config, logits_processor, kwargs, stock)
        target_cache, batch_size = call.target_cache, input_ids.shape[0]
        if batch_size > 1:
            check_rows(target, target_cache)
            if stock:
                raise ValueError(
                    f"Got a batch of {batch_size} sequences with `assistant_model`, and {stock}, which takes one sequence at a "
                    "time. Call `generate` once per sequence."
                )
        state = self._resume(target, call, input_ids, kwargs, stock)
        borrowed = BorrowedTarget.of(target, self.config)
        # A compiled target forward would trace through the tap.
        generation_config.disable_compile = True
        # A loop switches the recording of past rows on and leaves it on, in a cache that may be the user's.
        recording = [(layer, layer.record_past) for layer in target_cache.layers if hasattr(layer, "record_past")]
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(grouped_attention(target))
                if batch_size == 1:  # those of a batch are entered behind its prefill, see TargetRows
                    stack.enter_context(appending_in_place(target_cache))
                tap = TargetTap(borrowed, self.config, target_cache, state, kwargs.get("attention_mask"))
                stack.enter_context(tap)
                if stock:
                    stats, output = self._stock_decoding(
                        loop,
                        target,
                        input_ids,
                        borrowed,
                        tap,
                        generation_config,
                        logits_processor,
                        stopping_criteria,
                        **kwargs,
                    )
                else:
                    streamer = kwargs.pop("streamer", None)
                    model_kwargs = {name: value for name, value in kwargs.items() if name not in LOOP_ARGUMENTS}
                    decoding = AssistedDecoding(
                        self,
                        target,
                        borrowed,
                        tap,
                        input_ids,
                        generation_config,
                        logits_processor,
                        stopping_criteria,
                        streamer,
                        model_kwargs,
                    )
                    output, stats = decoding.run(), decoding.stats
        finally:
            for layer, record_past in recording:
                layer.record_past = record_past
        if batch_size == 1:
            leave_state(target_cache, state, self.config)
        self.stats = stats
        return output

    def _stock_decoding(
        self,
        loop: Callable[..., Any],
        target: PreTrainedModel,
        input_ids: torch.LongTensor,
        borrowed: BorrowedTarget,
        tap: TargetTap,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        **kwargs: Any,
    ) -> tuple[LongSparkStats, Any]:
        with_scores = bool(generation_config.return_dict_in_generate and generation_config.output_scores)
        rules = StoppingRules(stopping_criteria, generation_config, input_ids.shape[1], with_scores)
        generator = LongSparkCandidateGenerator(self, borrowed, tap, generation_config, logits_processor, rules)
        output = loop(
            target,
            input_ids,
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=rules.for_loop,
            assistant_model=generator,
            **kwargs,
        )
        generator.finish()
        return generator.stats, output

    def _resume(
        self,
        target: PreTrainedModel,
        call: Call,
        input_ids: torch.LongTensor,
        kwargs: dict[str, Any],
        stock: str | None,
    ) -> LongSparkCache:
        """
        The drafter state for the rows already in the target's cache. Changes `kwargs` so that the first pass of the stock
        loop processes only what is new; left alone it would process a full prompt again on top of the cached one.
        """
        fresh, target_cache = self.new_cache(), call.target_cache
        state, covered = take_state(target_cache, fresh, self.config)
        if call.past == 0:
            return fresh
        if not holds_rows_from(target_cache, self.config, covered):
            logger.warning_once(
                "The cache no longer holds all rows of the drafter's sliding layers; its summary starts at the oldest row "
                "held. Output is not affected; drafts may be accepted less often."
            )
        absorb_held_rows(target_cache, state, self.config, covered, kwargs.get("attention_mask"))
        if not stock:
            return state
        if kwargs.get("inputs_embeds") is not None:
            kwargs["inputs_embeds"] = kwargs["inputs_embeds"][:, call.past :]
        elif call.has_all_ids:
            # Embeddings of the new tokens: the loop's first pass then runs over these alone.
            kwargs["inputs_embeds"] = target.get_input_embeddings()(input_ids[:, call.past :])
        return state


# What the seam passes on beside the arguments of the target.
LOOP_ARGUMENTS = ("synced_gpus", "inputs_tensor", "assistant_tokenizer", "tokenizer")


def needs_stock_loop(
    target: PreTrainedModel, generation_config: GenerationConfig, kwargs: dict[str, Any]
) -> str | None:
    """Why only the assisted-decoding loop of transformers serves a call, or `None` if ours does."""
    if kwargs.get("synced_gpus"):
        return "`synced_gpus` is on"
    if generation_config.assistant_ensemble_weight is not None:
        return "`assistant_ensemble_weight` is set"
    updates = type(target)._update_model_kwargs_for_generation
    if inspect.unwrap(updates) is not GenerationMixin._update_model_kwargs_for_generation:
        return f"`{type(target).__name__}` has arguments of its own to carry from step to step"
    return None


# Of the three wrappers below: a newer copy of this file replaces those of an older one.
SEAM_VERSION = 2


def install() -> None:
    """
    Let `generate` ask an assistant model that knows how to assist. Done once per process, on import; repeated calls and
    other copies of this file (remote code beside the installed package) change nothing.

    Three methods are wrapped. `_assisted_decoding` hands the call to `assistant_model.assisted_decoding`,
    `_get_candidate_generator` takes `assistant_model.get_candidate_generator`, and `_validate_generation_mode` first asks
    `assistant_model.check_target`, whose message names the fix where the stock one asks for tokenizers. All go by the
    presence of that method; every other call runs the original. [`uninstall`] undoes it.
    """
    for name, wrap in _SEAM.items():
        original = getattr(GenerationMixin, name)
        found = getattr(original, "_longspark_seam", None)
        if found is not None and found < SEAM_VERSION:  # of an older copy
            original, found = original.__wrapped__, None
        if found is None:
            wrapper = functools.wraps(original)(wrap(original))  # `generate` reads the signature
            wrapper._longspark_seam = SEAM_VERSION
            setattr(GenerationMixin, name, wrapper)


def uninstall() -> None:
    """Give `GenerationMixin` its own methods back. Drafters cannot assist until [`install`] is called again."""
    for name in _SEAM:
        method = getattr(GenerationMixin, name)
        if hasattr(method, "_longspark_seam"):
            setattr(GenerationMixin, name, method.__wrapped__)


def _wrap_validation(original: Callable[..., Any]) -> Callable[..., Any]:
    def _validate_generation_mode(
        self: Any, generation_mode: Any, generation_config: Any, generation_mode_kwargs: dict
    ):
        check = getattr(generation_mode_kwargs.get("assistant_model"), "check_target", None)
        if check is not None and generation_mode == GenerationMode.ASSISTED_GENERATION:
            try:
                check(self)
            except BaseException:
                _end(generation_mode_kwargs.get("streamer"))
                raise
            # Several sequences of a prompt are a batch, which assisted generation refuses where it is not ours.
            generation_config = copy.copy(generation_config)
            generation_config.num_return_sequences = 1
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return _validate_generation_mode


def _end(streamer: BaseStreamer | None) -> None:
    """After an error: whoever reads from a streamer in another thread would wait for ever."""
    if streamer is not None:
        with contextlib.suppress(Exception):
            streamer.end()


def _wrap_decoding(original: Callable[..., Any]) -> Callable[..., Any]:
    def _assisted_decoding(
        self: Any, input_ids: torch.LongTensor, *args: Any, assistant_model: Any = None, **kwargs: Any
    ):
        assist = getattr(assistant_model, "assisted_decoding", None)
        if assist is not None:
            try:
                return assist(original, self, input_ids, *args, **kwargs)
            except BaseException:
                _end(kwargs.get("streamer"))
                raise
        return original(self, input_ids, *args, assistant_model=assistant_model, **kwargs)

    return _assisted_decoding


def _wrap_candidates(original: Callable[..., Any]) -> Callable[..., Any]:
    def _get_candidate_generator(self: Any, *args: Any, assistant_model: Any = None, **kwargs: Any):
        own = getattr(assistant_model, "get_candidate_generator", None)
        if own is not None:
            return own(main_model=self, **kwargs)
        return original(self, *args, assistant_model=assistant_model, **kwargs)

    return _get_candidate_generator


_SEAM = {
    "_validate_generation_mode": _wrap_validation,
    "_assisted_decoding": _wrap_decoding,
    "_get_candidate_generator": _wrap_candidates,
}

install()
