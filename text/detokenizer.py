"""The text of new tokens, piece by piece."""

from collections.abc import Iterable

from .tokenizer import Tokenizer


class DetokenizerStream:
    """Turns a stream of token ids into pieces of text, whose concatenation is the text of all ids.

    Text is held back while a later token could still change it (half a character).

    Args:
        tokenizer: the tokenizer.
        keep_special_tokens: whether special tokens appear in the text.
    """

    def __init__(self, tokenizer: Tokenizer, keep_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._keep_special_tokens = keep_special_tokens
        self._context: list[int] = []  # the last decoded token: decoders strip the leading space of a first token
        self._pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next tokens and returns the text that they complete, perhaps none; it is valid UTF-8."""
        known_incomplete = len(self._pending)
        self._pending += self._tokenizer.visible(ids, self._keep_special_tokens)
        for end in range(len(self._pending), known_incomplete, -1):
            if self._tokenizer.ends_complete(self._pending[:end]):
                return self._take(end)
        return ""

    def flush(self) -> str:
        """Ends the stream and returns the text that was held back, with incomplete bytes as U+FFFD."""
        return self._take(len(self._pending))

    def _take(self, count: int) -> str:
        ids, self._pending = self._pending[:count], self._pending[count:]
        if not ids:
            return ""
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        text = self._tokenizer.decode(self._context + ids, skip_special_tokens=False)
        self._context = ids[-1:]
        return text[len(before) :]
