"""Documents and a tokenizer make a token folder, in flat memory and on all cores."""

import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

from ...core.errors import ConfigError
from ...model.tokenizer import SIDE_FILES, Tokenizer
from .publish import new_folder
from .token_file import TokenFile, TokenFileWriter

PIECE_CHARACTERS: Final = 1 << 20
BATCH_CHARACTERS: Final = 1 << 21


def prepare_tokens(
    documents: Iterable[str], tokenizer: Tokenizer, out: Path, replaceable: Collection[str] = ()
) -> TokenFile:
    """Tokenizes documents into the new token folder `out`, which gets the tokenizer's files too.

    Each document is encoded as the prompt of a request would be (bos where the tokenizer adds one) and ends with eos. A
    document above `PIECE_CHARACTERS` is encoded in pieces that end with a line.

    Raises:
        ConfigError: no text at all, `out` is taken, or the tokenizer names no end-of-text token.
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
            for batch in _batches(documents):
                for (_, first, last), ids in zip(
                    batch, tokenizer.encode_batch([piece[0] for piece in batch]), strict=True
                ):
                    writer.append(start + ids if first else ids)
                    if last:
                        writer.end_document()
            writer.finish()
        for name in SIDE_FILES:
            if (tokenizer.folder / name).is_file():
                shutil.copyfile(tokenizer.folder / name, folder / name)
    return TokenFile(out)


def _start_of_document(tokenizer: Tokenizer, eos: int) -> list[int]:
    """What the tokenizer's post-processor puts before a text."""
    added = tokenizer.encode("")
    return added[:-1] if added[-1:] == [eos] else added


def _batches(documents: Iterable[str]) -> Iterator[list[tuple[str, bool, bool]]]:
    """Pieces of documents (text, whether the first, whether the last), some `BATCH_CHARACTERS` at a time."""
    batch: list[tuple[str, bool, bool]] = []
    size = 0
    for document in documents:
        start = 0
        while start < len(document):
            stop = _piece_end(document, start)
            batch.append((document[start:stop], start == 0, stop == len(document)))
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
