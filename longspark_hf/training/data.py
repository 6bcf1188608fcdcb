"""Training data: one JSONL of conversations, tokenised the way the target sees them.

Knows: the contract (`prompt` or `messages`, `response`, `temperature`, `complete`, `thinking`), chat templates, which
tokens count as response.
Does not know: what a drafter is.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from jinja2 import TemplateError
from torch.utils.data import Dataset
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase


T = TypeVar("T")
_RESPONSE = "THE-TARGET'S-RESPONSE"


@dataclass
class Sample:
    r"""
    One line of the data file.

    Args:
        messages (`list[dict]`): Chat messages before the response; a `prompt` becomes one user message.
        response (`str`): What the target answered.
        temperature (`float`): At which the target sampled the response; 0 is greedy.
        plain (`bool`): Whether the line held a `prompt`, usable without a chat template.
        complete (`bool`): Whether the target ended the response itself; one that was cut off has no end-of-sequence token.
        thinking (`bool`): Whether the target was to think first; for the chat template, as `enable_thinking`.
    """

    messages: list[dict[str, Any]]
    response: str
    temperature: float = 1.0
    plain: bool = False
    complete: bool = True
    thinking: bool = False


def read_samples(path: str | Path) -> list[Sample]:
    """
    Read a JSONL of samples: an object a line with `prompt` (text) or `messages` (list of `{"role", "content"}`),
    `response` (text) and optionally `temperature` (number, 1 by default), `complete` (whether the target ended the
    response itself, true by default) and `thinking` (whether it was to think first, false by default). Blank lines are
    skipped.

    Raises:
        `ValueError`: naming file, line and reason for the first line that is not such an object.
    """
    samples = read_lines(path, _parse)
    if not samples:
        raise ValueError(f"The data file {path} holds no samples.")
    return samples


def read_lines(path: str | Path, parse: Callable[[dict[str, Any]], T]) -> list[T]:
    """
    The objects of a JSONL file, parsed. Blank lines are skipped.

    Args:
        path (`str`): UTF-8.
        parse (`Callable`): From the fields of a line to what is wanted; raises `ValueError` with the reason if it cannot.

    Raises:
        `ValueError`: if the file cannot be read, or naming file, line and reason for the first bad line.
    """
    parsed = []
    for number, line in numbered_lines(path):
        try:
            parsed.append(parse(_object(line)))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        except RecursionError as error:
            raise ValueError(f"{path}, line {number}: lists or objects are nested too deeply") from error
    return parsed


def numbered_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """
    Lines of a UTF-8 file with their numbers, without blank ones.

    Raises:
        `ValueError`: if the file cannot be read, or naming the first line that is not UTF-8.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"Cannot read the data file {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            byte = f"byte {line[error.start]:#x} at column {error.start + 1}"
            raise ValueError(f"{path}, line {number}: not UTF-8 ({byte}). Save the file as UTF-8.") from error
        if text.strip():
            yield number, text


def parse_prompt(fields: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """
    The messages before the response, and whether they were given as a plain `prompt`.

    Raises:
        `ValueError`: with the reason, if a line with these fields has no usable prompt.
    """
    if ("prompt" in fields) == ("messages" in fields):
        raise ValueError('exactly one of "prompt" and "messages" is needed')
    if "prompt" in fields:
        _check_text(fields["prompt"], '"prompt"')
        return [{"role": "user", "content": fields["prompt"]}], True
    messages = fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError('"messages" must be a list that is not empty')
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError('every message needs "role" and "content"')
    return messages, False


def check_messages(messages: list[dict[str, Any]]) -> None:
    """
    Raise if chat messages are not of text.

    Args:
        messages (`list[dict]`): Each with a `content`.

    Raises:
        `ValueError`: with the reason.
    """
    for message in messages:
        _check_text(message["content"], '"content" of a message')
        _check_text(json.dumps(message, ensure_ascii=False), "a message")


def _check_text(value: Any, name: str) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} has half a surrogate pair at character {error.start}") from error


def _object(line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON (column {error.colno}: {error.msg})") from error
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object with named fields, got a {type(fields).__name__}")
    return fields


def _parse(fields: dict[str, Any]) -> Sample:
    messages, plain = parse_prompt(fields)
    response, temperature = fields.get("response"), fields.get("temperature", 1.0)
    if not isinstance(response, str) or not response:
        raise ValueError('"response" must be a text that is not empty')
    _check_text(response, '"response"')
    check_messages(messages)
    if (
        isinstance(temperature, bool)
        or not isinstance(temperature, int | float)
        or not 0 <= temperature <= sys.float_info.max
    ):
        raise ValueError(f'"temperature" must be a number of at least 0, got {temperature!r:.40}')
    flags = {"complete": fields.get("complete", True), "thinking": fields.get("thinking", False)}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f'"{name}" must be true or false, got {flag!r}')
    return Sample(messages, response, float(temperature), plain, **flags)


def join_samples(samples: Sequence[Sample], num_characters: int) -> list[list[Sample]]:
    """
    Join neighbouring samples into conversations of about `num_characters`, for contexts longer than any sample.

    Args:
        samples (`Sequence[Sample]`): In the order to join.
        num_characters (`int`): A conversation is closed when it has reached this length.

    Returns:
        `list[list[Sample]]`: Conversations; the target judges each response in the context it then has.
    """
    conversations: list[list[Sample]] = [[]]
    length = 0
    for sample in samples:
        if length >= num_characters:
            conversations.append([])
            length = 0
        conversations[-1].append(sample)
        length += len(sample.response) + sum(len(str(message["content"])) for message in sample.messages)
    return conversations


def stop_ids(config: PreTrainedConfig | GenerationConfig | None) -> set[int]:
    """Tokens that end a text, as a config lists them."""
    ids = getattr(config, "eos_token_id", None)
    return {ids} if isinstance(ids, int) else set(ids or ())


def response_end(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None) -> int | None:
    """
    The token that ends a response: of those at which the target stops, the first that its chat template puts behind an
    assistant's message (`<end_of_turn>` of Gemma, whose `eos_token` is another). The tokenizer's `eos_token` where there
    is none such, no chat template, or nothing is known of where the target stops.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Of the target.
        generation_config (`GenerationConfig`, *optional*): Of the target.
    """
    stops = stop_ids(generation_config)
    if not tokenizer.chat_template or not stops:
        return tokenizer.eos_token_id
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _RESPONSE}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except TemplateError:  # a template for other conversations
        return tokenizer.eos_token_id
    behind = tokenizer(text.partition(_RESPONSE)[2], add_special_tokens=False)["input_ids"]
    return next((token for token in behind if token in stops), tokenizer.eos_token_id)


