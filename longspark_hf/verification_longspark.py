"""Which draft tokens a target keeps, and what it says instead: the lossless rules, for sequences of their own length.

Knows: processors that must see the prefix of one sequence at a time, greedy comparison, speculative sampling.
Does not know: where logits come from, or when a sequence is finished (decoding_longspark).
"""

import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)


# Processors of transformers that neither look at the prefix nor mind any scores, and go by their values alone.
_PLAIN_FILTERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
# Those that do not ask which tokens the scores are of: a draft vocabulary is all they need to see.
VALUE_PROCESSORS = (*_PLAIN_FILTERS, TypicalLogitsWarper, EpsilonLogitsWarper, EtaLogitsWarper)
# Those that do not look at the prefix: all positions and sequences pass through them at once.
BLIND_PROCESSORS = (*VALUE_PROCESSORS, SuppressTokensLogitsProcessor)
# Those that take any prefix and any scores. All others are only shown prefixes that can be.
UNDEMANDING_PROCESSORS = (
    *_PLAIN_FILTERS,
    SuppressTokensLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
)
NOT_FINITE = (
    "The drafter's logits are not finite; the rest of this generation runs without drafts. Its weights may be damaged, or "
    "its dtype too narrow: try `dtype=torch.bfloat16` or `torch.float32`."
)


class RowProcessor:
    r"""
    A logits processor of a call, for sequences of different length.

    Processors take the ids of a whole batch and may keep something for each of its sequences. So one that looks at the
    prefix is shown a single sequence at a time, in every place of a batch of the original size, and asked for its place.

    Args:
        processor (`LogitsProcessor`): Prepared by `generate`.
        batch_size (`int`): Of the call.
    """

    def __init__(self, processor: LogitsProcessor, batch_size: int):
        self.processor, self.batch_size = processor, batch_size
        self.blind = type(processor) in BLIND_PROCESSORS
        self.demanding = type(processor) not in UNDEMANDING_PROCESSORS

    def __call__(self, prefixes: list[torch.LongTensor], places: list[int], scores: torch.Tensor) -> torch.Tensor:
        """
        Args:
            prefixes (`list[torch.LongTensor]`): Ids of each sequence, `(length,)`; not read by a blind processor.
            places (`list[int]`): Place of each in the batch of the call.
            scores (`torch.Tensor` of shape `(n, vocab_size)`): Of the token after each prefix.
        """
        if self.blind:
            return self.processor(None, scores)
        if self.batch_size == 1:
            return self.processor(prefixes[0][None].to(scores.device), scores)
        rows = []
        for prefix, place, row in zip(prefixes, places, scores):
            if isinstance(self.processor, PrefixConstrainedLogitsProcessor):
                rows.append(self._constrained(prefix.to(scores.device), place, row))
                continue
            prefix = prefix.to(scores.device).expand(self.batch_size, -1)
            rows.append(self.processor(prefix, row.expand(self.batch_size, -1).clone())[place])
        return torch.stack(rows)

    def _constrained(self, prefix: torch.LongTensor, place: int, scores: torch.Tensor) -> torch.Tensor:
        # Its function knows sequences by their place, and may have nothing to say about another one's prefix.
        allowed = self.processor._prefix_allowed_tokens_fn
        one = PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(place, ids), 1)
        return one(prefix[None], scores[None].clone())[0]


def agreement(
    draft: torch.LongTensor,
    scores: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
    uniform: torch.Tensor | None = None,
) -> torch.BoolTensor:
    """
    Where a target agrees with a draft, if it agreed before.

    Args:
        draft (`torch.LongTensor` of shape `(n, draft_length)`): Proposed tokens.
        scores (`torch.Tensor` of shape `(n, draft_length, vocab_size)`): Of the target at their positions, processed.
        draft_logits (`torch.Tensor` of the same shape, *optional*):
            Their softmax is the distribution that `draft` was sampled from. Without it, drafts must be the most likely.
        uniform (`torch.Tensor` of shape `(n, draft_length)`, *optional*): Random numbers, with `draft_logits`.

    Source: Leviathan et al., 2023, algorithm 1.
    """
    if draft_logits is None:
        return draft == scores.argmax(dim=-1)
    p, q = (t.softmax(dim=-1).gather(-1, draft[..., None])[..., 0] for t in (scores, draft_logits.to(scores)))
    return uniform * q < p


def own_tokens(
    accepted: torch.LongTensor,
    lengths: torch.LongTensor,
    scores: torch.Tensor,
    draft_logits: torch.Tensor | None,
    do_sample: bool,
) -> torch.LongTensor:
    """
    What the target says behind the accepted drafts: a correction of the first rejected one, or a bonus.

    Args:
        accepted (`torch.LongTensor` of shape `(n,)`): Accepted drafts of every sequence.
        lengths (`torch.LongTensor` of shape `(n,)`): Drafts that counted; behind the last of them comes the bonus.
        scores (`torch.Tensor` of shape `(n, draft_length + 1, vocab_size)`): Of the target, processed.
        draft_logits (`torch.Tensor` of shape `(n, draft_length, vocab_size)`, *optional*): As for [`agreement`].
        do_sample (`bool`): Sample, or take the most likely.

    Returns:
        `torch.LongTensor` of shape `(n, 1)`

    Source: Leviathan et al., 2023, algorithm 1.
    """
    rows = torch.arange(len(scores), device=scores.device)
    scores_next = scores[rows, accepted]
    if not do_sample:
        return scores_next.argmax(dim=-1, keepdim=True)
    p = scores_next.softmax(dim=-1)
    if draft_logits is not None:
        q = draft_logits[rows, accepted.clamp(max=draft_logits.shape[1] - 1)].to(p).softmax(dim=-1)
        rest = (p - q).clamp(min=0)
        # Rounding can leave nothing where p and q agree; p is then the limit.
        corrects = (accepted < lengths)[:, None] & (rest.sum(dim=-1, keepdim=True) > 0)
        p = torch.where(corrects, rest, p)
    return torch.multinomial(p, num_samples=1)
