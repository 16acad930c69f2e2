"""The preparation of a token folder from documents and a tokenizer, in constant memory and on all cores."""

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from ..core.errors import ConfigError
from ..text.tokenizer import Tokenizer
from ..text.tokenizer_files import SIDE_FILES
from .examples import Chat, Document, Example, ExampleEncoder
from .publish import new_folder
from .token_file import TokenFile, TokenFileWriter

PIECE_CHARACTERS: Final = 1 << 20
BATCH_CHARACTERS: Final = 1 << 21


class TextPiece(NamedTuple):
    """A piece of a text, short enough to be tokenized at once.

    Attributes:
        text: the piece.
        is_first: whether the text begins with it.
        is_last: whether the text ends with it.
    """

    text: str
    is_first: bool
    is_last: bool


def prepare_tokens(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    out: Path,
    replaceable: Collection[str] = (),
    leave_out: Callable[[Chat], None] = lambda chat: None,
) -> TokenFile:
    """Tokenizes documents into the new token folder `out`, with a copy of the tokenizer's files.

    Each text is encoded like the prompt of a request (with bos if the tokenizer adds one) and ends with eos. A text
    above `PIECE_CHARACTERS` is encoded in pieces that end with a line. Examples get a mask (see data/examples.py).

    Args:
        documents: texts and examples.
        tokenizer: the tokenizer, with the folder that it was read from.
        out: the folder to make.
        replaceable: the names that an existing folder `out` may hold and still be replaced.
        leave_out: a function that is called with each conversation that is left out because no token of it is learned.

    Raises:
        ConfigError: the documents have no text, `out` exists, the tokenizer names no end-of-text token, or its chat
            template refuses a conversation.
        CheckpointError: a document is a conversation, but the tokenizer has no chat template.
    """
    eos = tokenizer.eos_token_id
    if eos is None:
        raise ConfigError(
            f"The tokenizer in {tokenizer.folder} names no token that ends a document: add "
            '"eos_token": "..." to its tokenizer_config.json.'
        )
    start = _start_of_document(tokenizer, eos)
    with new_folder(out, replaceable) as folder:
        with TokenFileWriter(folder, tokenizer, eos) as writer:
            encoder = ExampleEncoder(tokenizer, start, eos)
            for batch in _batches(documents):
                if isinstance(batch, list):
                    _append_texts(writer, tokenizer, start, batch)
                    continue
                ids, learned = encoder.encode(batch)
                if isinstance(batch, Chat) and not any(learned[1:]):  # the first token is never a target
                    leave_out(batch)
                else:
                    writer.add_example(ids, learned)
            writer.finish()
        for name in SIDE_FILES:
            if (tokenizer.folder / name).is_file():
                shutil.copyfile(tokenizer.folder / name, folder / name)
    return TokenFile(out)


def _start_of_document(tokenizer: Tokenizer, eos: int) -> list[int]:
    """Returns the tokens that the tokenizer's post-processor puts before a text."""
    added = tokenizer.encode("")
    return added[:-1] if added[-1:] == [eos] else added


def _append_texts(writer: TokenFileWriter, tokenizer: Tokenizer, start: list[int], batch: list[TextPiece]) -> None:
    for piece, ids in zip(batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True):
        writer.append(start + ids if piece.is_first else ids)
        if piece.is_last:
            writer.end_document()


def _batches(documents: Iterable[Document]) -> Iterator[list[TextPiece] | Example]:
    """Yields the documents in order: batches of about `BATCH_CHARACTERS` of text, and single examples."""
    batch: list[TextPiece] = []
    size = 0
    for document in documents:
        if not isinstance(document, str):
            if batch:
                yield batch
            yield document
            batch, size = [], 0
            continue
        start = 0
        while start < len(document):
            stop = _piece_end(document, start)
            batch.append(TextPiece(document[start:stop], start == 0, stop == len(document)))
            size += stop - start
            start = stop
            if size >= BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _piece_end(document: str, start: int) -> int:
    stop = start + PIECE_CHARACTERS
    if stop >= len(document):
        return len(document)
    return document.rfind("\n", start, stop) + 1 or stop
