"""The text of new tokens after a prompt, piece by piece: all texts that anybody gets are made here.

It is what the new tokens add to the prompt's text: decode(prompt + new) without what it shares with decode(prompt). A
decoder strips a space that begins a text, so tokens decoded alone have another text than after a prompt. Where byte
tokens of the prompt and new ones are no UTF-8 together, the complete characters of the prompt stay as they are.
"""

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
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
        self._offsets: list[int] = []  # not taken yet
        self._later: list[int] = []  # of each token after these, the number of pending ones before it

    @property
    def is_first(self) -> bool:
        """Whether no token so far, of prompt or stream, has a text."""
        return not (self._context or self._pending)

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next tokens and returns the text that they complete, perhaps none; it is valid UTF-8."""
        return "".join(map(self._push, ids))

    def flush(self) -> str:
        """Ends the stream and returns the text that was held back, with incomplete bytes as U+FFFD."""
        return self._take()

    def take_offsets(self) -> list[int]:
        """Returns, of the next tokens whose places are certain, those of the characters in the text that they begin in.

        That is the text's end for a token that adds nothing to it.
        """
        self._settle()
        taken, self._offsets = self._offsets, []
        return taken

    def _push(self, token: int) -> str:
        self._later.append(len(self._pending))
        if not self._tokenizer.is_visible(token, self._keep_special_tokens):
            return ""
        self._pending.append(token)
        is_complete = self._tokenizer.ends_complete([*self._context, *self._pending])
        return self._take() if is_complete else ""

    def _take(self) -> str:
        ids, self._pending = self._pending, []
        if not ids:
            return ""
        added = self._added(ids)
        self._settle()
        if self._later and self._later[0] < len(ids):
            starts = self._starts(ids, len(added))
            self._offsets += [self._num_characters + starts[place] for place in self._later if place < len(ids)]
        self._later = [0 for place in self._later if place == len(ids)]
        self._context, self._unfinished = ids[-1:], ()
        self._num_characters += len(added)
        return added

    def _settle(self) -> None:
        """Moves the tokens that begin where the text ends, or will go on, to those whose places are certain."""
        while self._later and not self._later[0]:
            self._offsets.append(self._num_characters)
            del self._later[0]

    def _starts(self, ids: list[int], num_added: int) -> list[int]:
        """Returns the places in the text of pending tokens, the last of which completes it or ends the stream."""
        tokenizer = self._tokenizer
        if tokenizer.is_byte_level:
            return _begun_characters(*self._bytes_of(ids), num_added)
        run = ids if tokenizer.fallback_byte(ids[-1]) is not None else ids[:-1]
        num_run = len(self._added(run)) if run else 0
        before, pieces = self._bytes_of(run)
        is_text = _is_utf8(before + b"".join(pieces))
        starts = _begun_characters(before, pieces, num_run) if is_text else list(range(len(run)))
        return [*starts, num_run][: len(ids)]

    def _bytes_of(self, ids: list[int]) -> tuple[bytes, list[bytes]]:
        """Returns the bytes of the prompt's unfinished character, and those of each token."""
        return b"".join(map(self._tokenizer.token_bytes, self._unfinished)), list(map(self._tokenizer.token_bytes, ids))

    def _added(self, ids: list[int]) -> str:
        """Returns what tokens add to the text of those before them."""
        if len(self._context) == 1:
            before = self._tokenizer.text_alone(self._context[0])
        else:
            before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        text = self._tokenizer.decode(self._context + ids, skip_special_tokens=False)
        return text[_num_shared(before, text) :]  # more than what follows `before`: an unfinished character is new


def _begun_characters(before: bytes, pieces: list[bytes], num_added: int) -> list[int]:
    """Returns the characters in which pieces of bytes begin, as numbers among the last `num_added` ones of the text.

    Args:
        before: the bytes before the pieces.
        pieces: the pieces, none of them empty.
        num_added: the number of characters that are counted; those before them are the prompt's.
    """
    decoder, num_ended, found = codecs.getincrementaldecoder("utf-8")("replace"), 0, list[int]()
    for byte in before + b"".join(pieces):
        num_ended += len(decoder.decode(bytes((byte,))))
        found.append(num_ended - (not decoder.getstate()[0]))
    num_prompt = found[-1] + 1 - num_added
    places = accumulate(map(len, pieces[:-1]), initial=len(before))
    return [max(0, found[place] - num_prompt) for place in places]


def _is_utf8(text: bytes) -> bool:
    return _begins_utf8(text) and not _tail(text)


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
