"""The model's vocabulary for grammars: the bytes that each token adds to the text that users get.

A decoder may strip a space from the first token of a text, and reads byte tokens together with half a character at the
end of the prompt. So the vocabulary can differ at the first place of a text; from the second place on it is always
the same.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Final, Literal

from ....core.errors import CheckpointError, TkError
from ....text.detokenizer import PromptEnd
from ....text.tokenizer import Tokenizer
from .grammar import MASK_WORD, NUM_BYTES

if TYPE_CHECKING:
    from llguidance import LLTokenizer

Place = Literal["inside", "start", "unfinished"]
_NUM_PROBES: Final = 64  # random texts that show whether a token has the same bytes beside any others
_PROBE_TOKENS: Final = 8
_LETTERS: Final = "é▁€😀"  # of 2 to 4 bytes
_BEFORE: Final = ("", "\n")  # a text before another one, which then has no space before it


def place_of(tokenizer: Tokenizer, prompt: Sequence[int], keep_special_tokens: bool) -> Place:
    """Returns the place of the token that follows a prompt.

    Returns:
        "start" if the prompt has no text, so that decoders strip a space; "unfinished" if byte tokens at its end are
        the beginning of a character; else "inside", always if the tokens spell bytes, whose decoders strip nothing.
    """
    if tokenizer.is_byte_level:
        return "inside"
    end = PromptEnd.of(tokenizer, prompt, keep_special_tokens)
    if end.is_empty:
        return "start"
    return "unfinished" if end.unfinished else "inside"


class SpelledTokens:
    """A vocabulary as the grammar library takes it: the bytes of each token, and tokens for bytes that must follow.

    The library wants tokens for any bytes. So the 256 bytes are tokens too, behind those of the model; a vocabulary may
    have a space only at the beginning of words, for example. `mask_of` leaves them out.

    Args:
        tokens: the bytes of each token of the model; b"" for those that no text has.
        special_token_ids: the tokens that only their names match.
        eos_token_id: a token that ends a sample.
        encode: returns the token ids of a text.
    """

    bos_token_id: Final = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_token_ids: Sequence[int],
        eos_token_id: int,
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        self.special_token_ids, self.eos_token_id, self._encode = special_token_ids, eos_token_id, encode
        room = [b""] * (-len(tokens) % MASK_WORD)  # so that the mask of the model's tokens is one of whole words
        self._first_byte = len(tokens) + len(room)
        self.tokens = [*tokens, *room, *(bytes([byte]) for byte in range(NUM_BYTES))]
        special = {*special_token_ids, eos_token_id}
        self._ids = {text: token for token, text in enumerate(tokens) if text and token not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes) -> list[int]:
        """Returns tokens with these bytes: those of the tokenizer, or the longest ones if its own have other bytes."""
        return self._by_tokenizer(text) or self.longest_first(text)

    def longest_first(self, text: bytes) -> list[int]:
        """Returns tokens with these bytes, each as long as possible."""
        found, start = list[int](), 0
        while start < len(text):
            stops = range(min(len(text), start + self._longest), start, -1)
            stop = next((stop for stop in stops if text[start:stop] in self._ids), start + 1)
            found.append(self._ids.get(text[start:stop], self._first_byte + text[start]))
            start = stop
        return found

    def _by_tokenizer(self, text: bytes) -> list[int] | None:
        try:
            for before in _BEFORE:
                ids = self._encode(before + text.decode())
                start, size = len(ids), 0
                while start > 0 and size < len(text):
                    start -= 1
                    size += len(self._bytes(ids[start]))
                if b"".join(map(self._bytes, ids[start:])) == text:
                    return list(ids[start:])
        except (UnicodeDecodeError, TkError):  # a part of a character, or a text that the tokenizer refuses
            return None
        return None

    def _bytes(self, token: int) -> bytes:
        return self.tokens[token] if token < len(self.tokens) else b""


@dataclass(frozen=True)
class FirstTokens:
    """The vocabulary for the first token of a text, where it differs from that inside a text.

    Attributes:
        library: the vocabulary as the library has it.
        spelled: for each token whose bytes differ, tokens of the library with these bytes inside a text.
    """

    library: "LLTokenizer"
    spelled: Mapping[int, list[int]]


class Vocabulary:
    """A vocabulary for grammars; each part is built when it is needed, in half a second per 100,000 tokens.

    Attributes:
        inside: the vocabulary inside a text, as the library has it.
        special_ids: the tokens that texts show only if they are asked to.

    Args:
        vocab_size: the number of tokens of the model's vocabulary.
        eos_token_ids: the tokens that end a sample.

    Raises:
        CheckpointError: the bytes of a token depend on those beside it, or there is no token that could end a text.
        ImportError: the grammar library is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._size = tokenizer, vocab_size
        self.special_ids = tokenizer.special_ids
        self._texts = self._of_size(tokenizer.vocabulary_bytes())
        self._eos = [token for token in eos_token_ids if token < vocab_size] or [self._any_end()]
        self._check_neighbours()
        self._spelled = self._spelled_tokens(self._texts, lambda text: tokenizer.encode(text, special_tokens=False))
        self.inside = self._library(self._spelled)

    def first(self, place: Place) -> FirstTokens | None:
        """Returns the vocabulary for the first token at a place; None if it is the one inside a text."""
        if place == "inside":
            return None
        return self._start if place == "start" else self._after_bytes

    @cached_property
    def _start(self) -> FirstTokens | None:
        return self._differing(self._of_size(self._tokenizer.vocabulary_bytes(is_first=True)))

    @cached_property
    def _after_bytes(self) -> FirstTokens | None:
        fallback_byte = self._tokenizer.fallback_byte
        return self._differing(
            [text if fallback_byte(token) is None else b"" for token, text in enumerate(self._texts)]
        )

    def _differing(self, texts: list[bytes]) -> FirstTokens | None:
        """Returns the vocabulary for a first token with these bytes; tokens without text are never first."""
        different = [text != inside for text, inside in zip(texts, self._texts, strict=True)]
        if not any(different):
            return None
        spelled = {token: self._spelled.longest_first(texts[token]) for token in compress(range(self._size), different)}
        return FirstTokens(self._library(self._spelled_tokens(texts, lambda _: ())), spelled)

    def _of_size(self, texts: list[bytes]) -> list[bytes]:
        """Returns the bytes of the tokens of the model's vocabulary, which may be larger than the tokenizer's."""
        return [*texts[: self._size], *[b""] * (self._size - len(texts))]

    def _any_end(self) -> int:
        """Returns a token that shall end a sample, though the model has none, so that no grammar takes it for text."""
        for token in range(self._size):
            if token in self.special_ids or not self._texts[token]:
                return token
        raise CheckpointError("no token ends a text: name one as eos_token in tokenizer_config.json")

    def _spelled_tokens(self, texts: Sequence[bytes], encode: Callable[[str], Sequence[int]]) -> SpelledTokens:
        special = sorted(token for token in self.special_ids.union(self._eos) if token < self._size)
        return SpelledTokens(texts, special, self._eos[0], encode)

    def _library(self, tokens: SpelledTokens) -> "LLTokenizer":
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(tokens), eos_token=self._eos)

    def _check_neighbours(self) -> None:
        """Checks on some texts that the tokens of a text have the same bytes whatever is beside them.

        Raises:
            CheckpointError: they have not; a grammar would allow texts that users do not get.
        """
        tokenizer, before = self._tokenizer, self._tokenizer.ordinary_token
        byte_of = {tokenizer.fallback_byte(token): token for token in range(min(self._size, tokenizer.vocab_size))}
        known = [token for token, text in enumerate(self._texts) if text and token not in self.special_ids]
        chance = random.Random(0)
        known = chance.sample(known, min(len(known), _NUM_PROBES * _PROBE_TOKENS))  # to look at each takes long
        whole = [token for token in known if tokenizer.ends_complete([token])]
        probes = [[chance.choice(whole) for _ in range(_PROBE_TOKENS)] for _ in range(_NUM_PROBES) if whole]
        probes = [[probe[0], *probe] for probe in probes]
        letters = [bytes([byte]) for byte in _LETTERS.encode()]
        if all(letter in byte_of for letter in letters):
            probes.append([byte_of[letter] for letter in letters])
        start = len(tokenizer.decode(before, skip_special_tokens=False))
        for probe in probes:
            text = tokenizer.decode([*before, *probe], skip_special_tokens=False)[start:]
            if text != b"".join(self._texts[token] for token in probe).decode(errors="replace"):
                raise CheckpointError("its decoder gives a token another text beside other tokens")
