"""`tk data`: the preparation of token folders from text."""

import time
from pathlib import Path

import click

from ..core.progress import format_bytes, format_count, format_seconds, progress_bar
from .common import PATH, PATH_TEXT


@click.group(epilog="Example: tk data prepare books/ more.jsonl --tokenizer tokenizer --out tokens")
def data() -> None:
    """Turn text into token folders."""


@data.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...", type=PATH_TEXT)
@click.option(
    "--tokenizer", "tokenizer_folder", required=True, metavar="T", type=PATH, help="Folder with tokenizer.json."
)
@click.option("--out", required=True, metavar="DIR", type=PATH, help="Token folder to make.")
@click.option("--force", is_flag=True, help="Replace DIR if it is a token folder.")
def prepare(inputs: tuple[str, ...], tokenizer_folder: Path, out: Path, force: bool) -> None:
    """Tokenize INPUTs into one token folder for `tk train`.

    An INPUT is a text file (one document), a .jsonl file (one document per line), a folder of text and .jsonl files,
    or the word stdlib for the sources of Python's standard library. A line is {"text": ...}, or for fine-tuning
    {"prompt": ..., "response": ...} or {"messages": [{"role": ..., "content": ...}, ...]}. Training on the latter two
    learns only the response and the assistant's turns; the tokenizer's chat template renders messages.

    \b
    Example:
      tk tokenizer train books/ --vocab-size 8192 --out tokenizer
      tk data prepare books/ more.jsonl --tokenizer tokenizer --out tokens
    """
    from ..data.prepare import prepare_tokens
    from ..data.publish import refuse_existing
    from ..data.sources import find_corpus
    from ..data.token_file import FILES
    from ..text.tokenizer import Tokenizer

    replaceable = FILES if force else frozenset()
    refuse_existing(out, replaceable)
    tokenizer = Tokenizer.from_folder(tokenizer_folder)
    corpus = find_corpus(inputs)
    start = time.monotonic()
    with progress_bar("tokenizing", corpus.num_bytes, show=format_bytes) as bar:
        tokens = prepare_tokens(corpus.documents(bar.advance), tokenizer, out, replaceable)
    if corpus.skipped:
        click.echo(
            f"skipped {format_count(len(corpus.skipped), 'file')} without UTF-8 text, the first: {corpus.skipped[0]}",
            err=True,
        )
    meta = tokens.meta
    if tokens.masked:
        num_learned = int(tokens.learned(0, meta.num_tokens).sum())
        click.echo(f"learned: {num_learned:,} of {meta.num_tokens:,} tokens", err=True)
    click.echo(
        f"{out}: {meta.num_tokens:,} tokens of {meta.num_documents:,} documents ({format_bytes(corpus.num_bytes)}) "
        f"in {format_seconds(time.monotonic() - start)}"
    )
