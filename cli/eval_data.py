"""The texts that `tk eval` measures: a file of text or of rows, or a token folder."""

from collections.abc import Collection
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..core.errors import ConfigError
from ..data.sources import find_corpus
from ..data.token_file import TokenFile
from ..infer.engine.perplexity import EvalText
from ..text.tokenizer import Tokenizer
from .corpus_report import say_left_out


def read_texts(
    data: Path, tokenizer: Tokenizer | None, limit: int | None, ignored: Collection[str] = ()
) -> list[EvalText]:
    """Reads texts and tokenizes them, if they are not tokens already; prints what it left out on stderr.

    Args:
        data: a UTF-8 text file, which is one text; a file of rows with a "text" each, of any kind that
            `tk data prepare` reads; or a token folder, whose mask says which tokens count.
        tokenizer: the tokenizer of the model; None if the checkpoint has none.
        limit: the number of tokens after which the data is cut; None = all.
        ignored: fields of rows to leave out.

    Raises:
        ConfigError: the data cannot be read, is of another tokenizer, or needs a tokenizer.
    """
    texts = _token_folder(data, tokenizer) if data.is_dir() else _text_file(data, tokenizer, ignored)
    return texts if limit is None else _first(texts, limit)


def _token_folder(folder: Path, tokenizer: Tokenizer | None) -> list[EvalText]:
    file = TokenFile(folder)
    if tokenizer is not None and tokenizer.sha256 != file.tokenizer_sha256:
        raise ConfigError(
            f"{folder} was made with another tokenizer than that of the checkpoint, so its token ids mean other text. "
            "Give the text itself, or prepare it with `tk data prepare --tokenizer CKPT`."
        )
    edges = file.document_offsets.tolist()
    return [
        EvalText(file.read(start, stop), file.learned(start, stop) if file.masked else None)
        for start, stop in pairwise(edges)
    ]


def _text_file(path: Path, tokenizer: Tokenizer | None, ignored: Collection[str]) -> list[EvalText]:
    if tokenizer is None:
        raise ConfigError(
            "The checkpoint has no tokenizer.json, so text cannot be measured: copy that file into its folder, or name "
            "a token folder with --data."
        )
    texts, corpus = [], find_corpus([path], ignored)
    for document in corpus.documents():
        if not isinstance(document, str):
            raise ConfigError(
                f'{path} has fine-tuning examples, not {{"text": ...}}. Prepare it with `tk data prepare` and give the '
                "folder: only the answers then count."
            )
        texts.append(EvalText(np.array(tokenizer.encode(document), np.int64)))
    say_left_out(corpus)
    return texts


def _first(texts: list[EvalText], limit: int) -> list[EvalText]:
    kept: list[EvalText] = []
    for text in texts:
        tokens = text.tokens[:limit]
        kept.append(EvalText(tokens, None if text.counted is None else text.counted[:limit]))
        limit -= len(tokens)
        if not limit:
            break
    return kept
