"""Samples of a target's own making: prompts, responses, and what is not worth keeping.

Knows: where prompts and responses end, how they are drawn, which are dropped and why.
Does not know: where given prompts come from (prompts, documents), where samples go (synthesize).
"""

import dataclasses
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .data import render, stop_ids
from .prompts import Prompt, open_template
from .sampling import Continuation, continue_batch


REPEATED_NGRAM = 4


@dataclasses.dataclass(frozen=True)
class SynthesisSettings:
    r"""
    What the data depends on, besides target and prompts.

    Args:
        temperatures (`tuple[float, ...]`, *optional*, defaults to `(0.0, 0.7, 1.0)`):
            One is drawn for every sample; 0 is greedy. Nothing else shapes the target's distribution, neither top-k nor
            top-p nor what its generation config says.
        max_new_tokens (`int`, *optional*, defaults to 512): Responses are cut off there.
        min_new_tokens (`int`, *optional*, defaults to 2):
            Responses with fewer tokens, end-of-sequence not counted, are dropped.
        keep_cut (`bool`, *optional*, defaults to `True`):
            Whether responses that were cut off are kept, marked `complete: false`, or dropped.
        max_repetition (`float`, *optional*, defaults to 0.4): Texts with a higher [`repetition`] are dropped.
        thinking (`bool`, *optional*, defaults to `False`): For the chat template, as `enable_thinking`.
        prompt_temperature (`float`, *optional*, defaults to 0.8): Of prompts that the target makes up.
        prompt_top_k (`int`, *optional*, defaults to 50): Of prompts that the target makes up; 0 for no limit.
        max_prompt_tokens (`int`, *optional*, defaults to 256): Longer prompts that the target makes up are dropped.
        seed (`int`, *optional*, defaults to 0): Of all draws.

    Raises:
        `ValueError`: for values out of range.
    """

    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    max_new_tokens: int = 512
    min_new_tokens: int = 2
    keep_cut: bool = True
    max_repetition: float = 0.4
    thinking: bool = False
    prompt_temperature: float = 0.8
    prompt_top_k: int = 50
    max_prompt_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperatures or not all(0 <= t < float("inf") for t in self.temperatures):
            raise ValueError(f"Temperatures must be numbers of at least 0, got {list(self.temperatures)}.")
        if not 0 < self.prompt_temperature < float("inf"):
            raise ValueError(f"The temperature of prompts must be above 0, got {self.prompt_temperature}.")
        if not 2 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"Responses need at least 2 tokens and no more than the limit of {self.max_new_tokens}, got "
                f"min_new_tokens={self.min_new_tokens}."
            )
        if self.max_prompt_tokens < 1:
            raise ValueError(f"Prompts need at least 1 token, got max_prompt_tokens={self.max_prompt_tokens}.")
        if not 0 <= self.max_repetition <= 1:
            raise ValueError(f"The repetition limit is a share between 0 and 1, got {self.max_repetition}.")


def repetition(ids: Sequence[int], n: int = REPEATED_NGRAM) -> float:
    """
    Share of the n-grams that occurred before in the same text: 0 when nothing repeats, near 1 for a loop.

    Args:
        ids (`Sequence[int]`): Tokens of a text.
        n (`int`, *optional*, defaults to 4): Length of the n-grams.
    """
    ngrams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def room_for_prompt(target: PreTrainedModel, max_new_tokens: int) -> int:
    """
    Tokens of the longest prompt that a target takes before a response.

    Args:
        target (`PreTrainedModel`): Its config limits the length; one without a limit takes any.
        max_new_tokens (`int`): Of the response.

    Raises:
        `ValueError`: if the response leaves no room.
    """
    positions = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is None:
        return sys.maxsize
    if positions <= max_new_tokens:
        raise ValueError(
            f"Responses of {max_new_tokens} tokens leave no room for a prompt in the {positions} positions of the target. "
            "Lower `--max-new-tokens`."
        )
    return positions - max_new_tokens


