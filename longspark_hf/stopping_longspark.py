"""Stopping rules to the token, on a loop that looks at them between rounds only.

Knows: which rules the loop itself cuts a round at, how to let the others see every committed token once and in order.
Does not know: what is drafted, or when.
"""

import copy

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria


# They keep nothing from call to call, so they can be asked about tokens that are not committed yet.
STATELESS = (EosTokenCriteria, MaxLengthCriteria, StopStringCriteria)


class PerTokenCriterion(StoppingCriteria):
    """Calls a criterion once for every committed token, in order, as plain `generate` does."""

    def __init__(self, criterion: StoppingCriteria, length: int):
        self.criterion, self.start, self.seen = criterion, length, length

    def __call__(self, input_ids: torch.LongTensor, scores: tuple | None, **kwargs) -> torch.BoolTensor:
        fired = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        for length in range(self.seen + 1, input_ids.shape[1] + 1):
            scores_so_far = None if scores is None else scores[: length - self.start]
            fired = self.criterion(input_ids[:, :length], scores_so_far, **kwargs)
        self.seen = input_ids.shape[1]
        return fired


class StoppingRules:
    r"""
    The stopping criteria of one call, for the loop and for drafting.

    A draft must end before the first token that would fire a criterion: that token then comes as the target's own, the
    last of its round, where the loop looks. Criteria that may keep state are asked on a copy.

    Args:
        criteria (`StoppingCriteriaList`): Prepared by `generate`.
        generation_config (`GenerationConfig`): Prepared by `generate`; the loop cuts rounds at its length and EOS tokens.
        length (`int`): Tokens in `input_ids` before anything is generated.
        with_scores (`bool`): Whether the loop passes scores. Those of a draft are not known yet, so criteria that might
            read them leave no room for drafts.

    `for_loop` is the list to hand to the loop; `allow_drafts` is False where only plain rounds are exact.
    """

    def __init__(
        self, criteria: StoppingCriteriaList, generation_config: GenerationConfig, length: int, with_scores: bool
    ):
        self.for_loop, self._stateless, self._others = StoppingCriteriaList(), [], []
        for criterion in criteria:
            if not self._cut_by_the_loop(criterion, generation_config):
                if isinstance(criterion, STATELESS):
                    self._stateless.append(criterion)
                else:
                    self._others.append(criterion)
                    criterion = PerTokenCriterion(criterion, length)
            self.for_loop.append(criterion)
        self.allow_drafts = not (with_scores and self._others)

    @staticmethod
    def _cut_by_the_loop(criterion: StoppingCriteria, generation_config: GenerationConfig) -> bool:
        if isinstance(criterion, MaxLengthCriteria):
            return criterion.max_length >= generation_config.max_length
        if isinstance(criterion, EosTokenCriteria):
            own = getattr(generation_config, "_eos_token_tensor", None)
            return own is not None and bool(torch.isin(criterion.eos_token_id.to(own.device), own).all())
        return isinstance(criterion, MaxTimeCriteria)  # wall clock: between rounds is as good as between tokens

    def __bool__(self) -> bool:
        return bool(self._stateless or self._others)

    def begin_draft(self):
        """
        A function that says whether a draft must end before its newest token, for the tokens of one draft in order.

        Returns:
            `Callable[[torch.LongTensor], bool]`, or `None` if a criterion cannot be copied, so that nothing may be drafted.
        """
        try:
            others = copy.deepcopy(self._others)
        except Exception:  # whatever a user's object raises when copied
            self.allow_drafts = False
            return None
        criteria = [*self._stateless, *others]

        def fires(prefix: torch.LongTensor) -> bool:
            # All are asked, as each must see every token.
            return any([bool(torch.as_tensor(criterion(prefix, None)).any()) for criterion in criteria])

        return fires
