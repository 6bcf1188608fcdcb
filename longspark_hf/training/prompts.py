"""Prompts to make training data from: read from a file, or asked of the target itself.

Knows: the lines of a prompt file, where the user's text stands in a chat template.
Does not know: how a target generates (synthesize), how long documents become prompts (documents).
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from .data import check_messages, parse_prompt, read_lines


_USER_TEXT = "THE-USER'S-TEXT"


@dataclass(frozen=True)
class Prompt:
    r"""
    What the target is asked.

    Args:
        messages (`list[dict]`): Chat messages, the last one not from the assistant.
        plain (`bool`, *optional*, defaults to `True`): Whether it is one user message, written as `prompt`.
    """

    messages: list[dict[str, Any]]
    plain: bool = True

    @classmethod
    def of(cls, text: str) -> "Prompt":
        """One user message."""
        return cls([{"role": "user", "content": text}])

    def fields(self) -> dict[str, Any]:
        """As a line of the data file holds it."""
        return {"prompt": self.messages[0]["content"]} if self.plain else {"messages": self.messages}

    def key(self) -> bytes:
        """Equal for prompts that differ in case and white space only."""
        text = json.dumps([[m["role"], " ".join(m["content"].split()).casefold()] for m in self.messages])
        return hashlib.sha256(text.encode()).digest()

    def is_empty(self) -> bool:
        """Whether the last message says nothing."""
        return not self.messages[-1]["content"].strip()


def read_prompts(path: str | Path) -> list[Prompt]:
    """
    Read a JSONL with `prompt` (text) or `messages` (list of `{"role", "content"}`) in every line.

    Other fields are ignored, and so are assistant messages at the end of `messages`: they are responses, to be made anew.

    Args:
        path (`str`): Of the file; a data file will do.

    Raises:
        `ValueError`: if the file cannot be read or is empty, or naming file, line and reason for the first bad line.
    """
    prompts = read_lines(path, parse_prompt_line)
    if not prompts:
        raise ValueError(f"The prompt file {path} holds no prompts.")
    return prompts


def parse_prompt_line(fields: dict[str, Any]) -> Prompt:
    """
    The prompt in the fields of a line, see [`read_prompts`].

    Raises:
        `ValueError`: with the reason, if there is none.
    """
    messages, plain = parse_prompt(fields)
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ValueError('"messages" holds assistant messages only')
    check_messages(messages)
    return Prompt(messages, plain)


def without_duplicates(prompts: Iterable[Prompt]) -> tuple[list[Prompt], dict[str, int]]:
    """
    Prompts that say something not said before.

    Returns:
        `tuple`: the prompts, and how many were dropped by reason.
    """
    kept: list[Prompt] = []
    dropped = {"empty prompt": 0, "duplicate prompt": 0}
    seen = set()
    for prompt in prompts:
        if prompt.is_empty():
            dropped["empty prompt"] += 1
        elif prompt.key() in seen:
            dropped["duplicate prompt"] += 1
        else:
            seen.add(prompt.key())
            kept.append(prompt)
    return kept, {reason: count for reason, count in dropped.items() if count}


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Number and checksum of prompts, to tell whether a run is resumed with the same ones."""
    checksum = hashlib.sha256()
    for prompt in prompts:
        checksum.update(json.dumps(prompt.fields()).encode() + b"\n")
    return f"{len(prompts)} prompts, sha256 {checksum.hexdigest()[:16]}"


def open_template(tokenizer: PreTrainedTokenizerBase, **template_kwargs: Any) -> tuple[str, str]:
    """
    The chat template around the user's text. A target that continues the first part makes up a user's prompt (Magpie,
    Xu et al. 2024).

    Args:
        tokenizer (`PreTrainedTokenizerBase`): With a chat template.
        template_kwargs (`Any`): For the chat template.

    Returns:
        `tuple`: what comes before the user's text and what ends it.

    Raises:
        `ValueError`: without a chat template, or with one that does not show the user's text.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "The target's tokenizer has no chat template, so the target cannot make up prompts. Pass a file of prompts "
            "(`--prompts`) or documents (`--documents`)."
        )
    messages = [{"role": "user", "content": _USER_TEXT}]
    before, found, after = tokenizer.apply_chat_template(messages, tokenize=False, **template_kwargs).partition(
        _USER_TEXT
    )
    if not found:
        raise ValueError(
            "The target's chat template does not show the user's text as it is, so the target cannot make up prompts. "
            "Pass a file of prompts (`--prompts`) or documents (`--documents`)."
        )
    # A blank before the text belongs to the first word's token; left here, it would be followed by another.
    return before.rstrip(" "), after
