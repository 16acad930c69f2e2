"""Megatron-LM's indexed dataset, a pair of files PREFIX.bin and PREFIX.idx, memory-mapped without conversion.

PREFIX.idx, little endian:
    "MMIDIDX\\0\\0"     9 bytes
    version            uint64, 1
    dtype              uint8, a code (see `_DTYPES`)
    sequences          uint64, the number of sequences
    documents          uint64, the number of document indices: documents + 1
    lengths            int32 per sequence, in tokens
    pointers           int64 per sequence, its first byte in PREFIX.bin
    document indices   int64 per entry: the first sequence of each document, and the number of sequences
    modes              int8 per sequence, in multimodal files only; not read
PREFIX.bin holds the tokens of the sequences, one after another.
"""

import hashlib
import struct
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..core.errors import ConfigError
from ..text.tokenizer import Tokenizer

MAGIC: Final = b"MMIDIDX\x00\x00"
_HEADER: Final = struct.Struct("<9sQBQQ")
_DTYPES: Final = MappingProxyType({1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"})
_FLOATS: Final = MappingProxyType({6: "float64", 7: "float32"})
_CHUNK: Final = 1 << 20  # sequences that are checked at once
_SAMPLES: Final = 64  # places of the .bin that enter its fingerprint
_SAMPLE_BYTES: Final = 4096


def is_megatron(path: Path) -> bool:
    """Returns whether PATH.bin or PATH.idx exists."""
    return any(_with_ending(path, ending).is_file() for ending in (".bin", ".idx"))


def _with_ending(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


class MegatronFile:
    """A TokenStream over PREFIX.bin and PREFIX.idx.

    Every size in the index is checked against the sizes of the files before it is used.

    Args:
        path: PREFIX.
        tokenizer: the tokenizer that the files were made with.

    Attributes:
        num_tokens: the number of tokens in PREFIX.bin.
        document_offsets: int64 [documents + 1], the first token of each document, and num_tokens.
        fingerprint: a hash of the whole .idx, the .bin's size, samples of the .bin, and the tokenizer.

    Raises:
        ConfigError: a file is missing or damaged, or holds no token ids.
    """

    masked: Final = False

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self.path = path
        self.vocab_size = tokenizer.vocab_size
        self.tokenizer_sha256 = tokenizer.sha256
        self._index, self._bin = _with_ending(path, ".idx"), _with_ending(path, ".bin")
        index_size, bin_size = _size(self._index), _size(self._bin)
        dtype, num_sequences, num_entries = self._read_header(index_size)
        self._dtype = np.dtype(dtype)
        place = _HEADER.size
        lengths = self._table("<i4", num_sequences, place)
        pointers = self._table("<i8", num_sequences, place := place + 4 * num_sequences)
        indices = self._table("<i8", num_entries, place + 8 * num_sequences)
        self._check_sequences(lengths, pointers, bin_size)
        self.num_tokens = bin_size // self._dtype.itemsize
        self.document_offsets = self._offsets(pointers, indices)
        self._tokens: NDArray[Any] = np.memmap(self._bin, dtype=self._dtype, mode="r", shape=(self.num_tokens,))
        self.fingerprint = self._fingerprint(bin_size)

    def _read_header(self, size: int) -> tuple[str, int, int]:
        with self._index.open("rb") as file:
            header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(MAGIC):
            raise ConfigError(f"{self._index} is not an index file of Megatron-LM: it does not begin with {MAGIC!r}.")
        _, version, code, num_sequences, num_entries = _HEADER.unpack(header)
        if version != 1:
            raise ConfigError(f"{self._index} has version {version} of Megatron-LM's format; only version 1 is known.")
        if code not in _DTYPES:
            kind = f"is {_FLOATS[code]}, not integer token ids" if code in _FLOATS else "is not one of Megatron-LM's"
            raise ConfigError(f"{self._index}: dtype code {code} {kind}.")
        needed = _HEADER.size + 12 * num_sequences + 8 * num_entries
        if size not in (needed, needed + num_sequences):  # with the modes of a multimodal file
            raise ConfigError(
                f"{self._index} is damaged: {num_sequences} sequences and {num_entries} document indices take "
                f"{_HEADER.size} + 12 x {num_sequences} + 8 x {num_entries} = {needed} bytes, but the file has {size}."
            )
        if not num_sequences or num_entries < 2:
            raise ConfigError(f"{self._index} has no documents: there is nothing to train on.")
        return _DTYPES[code], num_sequences, num_entries

    def _table(self, dtype: str, length: int, place: int) -> NDArray[Any]:
        return np.memmap(self._index, dtype=dtype, mode="r", offset=place, shape=(length,))

    def _check_sequences(self, lengths: NDArray[Any], pointers: NDArray[Any], bin_size: int) -> None:
        """Checks that the sequences follow one another and fill the .bin, so that no pointer needs another check."""
        end = 0
        for first in range(0, len(lengths), _CHUNK):
            sizes = lengths[first : first + _CHUNK].astype(np.int64) * self._dtype.itemsize
            starts = end + np.concatenate(([0], np.cumsum(sizes)))
            wrong = np.flatnonzero((sizes < 0) | (pointers[first : first + _CHUNK] != starts[:-1]))
            if len(wrong):
                number = first + int(wrong[0])
                raise ConfigError(
                    f"{self._index} is damaged: sequence {number} has {lengths[number]} tokens and begins at byte "
                    f"{pointers[number]}, but the sequence before it ends at byte {starts[wrong[0]]}."
                )
            end = int(starts[-1])
        if end != bin_size or not end:
            raise ConfigError(f"{self._bin} has {bin_size} bytes, but the sequences in {self._index.name} take {end}.")

    def _offsets(self, pointers: NDArray[Any], indices: NDArray[Any]) -> NDArray[np.int64]:
        firsts = np.asarray(indices)
        if firsts[0] != 0 or firsts[-1] != len(pointers) or bool(np.any(firsts[1:] < firsts[:-1])):
            raise ConfigError(f"{self._index} is damaged: document indices must rise from 0 to {len(pointers)}.")
        firsts = np.unique(firsts)  # drops documents without a sequence
        offsets = np.append(pointers[firsts[:-1]] // self._dtype.itemsize, self.num_tokens)
        return np.unique(offsets).astype(np.int64)  # drops documents whose sequences are all empty

    def _fingerprint(self, bin_size: int) -> str:
        digest = hashlib.sha256(f"megatron\n{self.tokenizer_sha256}\n{bin_size}\n".encode())
        with self._index.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
        with self._bin.open("rb") as file:
            for number in range(_SAMPLES):
                file.seek(max(0, bin_size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the tokens [start, stop) as int64.

        Raises:
            ConfigError: an id is outside of the vocabulary: another tokenizer made the file, or it is damaged.
        """
        tokens = self._tokens[start:stop].astype(np.int64)
        wrong = np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))
        if len(wrong):
            raise ConfigError(
                f"{self._bin}: token {start + int(wrong[0])} is {tokens[wrong[0]]}, but the vocabulary of [data] "
                f"tokenizer has {self.vocab_size} ids: set [data] tokenizer to the one that the file was made with."
            )
        return tokens

    def learned(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Returns True for each of the tokens [start, stop): the format has no mask."""
        return np.ones(stop - start, np.bool_)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise ConfigError(
            f"Cannot read {path}: {error.strerror}; a dataset of Megatron-LM is a pair of files, .bin and .idx."
        ) from error
