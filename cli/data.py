"""`tk data`: the preparation of token folders from text."""

import json
import shlex
import time
from pathlib import Path

import click

from ..core.progress import format_bytes, format_seconds, progress_bar
from .common import PATH, PATH_TEXT, print_json
from .corpus_report import ignore_option, left_out_document, say_left_out
from .invocation import note, suggest


@click.group(epilog="Example: tk data prepare books/ more.jsonl --tokenizer tokenizer --out tokens")
def data() -> None:
    """Turn text into token folders."""


@data.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...", type=PATH_TEXT)
@click.option(
    "--tokenizer", "tokenizer_folder", required=True, metavar="FOLDER", type=PATH, help="Folder with tokenizer.json."
)
@click.option("--out", required=True, metavar="FOLDER", type=PATH, help="Token folder to make.")
@ignore_option
@click.option("--force", is_flag=True, help="Replace FOLDER if it is a token folder.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def prepare(
    inputs: tuple[str, ...], tokenizer_folder: Path, out: Path, ignored: tuple[str, ...], force: bool, as_json: bool
) -> None:
    """Tokenize INPUTs into one token folder for `tk train`.

    An INPUT is a text file (one document), a file of rows (.jsonl, .ndjson, .json, .parquet, .csv or .tsv; one document
    per row), a folder of them, or the word stdlib for the sources of Python's standard library. A row has a "text", or
    for fine-tuning a "prompt" and a "response" (or "completion"), "messages", or the fields of Alpaca or ShareGPT.
    Training on the latter learns only the response and the assistant's turns; the tokenizer's chat template renders
    messages. A field that tk would have to lose is an error that names it.

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
    corpus = find_corpus(inputs, ignored)
    start = time.monotonic()
    with progress_bar("tokenizing", corpus.num_bytes, show=format_bytes) as bar:
        tokens = prepare_tokens(corpus.documents(bar.advance), tokenizer, out, replaceable, corpus.leave_out)
    seconds = time.monotonic() - start
    meta = tokens.meta
    num_learned = int(tokens.learned(0, meta.num_tokens).sum())
    if as_json:
        sizes = {"documents": meta.num_documents, "tokens": meta.num_tokens, "learned_tokens": num_learned}
        rest = {"bytes": corpus.num_bytes, "seconds": seconds, **left_out_document(corpus)}
        print_json({"out": str(out), **sizes, **rest})
        return
    say_left_out(corpus)
    if tokens.masked:
        note(f"learned: {num_learned:,} of {meta.num_tokens:,} tokens")
    click.echo(
        f"{out}: {meta.num_tokens:,} tokens of {meta.num_documents:,} documents ({format_bytes(corpus.num_bytes)}) "
        f"in {format_seconds(seconds)}"
    )
    source = f"data.sources=[{{path = {json.dumps(str(out))}}}]"
    suggest(f"tk train CONFIG.toml --set {shlex.quote(source)}")
