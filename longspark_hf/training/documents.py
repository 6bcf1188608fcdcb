"""Long prompts from real documents: a stretch of text and a question about something early in it.

Knows: how documents are packed to a length in tokens, what in them can be asked about.
Does not know: how the target answers (synthesize).
"""

import itertools
import logging
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from .data import render
from .prompts import Prompt


logger = logging.getLogger(__name__)

SUFFIXES = (".md", ".py", ".rst", ".txt")
QUESTIONS = {
    "function": [
        "What does the function `{name}` do?",
        "Explain step by step how the function `{name}` works.",
        "Write a docstring for the function `{name}`.",
        "Write a short example that calls the function `{name}`.",
    ],
    "class": [
        "What is the class `{name}` for?",
        "Describe the class `{name}` and its methods.",
    ],
    "section": [
        "Summarize the section '{name}'.",
        "What are the main points of the section '{name}'?",
        "Explain the section '{name}' to a beginner.",
    ],
    "passage": [
        'Explain the passage that begins with "{name}".',
        'Summarize the passage that begins with "{name}".',
        'Repeat the passage that begins with "{name}", word for word, and then continue it.',
    ],
}
_QUESTION = "{text}\n\n---\n\nThis is about the text above. {question}"
_DEFINITION = re.compile(r"\s*(?:async )?(?P<kind>def|class) (?P<name>[A-Za-z_]\w*)(?=[(:\[])")
_HEADING = re.compile(r"#{1,6}\s+(?P<name>.*\w.*?)\s*#*\s*$")
_BEGINNING = re.compile(r'[^\W\d_][^\s"]*(?:[ \t]+[^\s"]+){7}')  # eight words of a paragraph, fit to be quoted
_EARLY = 0.5  # what is asked about begins in this share of the text
_PIECE_CHARACTERS = 200  # longer lines are split there, so that lengths come out close to those asked for
_SAME_LENGTH = 8  # prompts of one length follow each other, so that a batch is not mostly padding


@dataclass(frozen=True)
class Document:
    """A text, by the name of its file."""

    name: str
    text: str


@dataclass(frozen=True)
class _Piece:
    """A line of a document, or a part of a very long one, with its number of tokens."""

    text: str
    suffix: str
    num_tokens: int


def read_documents(paths: Sequence[str | Path]) -> list[Document]:
    """
    Read text files, and those in folders: markdown, reStructuredText, Python and plain text, hidden folders left out.

    Args:
        paths (`Sequence[str]`): A file is taken whatever its suffix.

    Raises:
        `ValueError`: if a path does not exist, a file is not UTF-8 text, or nothing is found.
    """
    documents = []
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"There is no document {path}.")
        files = [path] if path.is_file() else _files_in(path)
        for file in files:
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                if file == path:
                    raise ValueError(f"Cannot read the document {file}: {error}") from error
                logger.warning("Left out %s: %s", file, error)
                continue
            if text.strip():
                name = file.name if file == path else str(file.relative_to(path))
                documents.append(Document(name, text))
    if not documents:
        raise ValueError(
            f"No document with text among {', '.join(map(str, paths))}: looked for {', '.join(SUFFIXES)}."
        )
    return documents


