"""Chunks, the places in files of elements of one slot of one tensor, with checksums; and parts, lists of chunks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from isal.isal_zlib import crc32

from ...core.errors import ManifestError
from ...core.geometry import Box
from ...core.integers import ceil_div
from . import json_strict as strict
from .region import Region
from .safetensors_file import MAX_DIMS

BLOCK: Final = 2**24  # bytes of a chunk that share one checksum
_MAX_CRC: Final = 2**32 - 1
_KEYS: Final = frozenset({"tensor", "slot", "box", "file", "offset", "nbytes", "crc"})
_KEYS_AND_FLAT: Final = _KEYS | {"flat"}


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of elements stored in one place.

    Attributes:
        tensor: the logical tensor's name.
        slot: "weight" or a slot of the optimizer.
        box: the box of the logical tensor to which the elements belong.
        flat: [a, b) of the row-major order of `box`; None = the whole box.
        file: the name of the file that holds the bytes.
        offset: bytes from the file's start to the chunk.
        nbytes: bytes of the chunk.
        crc: zlib CRC-32 of each 16 MiB counted from the chunk's first byte; None if the source has no checksums.
    """

    tensor: str
    slot: str
    box: Box
    flat: tuple[int, int] | None
    file: str
    offset: int
    nbytes: int
    crc: tuple[int, ...] | None

    @property
    def start(self) -> int:
        """The number of the box's elements before the chunk."""
        return self.flat[0] if self.flat else 0

    @property
    def stop(self) -> int:
        """The number of the box's elements up to the chunk's end."""
        return self.flat[1] if self.flat else self.box.size

    @property
    def region(self) -> Region:
        """The elements that the chunk holds."""
        return Region(self.box, self.start, self.stop)

    def to_json(self) -> dict[str, Any]:
        """Returns the chunk's JSON object in a part."""
        flat = {} if self.flat is None else {"flat": list(self.flat)}
        return {
            "tensor": self.tensor,
            "slot": self.slot,
            "box": self.box.bounds(),
            **flat,
            "file": self.file,
            "offset": self.offset,
            "nbytes": self.nbytes,
            "crc": list(self.crc or ()),
        }


class _ChunkReader:
    """Reads the chunks of one part.

    A check of a large checkpoint reads a million chunks. So names and boxes that many chunks share are checked and held
    once, and the text of a message is built only for an error.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._names: dict[str, str] = {}
        self._boxes: dict[tuple[tuple[int, ...], ...], Box] = {}

    def read(self, value: Any, index: int) -> Chunk:
        """Reads one chunk; ManifestError if it breaks a rule that does not depend on its tensor."""
        if type(value) is not dict or value.keys() not in (_KEYS, _KEYS_AND_FLAT):
            strict.members(value, f"{self._what}: chunk {index}", sorted(_KEYS), ("flat",))
        box = self._box(value["box"], index)
        flat = self._interval(value["flat"], index, "flat") if "flat" in value else None
        if flat and flat[1] > box.size:
            raise ManifestError(
                f"{self._at(index, 'flat')}: {list(flat)} is no run of the elements of box {box.bounds()}."
            )
        nbytes = self._integer(value["nbytes"], index, "nbytes")
        crc = value["crc"]
        if type(crc) is not list or len(crc) != ceil_div(nbytes, BLOCK):
            strict.array(crc, self._at(index, "crc"), ceil_div(nbytes, BLOCK))
        for code in crc:
            if type(code) is not int or not 0 <= code <= _MAX_CRC:
                strict.integer(code, self._at(index, "crc"), 0, _MAX_CRC)
        return Chunk(
            tensor=self._name(value["tensor"], index, "tensor"),
            slot=self._name(value["slot"], index, "slot"),
            box=box,
            flat=flat,
            file=self._name(value["file"], index, "file"),
            offset=self._integer(value["offset"], index, "offset"),
            nbytes=nbytes,
            crc=tuple(crc),
        )

    def _at(self, index: int, key: str) -> str:
        return f"{self._what}: chunk {index}: {key}"

    def _integer(self, value: Any, index: int, key: str) -> int:
        if type(value) is int and 0 <= value <= strict.MAX_INT:
            return value
        return strict.integer(value, self._at(index, key))

    def _interval(self, value: Any, index: int, key: str) -> tuple[int, int]:
        if type(value) is list and len(value) == 2:
            low, high = value
            if type(low) is int and type(high) is int and 0 <= low <= high <= strict.MAX_INT:
                return low, high
        low, high = strict.array(value, self._at(index, key), 2)
        low = strict.integer(low, self._at(index, key))
        return low, strict.integer(high, self._at(index, key), low)

    def _name(self, value: Any, index: int, key: str) -> str:
        if type(value) is str and value in self._names:
            return self._names[value]
        if key == "file":
            strict.file_name(value, self._at(index, key))
        else:
            strict.text(value, self._at(index, key), 64 if key == "slot" else 512)
        return self._names.setdefault(value, value)

    def _box(self, value: Any, index: int) -> Box:
        pairs = strict.array(value, self._at(index, "box")) if type(value) is not list else value
        bounds = tuple([self._interval(pair, index, "box") for pair in pairs])
        if bounds not in self._boxes:
            if len(bounds) > MAX_DIMS:
                raise ManifestError(
                    f"{self._at(index, 'box')}: {len(bounds)} dims; at most {MAX_DIMS} dims are accepted."
                )
            self._boxes[bounds] = Box.from_bounds(bounds)
        return self._boxes[bounds]


class BlockCrcs:
    """Computes the checksums of a chunk from its bytes, which arrive in order."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self._crc = 0
        self._filled = 0

    def update(self, data: memoryview) -> None:
        """Adds the next bytes; `data` is 1-D, of bytes."""
        while len(data):
            piece = data[: BLOCK - self._filled]
            self._crc = crc32(piece, self._crc)
            self._filled += len(piece)
            data = data[len(piece) :]
            if self._filled == BLOCK:
                self._close_block()

    def finish(self) -> tuple[int, ...]:
        """Closes the last block, which may be shorter, and returns all checksums."""
        if self._filled:
            self._close_block()
        return tuple(self.blocks)

    def _close_block(self) -> None:
        self.blocks.append(self._crc)
        self._crc = self._filled = 0


