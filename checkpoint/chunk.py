"""Chunks: which elements of which tensor and slot lie at which bytes of which file, with their checksums."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from ..core import dtypes
from ..core.errors import ManifestError
from ..core.geometry import Box, covers_exactly
from . import json_strict as strict
from .region import Region
from .safetensors_file import MAX_DIMS

BLOCK: Final = 2**24  # bytes of a chunk under one checksum


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stored run of elements.

    Attributes:
        flat: [a, b) of the row-major order of `box`; None = all of it.
        offset: bytes from the file's start.
        crc: zlib CRC-32 of each 16 MiB counted from the chunk's first byte; None where the source has none.
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
    def region(self) -> Region:
        """The elements it holds."""
        return Region.of(self.box, self.flat)

    def to_json(self) -> dict[str, Any]:
        """As written in a part."""
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

    @staticmethod
    def from_json(value: Any, what: str) -> "Chunk":
        """Reads one; ManifestError, beginning with `what`, if it breaks a rule that can be seen without its tensor."""
        found = strict.members(value, what, ("tensor", "slot", "box", "file", "offset", "nbytes", "crc"), ("flat",))
        bounds = [_interval(pair, f"{what}: box") for pair in strict.array(found["box"], f"{what}: box")]
        box = Box.from_bounds(bounds)
        flat = _interval(found["flat"], f"{what}: flat") if "flat" in found else None
        if len(bounds) > MAX_DIMS or (flat and flat[1] > box.size):
            raise ManifestError(f"{what}: box {bounds} with flat {flat} is no run of at most {MAX_DIMS} dims.")
        nbytes = strict.integer(found["nbytes"], f"{what}: nbytes")
        crc = strict.array(found["crc"], f"{what}: crc", -(-nbytes // BLOCK))
        return Chunk(
            tensor=strict.text(found["tensor"], f"{what}: tensor"),
            slot=strict.text(found["slot"], f"{what}: slot", 64),
            box=box,
            flat=flat,
            file=strict.file_name(found["file"], f"{what}: file"),
            offset=strict.integer(found["offset"], f"{what}: offset"),
            nbytes=nbytes,
            crc=tuple(strict.integer(value, f"{what}: crc", 0, 2**32 - 1) for value in crc),
        )


def _interval(value: Any, what: str) -> tuple[int, int]:
    low, high = strict.array(value, what, 2)
    low = strict.integer(low, what)
    return low, strict.integer(high, what, low)


class BlockCrcs:
    """The checksums of a chunk whose bytes pass by in order."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self._crc = 0
        self._filled = 0

    def update(self, data: memoryview) -> None:
        """Takes in the next bytes; `data` is flat, of bytes."""
        while len(data):
            piece = data[: BLOCK - self._filled]
            self._crc = zlib.crc32(piece, self._crc)
            self._filled += len(piece)
            data = data[len(piece) :]
            if self._filled == BLOCK:
                self._close_block()

    def finish(self) -> tuple[int, ...]:
        """Closes the last, shorter block; all checksums."""
        if self._filled:
            self._close_block()
        return tuple(self.blocks)

    def _close_block(self) -> None:
        self.blocks.append(self._crc)
        self._crc = self._filled = 0


@dataclass(frozen=True, slots=True)
class DataFile:
    """Bytes of a safetensors file, and the SHA-256 of its header (length and JSON)."""

    size: int
    header_sha256: str


@dataclass(frozen=True, slots=True)
class Part:
    """What one writer wrote: its files and the chunks in them."""

    writer: int
    files: Mapping[str, DataFile] = field(default_factory=dict)
    chunks: tuple[Chunk, ...] = ()

    def to_bytes(self) -> bytes:
        """The content of parts/WRITER.json."""
        files = {name: {"size": f.size, "header_sha256": f.header_sha256} for name, f in self.files.items()}
        return strict.dump({"writer": self.writer, "files": files, "chunks": [c.to_json() for c in self.chunks]})

    @staticmethod
    def parse(data: bytes, what: str) -> "Part":
        """Reads a part; ManifestError, beginning with `what`, where it breaks a rule."""
        found = strict.members(strict.parse(data, what), what, ("writer", "files", "chunks"))
        files = {}
        for name, value in strict.mapping(found["files"], f"{what}: files").items():
            strict.file_name(name, f"{what}: files")
            fields = strict.members(value, f"{what}: {name}", ("size", "header_sha256"))
            size = strict.integer(fields["size"], f"{what}: {name}: size")
            files[name] = DataFile(size, strict.digest(fields["header_sha256"], f"{what}: {name}: header_sha256"))
        chunks = strict.array(found["chunks"], f"{what}: chunks")
        part = Part(
            writer=strict.integer(found["writer"], f"{what}: writer"),
            files=files,
            chunks=tuple(Chunk.from_json(chunk, f"{what}: chunk {i}") for i, chunk in enumerate(chunks)),
        )
        part._check_bytes(what)
        return part

    def _check_bytes(self, what: str) -> None:
        """Every chunk lies inside a file of this part, and no two share a byte."""
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


ChunkIndex = Mapping[tuple[str, str], tuple[Chunk, ...]]


def index_chunks(
    parts: list[Part], shapes: Mapping[str, tuple[int, ...]], slots: Mapping[str, Mapping[str, str]]
) -> ChunkIndex:
    """All chunks by (tensor, slot), in the order of their first element; checks that they tile each one exactly.

    Args:
        shapes: of every stored tensor.
        slots: dtype code of each slot of every stored tensor.

    Raises:
        ManifestError: a chunk of an unknown tensor or slot, outside its tensor, of the wrong length, overlapping
            another, or an element that no chunk holds.
    """
    found: dict[tuple[str, str], list[Chunk]] = {(name, slot): [] for name, of in slots.items() for slot in of}
    owner: dict[str, int] = {}
    for part in parts:
        for name in part.files:
            if owner.setdefault(name, part.writer) != part.writer:
                raise ManifestError(f"{name} is in the parts of writers {owner[name]} and {part.writer}.")
        for chunk in part.chunks:
            if (chunk.tensor, chunk.slot) not in found:
                raise ManifestError(f"{chunk.file} holds {chunk.tensor}, slot {chunk.slot}, unknown to the manifest.")
            found[chunk.tensor, chunk.slot].append(chunk)
    for (name, slot), chunks in found.items():
        chunks.sort(key=lambda chunk: (chunk.box.offset, chunk.region.start))
        _check_cover(f"{name}, slot {slot}", chunks, shapes[name], dtypes.by_code(slots[name][slot]).itemsize)
    return {key: tuple(chunks) for key, chunks in found.items()}


def _check_cover(what: str, chunks: list[Chunk], shape: tuple[int, ...], itemsize: int) -> None:
    whole = Box.whole(shape)
    boxes: list[Box] = []
    for chunk in chunks:
        if len(chunk.box.shape) != len(shape) or not whole.contains(chunk.box):
            raise ManifestError(f"{what}: box {chunk.box.bounds()} in {chunk.file} lies outside shape {list(shape)}.")
        if chunk.region.size * itemsize != chunk.nbytes:
            raise ManifestError(
                f"{what}: a chunk in {chunk.file} has {chunk.nbytes} bytes; its {chunk.region.size} elements "
                f"take {chunk.region.size * itemsize}."
            )
        boxes += [box for box, _ in chunk.region.parts()]
    if not covers_exactly(boxes, whole):
        stored = sum(chunk.region.size for chunk in chunks)
        raise ManifestError(f"{what}: its chunks ({stored} elements) do not hold each of {whole.size} exactly once.")