def document_prompts(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    context_tokens: Sequence[int],
    num_prompts: int | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    **template_kwargs: Any,
) -> list[Prompt]:
    """
    Pack documents to prompts of given lengths, each with a question about something in its first half.

    Args:
        documents (`Sequence[Document]`): In random order, one after the other; a long one is spread over several prompts.
        tokenizer (`PreTrainedTokenizerBase`): Of the target.
        context_tokens (`Sequence[int]`): Lengths of the rendered prompts, in turn; at most, and close to that.
        num_prompts (`int`, *optional*): How many; the documents are then walked through again, in another order and with
            other questions, as often as it takes. Once without it.
        max_tokens (`int`, *optional*): The longest prompt that the target takes, see [`room_for_prompt`].
        seed (`int`, *optional*, defaults to 0): Of order and questions.
        template_kwargs (`Any`): For the chat template.

    Raises:
        `ValueError`: if the target does not take so long prompts, or the documents are shorter than the longest, or hold
            nothing to ask about.
    """
    if min(context_tokens) < 1 or (max_tokens is not None and max(context_tokens) > max_tokens):
        raise ValueError(
            f"Prompts can have 1 to {max_tokens:,} tokens with this target and response length, got "
            f"{', '.join(map(str, context_tokens))}. Change `--context-tokens`, or lower `--max-new-tokens`."
        )
    pieces = {document: _pieces(document, tokenizer) for document in documents}
    total = sum(piece.num_tokens for parts in pieces.values() for piece in parts)
    if total < max(context_tokens):
        raise ValueError(
            f"The documents hold about {total:,} tokens, fewer than a prompt of {max(context_tokens):,}. Add documents or "
            "ask for shorter contexts (`--context-tokens`)."
        )
    expected = num_prompts or total * len(context_tokens) // sum(context_tokens)
    run = min(_SAME_LENGTH, max(1, expected // (2 * len(context_tokens))))
    lengths = itertools.cycle([length for length in context_tokens for _ in range(run)])

    prompts: list[Prompt] = []
    for turn in itertools.count():
        before = len(prompts)
        rng = random.Random(f"{seed}/documents/{turn}")
        order = rng.sample(list(documents), len(documents))
        stream = [piece for document in order for piece in pieces[document]]
        # Later turns begin elsewhere, so that a single document is not cut at the same places again.
        stream = stream[rng.randrange(len(stream) // 4 + 1) if turn else 0 :]
        for chunk, length in _chunks(stream, lengths):
            prompt = _ask(chunk, length, tokenizer, rng, template_kwargs)
            if prompt is not None:
                prompts.append(prompt)
            if len(prompts) == num_prompts:
                return prompts
        if not prompts:
            raise ValueError(
                "The documents hold nothing to ask about: no function, heading or paragraph that occurs once in a prompt "
                f"of {', '.join(map(str, context_tokens))} tokens. Add documents or ask for longer contexts."
            )
        if num_prompts is None or len(prompts) == before:
            return prompts


def _files_in(folder: Path) -> list[Path]:
    files = (file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    return sorted(f for f in files if not any(part.startswith(".") for part in f.relative_to(folder).parts))


def _pieces(document: Document, tokenizer: PreTrainedTokenizerBase) -> list[_Piece]:
    texts = [f"File: {document.name}\n", "\n"]
    for line in document.text.strip().splitlines(keepends=True):
        while len(line) > _PIECE_CHARACTERS:
            cut = line.rfind(" ", 1, _PIECE_CHARACTERS)
            cut = cut if cut > 0 else _PIECE_CHARACTERS
            texts.append(line[:cut])
            line = line[cut:]
        texts.append(line)
    texts[-1] += "\n\n"
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    suffix = Path(document.name).suffix.lower()
    return [_Piece(text, suffix, len(tokens)) for text, tokens in zip(texts, ids)]


def _chunks(stream: list[_Piece], lengths: Iterator[int]) -> Iterator[tuple[list[_Piece], int]]:
    """Successive stretches of the stream, each a little longer than asked for; a short rest is left out."""
    start = 0
    while start < len(stream):
        length, size, stop = next(lengths), 0, start
        while stop < len(stream) and size < length:
            size += stream[stop].num_tokens
            stop += 1
        if size < length:
            return
        yield stream[start:stop], length
        start = stop


def _ask(
    chunk: list[_Piece], length: int, tokenizer: PreTrainedTokenizerBase, rng: random.Random, template_kwargs: dict
) -> Prompt | None:
    found = _landmarks(chunk)
    if not found:
        return None
    kind = rng.choice(sorted(found))
    name, mark = rng.choice(found[kind])
    question = rng.choice(QUESTIONS[kind]).format(name=name)
    # The question takes some of the length, and the tokens of joined pieces are not quite the sum of theirs.
    while True:
        text = "".join(piece.text for piece in chunk).strip("\n")
        if mark not in text:
            return None  # the question alone fills the length
        prompt = Prompt.of(_QUESTION.format(text=text, question=question))
        rendered = render(prompt.messages, tokenizer, prompt.plain, **template_kwargs)
        ids = tokenizer(rendered, add_special_tokens=not tokenizer.chat_template, verbose=False)["input_ids"]
        excess = len(ids) - length
        if excess <= 0:
            return prompt
        while chunk and excess > 0:
            excess -= chunk[-1].num_tokens
            chunk = chunk[:-1]


def _landmarks(chunk: list[_Piece]) -> dict[str, list[tuple[str, str]]]:
    """What can be asked about: by kind, its name and the text it begins with, which must be found once only."""
    text = "".join(piece.text for piece in chunk)
    found: dict[str, list[tuple[str, str]]] = {}
    position, previous = 0, ""
    for piece in chunk:
        if position > _EARLY * len(text):
            break
        landmark = _landmark(piece, follows_gap=not previous.strip())
        if landmark and text.count(landmark[2]) == 1:
            found.setdefault(landmark[0], []).append(landmark[1:])
        position, previous = position + len(piece.text), piece.text
    return found


def _landmark(piece: _Piece, follows_gap: bool) -> tuple[str, str, str] | None:
    """Kind, name and beginning of what starts with this piece, if anything does."""
    if piece.suffix == ".py":
        match = _DEFINITION.match(piece.text)
        if match is None or match["name"].startswith("__"):
            return None
        return "function" if match["kind"] == "def" else "class", match["name"], match[0].strip()
    if piece.suffix == ".md" and (match := _HEADING.match(piece.text)):
        return "section", match["name"], piece.text.strip()
    match = _BEGINNING.match(piece.text) if follows_gap else None
    return ("passage", match[0], match[0]) if match else None
