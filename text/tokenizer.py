"""Tokenizers, built on Hugging Face `tokenizers`, for training and for serving.

The module imports no torch, since clients, data preparation and the server's process use it.
"""

import codecs
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Self

import tokenizers

from ..core.errors import CheckpointError, ConfigError, InvalidRequest
from .tokenizer_files import CONFIG_FILE, TOKENIZER_FILE, read_eos_token_ids, read_json

if TYPE_CHECKING:
    from .chat_template import ChatTemplate, Message


def _byte_alphabet() -> Mapping[str, int]:
    """Returns the byte of each character of GPT-2's byte-level BPE: printable ones, and others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    table = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return MappingProxyType(table)


_BYTE_OF: Final = _byte_alphabet()


@dataclass(frozen=True)
class _Spelling:
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


class Tokenizer:
    """A tokenizer.json, with the special ids of its model folder.

    Attributes:
        folder: the folder that it was read from; `SIDE_FILES` are its files.
        sha256: the SHA-256 of tokenizer.json.
        vocab_size: the highest token id + 1.
        longest_token_bytes: the bytes of the longest token; no text has fewer tokens than its bytes divided by this.
        eos_token_id: the token that ends a document, from tokenizer_config.json, or None if it names none.
        eos_token_ids: the tokens that end generation: those of config.json and generation_config.json, or
            `eos_token_id` alone if neither names any.
    """

    def __init__(self, folder: Path, text: str) -> None:
        self.folder = folder
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()
        self._backend = tokenizers.Tokenizer.from_str(text)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._spelling = _Spelling.of(json.loads(text).get("decoder"))
        added = self._backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        vocab = self._backend.get_vocab()
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.longest_token_bytes = self._spelling.longest(vocab)
        self.eos_token_id = self._document_end()
        fallback = frozenset() if self.eos_token_id is None else frozenset({self.eos_token_id})
        self.eos_token_ids = read_eos_token_ids(folder) or fallback

    @classmethod
    def from_folder(cls, folder: Path | str) -> Self:
        """Reads tokenizer.json and the configs in its folder.

        Raises:
            CheckpointError: tokenizer.json does not exist, or one of the files is damaged.
        """
        path = Path(folder) / TOKENIZER_FILE
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise CheckpointError(f"Cannot read the tokenizer {path}: {reason}.") from error
        try:
            return cls(path.parent, text)
        except CheckpointError:
            raise
        except Exception as error:  # `tokenizers` raises bare Exception for every file that it cannot read
            raise CheckpointError(
                f"{path} is damaged, or of a kind that this version of `tokenizers` cannot read: {error}."
            ) from error

    def _document_end(self) -> int | None:
        path = self.folder / CONFIG_FILE
        token = read_json(path).get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        if token is None:
            return None
        token_id = self._backend.token_to_id(token) if isinstance(token, str) else None
        if token_id is None:
            raise CheckpointError(f"{path}: eos_token {token!r} is not a token of {TOKENIZER_FILE} in the same folder.")
        return token_id

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text; other threads run meanwhile.

        Args:
            text: the text.
            special_tokens: whether tokenizer.json's post-processor adds its special tokens.

        Raises:
            InvalidRequest: the text is not valid Unicode.
        """
        try:
            # `encode` of a single text would hold the interpreter's lock: every thread would wait.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=special_tokens)
            return list(encoding.ids)
        except TypeError as error:
            raise InvalidRequest("The text has a lone surrogate; it must be valid Unicode.", field="text") from error

    @cached_property
    def chat_template(self) -> "ChatTemplate":
        """The chat template in the tokenizer's folder; raises CheckpointError if there is none."""
        from .chat_template import ChatTemplate  # few programs need it

        return ChatTemplate.from_folder(self.folder, self.special_tokens)

    def encode_chat(self, messages: "Sequence[Message]") -> list[int]:
        """Returns the token ids of a conversation up to the start of the assistant's next turn.

        Raises:
            CheckpointError: the tokenizer's folder has no chat template.
            ConfigError: the chat template refuses the messages.
        """
        try:
            prompt = self.chat_template.prompt(messages)
        except ConfigError as error:
            raise ConfigError(f"{self.folder}: {error}.") from error
        return self.encode(prompt, special_tokens=False)  # the template spells them out

    def encode_spans(self, text: str, spans: Iterable[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        """Returns the token ids of a text that spells out its special tokens, and for each whether it overlaps a span.

        Args:
            text: the text.
            spans: ranges [start, stop) of characters.
        """
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=False)  # see `encode`
        inside = bytearray(len(text))
        for start, stop in spans:
            inside[start:stop] = b"\1" * (stop - start)
        marked, end = [], 0
        for start, stop in encoding.offsets:  # some tokenizers leave a token's leading spaces out of its offsets
            marked.append(any(inside[min(start, end) : stop]))
            end = stop
        return list(encoding.ids), marked

    def to_json(self) -> str:
        """Returns the text of a tokenizer.json with the same vocabulary, without truncation and padding."""
        return self._backend.to_str()

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The special tokens as text, by rising id."""
        return tuple(self._added[token_id] for token_id in sorted(self._special))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text, without added special tokens; it runs on all cores."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids; incomplete bytes become U+FFFD, and unknown ids are skipped."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token, perhaps a part of a character, or b"" for an unknown id."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._spelling.to_bytes(token)

    def visible(self, ids: Iterable[int], keep_special_tokens: bool) -> list[int]:
        """Returns the ids that have a text: known ones, without special tokens unless they are kept."""
        return [
            token_id
            for token_id in ids
            if self._backend.id_to_token(token_id) is not None
            and (keep_special_tokens or token_id not in self._special)
        ]

    def ends_complete(self, ids: Sequence[int]) -> bool:
        """Returns whether no later token can change the text of `ids`, which are visible and at least one."""
        tokens = [self._backend.id_to_token(token_id) or "" for token_id in ids[-4:]]
        if self._spelling.byte_level:  # 4 tokens suffice: a character has at most 4 bytes, a token at least 1
            tail = codecs.getincrementaldecoder("utf-8")("replace")
            tail.decode(b"".join(self._spelling.to_bytes(token) for token in tokens))
            return not tail.getstate()[0]
        # A run of byte tokens is decoded as a whole: if it is not valid UTF-8, each of its bytes becomes U+FFFD.
        return self._spelling.fallback_byte(tokens[-1]) is None


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
