"""The files of one writer: planned before the first byte is written, then written front to back with checksums."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from ...core import dtypes
from ...core.casts import Array
from ...core.errors import CheckpointError
from ...core.geometry import Box
from ...core.integers import ceil_div
from ...core.ownership import Owned
from ...core.tensors import Table
from ..files import folders, small_files, storage
from ..files.direct_writer import DirectWriter
from ..format import json_strict as strict
from ..format.chunk import BLOCK, BlockCrcs, Chunk, DataFile, Part
from ..format.manifest import MAX_PART, PARTS
from ..format.region import Region, as_bytes
from ..format.safetensors_file import build_header

MAX_FILE: Final = 5 * 10**9  # bytes of data per file, as on the Hugging Face hub
MAX_ENTRIES: Final = 2**16  # entries per file, because readers limit the size of a header
_LONGEST_CHUNK: Final = 2**13  # the most bytes that a chunk takes in a part, without its checksums

Values: TypeAlias = "Array | Callable[[], Array]"


@dataclass(frozen=True, slots=True)
class PlannedEntry:
    """A run of elements and its place in a file: [begin, end) bytes."""

    owned: Owned
    dtype: dtypes.DType
    begin: int
    end: int

    @property
    def region(self) -> Region:
        """The elements of the entry."""
        return Region.of(self.owned.box, self.owned.flat)


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file to be written: its name, its header, and the entries that follow."""

    name: str
    header: bytes
    entries: tuple[PlannedEntry, ...]

    @property
    def size(self) -> int:
        """The file's size in bytes."""
        return self.entries[-1].end

    @property
    def digest(self) -> DataFile:
        """The file's record in a part."""
        return DataFile(self.size, hashlib.sha256(self.header).hexdigest())


def plan_files(
    writer: int,
    entries: Iterable[tuple[Owned, str]],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    marked: bool = True,
    max_file: int = MAX_FILE,
) -> tuple[PlannedFile, ...]:
    """Assigns (item, dtype code) entries to files: one series per slot, in the given order, wider dtypes first.

    A tensor that is stored whole has its own name in the file, other runs `name@slot#k`.
    """
    by_slot: dict[str, list[tuple[Owned, dtypes.DType]]] = {}
    for owned, code in entries:
        by_slot.setdefault(owned.slot, []).append((owned, dtypes.by_code(code)))
    files: list[PlannedFile] = []
    for slot, members in by_slot.items():
        stem = f"model-{writer:05d}" if slot == "weight" else f"optim-{slot}-{writer:05d}"
        for index, group in enumerate(_cut(members, max_file)):
            name = f"{stem}.safetensors" if index == 0 else f"{stem}-{index}.safetensors"
            files.append(_plan_file(name, group, shapes, marked))
    return tuple(files)


def _cut(members: list[tuple[Owned, dtypes.DType]], max_file: int) -> list[list[tuple[Owned, dtypes.DType]]]:
    groups: list[list[tuple[Owned, dtypes.DType]]] = []
    room = 0
    for owned, dtype in members:
        nbytes = Region.of(owned.box, owned.flat).size * dtype.itemsize
        if not groups or nbytes > room or len(groups[-1]) == MAX_ENTRIES:
            groups.append([])
            room = max_file
        groups[-1].append((owned, dtype))
        room -= nbytes
    return [sorted(group, key=lambda member: -member[1].itemsize) for group in groups]


def _plan_file(
    name: str, members: Sequence[tuple[Owned, dtypes.DType]], shapes: Mapping[str, tuple[int, ...]], marked: bool
) -> PlannedFile:
    counts: dict[tuple[str, str], int] = {}
    rows = []
    for owned, dtype in members:
        region = Region.of(owned.box, owned.flat)
        if owned.flat is None and owned.box == Box.whole(shapes[owned.tensor]):
            rows.append((owned.tensor, dtype.code, owned.box.shape))
            continue
        key = (owned.tensor, owned.slot)
        counts[key] = counts.get(key, -1) + 1
        shape = owned.box.shape if owned.flat is None else (region.size,)
        rows.append((f"{owned.tensor}@{owned.slot}#{counts[key]}", dtype.code, shape))
    header, placed = build_header(rows, marked)
    entries = [
        PlannedEntry(owned, dtype, place.begin, place.end)
        for (owned, dtype), place in zip(members, placed, strict=True)
    ]
    return PlannedFile(name, header, tuple(entries))


