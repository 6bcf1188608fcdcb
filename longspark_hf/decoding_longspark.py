"""The decoding loop: draft, verify, accept, for any number of sequences, each at its own pace.

Knows: one `generate` call from the prompt to its output, when a sequence ends, what streamers and criteria see and when.
Does not know: what is drafted (modeling_longspark), which tokens are kept (verification_longspark), where rows of the
target's cache go (rows_longspark).
"""

import contextlib
import functools
import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from .linear_longspark import few_rows, time_products
from .outputs_longspark import CallOutputs
from .rows_longspark import TargetRows
from .schedule_longspark import DraftSchedule
from .stats_longspark import LongSparkStats, PhaseClock
from .tap_longspark import TargetTap, to_device
from .target_longspark import BorrowedTarget
from .verification_longspark import NOT_FINITE, VALUE_PROCESSORS, RowProcessor, agreement, own_tokens


if TYPE_CHECKING:
    from .modeling_longspark import LongSparkDrafter

logger = logging.get_logger(__name__)

DEFAULT_CONFIDENCE_THRESHOLD = GenerationConfig()._get_default_generation_params()["assistant_confidence_threshold"]
# Of the prompt only; each round makes its own.
PROMPT_KWARGS = ("inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")


class Sequence:
    r"""
    What one sequence of the batch has said so far.

    Args:
        prompt (`torch.LongTensor` of shape `(length,)`): Its ids, padding included.
    """

    def __init__(self, prompt: torch.LongTensor):
        self.ids, self.tokens = prompt, []
        self.fired_at: int | None = None  # tokens it had when a stopping rule fired


