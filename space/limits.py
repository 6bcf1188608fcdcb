"""What the Space accepts, and how it says no. All of it is enforced here on the server, whatever a page or a client sends.

Does not know: models or pages.
"""

import os


MAX_FILE_BYTES = 2 * 2**20
MAX_PDF_PAGES = 300
FILE_TYPES = (".txt", ".md", ".py", ".pdf")
# Of prompt and document together, checked before anything is tokenized. 128K tokens of text are about half as many.
MAX_CHARACTERS = 1_500_000
MAX_NEW_TOKENS = 256
MAX_NTK_ALPHA = 4  # the target's context is stretched up to this factor
CONTEXTS = [1024 * 2**i for i in range(8)]  # 1K to 128K
MAX_QUEUE = 12
# A free CPU Space would read a prompt of 32K tokens for a quarter of an hour, with a queue behind it.
MAX_CONTEXT = int(os.environ.get("LONGSPARK_MAX_CONTEXT", 131072))
MAX_CONTEXT_ON_SHARED_CPU = 8192


class Refusal(ValueError):
    """What a visitor asked for cannot be done; the message says what was got, what is allowed and what to change."""


def check_number(name: str, value: float, low: float, high: float) -> None:
    """
    Raises:
        `Refusal`: unless `low <= value <= high`.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise Refusal(f"{name} is {value}; it can be {low:,} to {high:,}. Choose a value in that range.")


def short_length(num_tokens: int) -> str:
    """8192 as 8K, 7936 as 7,936."""
    return f"{num_tokens // 1024}K" if num_tokens and num_tokens % 1024 == 0 else f"{num_tokens:,}"
