"""Tokenizers, built on Hugging Face `tokenizers`, for training and for serving.

The module imports no torch, since clients, data preparation and the server's process use it.
"""

import codecs
import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import tokenizers

from ..core.errors import CheckpointError, ConfigError, InvalidRequest
from .chat_context import NEW_TURN, PromptForm
from .library_errors import failing_as
from .spelling import Spelling
from .template_files import template_sources
from .tokenizer_files import CONFIG_FILE, TOKENIZER_FILE, TextFiles, eos_token_ids_of

if TYPE_CHECKING:
    from .chat_template import ChatTemplate, Message


class Tokenizer:
    """A tokenizer.json, with the special ids of its model folder.

    Attributes:
        folder: the folder that it was read from; `SIDE_FILES` are its files.
        files: their content, but for tokenizer.json.
        sha256: the SHA-256 of tokenizer.json.
        vocab_size: the highest token id + 1.
        longest_token_bytes: the bytes of the longest token; no text has fewer tokens than its bytes divided by this.
        eos_token_id: the token that ends a document, from tokenizer_config.json, or None if it names none.
        eos_token_ids: the tokens that end generation: those of config.json and generation_config.json, or
            `eos_token_id` alone if neither names any.
    """

    def __init__(self, files: TextFiles, text: str) -> None:
        self.folder, self.files = files.folder, files.without(TOKENIZER_FILE)
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()
        self._backend = tokenizers.Tokenizer.from_str(text)
        self._backend.no_truncation()
        self._backend.no_padding()
        _keep_whole_offsets(self._backend.post_processor)
        self._spelling = Spelling.of(json.loads(text).get("decoder"))
        added = self._backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._known_bytes: dict[tuple[int, bool], bytes] = {}  # what `token_bytes` has returned
        self._known_texts: dict[int, str] = {}  # what `text_alone` has returned
        vocab = self._backend.get_vocab()
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.longest_token_bytes = self._spelling.longest(vocab)
        self.eos_token_id = self._document_end()
        fallback = frozenset() if self.eos_token_id is None else frozenset({self.eos_token_id})
        self.eos_token_ids = eos_token_ids_of(files) or fallback

    @classmethod
    def from_folder(cls, folder: Path | str) -> Self:
        """Reads tokenizer.json and the configs in its folder.

        Raises:
            CheckpointError: tokenizer.json does not exist, or one of the files is damaged.
        """
        return cls.of(TextFiles.read(Path(folder)))

    @classmethod
    def of(cls, files: TextFiles) -> Self:
        """Makes a tokenizer of files that were read; raises as `from_folder`."""
        path, text = files.folder / TOKENIZER_FILE, files.text(TOKENIZER_FILE)
        if text is None:
            raise CheckpointError(f"Cannot read the tokenizer {path}: {os.strerror(errno.ENOENT)}. {_advice(path)}")

        def unreadable(reason: str) -> CheckpointError:
            return CheckpointError(
                f"{path} is damaged, or of a kind that this version of `tokenizers` cannot read: {reason}."
            )

        try:
            with failing_as(unreadable):
                return cls(files, text)
        except (ValueError, TypeError, KeyError, AttributeError) as error:  # JSON of another shape
            raise unreadable(str(error)) from error

    def _document_end(self) -> int | None:
        path = self.folder / CONFIG_FILE
        token = self.files.json(CONFIG_FILE).get("eos_token")
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
            special_tokens: whether tokenizer.json's post-processor adds its special tokens.

        Raises:
            InvalidRequest: the text is not valid Unicode, or too much for the tokenizer.
        """
        # `encode` of a single text would hold the interpreter's lock: every thread would wait.
        with _encoding():
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=special_tokens)
        return list(encoding.ids)

    def encode_pair(self, prompt: str, continuation: str) -> tuple[list[int], int]:
        """Returns the token ids of two texts as one, and how many of them are wholly in the prompt.

        Those are the tokens that the post-processor puts before a text, and those that end in the prompt. A token that
        begins in the prompt and ends in the continuation is not among them. Special tokens after the text are left out.

        Raises:
            InvalidRequest: see `encode`.
        """
        with _encoding():
            (encoding,) = self._backend.encode_batch([prompt + continuation])
        ends = [end for _, end in encoding.offsets]
        is_added = encoding.special_tokens_mask
        stop = max((index + 1 for index, added in enumerate(is_added) if not added), default=0)
        start = next((index for index in range(stop) if ends[index] > len(prompt) and not is_added[index]), stop)
        return list(encoding.ids[:stop]), start

    @cached_property
    def chat_template(self) -> "ChatTemplate":
        """The chat template among the tokenizer's files; raises CheckpointError if there is none."""
        from .chat_template import ChatTemplate  # few programs need it

        return ChatTemplate(template_sources(self.files), self.special_tokens)

    def encode_chat(self, messages: "Sequence[Message]", form: PromptForm = NEW_TURN) -> list[int]:
        """Returns the token ids of a conversation up to the start of the assistant's next turn, or of such a form.

        Raises:
            CheckpointError: the tokenizer's folder has no chat template.
            ConfigError: the chat template refuses the messages.
        """
        try:
            prompt = self.chat_template.prompt(messages, form=form)
        except ConfigError as error:
            raise ConfigError(f"{self.folder}: {error}.") from error
        return self.encode(prompt, special_tokens=False)  # the template spells them out

    def encode_spans(self, text: str, spans: Iterable[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        """Returns the token ids of a text that spells out its special tokens, and for each whether it overlaps a span.

        Args:
            spans: ranges [start, stop) of characters.

        Raises:
            InvalidRequest: see `encode`.
        """
        with _encoding():
            (encoding,) = self._backend.encode_batch([text], add_special_tokens=False)  # see `encode`
        inside = bytearray(len(text))
        for start, stop in spans:
            inside[start:stop] = b"\1" * (stop - start)
        marked, end = [], 0
        for start, stop in encoding.offsets:  # some tokenizers leave a token's leading spaces out of its offsets
            marked.append(any(inside[min(start, end) : stop]))
            end = stop
        return list(encoding.ids), marked

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The special tokens as text, by rising id."""
        return tuple(self._added[token_id] for token_id in sorted(self._special))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text, without added special tokens; it runs on all cores.

        Raises:
            InvalidRequest: see `encode`.
        """
        with _encoding():
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids; incomplete bytes become U+FFFD, and unknown ids are skipped.

        Raises:
            CheckpointError: the tokenizer's decoder fails.
        """
        with failing_as(self._cannot_decode):
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def text_alone(self, token_id: int) -> str:
        """Returns the text of a token without others, special or not."""
        found = self._known_texts.get(token_id)
        if found is None:
            found = self._known_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return found

    def _cannot_decode(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"The decoder of {self.folder / TOKENIZER_FILE} cannot turn these token ids into text: {reason}. Mend its "
            "entry `decoder`, or ask for token ids."
        )

    def token_bytes(self, token_id: int, is_first: bool = False) -> bytes:
        """Returns the bytes that a token adds to a text, perhaps a part of a character; b"" for an unknown id.

        A special token has the bytes of its name, whether texts show it or not.

        Args:
            is_first: whether no other token comes before it, so that decoders strip a space that begins it.
        """
        found = self._known_bytes.get((token_id, is_first))
        if found is None:
            found = self._known_bytes[token_id, is_first] = self._bytes_of([token_id], is_first)[0]
        return found

    def vocabulary_bytes(self, is_first: bool = False) -> list[bytes]:
        """Returns `token_bytes` of the ids from 0 to `vocab_size`."""
        return self._bytes_of(range(self.vocab_size), is_first)

    def _bytes_of(self, ids: Sequence[int], is_first: bool) -> list[bytes]:
        tokens = [self._backend.id_to_token(token_id) or "" for token_id in ids]
        if self._spelling.byte_level:
            return [
                (token.encode() if token_id in self._special else self._spelling.to_bytes(token))
                for token_id, token in zip(ids, tokens, strict=True)
            ]
        before = [] if is_first else self.ordinary_token
        start = len(self.decode(before))
        with failing_as(self._cannot_decode):
            texts = self._backend.decode_batch([[*before, token] for token in ids], skip_special_tokens=False)
        found = [text[start:].encode() for text in texts]
        for place, (token_id, token) in enumerate(zip(ids, tokens, strict=True)):
            byte = self._spelling.fallback_byte(token)
            if token_id in self._special:
                found[place] = token.encode()
            elif byte is not None and not byte.isascii():  # whose text alone is U+FFFD
                found[place] = byte
        return found

    @cached_property
    def ordinary_token(self) -> list[int]:
        """A token that ends with a letter or digit, for a place in the middle of a text; [] if there is none."""
        for token_id in range(self.vocab_size):
            last = (self._backend.id_to_token(token_id) or "")[-1:]
            if last.isascii() and last.isalnum() and token_id not in self._added:
                return [token_id]
        return []

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of the special tokens, which texts do not show unless they are asked to."""
        return self._special

    def is_visible(self, token_id: int, keep_special_tokens: bool) -> bool:
        """Returns whether an id has a text: a known one, and not a special token unless they are kept."""
        if token_id in self._special and not keep_special_tokens:
            return False
        return self._backend.id_to_token(token_id) is not None

    @property
    def is_byte_level(self) -> bool:
        """Whether every character of a token stands for one byte."""
        return self._spelling.byte_level

    def fallback_byte(self, token_id: int) -> bytes | None:
        """Returns the byte that a token like "<0x0A>" stands for, or None for any other token."""
        return self._spelling.fallback_byte(self._backend.id_to_token(token_id) or "")

    def ends_complete(self, ids: Sequence[int]) -> bool:
        """Returns whether no later token can change the text of `ids`, which are visible and at least one."""
        last = self._backend.id_to_token(ids[-1]) or ""
        if not self._spelling.byte_level:
            # A run of byte tokens is decoded as a whole: if it is not valid UTF-8, each of its bytes becomes U+FFFD.
            return self._spelling.fallback_byte(last) is None
        if last and last[-1].isascii():  # as most tokens
            return True
        tokens = [self._backend.id_to_token(token_id) or "" for token_id in ids[-4:]]
        tail = codecs.getincrementaldecoder("utf-8")("replace")  # 4 tokens suffice: a character has at most 4 bytes
        tail.decode(b"".join(self._spelling.to_bytes(token) for token in tokens))
        return not tail.getstate()[0]


def _keep_whole_offsets(processor: Any) -> None:
    """Lets a post-processor leave the offsets of tokens whole, which it may trim by their spaces."""
    is_sequence = isinstance(processor, tokenizers.processors.Sequence)
    for step in processor if is_sequence else [processor]:
        if getattr(step, "trim_offsets", False):
            step.trim_offsets = False


@contextmanager
def _encoding() -> Iterator[None]:
    """Turns the failure of an encoding in the body into InvalidRequest."""
    try:
        with failing_as(_cannot_encode):
            yield
    except TypeError as error:
        raise InvalidRequest("The text has a lone surrogate; it must be valid Unicode.", field="text") from error


def _cannot_encode(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"The model's tokenizer cannot turn the text into tokens: {reason}. Send a shorter text, or one without the "
        "part that repeats itself, or token ids.",
        field="text",
    )


def _advice(missing: Path) -> str:
    """Returns what to do about a tokenizer.json that does not exist."""
    folder = missing.parent
    if folder.is_file():
        return "Name the folder that holds tokenizer.json, not a file."
    if not folder.is_dir():
        return "The folder does not exist; tk downloads nothing, so name a folder with tokenizer.json on this machine."
    if (folder / "tokenizer.model").exists():
        return (
            "The folder has only a tokenizer.model, which tk does not read: AutoTokenizer.from_pretrained(FOLDER)"
            ".save_pretrained(FOLDER) of transformers writes tokenizer.json beside it."
        )
    return "Copy the model's tokenizer.json into that folder, or make a tokenizer with `tk tokenizer train`."
