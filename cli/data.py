"""`tk data`: text into token files."""

import time
from pathlib import Path

import click

from ..core.progress import format_bytes, format_seconds, progress_bar


@click.group(epilog="Example: tk data prepare books/ more.jsonl --tokenizer tokenizer --out tokens")
def data() -> None:
    """Turn text into token files."""


@data.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--tokenizer", "tokenizer_folder", required=True, metavar="T", help="Folder with tokenizer.json.")
@click.option("--out", required=True, metavar="DIR", type=click.Path(path_type=Path), help="Token folder to make.")
@click.option("--force", is_flag=True, help="Replace DIR if it is a token folder.")
def prepare(inputs: tuple[str, ...], tokenizer_folder: str, out: Path, force: bool) -> None:
    """Tokenize INPUTs into one token folder for `tk train`.

    An INPUT is a text file (one document), a .jsonl file (a document per line), a folder of such files, or the word
    stdlib: the sources of Python's standard library. A line is {"text": ...}, or for fine-tuning {"prompt": ...,
    "response": ...} or {"messages": [{"role": ..., "content": ...}, ...]}, of which only the response and what the
    assistant says are learned; messages go through the tokenizer's chat template.

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
        click.echo(f"skipped {len(corpus.skipped)} files that are no UTF-8 text, {corpus.skipped[0]} first", err=True)
    meta = tokens.meta
    if tokens.masked:
        click.echo(f"learned: {int(tokens.learned(0, meta.num_tokens).sum()):,} tokens", err=True)
    click.echo(
        f"{out}: {meta.num_tokens:,} tokens of {meta.num_documents:,} documents ({format_bytes(corpus.num_bytes)}) "
        f"in {format_seconds(time.monotonic() - start)}"
    )
