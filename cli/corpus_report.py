"""The option to leave fields of rows out, and what commands say about parts of their inputs that they left out."""

from typing import TYPE_CHECKING, Any

import click

from ..core.progress import format_count
from .invocation import note

if TYPE_CHECKING:
    from ..data.corpus import Corpus

ignore_option = click.option(
    "--ignore",
    "ignored",
    multiple=True,
    metavar="FIELD",
    help="Leave a field of rows and messages out, as if it were absent; repeat it for several.",
)


def say_left_out(corpus: "Corpus") -> None:
    """Prints a line on stderr for each reason for which something of the inputs was left out."""
    counts, skipped = corpus.counts, corpus.skipped
    if skipped:
        files = format_count(len(skipped), "file")
        note(f"skipped {files} without text or rows, the first: {skipped[0].reason}")
    if counts.empty:
        note(f"left out {format_count(counts.empty, 'empty row')} of {counts.rows:,}")
    if counts.unlearned:
        rows = format_count(counts.unlearned, "row")
        note(f"left out {rows} of {counts.rows:,} with no token to learn, the first: {counts.why}")
    if corpus.reader.without_effect:
        names = (f"{name} (in {format_count(rows, 'row')})" for name, rows in corpus.reader.without_effect.items())
        note(f"fields without effect: {', '.join(names)}")


def left_out_document(corpus: "Corpus") -> dict[str, Any]:
    """Returns the same as plain data, for JSON."""
    counts = corpus.counts
    return {
        "rows": counts.rows,
        "empty_rows": counts.empty,
        "unlearned_rows": counts.unlearned,
        "first_unlearned": counts.why or None,
        "fields_without_effect": dict(corpus.reader.without_effect),
        "skipped_files": [{"path": str(each.path), "reason": each.reason} for each in corpus.skipped],
    }