class ChunkWriter:
    """Writes one entry's bytes front to back and takes their checksums.

    Args:
        put: writes bytes at an offset of the entry's file.
        file: the file's name.
        entry: says where in the file the bytes begin, and how many there are.
    """

    def __init__(self, put: Callable[[memoryview, int], None], file: str, entry: PlannedEntry) -> None:
        self.entry = entry
        self._put, self._file, self._at = put, file, entry.begin
        self._crcs = BlockCrcs()

    def write(self, data: memoryview) -> None:
        """Appends bytes; `data` is 1-D, of bytes."""
        self._put(data, self._at)
        self._crcs.update(data)
        self._at += len(data)

    def finish(self) -> Chunk:
        """Returns the chunk for the part, once all bytes are written."""
        if self._at != self.entry.end:
            raise RuntimeError(f"{self._file}: {self.entry.owned} got bytes up to {self._at}, not {self.entry.end}")
        owned = self.entry.owned
        nbytes = self.entry.end - self.entry.begin
        crc = self._crcs.finish()
        return Chunk(owned.tensor, owned.slot, owned.box, owned.flat, self._file, self.entry.begin, nbytes, crc)


def write_part(
    folder: Path, writer: int, table: Table, entries: Sequence[tuple[Owned, str, Values]], *, max_file: int = MAX_FILE
) -> Part:
    """Writes the items that one rank owns, durably: its safetensors files, then its part, which marks them complete.

    Args:
        folder: the step's temporary folder, from `LockedRun.begin_step`; made if it is missing.
        writer: this rank.
        table: the model's tensors.
        entries: (item, dtype code, values); values are a 1-D C-contiguous array of exactly those elements in the numpy
            dtype of `core.dtypes`, or a function that returns it and is called just before the write.

    Raises:
        CheckpointError: an array does not have the item's size and dtype.
        OSError: the disk is full or fails.
    """
    folders.make_dirs(folder / PARTS)
    shapes = {spec.name: spec.shape for spec in table}
    values = {owned: source for owned, _, source in entries}
    files = plan_files(writer, ((owned, code) for owned, code, _ in entries), shapes, max_file=max_file)
    check_part(writer, files)
    try:
        chunks = _write_files(folder, files, values)
        part = Part(writer, {file.name: file.digest for file in files}, tuple(chunks))
        put_part(folder, part)
    except OSError:
        with suppress(OSError):  # on a full disk they would stand in the way of everything else
            for file in files:
                folders.remove_file(folder / file.name)
        raise
    return part


def _write_files(folder: Path, files: Sequence[PlannedFile], values: Mapping[Owned, Values]) -> list[Chunk]:
    chunks: list[Chunk] = []
    disk = DirectWriter()
    for file in files:
        with storage.closing(storage.open_new(folder / file.name)) as fd:
            storage.pwrite(fd, memoryview(file.header), 0)
            for entry in file.entries:
                out = ChunkWriter(partial(disk.pwrite, fd), file.name, entry)
                out.write(_bytes_of(values[entry.owned], entry))
                chunks.append(out.finish())
            storage.fsync(fd)
    return chunks


def put_part(folder: Path, part: Part) -> None:
    """Writes parts/WRITER.json whole or not at all; `seal` makes its name durable.

    It is the last thing that a writer does in the folder: rank 0 may rename the folder once the last part is there.
    """
    small_files.place_small(folder / PARTS / part_name(part.writer), _readable(part), "writing")


def check_part(writer: int, files: Sequence[PlannedFile]) -> None:
    """Raises CheckpointError, before anything is written, if readers would refuse the part about these files."""
    if sum(len(file.entries) for file in files) <= MAX_PART // _LONGEST_CHUNK:
        return
    chunks = []
    for file in files:
        for entry in file.entries:
            owned, nbytes = entry.owned, entry.end - entry.begin
            crc = (2**32 - 1,) * ceil_div(nbytes, BLOCK)  # the longest that they can be
            chunks.append(Chunk(owned.tensor, owned.slot, owned.box, owned.flat, file.name, entry.begin, nbytes, crc))
    _readable(Part(writer, {file.name: file.digest for file in files}, tuple(chunks)))


def _readable(part: Part) -> bytes:
    data = part.to_bytes()
    if len(data) > MAX_PART:
        raise CheckpointError(
            f"Writer {part.writer} would write {len(part.chunks)} tensors or parts of them, and its chunk table of "
            f"{len(data)} bytes would not be read: at most {MAX_PART} are accepted. Use more ranks (--tp, --pp of the "
            f"target), or fewer and larger tensors."
        )
    strict.check_counts(data, f"the chunk table of writer {part.writer}")
    return data


def part_name(writer: int) -> str:
    """Returns the name of a writer's part inside parts/."""
    return f"{writer:05d}.json"


def _bytes_of(source: Values, entry: PlannedEntry) -> memoryview:
    values = source() if callable(source) else source
    wanted = (entry.region.size,)
    if values.shape != wanted or not values.flags.c_contiguous or values.itemsize != entry.dtype.itemsize:
        raise CheckpointError(
            f"{entry.owned.tensor}, slot {entry.owned.slot}: got values of shape {values.shape} and {values.dtype}; "
            f"a contiguous array of shape {wanted} and {entry.dtype.numpy} is required."
        )
    return as_bytes(values)
