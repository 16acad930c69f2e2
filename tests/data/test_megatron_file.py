"""Megatron-LM's .bin and .idx, written from the format's description: they are read, and every damage is named."""

import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk.core.errors import ConfigError
from tk.data.dataset import PackedDataset
from tk.data.megatron_file import MegatronFile
from tk.data.token_stream import open_tokens
from tk.tests.example_counts import examples
from tk.text.tokenizer import Tokenizer

CODES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}
HEADER = 34  # bytes
Documents = Sequence[Sequence[Sequence[int]]]


def write(prefix: Path, documents: Documents, code: int = 8, modes: bool = False) -> Path:
    """Writes documents, lists of sequences of token ids, as PREFIX.bin and PREFIX.idx; returns PREFIX."""
    dtype = np.dtype(f"<{CODES[code]}")
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    pointers = np.cumsum([0, *lengths])[:-1] * dtype.itemsize
    firsts = np.cumsum([0, *(len(document) for document in documents)])
    with prefix.with_name(f"{prefix.name}.bin").open("wb") as file:
        for sequence in sequences:
            file.write(np.array(sequence, dtype).tobytes())
    with prefix.with_name(f"{prefix.name}.idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(firsts)))
        file.write(np.array(lengths, "<i4").tobytes())
        file.write(pointers.astype("<i8").tobytes())
        file.write(firsts.astype("<i8").tobytes())
        file.write(bytes(len(sequences)) if modes else b"")
    return prefix


DOCUMENTS = [[[5, 6, 0]], [[7, 8], [9, 0]], [[1, 2, 3, 4, 0]]]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("modes", [False, True])
def test_documents_come_back(byte_level: Tokenizer, tmp_path: Path, code: int, modes: bool) -> None:
    tokens = MegatronFile(write(tmp_path / "corpus", DOCUMENTS, code, modes), byte_level)
    assert (tokens.num_tokens, tokens.vocab_size, tokens.masked) == (12, 1000, False)
    assert tokens.document_offsets.tolist() == [0, 3, 7, 12]
    assert tokens.read(2, 9).tolist() == [0, 7, 8, 9, 0, 1, 2]
    assert tokens.learned(2, 4).tolist() == [True, True]


@examples(40)
@given(documents=st.lists(st.lists(st.lists(st.integers(0, 999), max_size=4), max_size=3), max_size=8))
def test_empty_sequences_and_documents_are_none(
    byte_level: Tokenizer, tmp_path_factory: pytest.TempPathFactory, documents: Documents
) -> None:
    prefix = write(tmp_path_factory.mktemp("any") / "corpus", documents)
    joined = [[token for sequence in document for token in sequence] for document in documents]
    expected = [document for document in joined if document]
    if not expected:
        with pytest.raises(ConfigError):
            MegatronFile(prefix, byte_level)
        return
    tokens = MegatronFile(prefix, byte_level)
    offsets = tokens.document_offsets.tolist()
    found = [tokens.read(start, stop).tolist() for start, stop in pairwise(offsets)]
    assert found == expected


def test_rows_are_those_of_the_same_tokens_in_a_folder(
    token_folder: Path, byte_level: Tokenizer, tmp_path: Path
) -> None:
    ours = open_tokens(token_folder, None)
    offsets = ours.document_offsets.tolist()
    documents = [[ours.read(a, b).tolist()] for a, b in pairwise(offsets)]
    prefix = write(tmp_path / "library", documents, code=4)
    for packing in ("concat", "documents"):
        rows, expected = (
            PackedDataset([(path, 1.0)], 40, 0, "train", 0.1, packing, byte_level) for path in (prefix, token_folder)
        )
        assert rows.num_rows == expected.num_rows
        for number in range(0, rows.num_rows, 50):
            mine, other = (each.sources[0].rows.read_row(number) for each in (rows, expected))
            assert np.array_equal(mine.targets, other.targets)
            assert mine.documents == other.documents
        assert rows.fingerprint != expected.fingerprint, "another order of rows: the key has the fingerprint in it"


def _set(place: int, content: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data[:place] + content + data[place + len(content) :]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_set(0, b"MMIDIDY"), "is not an index file of Megatron-LM"),
        (lambda data: data[:20], "is not an index file of Megatron-LM"),
        (_set(9, struct.pack("<Q", 2)), "has version 2 of Megatron-LM's format"),
        (_set(17, b"\x07"), "float32, not integer token ids"),
        (_set(17, b"\x63"), "dtype code 99 is not one of"),
        (_set(18, struct.pack("<Q", 2**61)), "2305843009213693952 sequences"),
        (_set(26, struct.pack("<Q", 2**63)), "but the file has 114"),
        (lambda data: data[:-3], "but the file has 111"),
        (_set(HEADER, struct.pack("<i", -1)), "sequence 0 has -1 tokens"),
        (_set(HEADER + 4, struct.pack("<i", 2**30)), "sequence 2 has 2 tokens and begins at byte"),
        (
            _set(HEADER + 12, struct.pack("<i", 6)),
            r"corpus\.bin has 24 bytes, but the sequences in corpus\.idx take 26",
        ),
        (_set(HEADER + 24, struct.pack("<q", 2**60)), "sequence 1 has 2 tokens and begins at byte 1152921504606846976"),
        (_set(HEADER + 48, struct.pack("<q", 1)), "document indices must rise from 0 to 4"),
        (_set(HEADER + 56, struct.pack("<q", -5)), "document indices must rise"),
        (_set(HEADER + 72, struct.pack("<q", 5)), "document indices must rise"),
    ],
)
def test_a_damaged_index_is_named(
    byte_level: Tokenizer, tmp_path: Path, damage: Callable[[bytes], bytes], said: str
) -> None:
    prefix = write(tmp_path / "corpus", DOCUMENTS)
    index = tmp_path / "corpus.idx"
    index.write_bytes(damage(index.read_bytes()))
    with pytest.raises(ConfigError, match=said):
        MegatronFile(prefix, byte_level)


