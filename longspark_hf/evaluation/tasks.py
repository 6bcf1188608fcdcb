"""Tasks as data: which prompts `longspark bench` asks, and how a target's tokenizer sees them.

Knows: the paper's sets by their names on the Hub, a user's own JSONL, code spans of the Python standard library.
Does not know: how prompts are answered (answering) or what is measured (bench).
"""

import hashlib
import json
import random
import re
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from longspark_hf.training.data import read_lines


MAX_NEW_TOKENS, LONG_MAX_NEW_TOKENS, STDLIB_MAX_NEW_TOKENS = 2048, 8192, 256
_STDLIB_NAME = re.compile(r"stdlib-([1-9]\d*)k")
_STDLIB_LIMIT = 128
# No tokenizer packs more characters of text or code into a token on average; spares it the rest of a long document.
_CHARACTERS_PER_TOKEN = 8
_ANSWER = "THE-ASSISTANT'S-ANSWER"


@dataclass(frozen=True)
class Task:
    """Conversations to be answered, each a list of user turns, with at most `max_new_tokens` a turn."""

    name: str
    conversations: list[list[str]]
    max_new_tokens: int

    def fingerprint(self) -> str:
        """Number and checksum of the prompts, to tell whether a run is resumed with the same ones."""
        checksum = hashlib.sha256(json.dumps(self.conversations).encode()).hexdigest()
        return f"{len(self.conversations)} prompts, sha256 {checksum[:16]}"


@dataclass(frozen=True)
class Document:
    """A long text between two short ones, to be cut so that the prompt has the length asked for."""

    text: str
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class HubTask:
    r"""
    Args:
        dataset (`str`): Id on the Hub.
        read (`Callable`): From all rows to conversations (lists of user turns), or to [`Document`]s.
        config, split (`str`): For `datasets.load_dataset`.
        files (`tuple[str, ...]`): JSON or JSONL files of the dataset; read without the `datasets` package.
        max_new_tokens (`int`): Of an answer.
        context_tokens (`int`, *optional*): Length of prompts made from documents.
    """

    dataset: str
    read: Callable[[list[dict[str, Any]]], Iterable[list[str] | Document]]
    config: str | None = None
    split: str = "test"
    files: tuple[str, ...] = field(default=())
    max_new_tokens: int = MAX_NEW_TOKENS
    context_tokens: int | None = None


def _filled(template: str) -> Callable[[list[dict[str, Any]]], Iterable[list[str]]]:
    return lambda rows: ([template.format(**row)] for row in rows)


def _alpaca(rows: list[dict[str, Any]]) -> Iterable[list[str]]:
    for row in rows:
        yield [f"{row['instruction']}\n\nInput:\n{row['input']}" if row["input"] else row["instruction"]]


def _livecodebench(rows: list[dict[str, Any]]) -> Iterable[list[str]]:
    for row in rows:
        code = row.get("starter_code") or "# YOUR CODE HERE"
        yield [
            "Write a correct Python program for the following question. Answer with the program only.\n\n"
            f"### Question:\n{row['question_content']}\n\n### Format:\n```python\n{code}\n```\n\n### Answer:"
        ]


def _continuations(rows: list[dict[str, Any]]) -> Iterable[Document]:
    for row in rows:
        yield Document(row["context"], "Continue the following text in the same manner.\n\n")


def _repositories(rows: list[dict[str, Any]]) -> Iterable[Document]:
    for row in rows:
        if row["domain"] == "Code Repository Understanding":
            yield Document(row["context"], "```\n", "\n```\n\nContinue this code where it stops.")


def _issues(rows: list[dict[str, Any]]) -> Iterable[Document]:
    """An issue behind its repository: the files retrieved for it, then those retrieved for other issues there."""
    code: dict[str, list[str]] = {}
    for row in rows:
        code.setdefault(row["repo"], []).append(row["text"].partition("<code>")[2].partition("</code>")[0])
    for row in rows:
        own = row["text"].partition("<code>")[2].partition("</code>")[0]
        others = (files for files in code[row["repo"]] if files != own)
        after = f"\n</code>\n\n<issue>\n{row['problem_statement']}\n</issue>\n\nWrite a patch that solves this issue."
        yield Document("\n".join([own, *others]), "<code>\n", after)


_MATH = "\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_LONGBENCH = {"dataset": "zai-org/LongBench-v2", "split": "train", "files": ("data.json",)}
_LONG = {"max_new_tokens": LONG_MAX_NEW_TOKENS}