class SampleMaker:
    """Makes samples batch by batch. What comes of a batch depends on its place, the seed and the prompts `seen`."""

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: SynthesisSettings,
        makes_up_prompts: bool,
    ):
        self.target, self.tokenizer, self.settings = target, tokenizer, settings
        self.template_kwargs = {"enable_thinking": settings.thinking}
        self.seen: set[bytes] = set()

        if tokenizer.eos_token_id is None:
            raise ValueError(
                "The target's tokenizer has no end-of-sequence token, so no response can end. Set `tokenizer.eos_token`."
            )
        self.eos_ids = {tokenizer.eos_token_id} | stop_ids(target.generation_config)
        self.pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.max_prompt_tokens = room_for_prompt(target, settings.max_new_tokens)
        if makes_up_prompts:
            opening, closing = open_template(tokenizer, **self.template_kwargs)
            self.opening_ids = tokenizer(opening, add_special_tokens=False)["input_ids"]
            if not self.opening_ids:
                raise ValueError(
                    "The target's chat template puts nothing before the user's text, so the target cannot make up prompts. "
                    "Pass a file of prompts (`--prompts`) or documents (`--documents`)."
                )
            # Most templates end the user's text with a token of its own, some with plain text.
            first = tokenizer(closing, add_special_tokens=False)["input_ids"][:1]
            by_token = bool(first) and first[0] in tokenizer.added_tokens_decoder
            self.end_of_turn_ids = self.eos_ids | set(first if by_token else [])
            self.end_of_turn_text = "" if by_token else closing.rstrip() or closing

    def make(
        self, batch: Sequence[Prompt | None], place: int, tell: Callable[[float, int], None]
    ) -> tuple[list[dict[str, Any]], Counter]:
        """
        Samples of a batch, and what to add to the totals.

        Args:
            batch (`Sequence[Prompt]`): To answer; `None` to make one up first.
            place (`int`): Of the first one among all.
            tell (`Callable`): Told the share of the batch that is done and the tokens generated.
        """
        counts: Counter = Counter()
        draws = [random.Random(f"{self.settings.seed}/sample/{place + row}") for row in range(len(batch))]
        temperatures = [draw.choice(self.settings.temperatures) for draw in draws]
        devices = [self.target.device] if self.target.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(random.Random(f"{self.settings.seed}/batch/{place}").getrandbits(63))
            prompts = self._make_up(len(batch), counts, tell) if batch[0] is None else batch
            asked = [
                (prompt, temperature, ids)
                for prompt, temperature in zip(prompts, temperatures)
                if prompt is not None and (ids := self._encode(prompt, counts))
            ]
            answers = self._answer(asked, counts, tell) if asked else []

        records = []
        for (prompt, temperature, ids), answer in zip(asked, answers):
            text = self.tokenizer.decode(answer.ids, skip_special_tokens=True)
            if not answer.complete:
                text = text.rstrip("\ufffd")  # half a character
            if reason := self._objection(answer, text, "response"):
                counts[f"dropped/{reason}"] += 1
                continue
            record = prompt.fields() | {"response": text, "temperature": temperature}
            if not answer.complete:
                record["complete"] = False
            if self.settings.thinking:
                record["thinking"] = True
            records.append(record)
            self.seen.add(prompt.key())
            counts.update(kept=1, prompt_tokens=len(ids), response_tokens=len(answer.ids))
            counts.update({f"temperature/{temperature:g}": 1, "cut": int(not answer.complete)})
        return records, counts

    def _make_up(self, number: int, counts: Counter, tell: Callable[[float, int], None]) -> list[Prompt | None]:
        """Prompts of the target's own, `None` in place of those dropped."""
        texts = continue_batch(
            self.target,
            [self.opening_ids] * number,
            [self.settings.prompt_temperature] * number,
            self.settings.max_prompt_tokens,
            self.end_of_turn_ids,
            self.pad_id,
            self.settings.prompt_top_k,
            lambda steps, tokens: tell(0.0, tokens),
        )
        prompts: list[Prompt | None] = []
        new: set[bytes] = set()
        for made in texts:
            counts["generated_tokens"] += len(made.ids) + made.complete
            text = self.tokenizer.decode(made.ids, skip_special_tokens=True).lstrip()
            if self.end_of_turn_text:
                text, end, _ = text.partition(self.end_of_turn_text)
                made = Continuation(made.ids, made.complete or bool(end))
            prompt = Prompt.of(text.strip())
            reason = self._objection(made, text, "prompt")
            if reason is None and (prompt.key() in self.seen or prompt.key() in new):
                reason = "duplicate prompt"
            if reason is not None:
                counts[f"dropped/{reason}"] += 1
            new.add(prompt.key())
            prompts.append(prompt if reason is None else None)
        return prompts

    def _encode(self, prompt: Prompt, counts: Counter) -> list[int] | None:
        """Token ids for the target to continue, or nothing for a prompt that it cannot be asked."""
        try:
            text = render(prompt.messages, self.tokenizer, prompt.plain, **self.template_kwargs)
        except TemplateError:
            counts["dropped/prompt refused by the chat template"] += 1
            return None
        ids = self.tokenizer(text, add_special_tokens=not self.tokenizer.chat_template, verbose=False)["input_ids"]
        if not ids:
            counts["dropped/empty prompt"] += 1
        elif len(ids) > self.max_prompt_tokens:
            counts["dropped/prompt too long"] += 1
            return None
        return ids

    def _answer(
        self, asked: list[tuple[Prompt, float, list[int]]], counts: Counter, tell: Callable[[float, int], None]
    ) -> list[Continuation]:
        settings, tokens_before = self.settings, counts["generated_tokens"]
        answers = continue_batch(
            self.target,
            [ids for _, _, ids in asked],
            [temperature for _, temperature, _ in asked],
            settings.max_new_tokens,
            self.eos_ids,
            self.pad_id,
            step=lambda steps, tokens: tell(steps / settings.max_new_tokens, tokens_before + tokens),
        )
        counts["generated_tokens"] += sum(len(answer.ids) + answer.complete for answer in answers)
        return answers

    def _objection(self, made: Continuation, text: str, kind: str) -> str | None:
        """Why a prompt or a response is dropped."""
        settings = self.settings
        if not text.strip():
            return f"empty {kind}"
        if kind == "response" and len(made.ids) < settings.min_new_tokens:
            return f"short {kind}"
        # A prompt that was cut off asks for something else than the whole of it, so it is of no use.
        if not made.complete and (kind == "prompt" or not settings.keep_cut):
            return f"{kind} cut off"
        if repetition(made.ids) > settings.max_repetition:
            return f"repetitive {kind}"
        return None
