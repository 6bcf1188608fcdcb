"""What the Space accepts, and how it says no. All of it is enforced here on the server, whatever a page or a client sends.

Does not know: models or pages.
"""

import os
import reprlib
from typing import Any


MAX_FILE_BYTES = 2 * 2**20
MAX_PDF_PAGES = 300
# A small PDF can unpack to any amount of work; one document is read at a time, so others wait for it.
MAX_PDF_SECONDS = 20
FILE_TYPES = (".txt", ".md", ".py", ".pdf")
# Of prompt and document together, checked before anything is tokenized. 128K tokens of text are about half as many.
MAX_CHARACTERS = 1_500_000
MAX_NEW_TOKENS = 256
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2  # below, logits divided by it overflow; 0 is greedy
MAX_BLOCK_SIZE = 64
MAX_NTK_ALPHA = 4  # the target's context is stretched up to this factor
CONTEXTS = [1024 * 2**i for i in range(8)]  # 1K to 128K
MAX_QUEUE = 12
# A free CPU Space would read a prompt of 32K tokens for a quarter of an hour, with a queue behind it.
MAX_CONTEXT = int(os.environ.get("LONGSPARK_MAX_CONTEXT", 131072))
MAX_CONTEXT_ON_SHARED_CPU = 8192


class Refusal(ValueError):
    """What a visitor asked for cannot be done; the message says what was got, what is allowed and what to change."""


def check_number(name: str, value: Any, low: float, high: float) -> None:
    """
    Raises:
        `Refusal`: unless it is a number and `low <= value <= high`.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise Refusal(f"{name} is {shown(value)}; it can be {low:,} to {high:,}. Choose a number in that range.")


def check_whole(name: str, value: Any, low: int, high: int) -> None:
    """
    Raises:
        `Refusal`: unless it is a whole number, 2.0 included, and `low <= value <= high`.
    """
    check_number(name, value, low, high)
    if value != int(value):
        raise Refusal(f"{name} is {shown(value)}; it has to be a whole number, {low:,} to {high:,}. Round it.")


def check_temperature(value: Any) -> None:
    """
    Raises:
        `Refusal`: unless it is 0 or a temperature that can be sampled at.
    """
    check_number("The temperature", value, 0, MAX_TEMPERATURE)
    if 0 < value < MIN_TEMPERATURE:
        raise Refusal(
            f"The temperature is {shown(value)}; it can be 0 (greedy), or {MIN_TEMPERATURE} to {MAX_TEMPERATURE}. Choose 0 "
            "for what is so close to it."
        )


def check_switch(name: str, value: Any) -> None:
    """
    Raises:
        `Refusal`: unless it is true or false. A number or a text in its place would be calculated with.
    """
    if not isinstance(value, bool):
        raise Refusal(f"{name} is {shown(value)}; it can be true or false. Choose one of them.")


def check_text(name: str, value: Any) -> None:
    """
    Raises:
        `Refusal`: unless it is a text that can be written as UTF-8.
    """
    if not isinstance(value, str):
        raise Refusal(f"{name} is {shown(value)}; it has to be a text. Send a string.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Refusal(
            f"{name} has half a character at position {error.start + 1:,} (a lone surrogate), which no text has. Leave it "
            "out."
        ) from None


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


def shown(value: Any) -> str:
    """What somebody sent, for a message about it: as Python writes it, but never long."""
    return _SHORT.repr(value)


def cut(name: str) -> str:
    """A name for a message or the page: 100 characters at most."""
    return name if len(name) <= 100 else f"{name[:99]}…"


def short_length(num_tokens: int) -> str:
    """8192 as 8K, 7936 as 7,936."""
    return f"{num_tokens // 1024}K" if num_tokens and num_tokens % 1024 == 0 else f"{num_tokens:,}"
