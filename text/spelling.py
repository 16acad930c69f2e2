"""The bytes that the tokens of a vocabulary stand for, as the decoder in tokenizer.json reads them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Self


def _byte_alphabet() -> Mapping[str, int]:
    """Returns the byte of each character of GPT-2's byte-level BPE: printable ones, and others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    table = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return MappingProxyType(table)


_BYTE_OF: Final = _byte_alphabet()


@dataclass(frozen=True)
class Spelling:
    """The vocabulary's spelling of bytes and spaces, as the decoder in tokenizer.json reads them.

    Attributes:
        byte_level: whether every character of a token stands for one byte.
        byte_fallback: whether a token like "<0x0A>" stands for a byte, here 10.
        space: the character that stands for a space ("▁"), or "" if there is none.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    space: str = ""

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
        return cls("ByteLevel" in kinds, "ByteFallback" in kinds, spaces[0] if spaces else "")

    def fallback_byte(self, token: str) -> bytes | None:
        """Returns the byte that a token like "<0x0A>" stands for, or None for any other token."""
        if not (self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">")):
            return None
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return None

    def to_bytes(self, token: str) -> bytes:
        """Returns the bytes of the text that the decoder makes of a token of the vocabulary."""
        if self.byte_level:
            spelled = [_BYTE_OF.get(char, -1) for char in token]
            return token.encode() if -1 in spelled else bytes(spelled)
        byte = self.fallback_byte(token)
        if byte is not None:
            return byte
        return (token.replace(self.space, " ") if self.space else token).encode()

    def longest(self, vocabulary: Iterable[str]) -> int:
        """Returns the bytes of the longest token; 1 without any."""
        return max((len(token) if token.isascii() else len(self.to_bytes(token)) for token in vocabulary), default=1)
