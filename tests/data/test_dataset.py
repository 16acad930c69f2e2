"""Rows: every token is a target once per epoch, splits do not overlap, and rows depend on seed, data and index only."""

import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk.core.errors import ConfigError
from tk.data.dataset import MIXTURE_BLOCK, PackedDataset
from tk.data.documents import Split
from tk.data.permutation import derive_key, permute
from tk.data.row import Row
from tk.data.token_file import TokenFile
from tk.data.unigram import unigram_entropy
from tk.tests.example_counts import examples

LENGTH = 32


def dataset(*folders: Path, seed: int = 0, split: Split = "train", seq_len: int = LENGTH) -> PackedDataset:
    return PackedDataset([(folder, 1.0) for folder in folders], seq_len, seed, split, eval_fraction=0.1)


def _bytes(row: Row) -> bytes:
    """Returns the seq_len + 1 tokens of a row."""
    return np.append(row.inputs, row.targets[-1]).tobytes()


@given(size=st.integers(1, 300), key=st.integers(0, 2**64 - 1))
def test_a_permutation_takes_every_place_once(size: int, key: int) -> None:
    assert sorted(permute(index, size, key) for index in range(size)) == list(range(size))


def test_permutations_are_even() -> None:
    """Over many keys each of 5 items must take each of 5 places equally often (chi-squared, 16 degrees of freedom)."""
    num_keys = 4000
    counts = Counter((index, permute(index, 5, derive_key(key))) for key in range(num_keys) for index in range(5))
    expected = num_keys / 5
    assert sum((counts[i, j] - expected) ** 2 / expected for i in range(5) for j in range(5)) < 39.3  # p = 0.001
    large = [permute(index, 10**12, 1) for index in range(1000)]
    assert max(large) < 10**12
    assert abs(np.mean(large) / 10**12 - 0.5) < 0.05


@pytest.mark.parametrize("seq_len", [11, 64])
def test_every_token_is_a_target_once_per_epoch(token_folder: Path, seq_len: int) -> None:
    rows = dataset(token_folder, seq_len=seq_len)
    source = rows.sources[0]
    stream = source.tokens.read(source.start, source.stop)
    for epoch in (0, 1):
        epoch_rows = [rows.row(epoch * rows.num_rows + number) for number in range(rows.num_rows)]
        shapes = {(part.shape, part.dtype) for row in epoch_rows for part in (row.inputs, row.targets)}
        assert shapes == {((seq_len,), np.dtype(np.int64))}
        assert {row.documents for row in epoch_rows} == {()}
        targets = Counter(int(token) for row in epoch_rows for token in row.targets)
        assert targets == Counter(stream[1 : rows.num_rows * seq_len + 1].tolist())
        packed = {stream[number * seq_len :][: seq_len + 1].tobytes() for number in range(rows.num_rows)}
        assert {_bytes(row) for row in epoch_rows} == packed
    assert (source.stop - source.start - 1) - rows.num_rows * seq_len in range(seq_len)


def test_orders_differ_by_epoch_and_seed(token_folder: Path) -> None:
    rows, other = dataset(token_folder), dataset(token_folder, seed=1)
    first, second, reseeded = (
        [_bytes(source.row(start + number)) for number in range(rows.num_rows)]
        for source, start in ((rows, 0), (rows, rows.num_rows), (other, 0))
    )
    in_order = [_bytes(rows.sources[0].rows.read_row(number)) for number in range(rows.num_rows)]
    assert sorted(first) == sorted(second) == sorted(reseeded) == sorted(in_order)
    for one, two in ((first, second), (first, reseeded), (first, in_order)):
        assert sum(a == b for a, b in zip(one, two, strict=True)) < rows.num_rows / 4


@examples(100)
@given(indexes=st.lists(st.integers(0, 10**9), max_size=8))
def test_a_row_does_not_depend_on_earlier_reads(token_folder: Path, indexes: list[int]) -> None:
    used = dataset(token_folder, token_folder)
    for index in [*indexes, 5]:
        assert _bytes(used.row(index)) == _bytes(dataset(token_folder, token_folder).row(index))


