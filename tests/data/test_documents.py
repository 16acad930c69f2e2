"""Rows of documents: every token is a target once, examples keep their masks, and rows are pure functions."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tk.core.errors import ConfigError
from tk.core.labels import IGNORED
from tk.data.batches import global_batch
from tk.data.dataset import PackedDataset, Packing
from tk.data.documents import SPLITS, DocumentRows, Split
from tk.data.row import Row
from tk.data.token_file import TokenFile, TokenFileWriter
from tk.text.tokenizer import Tokenizer

LENGTH = 32


def packed(folder: Path, seed: int = 0, split: Split = "train", seq_len: int = LENGTH) -> PackedDataset:
    return PackedDataset([(folder, 1.0)], seq_len, seed, split, 0.1, "documents")


def documents_of(row: Row) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns (inputs, targets) of each document in a row."""
    ends = np.cumsum(row.documents).tolist()
    pieces = [slice(end - length, end) for end, length in zip(ends, row.documents, strict=True)]
    return [(tuple(row.inputs[piece].tolist()), tuple(row.targets[piece].tolist())) for piece in pieces]


@pytest.mark.parametrize("seq_len", [50, 500])
def test_every_token_of_a_document_is_a_target_once(token_folder: Path, seq_len: int) -> None:
    rows = packed(token_folder, seq_len=seq_len)
    source = rows.sources[0]
    tokens, expected = TokenFile(token_folder), Counter[tuple[int, ...]]()
    for start, stop in zip(tokens.document_offsets[:-1].tolist(), tokens.document_offsets[1:].tolist(), strict=True):
        if stop <= source.stop:
            ids = tokens.read(start, stop).tolist()
            expected.update(tuple(ids[at : at + seq_len + 1]) for at in range(0, len(ids) - 1, seq_len))
    for epoch in (0, 1):
        found = Counter[tuple[int, ...]]()
        for number in range(rows.num_rows):
            for inputs, targets in documents_of(rows.row(epoch * rows.num_rows + number)):
                if targets != (IGNORED,) * len(targets):
                    assert inputs[1:] == targets[:-1]
                    found[(*inputs, targets[-1])] += 1
        assert found == expected
    assert isinstance(source.rows, DocumentRows)
    assert source.rows.num_long == sum(stop - start > seq_len + 1 for start, stop in _bounds(tokens, source.stop))


def _bounds(tokens: TokenFile, end: int) -> list[tuple[int, int]]:
    offsets = tokens.document_offsets.tolist()
    return [(start, stop) for start, stop in pairwise(offsets) if stop <= end]


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_sample_order_is_a_function_of_seed_and_samples_consumed(
    make_tokens: Callable[[Sequence[str]], Path], packing: Packing
) -> None:
    """On any layout, a resumed run must neither repeat nor skip a row."""
    random = Random(0)  # random rows, because files of a library share lines; here no two rows are equal
    texts = [" ".join(f"{random.getrandbits(60):x}" for _ in range(random.randint(2, 40))) for _ in range(300)]
    folder = make_tokens(texts)
    whole = PackedDataset([(folder, 1.0)], LENGTH, 3, "train", 0.1, packing)
    order = [whole.row(index).targets.tobytes() for index in range(2 * whole.num_rows)]
    assert len(set(order[: whole.num_rows])) == whole.num_rows, "no row comes twice in an epoch"
    assert set(order[whole.num_rows :]) == set(order[: whole.num_rows])
    for consumed, batch, dp, micro in ((0, 6, 1, 6), (7, 6, 2, 2), (whole.num_rows - 2, 5, 3, 1), (41, 9, 4, 2)):
        resumed = PackedDataset([(folder, 1.0)], LENGTH, 3, "train", 0.1, packing)
        ranks = [global_batch(resumed, consumed, batch, rank, dp, micro) for rank in range(dp)]
        rows = [row.tobytes() for pieces in zip(*ranks, strict=True) for piece in pieces for row in piece.targets]
        assert rows[:batch] == order[consumed : consumed + batch]
        assert all(set(np.frombuffer(row, np.int64).tolist()) == {IGNORED} for row in rows[batch:])


def test_packing_is_part_of_the_fingerprint(token_folder: Path) -> None:
    concat = PackedDataset([(token_folder, 1.0)], LENGTH, 0, eval_fraction=0.1)
    assert packed(token_folder).fingerprint != concat.fingerprint
    assert packed(token_folder, seed=4).fingerprint == packed(token_folder).fingerprint


def test_splits_share_no_document(token_folder: Path) -> None:
    train, held_out = (packed(token_folder, split=split, seq_len=20_000) for split in SPLITS)
    inside = [
        {piece for number in range(each.num_rows) for piece in documents_of(each.row(number)) if any(piece[0])}
        for each in (train, held_out)
    ]
    assert all(inside)
    assert not inside[0] & inside[1]


@pytest.fixture
def make_examples(byte_level: Tokenizer, tmp_path: Path) -> Callable[[Sequence[tuple[int, int]]], Path]:
    """A function that makes a token folder of examples, given as (question tokens, answer tokens); ids rise from 1."""

    def make(examples: Sequence[tuple[int, int]]) -> Path:
        with TokenFileWriter(tmp_path, byte_level, 0) as writer:
            for question, answer in examples:
                ids = range(1, question + answer + 1)
                writer.add_example(list(ids), [False] * question + [True] * answer)
            writer.finish()
        return tmp_path

    return make


def test_examples_are_truncated_and_empty_ones_left_out(
    make_examples: Callable[[Sequence[tuple[int, int]]], Path],
) -> None:
    folder = make_examples([(3, 2), (LENGTH - 1, 20), (LENGTH + 1, 5), (4, 0), (2, 4), *[(5, 5)] * 10])
    rows = PackedDataset([(folder, 1.0)], LENGTH, 0, "train", 0.3, "documents")
    source = rows.sources[0].rows
    assert isinstance(source, DocumentRows)
    assert (source.num_long, source.num_empty) == (2, 2)
    assert "2 documents are longer than seq_len = 32 and truncated; 2 are left out" in rows.notes()[0]
    found = [piece for number in range(source.num_rows) for piece in documents_of(source.read_row(number))]
    answers = [[token for token in targets if token != IGNORED] for _, targets in found]
    assert sorted(answer for answer in answers if answer)[:3] == [[3, 4, 5, 6], [4, 5], [6, 7, 8, 9, 10]]
    assert [LENGTH, LENGTH + 1] in answers, "the rest of the long answer"


def test_a_mask_holds_in_a_stream_too(make_examples: Callable[[Sequence[tuple[int, int]]], Path]) -> None:
    folder = make_examples([(3, 2)] * 20)
    rows = PackedDataset([(folder, 1.0)], 9, 0, eval_fraction=0.3)
    first = rows.sources[0].rows.read_row(0)
    assert first.inputs.tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 4]
    assert first.targets.tolist() == [IGNORED, IGNORED, 4, 5, IGNORED, IGNORED, IGNORED, 4, 5]


def test_nothing_to_learn_is_refused(make_examples: Callable[[Sequence[tuple[int, int]]], Path]) -> None:
    with pytest.raises(ConfigError, match="no document with a token to learn within seq_len = 32"):
        packed(make_examples([(40, 3)] * 20))
