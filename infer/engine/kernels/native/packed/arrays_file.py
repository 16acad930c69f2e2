"""A file of named arrays with checksums, which processes map into their memory instead of reading it.

The arrays come first, each on cache lines of its own, so that products read them where they lie. Behind them is an
index as JSON, and behind that a footer of fixed size, which ends the file.
"""

import json
import mmap
import os
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, Final

import numpy as np
from isal.isal_zlib import crc32

from ......core.casts import Array
from ......core.integers import round_up
from ..binding.memory import CACHE_LINE

_FOOTER: Final = struct.Struct("<12sQI")  # magic, bytes of the index, its CRC-32
_MAGIC: Final = b"tk-arrays-1\n"
_BLOCK: Final = 2**24  # bytes of data that share a checksum


class DamagedArrays(ValueError):
    """A file of arrays whose bytes are not those that were written."""


def write_arrays(file: IO[bytes], arrays: Mapping[str, Array], about: Mapping[str, str]) -> None:
    """Writes arrays and their index, front to back.

    Args:
        file: an empty file.
        arrays: contiguous arrays of any dtype by name.
        about: texts that describe the file; `map_arrays` demands the same.

    Raises:
        OSError: the file cannot be written.
    """
    checksums, places, at = _Checksums(), {}, 0
    for name, values in arrays.items():
        places[name] = [values.dtype.str, values.shape, at]
        content = values.reshape(-1).view(np.uint8)
        for part in (content.data, bytes(round_up(content.size, CACHE_LINE) - content.size)):
            file.write(part)
            checksums.add(part)
        at += round_up(content.size, CACHE_LINE)
    index = {"about": dict(about), "arrays": places, "size": at, "crc32": checksums.close()}
    text = json.dumps(index).encode()
    file.write(text + _FOOTER.pack(_MAGIC, len(text), crc32(text)))


def map_arrays(descriptor: int, about: Mapping[str, str], threads: int) -> dict[str, Array]:
    """Maps a file for reading, and checks all its bytes.

    The map holds a duplicate of the descriptor, and with it its lock, until the last array is dropped.

    Args:
        descriptor: that of the file, open for reading.
        about: the texts with which the file was written.
        threads: the number of threads that compute checksums.

    Returns:
        The arrays, which cannot be written.

    Raises:
        DamagedArrays: the file is not one that `write_arrays` has written in full, or is about something else.
        OSError: it cannot be read.
    """
    size = os.fstat(descriptor).st_size
    index = _index(descriptor, size)
    if index["about"] != dict(about):
        raise DamagedArrays("it holds other weights than its name says")
    if not index["size"]:
        return {}
    data = np.frombuffer(mmap.mmap(descriptor, index["size"], prot=mmap.PROT_READ), np.uint8)
    starts = range(0, len(data), _BLOCK)
    with ThreadPoolExecutor(threads, "tk-packed") as pool:
        found = list(pool.map(lambda start: crc32(data[start : start + _BLOCK].data), starts))
    if found != index["crc32"]:
        number = next(n for n, (a, b) in enumerate(zip(found, index["crc32"], strict=False)) if a != b)
        raise DamagedArrays(f"its bytes from {number * _BLOCK} on do not match their checksum")
    return {name: _array(data, *place) for name, place in index["arrays"].items()}


def _array(data: Array, dtype: str, shape: list[int], start: int) -> Array:
    kind = np.dtype(dtype)
    stop = start + kind.itemsize * int(np.prod(shape, dtype=np.int64))
    values: Array = data[start:stop].view(kind).reshape(shape)
    return values


def _index(descriptor: int, size: int) -> dict[str, Any]:
    """Reads the index; its checksum covers it, so what it says needs no further check."""
    if size < _FOOTER.size:
        raise DamagedArrays("it is too short")
    magic, length, checksum = _FOOTER.unpack(os.pread(descriptor, _FOOTER.size, size - _FOOTER.size))
    if magic != _MAGIC or length > size - _FOOTER.size:
        raise DamagedArrays("its end is not that of a file of packed weights")
    text = os.pread(descriptor, length, size - _FOOTER.size - length)
    if len(text) != length or crc32(text) != checksum:
        raise DamagedArrays("its index does not match its checksum")
    index: dict[str, Any] = json.loads(text)
    if index["size"] + length + _FOOTER.size != size:
        raise DamagedArrays("it has another size than when it was written")
    return index


class _Checksums:
    """The CRC-32 of each block of bytes that arrive in order."""

    def __init__(self) -> None:
        self._found: list[int] = []
        self._crc, self._length = 0, 0

    def add(self, content: memoryview | bytes) -> None:
        left = memoryview(content)
        while len(left):
            part = left[: _BLOCK - self._length]
            self._crc, self._length = crc32(part, self._crc), self._length + len(part)
            left = left[len(part) :]
            if self._length == _BLOCK:
                self._end_block()

    def close(self) -> list[int]:
        if self._length:
            self._end_block()
        return self._found

    def _end_block(self) -> None:
        self._found.append(self._crc)
        self._crc, self._length = 0, 0