def test_rows_are_the_same_in_every_process(token_folder: Path) -> None:
    program = (
        "import hashlib, sys; from tk.data.dataset import PackedDataset\n"
        f"rows = PackedDataset([(sys.argv[1], 2.0), (sys.argv[1], 1.0)], {LENGTH}, 3)\n"
        "content = b''.join(rows.row(i).targets.tobytes() for i in range(50))\n"
        "print(rows.fingerprint, hashlib.sha256(content).hexdigest())"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", program, str(token_folder)],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1


def test_splits_share_no_document(token_folder: Path) -> None:
    train, held_out = dataset(token_folder).sources[0], dataset(token_folder, split="eval").sources[0]
    assert (train.start, train.stop, held_out.stop) == (0, held_out.start, held_out.tokens.num_tokens)
    assert held_out.start in held_out.tokens.document_offsets
    assert 0.05 <= (held_out.stop - held_out.start) / held_out.stop <= 0.1
    orders = [
        [dataset(token_folder, split="eval", seed=seed).row(i).targets.tobytes() for i in range(5)] for seed in (0, 1)
    ]
    assert orders[0] == orders[1], "every seed is evaluated on the same rows"


def test_a_single_document_is_cut(make_tokens: Callable[[Sequence[str]], Path], documents: list[str]) -> None:
    folder = make_tokens([max(documents, key=len)])
    held_out = dataset(folder, split="eval").sources[0]
    assert held_out.stop - held_out.start == round(0.1 * held_out.stop)


def test_a_mixture_keeps_its_weights(token_folder: Path, make_tokens: Callable[[Sequence[str]], Path]) -> None:
    other = make_tokens(["x = 1\n" * 500])
    mixed = PackedDataset([(token_folder, 3.0), (other, 1.0)], LENGTH, seed=5)
    chosen = [mixed._choose(index) for index in range(2 * MIXTURE_BLOCK)]
    for block in (chosen[:MIXTURE_BLOCK], chosen[MIXTURE_BLOCK:]):
        assert Counter(number for number, _ in block) == {0: MIXTURE_BLOCK * 3 // 4, 1: MIXTURE_BLOCK // 4}
    for number in (0, 1):
        ordinals = [ordinal for source, ordinal in chosen if source == number]
        assert sorted(ordinals) == list(range(len(ordinals))), "no row of a source is left out or given twice"
    assert 600 < sum(number == 0 for number, _ in chosen[:1000]) < 900


@pytest.mark.parametrize(
    "weights",
    [
        *([1e-9, 1.0], [1.0] * 3, [0.1, 0.2, 0.7], [1.0] * 5000, [0.0, 1.0], [math.inf], [math.nan], []),
        pytest.param([1e308, 1e308, 1.0], id="a sum above the largest float"),
        pytest.param([5e-324, 1e-323], id="the smallest floats"),
    ],
)
def test_weights_of_any_size(token_folder: Path, weights: list[float]) -> None:
    good = 0 < len(weights) <= MIXTURE_BLOCK and all(0 < weight < math.inf for weight in weights)
    if not good:
        with pytest.raises(ConfigError, match="weight above 0"):
            PackedDataset([(token_folder, weight) for weight in weights], LENGTH, 0)
        return
    quotas = PackedDataset([(token_folder, weight) for weight in weights], LENGTH, 0)._quotas
    assert sum(quotas) == MIXTURE_BLOCK
    assert min(quotas) >= 1
    for quota, weight in zip(quotas, weights, strict=True):
        assert abs(quota - Fraction(weight) / sum(map(Fraction, weights)) * MIXTURE_BLOCK) <= 1


def test_fingerprints_of_different_data_differ(
    token_folder: Path, make_tokens: Callable[[Sequence[str]], Path]
) -> None:
    other = make_tokens(["x = 1\n" * 500])
    variants = [
        dataset(token_folder),
        dataset(token_folder, seq_len=LENGTH + 1),
        dataset(token_folder, other),
        dataset(other, token_folder),
        PackedDataset([(token_folder, 1.0)], LENGTH, 0, eval_fraction=0.2),
        PackedDataset([(token_folder, 1.0), (other, 2.0)], LENGTH, 0, eval_fraction=0.1),
    ]
    assert len({rows.fingerprint for rows in variants}) == len(variants)
    assert dataset(token_folder, seed=9).fingerprint == dataset(token_folder).fingerprint


def test_unusable_data_is_refused(
    token_folder: Path, byte_fallback_folder: Path, tmp_path: Path, make_tokens: Callable[[Sequence[str]], Path]
) -> None:
    from tk.data.prepare import prepare_tokens
    from tk.text.tokenizer import Tokenizer

    with pytest.raises(ConfigError, match="fewer than one row of seq_len"):
        dataset(make_tokens(["few words"]))
    with pytest.raises(ConfigError, match="not a token folder"):
        dataset(tmp_path)
    prepare_tokens(["some text"], Tokenizer.from_folder(byte_fallback_folder), tmp_path / "foreign")
    with pytest.raises(ConfigError, match="different tokenizers"):
        dataset(token_folder, tmp_path / "foreign")


def test_unigram_entropy(token_folder: Path, make_tokens: Callable[[Sequence[str]], Path]) -> None:
    tokens = TokenFile(token_folder)
    train, held_out = (dataset(token_folder, split=split) for split in ("train", "eval"))
    counts = Counter(tokens.read(0, train.sources[0].stop).tolist())
    total = sum(counts.values())
    expected = math.log(total) - sum(count * math.log(count) for count in counts.values()) / total
    assert unigram_entropy(train) == pytest.approx(expected, rel=1e-12)
    assert unigram_entropy(held_out) != unigram_entropy(train)