HUB_TASKS = {
    "gsm8k": HubTask("openai/gsm8k", _filled("{question}" + _MATH), config="main"),
    "math500": HubTask("HuggingFaceH4/MATH-500", _filled("{problem}" + _MATH), files=("test.jsonl",)),
    "aime25": HubTask(
        "opencompass/AIME2025", _filled("{question}" + _MATH), files=("aime2025-I.jsonl", "aime2025-II.jsonl")
    ),
    "mbpp": HubTask("google-research-datasets/mbpp", _filled("{prompt}"), config="sanitized"),
    "humaneval": HubTask(
        "openai/openai_humaneval",
        _filled(
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\n{prompt}\n```"
        ),
    ),
    "livecodebench": HubTask("livecodebench/code_generation_lite", _livecodebench, files=("test6.jsonl",)),
    "mt-bench": HubTask(
        "HuggingFaceH4/mt_bench_prompts", lambda rows: (list(row["prompt"]) for row in rows), split="train"
    ),
    "alpaca": HubTask("tatsu-lab/alpaca", _alpaca, split="train"),
    "longspec-32k": HubTask(**_LONGBENCH, **_LONG, read=_continuations, context_tokens=32 * 1024),
    "code-64k": HubTask(**_LONGBENCH, **_LONG, read=_repositories, context_tokens=64 * 1024),
    "issue-128k": HubTask("princeton-nlp/SWE-bench_Lite_bm25_27K", _issues, **_LONG, context_tokens=128 * 1024),
}


def load_tasks(
    names: list[str],
    tokenizer: PreTrainedTokenizerBase,
    num_prompts: int | None = None,
    max_new_tokens: int | None = None,
    seed: int = 0,
) -> list[Task]:
    """
    Load tasks by name.

    Args:
        names (`list[str]`): Of [`HUB_TASKS`], `stdlib-1k` to `stdlib-128k`, or paths of JSONL files with a list `turns`.
        tokenizer (`PreTrainedTokenizerBase`): Of the target; cuts long prompts to length.
        num_prompts (`int`, *optional*): Drawn from each task with `seed`; all of them where it has fewer.
        max_new_tokens (`int`, *optional*): In place of the tasks' own.
        seed (`int`, *optional*, defaults to 0): Of that draw.

    Raises:
        `ValueError`: for an unknown or repeated name, a file without usable prompts (naming file, line and reason), or
        data that cannot be had.
    """
    for name in names:  # before the first download
        _check_name(name)
    tasks = [_load(name, tokenizer, num_prompts, random.Random(seed)) for name in names]
    for task in tasks:
        if [other.name for other in tasks].count(task.name) > 1:
            raise ValueError(f"The task '{task.name}' is asked for twice. Rename one of the files, or leave one out.")
    if max_new_tokens is not None:
        tasks = [Task(task.name, task.conversations, max_new_tokens) for task in tasks]
    return tasks


def _check_name(name: str) -> None:
    span = _STDLIB_NAME.fullmatch(name)
    if span and int(span[1]) > _STDLIB_LIMIT:
        raise ValueError(
            f"The task '{name}' is too long. Code spans go from `stdlib-1k` to `stdlib-{_STDLIB_LIMIT}k`."
        )
    if not span and name not in HUB_TASKS and not name.endswith(".jsonl") and not Path(name).is_file():
        raise ValueError(
            f"Unknown task '{name}'. There are {', '.join(HUB_TASKS)}, stdlib-1k to stdlib-{_STDLIB_LIMIT}k, and "
            'JSONL files with {"turns": [...]} in every line.'
        )


def _load(name: str, tokenizer: PreTrainedTokenizerBase, num_prompts: int | None, draw: random.Random) -> Task:
    if span := _STDLIB_NAME.fullmatch(name):
        return Task(
            name, stdlib_prompts(tokenizer, 1024 * int(span[1]), num_prompts or 4, draw), STDLIB_MAX_NEW_TOKENS
        )
    if name not in HUB_TASKS:
        conversations = read_lines(name, _parse_turns)
        if not conversations:
            raise ValueError(f"The prompt file {name} holds no prompts.")
        return Task(Path(name).stem, _drawn(conversations, num_prompts, draw), MAX_NEW_TOKENS)

    task = HUB_TASKS[name]
    try:
        items = list(task.read(_rows(name, task)))
    except (KeyError, TypeError) as error:
        raise ValueError(f"The dataset {task.dataset} of the task '{name}' has changed: {error!r}.") from error
    if task.context_tokens is not None:
        draw.shuffle(items)
        items = _cut(items, tokenizer, task.context_tokens, num_prompts)
    conversations = _drawn(items, num_prompts, draw)
    if not conversations:
        raise ValueError(f"The dataset {task.dataset} has no prompts for the task '{name}'.")
    return Task(name, conversations, task.max_new_tokens)


def _drawn(items: list[Any], num_prompts: int | None, draw: random.Random) -> list[Any]:
    if num_prompts is None or num_prompts >= len(items):
        return items
    return [items[index] for index in sorted(draw.sample(range(len(items)), num_prompts))]


def _parse_turns(fields: dict[str, Any]) -> list[str]:
    turns = fields.get("turns")
    if not isinstance(turns, list) or not turns:
        raise ValueError('"turns" must be a list of texts that is not empty')
    if not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError('every one of "turns" must be a text that is not empty')
    return turns


def _rows(name: str, task: HubTask) -> list[dict[str, Any]]:
    """The rows of a dataset: from its JSON files where it has such, else by the `datasets` package."""
    try:
        if task.files:
            return [row for file in task.files for row in _json_rows(task.dataset, file)]
        from datasets import load_dataset

        return [dict(row) for row in load_dataset(task.dataset, task.config, split=task.split)]
    except ImportError as error:
        raise ValueError(
            f"The task '{name}' needs the datasets package to read {task.dataset}: pip install datasets. Without it: "
            f"{', '.join(key for key, other in HUB_TASKS.items() if other.files)}, stdlib-1k, or a JSONL of your own."
        ) from error
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(". ")
        raise ValueError(
            f"Cannot load the dataset {task.dataset} of the task '{name}' ({reason}). Without network: stdlib-1k to "
            f"stdlib-{_STDLIB_LIMIT}k, or a JSONL of your own."
        ) from error


def _json_rows(dataset: str, file: str) -> list[dict[str, Any]]:
    from huggingface_hub import hf_hub_download

    path = hf_hub_download(dataset, file, repo_type="dataset")
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()] if file.endswith("l") else json.load(lines)


def _cut(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, num_tokens: int, num_prompts: int | None
) -> list[list[str]]:
    """Prompts of about `num_tokens` tokens, chat template included; documents too short for it are left out."""
    prompts: list[list[str]] = []
    for document in documents:
        frame = len(first_ids(tokenizer, document.before + document.after))
        text = document.text[: _CHARACTERS_PER_TOKEN * num_tokens]
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= num_tokens - frame > 0:
            prompts.append([document.before + tokenizer.decode(ids[: num_tokens - frame]) + document.after])
        if len(prompts) == num_prompts:
            break
    return prompts


def stdlib_prompts(
    tokenizer: PreTrainedTokenizerBase, num_tokens: int, num_prompts: int, draw: random.Random
) -> list[list[str]]:
    """
    Questions about spans of the standard library's sources, each from the start of another file on.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Cuts them to length.
        num_tokens (`int`): Of each prompt, chat template included, about.
        num_prompts (`int`): How many.
        draw (`random.Random`): Chooses the files.

    Returns:
        `list[list[str]]`: conversations of one turn.

    Raises:
        `ValueError`: where Python's sources are not there, or too short.
    """
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    starts = draw.sample(range(len(files)), min(num_prompts, len(files)))

    def span(start: int) -> Document:
        text = ""
        for path in files[start:] + files[:start]:
            text += path.read_text(encoding="utf-8", errors="replace")
            if len(text) >= _CHARACTERS_PER_TOKEN * num_tokens:
                break
        return Document(text, "```python\n", "\n```\n\nDescribe what this Python source does, part by part.")

    prompts = _cut(map(span, starts), tokenizer, num_tokens, num_prompts)
    if not prompts:
        raise ValueError(
            f"{sysconfig.get_path('stdlib')} has not enough Python sources for a prompt of {num_tokens} tokens. Use a "
            "JSONL file of your own."
        )
    return prompts


def first_ids(tokenizer: PreTrainedTokenizerBase, turn: str) -> list[int]:
    """Tokens of a conversation's first user turn, up to where the answer begins. Thinking is off."""
    if not tokenizer.chat_template:
        return tokenizer(turn, verbose=False)["input_ids"]
    messages = [{"role": "user", "content": turn}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def next_ids(tokenizer: PreTrainedTokenizerBase, ids: list[int], turn: str) -> list[int]:
    """
    Tokens of a conversation with a further user turn behind them.

    The tokens so far are kept as they are, where encoding the conversation anew might split an answer differently: so a
    cache over them stays valid.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): With or without a chat template.
        ids (`list[int]`): Prompt and answer so far; the answer may have been cut off.
        turn (`str`): What the user says now.

    Raises:
        `ValueError`: if the chat template does not show answers as they are.
    """
    if not tokenizer.chat_template:
        return ids + tokenizer(f"\n\n{turn}", add_special_tokens=False, verbose=False)["input_ids"]
    messages = [("user", "?"), ("assistant", _ANSWER), ("user", turn)]
    text = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    _, found, rest = text.partition(_ANSWER)
    if not found:
        raise ValueError(
            "The target's chat template changes answers, so a conversation cannot be continued in its cache."
        )
    added = tokenizer(rest, add_special_tokens=False, verbose=False)["input_ids"]
    # An answer that ended by itself already holds the token that ends it.
    return ids + (added[1:] if added[:1] == ids[-1:] else added)