def tokenize(
    conversation: Sequence[Sample],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int = 4096,
    max_response_length: int | None = None,
    end_id: int | None = None,
    **template_kwargs: Any,
) -> dict[str, Any] | None:
    r"""
    Token ids of a conversation and which of them are responses, up to and including the token that ends them.

    Args:
        conversation (`Sequence[Sample]`): One sample, or several as successive turns.
        tokenizer (`PreTrainedTokenizerBase`): Of the target. Without a chat template, prompts are taken as plain text.
        max_length (`int`, *optional*, defaults to 4096): Tokens after this are cut.
        max_response_length (`int`, *optional*):
            Responses of at least so many tokens are taken as cut off there, like those of samples that are not `complete`.
            No token that ends them is learned after them; where another turn follows, one stands there unlearned.
        end_id (`int`, *optional*): Ends a response, see [`response_end`]; the tokenizer's `eos_token` by default.
        template_kwargs (`Any`): For the chat template, besides `enable_thinking`, which the sample knows.

    Returns:
        `dict`: `input_ids` and `response_mask` (lists of equal length) and `temperature`; `None` when fewer than two
        response tokens are left. Turns from where the template rewrites earlier ones are left out.

    Raises:
        `ValueError`: for an empty prompt before which the tokenizer puts nothing, so that no anchor has a row before it.
    """
    return _tokenize(conversation, tokenizer, max_length, max_response_length, end_id, **template_kwargs)[0]


def _tokenize(
    conversation: Sequence[Sample],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int = 4096,
    max_response_length: int | None = None,
    end_id: int | None = None,
    **template_kwargs: Any,
) -> tuple[dict[str, Any] | None, int]:
    """As [`tokenize`], and how many turns that took."""
    input_ids: list[int] = []
    response_mask: list[bool] = []
    messages: list[dict[str, Any]] = []
    rendered, num_turns = "", len(conversation)
    end_id = tokenizer.eos_token_id if end_id is None else end_id
    for turn, sample in enumerate(conversation):
        # A template may open every conversation with a system message, but only the first turn keeps one.
        messages = messages + [m for m in sample.messages if turn == 0 or m["role"] != "system"]
        # Thinking or not changes how the response begins, so the template must be asked as it was for the response.
        text = render(messages, tokenizer, sample.plain, **{"enable_thinking": sample.thinking, **template_kwargs})
        if not text.startswith(rendered):
            num_turns = turn  # the template rewrites earlier turns, so their ids cannot be continued
            break
        prompt_ids = tokenizer(text[len(rendered) :], add_special_tokens=not tokenizer.chat_template and turn == 0)
        if not input_ids and not prompt_ids["input_ids"]:
            raise ValueError("the prompt is empty, and the target's tokenizer puts nothing before a response")
        response_ids = tokenizer(sample.response, add_special_tokens=False)["input_ids"]
        within = max_response_length is None or len(response_ids) < max_response_length
        complete = sample.complete and within
        response_ids = response_ids[:max_response_length]
        input_ids += prompt_ids["input_ids"] + response_ids
        response_mask += [False] * len(prompt_ids["input_ids"]) + [True] * len(response_ids)
        if complete or turn + 1 < len(conversation):
            input_ids.append(end_id)
            response_mask.append(complete)
        if len(input_ids) >= max_length:
            break
        messages = messages + [{"role": "assistant", "content": sample.response}]
        rendered = text + sample.response + tokenizer.decode([end_id])
    input_ids, response_mask = input_ids[:max_length], response_mask[:max_length]
    if sum(response_mask) < 2:
        return None, num_turns
    item = {"input_ids": input_ids, "response_mask": response_mask, "temperature": conversation[0].temperature}
    return item, num_turns


