"""A vocabulary as the grammar library takes it: the bytes of each token, and tokens for bytes that must follow.

The library wants tokens for any bytes. So the 256 bytes are tokens too, behind those of the model; a vocabulary may
have a space only at the beginning of words, for example. `mask_of` leaves them out.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ....core.errors import TkError

if TYPE_CHECKING:
    from llguidance import LLMatcher

_BYTES: Final = 256
_WORD: Final = 32  # bits of a word of a mask
_BEFORE: Final = ("", "\n")  # a text before another one, which then has no space before it


class SpelledTokens:
    """The bytes of each token, in the library's words.

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
        room = [b""] * (-len(tokens) % _WORD)  # so that the mask of the model's tokens is one of whole words
        self._first_byte = len(tokens) + len(room)
        self.tokens = [*tokens, *room, *(bytes([byte]) for byte in range(_BYTES))]
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


def mask_of(state: "LLMatcher", num_words: int) -> npt.NDArray[Any]:
    """Returns which tokens of the model may follow: uint32 [num_words]; other threads run meanwhile."""
    mask = np.empty(num_words + _BYTES // _WORD, np.uint32)
    state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return mask[:num_words]