@dataclass(frozen=True, slots=True)
class DataFile:
    """The size of a safetensors file in bytes, and the SHA-256 of its header (length and JSON)."""

    size: int
    header_sha256: str


@dataclass(frozen=True, slots=True)
class Part:
    """The files that one writer wrote, and the chunks in them."""

    writer: int
    files: Mapping[str, DataFile] = field(default_factory=dict)
    chunks: tuple[Chunk, ...] = ()

    def to_bytes(self) -> bytes:
        """Returns the content of parts/WRITER.json."""
        files = {name: {"size": f.size, "header_sha256": f.header_sha256} for name, f in self.files.items()}
        return strict.dump({"writer": self.writer, "files": files, "chunks": [c.to_json() for c in self.chunks]})

    @staticmethod
    def parse(data: bytes, what: str) -> "Part":
        """Reads a part; if it breaks a rule, raises a ManifestError that begins with `what`."""
        found = strict.members(strict.parse(data, what), what, ("writer", "files", "chunks"))
        files = {}
        for name, value in strict.mapping(found["files"], f"{what}: files").items():
            strict.file_name(name, f"{what}: files")
            fields = strict.members(value, f"{what}: {name}", ("size", "header_sha256"))
            size = strict.integer(fields["size"], f"{what}: {name}: size")
            files[name] = DataFile(size, strict.digest(fields["header_sha256"], f"{what}: {name}: header_sha256"))
        chunks = strict.array(found["chunks"], f"{what}: chunks")
        reader = _ChunkReader(what)
        part = Part(
            writer=strict.integer(found["writer"], f"{what}: writer"),
            files=files,
            chunks=tuple([reader.read(chunk, index) for index, chunk in enumerate(chunks)]),
        )
        part._check_bytes(what)
        return part

    def _check_bytes(self, what: str) -> None:
        """Checks that every chunk lies inside a file of this part, and that no two chunks share a byte."""
        by_file: dict[str, list[Chunk]] = {}
        for chunk in self.chunks:
            if chunk.file not in self.files or chunk.offset + chunk.nbytes > self.files[chunk.file].size:
                raise ManifestError(f"{what}: a chunk of {chunk.tensor} lies outside the part's files: {chunk.file}.")
            by_file.setdefault(chunk.file, []).append(chunk)
        for name, chunks in by_file.items():
            chunks.sort(key=lambda chunk: (chunk.offset, chunk.nbytes))
            for one, two in pairwise(chunks):
                if one.offset + one.nbytes > two.offset:
                    raise ManifestError(f"{what}: chunks of {one.tensor} and {two.tensor} overlap in {name}.")
