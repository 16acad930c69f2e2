"""Documents and a tokenizer make a token folder, in flat memory and on all cores."""

import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from ..core.errors import ConfigError
from ..text.tokenizer import SIDE_FILES, Tokenizer
from .examples import Document, Example, ExampleEncoder
from .publish import new_folder
from .token_file import TokenFile, TokenFileWriter

PIECE_CHARACTERS: Final = 1 << 20
BATCH_CHARACTERS: Final = 1 << 21


class TextPiece(NamedTuple):
    """A part of a text."""

    text: str
    is_first: bool
    is_last: bool


def prepare_tokens(
    documents: Iterable[Document], tokenizer: Tokenizer, out: Path, replaceable: Collection[str] = ()
) -> TokenFile:
    """Tokenizes documents into the new token folder `out`, which gets the tokenizer's files too.

    Each text is encoded as the prompt of a request would be (bos where the tokenizer adds one) and ends with eos. One
    above `PIECE_CHARACTERS` is encoded in pieces that end with a line. Examples get a mask (see data/examples.py).

    Raises:
        ConfigError: no text at all, `out` is taken, the tokenizer names no end-of-text token, or its chat template
            refuses a conversation.
        CheckpointError: there are conversations and no chat template.
    """
    eos = tokenizer.eos_token_id
    if eos is None:
        raise ConfigError(
            f"The tokenizer in {tokenizer.folder} names no token that ends a document; add "
            '"eos_token": "..." to its tokenizer_config.json.'
        )
    start = _start_of_document(tokenizer, eos)
    with new_folder(out, replaceable) as folder:
        with TokenFileWriter(folder, tokenizer, eos) as writer:
            encoder = ExampleEncoder(tokenizer, start, eos)
            for batch in _batches(documents):
                if isinstance(batch, list):
                    _append_texts(writer, tokenizer, start, batch)
                else:
                    writer.add_example(*encoder.encode(batch))
            writer.finish()
        for name in SIDE_FILES:
            if (tokenizer.folder / name).is_file():
                shutil.copyfile(tokenizer.folder / name, folder / name)
    return TokenFile(out)


def _start_of_document(tokenizer: Tokenizer, eos: int) -> list[int]:
    """What the tokenizer's post-processor puts before a text."""
    added = tokenizer.encode("")
    return added[:-1] if added[-1:] == [eos] else added


def _append_texts(writer: TokenFileWriter, tokenizer: Tokenizer, start: list[int], batch: list[TextPiece]) -> None:
    for piece, ids in zip(batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True):
        writer.append(start + ids if piece.is_first else ids)
        if piece.is_last:
            writer.end_document()


def _batches(documents: Iterable[Document]) -> Iterator[list[TextPiece] | Example]:
    """In order: pieces of texts, some `BATCH_CHARACTERS` at a time, and examples."""
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
