"""Batched sampling from a target: many prompts at once, each at its own temperature.

Knows: left padding, temperatures by row, where a text ends.
Does not know: what is sampled for (synthesize).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList


@dataclass(frozen=True)
class Continuation:
    r"""
    What a target made of a prompt.

    Args:
        ids (`list[int]`): New tokens, without the one that ended them.
        complete (`bool`): Whether the target ended it; else it was cut off at the limit.
    """

    ids: list[int]
    complete: bool


class RowTemperatures(LogitsProcessor):
    r"""
    Another temperature for every row of a batch; 0 leaves only the most likely token.

    Args:
        temperatures (`Sequence[float]`): One a row.
    """

    def __init__(self, temperatures: Sequence[float]):
        self.temperatures = torch.tensor(temperatures)[:, None]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        temperatures = self.temperatures.to(scores.device)
        greedy = temperatures == 0
        best = torch.full_like(scores, -torch.inf).scatter(-1, scores.argmax(dim=-1, keepdim=True), 0.0)
        return torch.where(greedy, best, scores / temperatures.masked_fill(greedy, 1.0))


class _Steps(StoppingCriteria):
    """Stops nothing; counts the tokens of rows that have not ended."""

    def __init__(self, eos_ids: torch.LongTensor, told: Callable[[int, int], None]):
        self.eos_ids, self.told = eos_ids, told
        self.steps = self.tokens = 0
        self.running = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_) -> torch.BoolTensor:
        going_on = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        running = ~going_on if self.running is None else self.running
        self.steps += 1
        self.tokens += int(running.sum())
        self.running = running & ~torch.isin(input_ids[:, -1], self.eos_ids)
        self.told(self.steps, self.tokens)
        return going_on


def continue_batch(
    target: PreTrainedModel,
    prompt_ids: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    max_new_tokens: int,
    eos_ids: Collection[int],
    pad_id: int,
    top_k: int = 0,
    step: Callable[[int, int], None] = lambda steps, tokens: None,
) -> list[Continuation]:
    """
    Continue prompts, all in one `generate` call, drawing from torch's generator.

    Args:
        target (`PreTrainedModel`): Its generation config is overruled, but for tokens it suppresses.
        prompt_ids (`Sequence[Sequence[int]]`): Not empty, of any lengths.
        temperatures (`Sequence[float]`): One a prompt; 0 is greedy.
        max_new_tokens (`int`): Limit.
        eos_ids (`Collection[int]`): Tokens that end a text.
        pad_id (`int`): For the left of shorter prompts and the right of ended texts.
        top_k (`int`, *optional*, defaults to 0): Draw from so many tokens only; 0 for all.
        step (`Callable`, *optional*): Told the steps done and the tokens drawn, after every step.
    """
    length = max(map(len, prompt_ids))
    input_ids = torch.tensor([[pad_id] * (length - len(ids)) + list(ids) for ids in prompt_ids])
    attention_mask = torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids in prompt_ids])
    steps = _Steps(torch.tensor(sorted(eos_ids), device=target.device), step)
    output = target.generate(
        input_ids=input_ids.to(target.device),
        attention_mask=attention_mask.to(target.device),
        logits_processor=LogitsProcessorList([RowTemperatures(temperatures)]),
        stopping_criteria=StoppingCriteriaList([steps]),
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(eos_ids),
        pad_token_id=pad_id,
        do_sample=True,
        # A target's own generation config may shape its distribution: training data must not.
        top_k=top_k,
        temperature=1.0,
        top_p=1.0,
        typical_p=1.0,
        min_p=0.0,
        epsilon_cutoff=0.0,
        eta_cutoff=0.0,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        num_beams=1,
        num_return_sequences=1,
        return_dict_in_generate=False,
    )
    return [_continuation(row, eos_ids) for row in output[:, length:].tolist()]


def _continuation(ids: list[int], eos_ids: Collection[int]) -> Continuation:
    end = next((i for i, token in enumerate(ids) if token in eos_ids), None)
    return Continuation(ids, False) if end is None else Continuation(ids[:end], True)
