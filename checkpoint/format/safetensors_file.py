"""The header of a safetensors file: read as untrusted input, and written padded so that data starts on a page.

The format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the bytes,
without holes. See the README of huggingface/safetensors, section Format.
"""

import hashlib
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...core import dtypes
from ...core.errors import ManifestError
from ..files import storage
from ..files.lfs_pointers import refuse_open_pointer
from . import json_strict as strict

MAX_HEADER: Final = 100_000_000  # bytes, the limit of the safetensors library
MAX_DIMS: Final = 8
PAGE: Final = 4096
METADATA_KEY: Final = "__metadata__"
TK_MARK: Final = "tk"
_DAMAGED: Final = "The file is damaged, cut short or no safetensors file: copy or download it again."


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: its dtype code, its shape, and [begin, end) of its bytes counted from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """The content of a file's header; `sha256` is over the length and the JSON together.

    `state` is that of the file when the header was read.
    """

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    data_start: int
    sha256: str
    state: storage.FileState

    @property
    def size(self) -> int:
        """The size of the file in bytes: the end of its last tensor."""
        return max((entry.end for entry in self.entries.values()), default=self.data_start)


def read_header(path: Path) -> Header:
    """Reads and checks the header of a file.

    Raises:
        ManifestError: the header breaks a rule of the format; the message names the file and the rule.
        ShardMissing: the file does not exist.
    """
    with storage.reading(path) as fd:
        state = storage.file_state(fd)
        size = state.size
        raw = bytearray(8)
        if storage.pread(fd, memoryview(raw), 0) != 8:
            raise ManifestError(f"{path} has {size} bytes; a safetensors file has 8 at least. {_DAMAGED}")
        refuse_open_pointer(path, fd)
        (length,) = struct.unpack("<Q", raw)
        if length > min(MAX_HEADER, size - 8):
            raise ManifestError(
                f"{path}: its header claims {length} bytes; the file has {size} and at most {MAX_HEADER} are accepted. "
                f"{_DAMAGED}"
            )
        text = bytearray(length)
        storage.read_exact(fd, memoryview(text), 8, path)
    try:
        entries, metadata = _parse_header(bytes(text), size - 8 - length, 8 + length, str(path))
    except ManifestError as error:
        raise ManifestError(f"{error} {_DAMAGED}") from error
    return Header(entries, metadata, 8 + length, hashlib.sha256(raw + text).hexdigest(), state)


def _parse_header(text: bytes, data_size: int, start: int, what: str) -> tuple[dict[str, Entry], dict[str, str]]:
    if not text.startswith(b"{"):
        raise ManifestError(f"{what}: its header is not a JSON object.")
    document = strict.mapping(strict.parse(text, f"{what}: its header"), what)
    metadata = strict.mapping(document.pop(METADATA_KEY, {}), f"{what}: __metadata__")
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ManifestError(f"{what}: __metadata__ must map strings to strings.")
    entries = {
        name: _parse_entry(name, value, start, f"{what}: tensor {name[:80]!r}") for name, value in document.items()
    }
    end = start
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != end:
            kind = "overlaps the one before it" if entry.begin < end else "leaves a hole before it"
            raise ManifestError(f"{what}: tensor {entry.name!r} {kind}.")
        end = entry.end
    if end != start + data_size:
        raise ManifestError(f"{what}: its header describes {end - start} bytes of data; the file has {data_size}.")
    return entries, metadata


def _parse_entry(name: str, value: object, start: int, what: str) -> Entry:
    strict.tensor_name(name, what)
    fields = strict.members(value, what, ("dtype", "shape", "data_offsets"))
    dtype = dtypes.by_code(strict.text(fields["dtype"], f"{what}: dtype", 16), what)
    dims = strict.array(fields["shape"], f"{what}: shape")
    if len(dims) > MAX_DIMS:
        raise ManifestError(f"{what} has {len(dims)} dims; at most {MAX_DIMS} are accepted.")
    shape = tuple(strict.integer(extent, f"{what}: shape") for extent in dims)
    begin, end = (
        strict.integer(edge, f"{what}: data_offsets") for edge in strict.array(fields["data_offsets"], what, 2)
    )
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise ManifestError(
            f"{what}: shape {list(shape)} of {dtype.code} takes {math.prod(shape) * dtype.itemsize} bytes, "
            f"its data_offsets hold {end - begin}."
        )
    return Entry(name, dtype.code, shape, start + begin, start + end)


def build_header(entries: Iterable[tuple[str, str, tuple[int, ...]]], marked: bool = True) -> tuple[bytes, list[Entry]]:
    """Builds the header of a file that holds the given tensors in order, padded with spaces to a multiple of 4 KiB.

    Args:
        entries: (name, dtype code, shape) of each tensor.
        marked: whether `__metadata__` says that the file belongs to a tk checkpoint.

    Returns:
        The header's bytes, and each tensor's place in the file, in the given order.

    Raises:
        ManifestError: two tensors have one name, or the header is larger than readers accept.
    """
    document: dict[str, object] = {METADATA_KEY: {"format": "pt"} | ({TK_MARK: "1"} if marked else {})}
    placed: list[Entry] = []
    end = 0
    for name, dtype, shape in entries:
        if name in document:
            raise ManifestError(f"Two tensors would be called {name!r} in one safetensors file; rename one.")
        begin, end = end, end + math.prod(shape) * dtypes.by_code(dtype).itemsize
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        placed.append(Entry(name, dtype, shape, begin, end))
    text = strict.dump(document)
    if len(text) > MAX_HEADER:
        raise ManifestError(
            f"A safetensors header of {len(text)} bytes would not be read: at most {MAX_HEADER} are accepted. Store "
            "fewer and larger tensors."
        )
    text += b" " * (-(8 + len(text)) % PAGE)
    start = 8 + len(text)
    shifted = [Entry(e.name, e.dtype, e.shape, start + e.begin, start + e.end) for e in placed]
    return struct.pack("<Q", len(text)) + text, shifted
