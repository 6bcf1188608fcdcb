"""Text of tokens one by one, as they come. Does not know: where the tokens come from."""

from transformers.tokenization_utils_base import PreTrainedTokenizerBase


class Pieces:
    """
    The text each token adds. A token that ends within a character adds nothing; the one that completes it adds it whole.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Of the target.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._open: list[int] = []

    def add(self, token_id: int) -> str:
        self._open.append(token_id)
        text = self._tokenizer.decode(self._open, skip_special_tokens=True)
        if text.endswith("\ufffd") and len(self._open) < 4:  # no character has more than four bytes
            return ""
        self._open.clear()
        return text