class AssistedDecoding:
    r"""
    One `generate` call with a drafter.

    Args:
        drafter ([`LongSparkDrafter`]): Drafts.
        target (`PreTrainedModel`): Verifies.
        borrowed ([`BorrowedTarget`]): The target's modules.
        tap ([`TargetTap`]): Over the target's cache, entered.
        input_ids (`torch.LongTensor` of shape `(batch_size, length)`): The prompts; may be empty with `inputs_embeds`.
        generation_config (`GenerationConfig`): Prepared by `generate`; `num_assistant_tokens` caps the draft.
        logits_processor (`LogitsProcessorList`), stopping_criteria (`StoppingCriteriaList`): Prepared by `generate`.
        streamer (`BaseStreamer`, *optional*): Receives what plain `generate` would send; a single sequence's by rounds.
        model_kwargs (`dict`): Prepared by `generate`, with the target's cache.

    A round looks at the device once. Criteria see every committed token, once and in order, of one sequence at a time.
    """

    def __init__(
        self,
        drafter: "LongSparkDrafter",
        target: PreTrainedModel,
        borrowed: BorrowedTarget,
        tap: TargetTap,
        input_ids: torch.LongTensor,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None,
        model_kwargs: dict[str, Any],
    ):
        self.drafter, self.target, self.borrowed, self.tap = drafter, target, borrowed, tap
        self.config, self.streamer, self.model_kwargs = generation_config, streamer, model_kwargs
        self.cache = tap.target_cache
        self.batch_size, self.prompt_length = input_ids.shape
        self.input_ids, self.device = input_ids, input_ids.device
        self.sequences = [Sequence(prompt) for prompt in input_ids]
        self.running = list(range(self.batch_size))  # sequences, by their place in this round
        self.processors = [RowProcessor(processor, self.batch_size) for processor in logits_processor]
        self.blind = all(processor.blind for processor in self.processors)
        self.by_value = all(type(processor) in VALUE_PROCESSORS for processor in logits_processor)
        self.demanding = any(processor.demanding for processor in self.processors)
        self._read_criteria(stopping_criteria)
        self.needs_ids = bool(self.criteria) or not self.blind
        self.stats = LongSparkStats(accepted_by_position=[0] * drafter.config.block_size)
        self.outputs = CallOutputs(generation_config, model_kwargs, self.cache, self.batch_size)
        pad = generation_config._pad_token_tensor
        self.pad = None if pad is None else int(pad)
        # Sequences that ended, in one more round: plain `generate` leaves the rows of their last tokens in the cache.
        self.lingering: set[int] = set()
        self.keeps_cache = generation_config.return_dict_in_generate or getattr(self.cache, "_is_user_defined", False)
        self.rows: TargetRows | None = None
        self.columns = int(self.cache.get_seq_length())  # committed, of a single sequence
        self.schedule = DraftSchedule(drafter.config.block_size, generation_config.num_assistant_tokens)
        # `generate` fills in its default where the user said nothing.
        threshold = generation_config.assistant_confidence_threshold
        self.confidence = None if threshold == DEFAULT_CONFIDENCE_THRESHOLD else threshold
        self.clock = PhaseClock(self.device)
        self.drafting = True
        self.streamed = 0
        self.samples_drafts = generation_config.do_sample and drafter.config.proposal == "sampled"

    def _read_criteria(self, stopping_criteria: StoppingCriteriaList) -> None:
        eos = getattr(self.config, "_eos_token_tensor", None)
        self.eos = set() if eos is None else set(eos.flatten().tolist())
        # With such a rule plain `generate` pads sequences that ended; without, they go on until all have.
        pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self.ends_at_once = pads or self.batch_size == 1
        self.criteria, lengths = [], []
        for criterion in stopping_criteria:
            if isinstance(criterion, EosTokenCriteria):
                self.eos |= set(criterion.eos_token_id.flatten().tolist())
            elif isinstance(criterion, MaxLengthCriteria):
                lengths.append(criterion.max_length)
            else:
                self.criteria.append(criterion)
        # A user's rule takes the place of the one that `generate` makes, and may be the longer one.
        self.budget = min(lengths, default=self.config.max_length) - self.prompt_length
        self.budget = max(self.budget, 1)  # the token that follows from the prefill is said before any rule is asked

    def run(self) -> GenerateDecoderOnlyOutput | torch.LongTensor:
        """Generate. What `generate` returns."""
        time_products(self.target, self.batch_size * (self.drafter.config.block_size + 1))
        try:
            with contextlib.ExitStack() as stack:
                self._prefill()
                # Sequences may end with the token of the prompt, so rows are entered before the first of them retires.
                if self.batch_size > 1:
                    mask = self.model_kwargs.get("attention_mask")
                    self.rows = stack.enter_context(TargetRows(self.target, self.cache, mask))
                else:
                    self.cache.activate_past_recording()
                first_column = int(self.cache.get_seq_length())
                self._retire()
                self.clock.mark("rest")
                stack.enter_context(self.target._optimize_model_for_decode())
                while self.running:
                    self._round()
                if self.rows is not None:
                    # Some may have run ahead of the step at which all had ended, or have written their last token.
                    self.rows.length = min(self.rows.length, first_column + self._steps() - 1)
        except BaseException:
            if self.rows is None:
                self._take_back()
            raise
        self.stats.state_bytes = self.tap.state.nbytes
        self.stats.transferred_bytes += self.tap.state.transferred_bytes
        seconds = self.clock.seconds()
        self.stats.prefill_seconds = seconds["prefill"]
        self.stats.draft_seconds, self.stats.verify_seconds = seconds.get("draft", 0.0), seconds.get("verify", 0.0)
        if self.streamer is not None:
            self.streamer.end()
        return self._output()

    # -- passes of the target

    def _prefill(self) -> None:
        self.clock.mark("start")
        outputs = self.target._prefill(self.input_ids, self.config, self.model_kwargs)
        if not self.cache.is_croppable:
            raise ValueError(
                "The target's cache cannot take back rejected tokens, which is known only after the prompt was processed. Use "
                "a target without such layers, or leave out `assistant_model`."
            )
        self.tap.commit()
        self._read_positions()
        self.columns = int(self.cache.get_seq_length())
        logits = outputs.logits[:, -1:].to(dtype=torch.float32, device=self.device, copy=True)
        nothing = self.input_ids.new_empty((self.batch_size, 0))
        self.anchors = self._keep(nothing, None, logits, outputs, prefill=True)
        self.clock.mark("prefill")

    def _read_positions(self) -> None:
        position_ids = self.model_kwargs.get("position_ids")
        self.axes = None  # of a multimodal target: by how much positions on each axis are ahead of the first one's
        if position_ids is not None:
            last = position_ids[..., -1]
            if last.ndim == 2:
                self.axes = (last - last[0]).to(self.device).expand(-1, self.batch_size)
                last = last[0]
        else:
            mask = self.model_kwargs.get("attention_mask")
            last = (torch.tensor(int(self.cache.get_seq_length())) if mask is None else mask.sum(dim=1)) - 1
        self.positions = last.expand(self.batch_size).to(self.device) + 1  # of the anchors
        # No draft is committed beyond, where the rotary embedding of all sequences could be another one.
        self.last_positions = self.positions + self.budget - 1

    def _verify(self, token_ids: torch.LongTensor) -> Any:
        num_new = token_ids.shape[1]
        position_ids = self.positions[:, None] + torch.arange(num_new, device=self.device)
        position_ids = torch.minimum(position_ids, self.last_positions[self.running, None])
        if self.axes is not None:
            position_ids = position_ids + self.axes[:, self.running, None]
        kwargs = {name: value for name, value in self.model_kwargs.items() if name not in PROMPT_KWARGS}
        for name in ("token_type_ids", "mm_token_type_ids"):
            if self.model_kwargs.get(name) is not None:
                kwargs[name] = self.model_kwargs[name][self.running, -1:].expand(-1, num_new)
        inputs = self.target.prepare_inputs_for_generation(
            token_ids,
            attention_mask=self._mask(num_new),
            position_ids=position_ids,
            is_first_iteration=False,
            **kwargs,
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = num_new
        with few_rows():
            return self.target(**inputs, return_dict=True)

    def _take_back(self) -> None:
        """After an error: a cache of the user's keeps what was committed, and no draft; nothing where a layer cannot go back."""
        try:
            for layer in self.cache.layers:
                if layer.is_initialized and layer.is_croppable:
                    layer.crop(-max(int(layer.get_seq_length()) - self.columns, 0))
        except Exception:  # the error on its way says more
            self.cache.reset()

    def _mask(self, num_new: int) -> torch.Tensor | dict[str, torch.Tensor] | None:
        if self.rows is not None:
            return self.rows.masks(num_new)
        mask = self.model_kwargs.get("attention_mask")
        if mask is None:
            return None
        length = int(self.cache.get_seq_length()) + num_new
        return torch.cat([mask, mask.new_ones((len(mask), length - mask.shape[1]))], dim=1)

    # -- a round

    def _round(self) -> None:
        start = time.perf_counter()
        left = max(self.budget - len(self.sequences[b].tokens) for b in self.running if b not in self.lingering) - 1
        num_tokens = max(min(self.schedule.length(), left), 0) if self.drafting else 0
        draft = self._draft(num_tokens) if num_tokens else None
        self.clock.mark("draft")
        token_ids = self.anchors[:, None]
        if draft is not None:
            token_ids = torch.cat([token_ids, draft.token_ids.to(self.device)], dim=1)
        outputs = self._verify(token_ids)
        logits = outputs.logits[:, -token_ids.shape[1] :].to(dtype=torch.float32, device=self.device)
        self.anchors = self._keep(token_ids[:, 1:], draft, logits, outputs)
        self.clock.mark("verify")
        self.schedule.note(num_tokens, self.accepted, time.perf_counter() - start)
        self._retire()
        self.clock.mark("rest")  # a streamer takes as long as it takes

    def _draft(self, num_tokens: int) -> Any:
        draft = self.drafter.draft(
            self.anchors,
            self.positions,
            self.tap.state,
            self.borrowed,
            num_tokens=num_tokens,
            do_sample=self.samples_drafts,
            logits_processor=[functools.partial(self._process_draft, processor) for processor in self.processors],
            input_ids=self.anchors[:, None] if self.processors else None,
            ends_behind=self._is_eos if self.demanding else None,
            by_value=self.by_value,
        )
        if self.confidence and draft.token_ids.shape[1]:
            draft = self._cut_where_unsure(draft)
        self._count_transfer(draft)
        return draft if draft.token_ids.shape[1] else None

    def _count_transfer(self, draft: Any) -> None:
        drafter, n = self.drafter, len(self.running)
        if drafter.device == self.device:
            return
        # Embeddings of the block come, states for the norm and the head go; logits come, and go back to be compared.
        states = n * drafter.config.block_size * drafter.config.hidden_size * drafter.dtype.itemsize
        base = n * draft.token_ids.shape[1] * (drafter.config.draft_vocab_size or drafter.config.vocab_size)
        self.stats.transferred_bytes += 4 * states + base * self.target.dtype.itemsize + draft.token_ids.nbytes
        if self.config.do_sample:
            self.stats.transferred_bytes += draft.logits.nbytes

    def _cut_where_unsure(self, draft: Any) -> Any:
        # By the distribution, not by the token that was drawn from it: leaving out drawn tokens by what they are would
        # change the distribution of what is committed.
        sure = draft.logits.softmax(dim=-1).amax(dim=-1) >= self.confidence
        possible = draft.possible & sure.cumprod(dim=1).bool()
        longest = int(possible.sum(dim=1).max())
        return type(draft)(
            draft.token_ids[:, :longest], draft.logits[:, :longest], draft.finite, possible[:, :longest]
        )

    def _process_draft(
        self, processor: RowProcessor, anchor_and_draft: torch.LongTensor, scores: torch.Tensor
    ) -> torch.Tensor:
        if processor.blind:
            return processor([], [], scores)
        prefixes, places = self._prefixes(anchor_and_draft[:, 1:]), self._places()
        processed = scores.clone()
        processed[places] = processor(
            [prefixes[place] for place in places], [self.running[place] for place in places], scores[places]
        )
        return processed

    def _places(self) -> list[int]:
        """Of sequences that go on; processors are not asked about the others."""
        return [place for place, b in enumerate(self.running) if b not in self.lingering]

    def _process(self, prefixes: list[torch.LongTensor], sequences: list[int], scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()  # some work in place, and the logits may be asked for
        for processor in self.processors:
            scores = processor(prefixes, sequences, scores)
        return scores

    def _is_eos(self, prefix: torch.LongTensor) -> bool:
        return not self.eos.isdisjoint(prefix[:, -1].tolist())

    def _prefixes(self, draft: torch.LongTensor) -> list[torch.LongTensor]:
        return [torch.cat([self.sequences[b].ids, d.to(self.device)]) for b, d in zip(self.running, draft)]

    def _keep(
        self, draft_ids: torch.LongTensor, draft: Any, logits: torch.Tensor, outputs: Any, prefill: bool = False
    ) -> torch.LongTensor:
        """Choose what is committed, and commit it everywhere. Returns the newest token of every running sequence."""
        lengths = torch.zeros(len(logits), dtype=torch.long, device=self.device)
        finite, draft_logits = torch.ones_like(lengths), None
        if draft is not None:
            finite = draft.finite.to(self.device).long()
            lengths = draft.possible.to(self.device).long().cumprod(dim=1).sum(dim=1)
            draft_logits = self._proposal(draft) if self.config.do_sample else None
        scores, agreed = self._judge(draft_ids, draft_logits, logits)
        counts = torch.arange(draft_ids.shape[1], device=self.device) < lengths[:, None]
        accepted = (agreed & counts).cumprod(dim=1).sum(dim=1)
        own = own_tokens(accepted, lengths, scores, draft_logits, self.config.do_sample)
        tokens = torch.cat([draft_ids, own], dim=1).scatter(1, accepted[:, None], own)

        # The one look at the device of this round.
        looked = torch.cat([accepted[:, None], finite[:, None], tokens], dim=1).tolist()
        self.accepted = [looked[place][0] for place in self._places()]
        if not all(row[1] for row in looked):
            self.drafting = False
            logger.warning(NOT_FINITE)
        if not prefill:
            self.clock.mark("verify")
        else:
            self.outputs.take_prompt(outputs)
        kept = [self._take(place, row[2 : 3 + row[0]], scores, logits, outputs) for place, row in enumerate(looked)]
        number = to_device(kept, self.device)
        if not prefill:
            for place in self._places():
                self.stats.count_round(kept[place], accepted=min(looked[place][0], kept[place]))
            self.clock.mark("rest")  # criteria are the user's
            self.tap.commit(kept)
            self.clock.mark("draft")
            if self.rows is not None:
                self.rows.commit(kept)
            else:
                self.columns += kept[0]  # first: what Ctrl-C leaves half cropped is cropped to it
                self.cache.crop(kept[0] - tokens.shape[1])
            self.positions = self.positions + number
        return tokens.gather(1, number[:, None] - 1)[:, 0]

    def _proposal(self, draft: Any) -> torch.Tensor:
        """Logits of the distribution that the draft came from; a point mass where the most likely token was taken."""
        logits = draft.logits.to(self.device)
        if self.samples_drafts:
            return logits
        return torch.full_like(logits, -torch.inf).scatter(-1, draft.token_ids.to(self.device)[..., None], 0.0)

    def _judge(
        self, draft_ids: torch.LongTensor, draft_logits: torch.Tensor | None, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's processed scores at every position, and where it agrees with the draft."""
        size, scores = draft_ids.shape[1], logits
        uniform = None if draft_logits is None else torch.rand(draft_ids.shape, device=self.device)
        if self.processors and self.blind:
            scores = self._process([], [], logits.flatten(0, 1)).view_as(logits)
        elif self.processors:
            scores = logits.clone()
            agreed = torch.zeros_like(draft_ids, dtype=torch.bool)
            places = self._places()
            for position in range(size + 1):
                prefixes = self._prefixes(draft_ids[:, :position])
                scores[places, position] = self._process(
                    [prefixes[place] for place in places],
                    [self.running[place] for place in places],
                    logits[places, position],
                )
                if position < size and self.demanding:
                    # Only behind drafts that are kept: these processors are never shown a prefix that cannot be.
                    at = slice(position, position + 1)
                    q = None if draft_logits is None else draft_logits[:, at]
                    u = None if uniform is None else uniform[:, at]
                    agreed[:, at] = agreement(draft_ids[:, at], scores[:, at], q, u)
                    kept = agreed[:, position].tolist()
                    places = [p for p in places if kept[p] and int(draft_ids[p, position]) not in self.eos]
                    if not places:
                        break
            if self.demanding:
                return scores, agreed
        return scores, agreement(draft_ids, scores[:, :size], draft_logits, uniform)

    def _take(self, place: int, tokens: list[int], scores: torch.Tensor, logits: torch.Tensor, outputs: Any) -> int:
        """Commit tokens to a sequence up to where it ends. Returns how many."""
        b = self.running[place]
        if b in self.lingering:
            return 1  # the row of its last token
        sequence = self.sequences[b]
        tokens = tokens[: self.budget - len(sequence.tokens)]
        length = sequence.ids.shape[0]
        if self.needs_ids:
            sequence.ids = torch.cat([sequence.ids, to_device(tokens, self.device)])
        for index, token in enumerate(tokens):
            sequence.tokens.append(token)
            self.outputs.take_token(b, place, index, scores, logits, outputs)
            fires = self._fires(b, sequence.ids[: length + index + 1])
            if (fires or token in self.eos) and sequence.fired_at is None:
                sequence.fired_at = len(sequence.tokens)
            if sequence.fired_at is not None and self.ends_at_once:
                break
        if self.needs_ids:
            sequence.ids = sequence.ids[: length + index + 1]
        return index + 1

    def _fires(self, b: int, ids: torch.LongTensor) -> bool:
        """Whether a criterion stops sequence `b` at these ids. All are asked, as each must see every token."""
        if not self.criteria:
            return False
        ids, scores = ids.expand(self.batch_size, -1), self.outputs.scores(b, self.batch_size)
        answers = [torch.as_tensor(criterion(ids, scores)) for criterion in self.criteria]
        return any([bool(answer.flatten()[b if answer.numel() > 1 else 0]) for answer in answers])

    def _retire(self) -> None:
        """Take leave of the sequences that ended, and stream what no sequence can change any more."""
        if all(sequence.fired_at is not None for sequence in self.sequences):
            self.budget = min(self.budget, max(sequence.fired_at for sequence in self.sequences))
        ended = [place for place, b in enumerate(self.running) if self._ended(b)]
        finished = ended
        if self.keeps_cache and len(ended) < len(self.running):
            finished = [place for place in ended if self.running[place] in self.lingering]
            self.lingering.update(self.running[place] for place in ended)
        if finished and self.rows is not None:
            places = self.rows.retire(finished)
        elif finished:
            places = []
        else:
            places = None
        if places is not None:
            self.running = [self.running[place] for place in places]
            if places:
                self.schedule.resize(len(places) / (len(places) + len(finished)))
                index = to_device(places, self.device)
                self.anchors, self.positions = self.anchors[index], self.positions[index]
                self.tap.state.batch_select_indices(index.to(self.tap.state.boundary.device))
        self._stream()

    def _ended(self, b: int) -> bool:
        sequence = self.sequences[b]
        return len(sequence.tokens) >= self.budget or (sequence.fired_at is not None and self.ends_at_once)

    # -- what comes out

    def _stream(self) -> None:
        if self.streamer is None:
            return
        if self.batch_size == 1:
            new = self.sequences[0].tokens[self.streamed : self.budget]
            if new:
                self.streamer.put(torch.tensor([new]))
            self.streamed += len(new)
            return
        # Step by step like plain `generate`: a step is out when every sequence has said its token, or nothing more.
        while any(len(s.tokens) > self.streamed for s in self.sequences) and self.streamed < self.budget:
            column = [self._token(b, self.streamed) for b in range(self.batch_size)]
            if None in column:
                break
            self.streamer.put(torch.tensor(column))
            self.streamed += 1

    def _token(self, b: int, step: int) -> int | None:
        """The token of a sequence at a step: padding where it ended before, `None` where it is not there yet."""
        tokens = self.sequences[b].tokens
        if step < len(tokens):
            return tokens[step]
        return self.pad if self._ended(b) else None

    def _steps(self) -> int:
        return max(min(len(sequence.tokens), self.budget) for sequence in self.sequences)

    def _output(self) -> GenerateDecoderOnlyOutput | torch.LongTensor:
        steps = self._steps()
        new = [[self._token(b, step) for step in range(steps)] for b in range(self.batch_size)]
        ids = torch.cat([self.input_ids, torch.tensor(new, dtype=torch.long).to(self.device)], dim=1)
        return self.outputs.assemble(ids, steps)
