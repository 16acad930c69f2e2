"""The text of new tokens after a prompt, piece by piece: all texts that anybody gets are made here.

It is what the new tokens add to the prompt's text: decode(prompt + new) without what it shares with decode(prompt). A
decoder strips a space that begins a text, so tokens decoded alone have another text than after a prompt. Where byte
tokens of the prompt and new ones are no UTF-8 together, the complete characters of the prompt stay as they are.
"""

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Self

from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """The end of a prompt, as far as the text of what follows depends on it.

    Attributes:
        closed: a token before `unfinished`; none if the text begins with what follows.
        unfinished: the last tokens, which are the first bytes of a character.
    """

    closed: tuple[int, ...] = ()
    unfinished: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer, prompt: Sequence[int], keep_special_tokens: bool) -> Self:
        """Returns the end of a prompt; it looks at few of its tokens, unless the last ones are hidden or bytes.

        Args:
            tokenizer: the tokenizer.
            prompt: the tokens of the prompt.
            keep_special_tokens: whether texts show special tokens.
        """
        visible = (token for token in reversed(prompt) if tokenizer.is_visible(token, keep_special_tokens))
        return cls._of_byte_level(tokenizer, visible) if tokenizer.is_byte_level else cls._of_others(tokenizer, visible)

    @classmethod
    def _of_byte_level(cls, tokenizer: Tokenizer, visible: Iterator[int]) -> Self:
        last = tuple(islice(visible, 4))[::-1]  # a character has at most 4 bytes, a token at least 1
        for stop in range(len(last), 0, -1):
            if tokenizer.ends_complete(last[:stop]):
                return cls(last[stop - 1 : stop], last[stop:])
        return cls((), last)

    @classmethod
    def _of_others(cls, tokenizer: Tokenizer, visible: Iterator[int]) -> Self:
        """Returns the end of a prompt whose last characters may be spelled by byte tokens."""
        closed: tuple[int, ...] = ()
        run: list[int] = []
        for token in visible:
            if tokenizer.fallback_byte(token) is None:
                closed = (token,)
                break
            run.append(token)
        run.reverse()
        pending = _num_pending(b"".join(tokenizer.fallback_byte(token) or b"" for token in run))
        if pending < len(run) and not closed:
            closed = tuple(tokenizer.ordinary_token)
        return cls(closed, tuple(run[len(run) - pending :]))

    @property
    def is_empty(self) -> bool:
        """Whether the text begins with what follows."""
        return not (self.closed or self.unfinished)


NO_PROMPT: Final = PromptEnd()


class DetokenizerStream:
    """Turns a stream of token ids after a prompt into pieces of text, whose concatenation is what they add to its text.

    Text is held back while a later token could still change it (half a character).

    Args:
        tokenizer: the tokenizer.
        keep_special_tokens: whether special tokens appear in the text.
        end: the end of the prompt, for the same `keep_special_tokens`.
    """

    def __init__(self, tokenizer: Tokenizer, keep_special_tokens: bool = False, end: PromptEnd = NO_PROMPT) -> None:
        self._tokenizer = tokenizer
        self._keep_special_tokens = keep_special_tokens
        self._context = [*end.closed, *end.unfinished]  # the tokens before `pending` on which their text depends
        self._unfinished = end.unfinished  # until a text is taken
        self._pending: list[int] = []
        self._num_characters = 0

    @property
    def is_first(self) -> bool:
        """Whether no token so far, of prompt or stream, has a text."""
        return not (self._context or self._pending)

    def offset_of(self, token: int) -> int:
        """Returns the place in the text where the next token begins: in a character, if the token goes on with one.

        Byte tokens that could be UTF-8 so far count as such; what follows may still make each of them U+FFFD.
        """
        if not self._pending:
            return self._num_characters
        tokenizer = self._tokenizer
        is_hidden = not tokenizer.is_visible(token, self._keep_special_tokens)
        held = b"".join(map(tokenizer.token_bytes, [*self._unfinished, *self._pending]))
        if tokenizer.is_byte_level:
            text = self._added(self._pending)  # ends with U+FFFD for a character that is not complete
            goes_on = is_hidden or _begins_utf8(_tail(held) + tokenizer.token_bytes(token)[:1])
            return self._num_characters + max(0, len(text) - goes_on)
        byte = b"" if is_hidden else tokenizer.fallback_byte(token)
        if byte is None:  # which ends the run of byte tokens
            return self._num_characters + len(self._added(self._pending))
        is_text = _begins_utf8(held + byte)
        return self._num_characters + (len(held.decode(errors="ignore")) if is_text else len(self._pending))

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next tokens and returns the text that they complete, perhaps none; it is valid UTF-8."""
        known_incomplete = len(self._pending)
        self._pending += [each for each in ids if self._tokenizer.is_visible(each, self._keep_special_tokens)]
        for end in range(len(self._pending), known_incomplete, -1):
            if self._tokenizer.ends_complete([*self._context, *self._pending[:end]]):
                return self._take(end)
        return ""

    def flush(self) -> str:
        """Ends the stream and returns the text that was held back, with incomplete bytes as U+FFFD."""
        return self._take(len(self._pending))

    def _take(self, count: int) -> str:
        ids, self._pending = self._pending[:count], self._pending[count:]
        if not ids:
            return ""
        added = self._added(ids)
        self._context, self._unfinished = ids[-1:], ()
        self._num_characters += len(added)
        return added

    def _added(self, ids: list[int]) -> str:
        """Returns what tokens add to the text of those before them."""
        if len(self._context) == 1:
            before = self._tokenizer.text_alone(self._context[0])
        else:
            before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        text = self._tokenizer.decode(self._context + ids, skip_special_tokens=False)
        return text[_num_shared(before, text) :]  # more than what follows `before`: an unfinished character is new


def _num_pending(text: bytes) -> int:
    """Returns how many of the last bytes are the beginning of a character; all of them if the text is not UTF-8."""
    return len(_tail(text)) if _begins_utf8(text) else len(text)


def _begins_utf8(text: bytes) -> bool:
    """Returns whether a text is UTF-8, but for the last character, which may be incomplete."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(text)
    except UnicodeDecodeError:
        return False
    return True


def _tail(text: bytes) -> bytes:
    """Returns the last bytes, which are the beginning of a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text)
    return decoder.getstate()[0]


def _num_shared(first: str, second: str) -> int:
    """Returns the number of characters with which both texts begin."""
    if second.startswith(first):
        return len(first)
    places = (place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return next(places, min(len(first), len(second)))