def render(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, plain: bool, **template_kwargs: Any
) -> str:
    """
    The text that the target continues with its response.

    Args:
        messages (`list[dict]`): So far, the user's last.
        tokenizer (`PreTrainedTokenizerBase`): Of the target; without a chat template the text is the prompt itself.
        plain (`bool`): Whether the messages came as a plain prompt.
        template_kwargs (`Any`): For the chat template.

    Raises:
        `ValueError`: for `messages` without a chat template.
    """
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template_kwargs)
    if not plain:
        raise ValueError(
            'The tokenizer has no chat template, so samples with "messages" cannot be used: give "prompt", or set '
            "`tokenizer.chat_template`."
        )
    return "".join(message["content"] for message in messages)


class ConversationDataset(Dataset):
    r"""
    Tokenised conversations.

    Args:
        conversations (`Sequence[Sequence[Sample]]`): See [`join_samples`]; single samples as lists of one.
        tokenizer (`PreTrainedTokenizerBase`): Of the target.
        kwargs (`Any`): For [`tokenize`].

    Where a chat template rewrites earlier turns, a new conversation begins. `dropped` counts conversations without a
    usable response, `dropped_as` for each reason.
    """

    def __init__(self, conversations: Sequence[Sequence[Sample]], tokenizer: PreTrainedTokenizerBase, **kwargs: Any):
        self.items, self.dropped_as = [], Counter()
        for conversation in conversations:
            while conversation:
                item, num_turns = _tokenize(conversation, tokenizer, **kwargs)
                taken, conversation = conversation[:num_turns], conversation[num_turns:]
                if item is not None:
                    self.items.append(item)
                elif tokenize(taken, tokenizer, **(kwargs | {"max_length": sys.maxsize})) is None:
                    self.dropped_as["response of fewer than two tokens"] += 1
                else:
                    self.dropped_as["no room for a response within max_length"] += 1
        self.dropped = self.dropped_as.total()
        if not self.items:
            raise ValueError("No conversation has a response of two tokens or more within `max_length`.")

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]

    def num_response_tokens(self) -> int:
        """Over all conversations."""
        return sum(sum(item["response_mask"]) for item in self.items)


def collate(items: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad conversations on the right: `input_ids`, `attention_mask`, `response_mask` `(batch_size, length)`."""
    length = max(len(item["input_ids"]) for item in items)
    batch = {
        "input_ids": torch.zeros(len(items), length, dtype=torch.long),
        "attention_mask": torch.zeros(len(items), length, dtype=torch.long),
        "response_mask": torch.zeros(len(items), length, dtype=torch.bool),
    }
    for row, item in enumerate(items):
        count = len(item["input_ids"])
        batch["input_ids"][row, :count] = torch.as_tensor(item["input_ids"])
        batch["attention_mask"][row, :count] = 1
        batch["response_mask"][row, :count] = torch.as_tensor(item["response_mask"])
    return batch


def frequent_tokens(dataset: ConversationDataset, size: int, vocab_size: int) -> torch.LongTensor:
    """
    The tokens most frequent in the responses, a draft vocabulary.

    Args:
        dataset ([`ConversationDataset`]): Counted over.
        size (`int`): How many; ties and unseen tokens are filled up by lowest id.
        vocab_size (`int`): Of the target.

    Returns:
        `torch.LongTensor` of shape `(size,)`: sorted.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for item in dataset.items:
        ids = torch.as_tensor(item["input_ids"])[torch.as_tensor(item["response_mask"])]
        counts += torch.bincount(ids, minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:size].sort().values
