"""`tk tokenizer`: the training of tokenizers."""

import shlex
import time
from pathlib import Path

import click

from ..core.progress import format_bytes, format_seconds, progress_bar
from .common import PATH, PATH_TEXT, print_json
from .corpus_report import ignore_option, left_out_document, say_left_out
from .invocation import note, suggest
from .signals import exit_on_signals


@click.group(epilog="Example: tk tokenizer train books/ --vocab-size 8192 --out tokenizer")
def tokenizer() -> None:
    """Train a byte-level BPE tokenizer."""


@tokenizer.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...", type=PATH_TEXT)
@click.option("--vocab-size", required=True, type=int, metavar="N", help="Number of tokens, 257 to 1048576.")
@click.option("--out", required=True, metavar="FOLDER", type=PATH, help="Tokenizer folder to make.")
@ignore_option
@click.option("--force", is_flag=True, help="Replace FOLDER if it is a tokenizer folder.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def train(
    inputs: tuple[str, ...], vocab_size: int, out: Path, ignored: tuple[str, ...], force: bool, as_json: bool
) -> None:
    """Train a byte-level BPE tokenizer on INPUTs.

    An INPUT is a text file, a file of rows, a folder of them, or the word stdlib, as for `tk data prepare`. FOLDER gets
    tokenizer.json and tokenizer_config.json, which transformers reads too.

    \b
    Example:
      tk tokenizer train books/ --vocab-size 8192 --out tokenizer
    """
    from ..data.publish import refuse_existing
    from ..data.sources import find_corpus
    from ..data.tokenizer_training import learn_byte_level_bpe, write_byte_level_bpe
    from ..text.tokenizer_files import SIDE_FILES

    replaceable = frozenset(SIDE_FILES if force else ())
    refuse_existing(out, replaceable)
    corpus = find_corpus(inputs, ignored)
    start = time.monotonic()
    with progress_bar("training the tokenizer", corpus.num_bytes, show=format_bytes) as bar:
        learned = learn_byte_level_bpe(corpus.texts(bar.advance), vocab_size)
    with exit_on_signals():  # only here: training runs in native code, where Python cannot handle a signal
        trained = write_byte_level_bpe(learned, out, replaceable)
    seconds = time.monotonic() - start
    if as_json:
        sizes = {"tokens": trained.vocab_size, "bytes": corpus.num_bytes, "seconds": seconds}
        print_json({"out": str(out), **sizes, **left_out_document(corpus)})
        return
    say_left_out(corpus)
    click.echo(f"{out}: {trained.vocab_size:,} tokens, in {format_seconds(seconds)}")
    if trained.vocab_size < vocab_size:
        note(f"the text is too short for {vocab_size:,} tokens: use more text, or a smaller --vocab-size")
    words = [*inputs, *(word for each in ignored for word in ("--ignore", each)), "--tokenizer", str(out)]
    suggest(f"tk data prepare {shlex.join(words)} --out tokens")
