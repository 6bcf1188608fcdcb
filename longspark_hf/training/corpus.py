"""The data of one training run: what trains, what is held out, and figures about both.

Knows: how a data file is split, why conversations were dropped, which mistakes in a file stop a run.
Does not know: the format of a line (data) or what is trained.
"""

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedTokenizerBase

from .data import (
    ConversationDataset,
    Sample,
    frequent_tokens,
    join_samples,
    numbered_lines,
    read_samples,
    response_end,
    tokenize,
)


@dataclass
class TrainingData:
    r"""
    A tokenised data file, split.

    Args:
        path (`str`): Of the file.
        digest (`str`): Of its content; a run goes on only with the same.
        settings (`dict`): How it was split and tokenised.
        training, held_out ([`ConversationDataset`]): The held-out conversations are the last of the file.
    """

    path: str
    digest: str
    settings: dict[str, Any]
    training: ConversationDataset
    held_out: ConversationDataset

    def prompts(self, count: int) -> list[torch.LongTensor]:
        """Prompts of shape `(1, length)` of the last `count` held-out conversations, for the τ of `generate`."""
        items = self.held_out.items[-count:] if count else []
        return [torch.tensor([item["input_ids"][: item["response_mask"].index(True)]]) for item in items]

    def sample(self, count: int = 150) -> list[torch.LongTensor]:
        """About `count` conversations of shape `(1, length)` from all over the training data."""
        items = self.training.items[:: max(1, len(self.training) // count)]
        return [torch.tensor([item["input_ids"]]) for item in items]

    def mean_length(self) -> float:
        """Tokens per training conversation."""
        return sum(len(item["input_ids"]) for item in self.training.items) / len(self.training)

    def longest(self) -> int:
        """Tokens of the longest training conversation."""
        return max(len(item["input_ids"]) for item in self.training.items)

    def describe(self, draft_vocab_size: int | None, vocab_size: int) -> dict[str, Any]:
        """
        Figures about the data.

        Args:
            draft_vocab_size (`int`, *optional*): Of the drafter; `None` proposes all tokens.
            vocab_size (`int`): Of the target.

        Returns:
            `dict`: plain values; lengths in tokens, `cut` conversations at `max_length`, `draft_vocab_coverage` as a share of the held-out response tokens.
        """
        items = self.training.items
        return {
            "path": self.path,
            "conversations": len(items),
            "held_out": len(self.held_out),
            "dropped": dict(self.training.dropped_as + self.held_out.dropped_as),
            "response_tokens": self.training.num_response_tokens(),
            "tokens": sum(len(item["input_ids"]) for item in items),
            "longest": self.longest(),
            "cut": sum(len(item["input_ids"]) == self.settings["max_length"] for item in items),
            "draft_vocab_coverage": self._coverage(draft_vocab_size, vocab_size),
        }

    def _coverage(self, draft_vocab_size: int | None, vocab_size: int) -> float:
        if draft_vocab_size is None:
            return 1.0
        proposable = torch.zeros(vocab_size, dtype=torch.bool)
        proposable[frequent_tokens(self.training, draft_vocab_size, vocab_size)] = True
        ids = [torch.tensor(i["input_ids"])[torch.tensor(i["response_mask"])] for i in self.held_out.items]
        return proposable[torch.cat(ids)].float().mean().item()


def load_training_data(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    generation_config: GenerationConfig | None = None,
    *,
    eval_share: float = 0.05,
    long_share: float = 0.0,
    long_characters: int = 8000,
    max_length: int = 4096,
    max_response_length: int | None = None,
) -> TrainingData:
    r"""
    Read, split and tokenise a data file.

    Args:
        path (`str`): JSONL, see [`read_samples`].
        tokenizer (`PreTrainedTokenizerBase`): Of the target.
        vocab_size (`int`), generation_config (`GenerationConfig`, *optional*): Of the target.
        eval_share (`float`, *optional*, defaults to 0.05): Share of the samples held out, at the end; at least one.
        long_share (`float`, *optional*, defaults to 0): Share of the training samples joined to long conversations.
        long_characters (`int`, *optional*, defaults to 8000): Length of those.
        max_length, max_response_length (`int`, *optional*): See [`tokenize`].

    Raises:
        `ValueError`: naming what is wrong with the file, and its line where one line is at fault.
    """
    samples = read_samples(path)
    num_held_out = max(1, int(len(samples) * eval_share))
    if len(samples) < 2:
        raise ValueError(
            f"The data file {path} holds {len(samples)} sample, but one is held out for evaluation and another is needed "
            "to train on. Add samples; some hundreds are the least that teaches anything."
        )
    training, held_out = samples[:-num_held_out], samples[-num_held_out:]
    lengths = {"max_length": max_length, "max_response_length": max_response_length}
    datasets, end_id = [], response_end(tokenizer, generation_config)
    for name, conversations in (
        ("training", _conversations(training, long_share, long_characters)),
        ("held-out", [[sample] for sample in held_out]),
    ):
        try:
            datasets.append(ConversationDataset(conversations, tokenizer, end_id=end_id, **lengths))
        except (TemplateError, TypeError, ValueError) as error:
            what = f"the {len(conversations)} {name} conversations"
            raise ValueError(_refusal(path, samples, what, tokenizer, error)) from error
    largest = max(max(item["input_ids"]) for dataset in datasets for item in dataset.items)
    if largest >= vocab_size:
        raise ValueError(
            f"The tokenizer makes token id {largest} of {path}, but the target's vocabulary ends at {vocab_size - 1}: "
            "it belongs to another model. Put the target's own tokenizer into its folder."
        )
    settings = {"eval_share": eval_share, "long_share": long_share, "long_characters": long_characters, **lengths}
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    return TrainingData(str(path), digest, settings, *datasets)


def _conversations(samples: list[Sample], long_share: float, long_characters: int) -> list[list[Sample]]:
    num_joined = int(len(samples) * long_share)
    order = random.Random(0).sample(range(len(samples)), num_joined)
    joined = set(order)
    conversations = [[sample] for index, sample in enumerate(samples) if index not in joined]
    return conversations + [c for c in join_samples([samples[i] for i in order], long_characters) if c]


def _refusal(
    path: str | Path, samples: list[Sample], what: str, tokenizer: PreTrainedTokenizerBase, error: Exception
) -> str:
    """Chat templates raise on what they cannot render, such as a role they do not know; this finds the line."""
    for (number, _), sample in zip(numbered_lines(path), samples):
        try:
            tokenize([sample], tokenizer)
        except ValueError as reason:
            return f"{path}, line {number}: {reason}"
        except (TemplateError, TypeError) as reason:
            return f"{path}, line {number}: the target's chat template refuses these messages ({reason})"
    if isinstance(error, ValueError):
        return f"{path}, {what}: {error}"
    return f"{path}: the target's chat template refuses a conversation joined of several lines ({error})"
