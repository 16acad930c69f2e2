"""The bytes that the tokens of a vocabulary stand for, as the decoder in tokenizer.json reads them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Self


def _byte_alphabet() -> Mapping[int, int]:
    """Returns the table that turns a character of GPT-2's byte-level BPE into the character of its byte's number.

    Printable bytes stand for themselves, and others are characters from U+0100 on. Characters below U+0100 that stand
    for no byte become one that Latin-1 does not have.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return MappingProxyType(dict.fromkeys(others, 0xFFFF) | {256 + i: byte for i, byte in enumerate(others)})


_BYTE_OF: Final = _byte_alphabet()


@dataclass(frozen=True)
class Spelling:
    """The vocabulary's spelling of bytes and spaces, as the decoder in tokenizer.json reads them.

    Attributes:
        byte_level: whether every character of a token stands for one byte.
        byte_fallback: whether a token like "<0x0A>" stands for a byte, here 10.
        space: the character that stands for a space ("▁"), or "" if there is none.
        joins: whether a space is put before tokens that do not spell it.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    space: str = ""
    joins: bool = False

    @classmethod
    def of(cls, decoder: Any) -> Self:
        """Reads the "decoder" entry of tokenizer.json, sequences of decoders included."""
        steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        kinds = {step["type"] for step in steps}
        spaces = [step["replacement"] for step in steps if step["type"] == "Metaspace"]
        spaces += [
            step["pattern"]["String"]
            for step in steps
            if step["type"] == "Replace" and step["content"] == " " and "String" in step["pattern"]
        ]
        joins = not kinds or "WordPiece" in kinds
        return cls("ByteLevel" in kinds, "ByteFallback" in kinds, spaces[0] if spaces else "", joins)

    def fallback_byte(self, token: str) -> bytes | None:
        """Returns the byte that a token like "<0x0A>" stands for, or None for any other token."""
        if not (self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">")):
            return None
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return None

    def to_bytes(self, token: str) -> bytes:
        """Returns the bytes that a token of the vocabulary spells; what decoders strip or add is not known here."""
        if self.byte_level:
            try:
                return token.translate(_BYTE_OF).encode("latin-1")
            except UnicodeEncodeError:
                return token.encode()
        byte = self.fallback_byte(token)
        if byte is not None:
            return byte
        return (token.replace(self.space, " ") if self.space else token).encode()

    def longest(self, vocabulary: Iterable[str]) -> int:
        """Returns the most bytes that a token adds to a text; 1 without any."""
        sizes = (len(token) if token.isascii() else len(self.to_bytes(token)) for token in vocabulary)
        return max(sizes, default=1) + self.joins