def test_other_damage_is_named(byte_level: Tokenizer, token_folder: Path, tmp_path: Path) -> None:
    prefix = write(tmp_path / "corpus", [[[5, 999, 1000]]])
    with pytest.raises(ConfigError, match="token 2 is 1000, but the vocabulary of"):
        MegatronFile(prefix, byte_level).read(0, 3)
    with pytest.raises(ConfigError, match="token 1 is -1"):
        MegatronFile(write(tmp_path / "signed", [[[5, -1]]], code=4), byte_level).read(0, 2)
    with pytest.raises(ConfigError, match=r"corpus\.bin does not say which tokenizer"):
        open_tokens(prefix, None)
    (tmp_path / "corpus.bin").write_bytes(b"123456789")
    with pytest.raises(ConfigError, match=r"corpus\.bin has 9 bytes"):
        MegatronFile(prefix, byte_level)
    (tmp_path / "corpus.bin").unlink()
    with pytest.raises(ConfigError, match=r"Cannot read .*corpus\.bin"):
        MegatronFile(prefix, byte_level)
    with pytest.raises(ConfigError, match="not a token folder"):
        open_tokens(tmp_path / "nothing", byte_level)


def test_its_fingerprint_is_of_its_content(byte_level: Tokenizer, byte_fallback: Tokenizer, tmp_path: Path) -> None:
    other = [*DOCUMENTS[:2], [[1, 2, 3, 5, 0]]]
    cut = [[[5, 6, 0], [7, 8]], [[9, 0]], [[1, 2, 3, 4, 0]]]
    prefixes = [write(tmp_path / str(number), each) for number, each in enumerate((DOCUMENTS, DOCUMENTS, other, cut))]
    first, again, changed, regrouped = (MegatronFile(prefix, byte_level).fingerprint for prefix in prefixes)
    assert first == again
    assert len({first, changed, regrouped, MegatronFile(prefixes[0], byte_fallback).fingerprint}) == 4
