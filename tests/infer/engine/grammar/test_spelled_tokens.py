"""Tokens for any bytes: the tokenizer's own if they have these bytes, else the longest, else the library's."""

from collections.abc import Sequence

from tk.core.errors import InvalidRequest
from tk.infer.engine.grammar.vocabulary import SpelledTokens

TOKENS = [b"</s>", b"a", b"b", b"ab", b" c", b"", b"c\n"]
BYTE = 32  # the id of byte 0, behind a whole word of a mask


def spelled(encode: dict[str, Sequence[int]] | None = None) -> SpelledTokens:
    known = encode or {}

    def ids(text: str) -> Sequence[int]:
        if text not in known:
            raise InvalidRequest("The text cannot be tokenized.")
        return known[text]

    return SpelledTokens(TOKENS, [0], 0, ids)


def test_every_byte_is_a_token_behind_those_of_the_model() -> None:
    made = spelled()
    assert made.tokens[: len(TOKENS)] == TOKENS
    assert [made.tokens[BYTE + byte] for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert made(b"c \xff") == [BYTE + ord("c"), BYTE + 32, BYTE + 255]


def test_tokens_are_as_long_as_possible() -> None:
    assert spelled()(b"aab c") == spelled().longest_first(b"aab c") == [1, 3, 4]
    assert spelled()(b"</s>")[0] != 0, "a special token is no text"


def test_the_tokenizers_own_tokens_come_first() -> None:
    assert spelled({"ab": [1, 2]})(b"ab") == [1, 2]
    assert spelled({"ab": [4], "\nab": [6, 1, 2]})(b"ab") == [1, 2], "without the line before"
    assert spelled({"ab": [4], "\nab": [4]})(b"ab") == [3], "other bytes"
    assert spelled({"ab": [99], "\nab": [99]})(b"ab") == [3], "ids that are unknown"
