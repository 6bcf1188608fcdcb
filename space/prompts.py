"""What the target reads: example prompts, and prompts brought to a length by real text or code.

Knows: chat template, document, padding, and which lengths are refused. Does not know: files (documents) or pages.
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

from limits import MAX_CHARACTERS, MAX_NEW_TOKENS, Refusal, check_text, check_whole
from pool import LoadedTarget
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from longspark_hf.evaluation.tasks import first_ids


# Name, prompt, length of the context (0: as written), new tokens.
EXAMPLES = [
    ("Chat", "Explain to a curious child, step by step, why the sky is blue and why sunsets are red.", 0, 96),
    ("Code", "Write a Python function that returns the first n prime numbers, with a docstring.", 0, 96),
    (
        "Maths",
        "A baker sells 24 rolls in the morning and half as many in the afternoon. Each roll costs 2 dollars. How much "
        "money does she take that day? Think step by step.",
        0,
        96,
    ),
    ("Long document", "Describe what this text does, and name its most important parts.", 4096, 64),
]
_CHARACTERS_PER_TOKEN = 8  # no tokenizer packs more on average; spares it the rest of a long text


@dataclass(frozen=True)
class Prompt:
    """Token ids for the target, and in words where they come from: what was cut, what was added."""

    ids: list[int]
    origin: str


def build_prompt(
    loaded: LoadedTarget, prompt: str, document: str = "", context: int = 0, max_new_tokens: int = 64
) -> Prompt:
    """
    A prompt for a target, with room for the answer.

    Args:
        loaded ([`LoadedTarget`]): Its tokenizer and limits are used.
        prompt (`str`): The question.
        document (`str`, *optional*): Text in front of the question.
        context (`int`, *optional*, defaults to 0):
            Tokens of prompt and answer together: the document is cut, or sources of Python's standard library are put in
            front of the question, until the length is that. 0 takes prompt and document as they are.
        max_new_tokens (`int`, *optional*, defaults to 64): Room for the answer.

    Raises:
        `Refusal`: for an empty prompt, one that is too long, or a context that is not offered.
    """
    check_whole("The number of new tokens", max_new_tokens, 1, MAX_NEW_TOKENS)
    check_text("The prompt", prompt)
    check_text("The document", document)
    if not prompt.strip():
        raise Refusal("The prompt is empty. Write a question, or choose one of the examples.")
    if len(prompt) + len(document) > MAX_CHARACTERS:
        raise Refusal(
            f"Prompt and document have {len(prompt) + len(document):,} characters; up to {MAX_CHARACTERS:,} are read. "
            "Shorten them."
        )
    limit, tokenizer = loaded.max_context, loaded.tokenizer
    if isinstance(context, bool) or context != 0:  # 0 takes the prompt as it is
        check_whole("The context", context, min(256, limit), limit)
    if context:
        ids, origin = _padded(tokenizer, prompt, document, int(context) - int(max_new_tokens))
    else:
        ids = first_ids(tokenizer, f"{document}\n\n{prompt}" if document else prompt)
        origin = "your document and prompt" if document else "your prompt"
    if len(ids) + max_new_tokens > limit:
        raise Refusal(
            f"The prompt has {len(ids):,} tokens, and {max_new_tokens} new ones are to follow; together they can be up to "
            f"{limit:,} here. Shorten the prompt"
            + (", or choose a context, to which the document is cut." if document else ".")
        )
    return Prompt(ids, origin)


def _padded(tokenizer: PreTrainedTokenizerBase, prompt: str, document: str, num_tokens: int) -> tuple[list[int], str]:
    def framed(text: str) -> list[int]:
        return first_ids(tokenizer, f"{text}\n\n{prompt}" if document else f"```python\n{text}\n```\n\n{prompt}")

    room = num_tokens - len(framed(""))
    if room <= 0:
        raise Refusal(
            f"The prompt alone has {len(framed('')):,} tokens; this context leaves {num_tokens:,} for it. Choose a longer "
            "context, or shorten the prompt."
        )
    text, origin = document, "your document, cut to fit, and your prompt"
    if len(_ids(tokenizer, document, room)) < room:
        text = f"{document}\n\n{_sources(room)}" if document else _sources(room)
        origin = ("your document and " if document else "") + "sources of Python's standard library, and your prompt"
    text_ids = _ids(tokenizer, text, room)
    ids = framed(tokenizer.decode(text_ids))
    # What was cut out need not be encoded as it was: half a character comes back as more tokens than it had.
    while len(ids) > num_tokens:
        text_ids = text_ids[: max(len(text_ids) - (len(ids) - num_tokens), 0)]
        ids = framed(tokenizer.decode(text_ids))
    return ids, origin


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, num_tokens: int) -> list[int]:
    text = text[: _CHARACTERS_PER_TOKEN * num_tokens]
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:num_tokens]


def _sources(num_tokens: int) -> str:
    """Python sources of this machine, enough for `num_tokens` tokens."""
    text = ""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="replace")
        if len(text) >= _CHARACTERS_PER_TOKEN * num_tokens:
            break
    return text
