"""The copy engine: executes a plan in bounded memory; it checks checksums on reading and computes them on writing.

One thread reads, checks, interleaves and casts the next tiles; the calling thread scatters, checksums and writes.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from ...core.casts import Array, cast
from ..files import storage
from ..files.data_files import DataFiles, NewFiles
from ..files.direct_writer import DirectWriter
from ..files.joined_writer import JoinedWriter
from ..format.chunk import BlockCrcs, Chunk, Part
from ..format.region import as_bytes, copy_region
from ..read.chunk_blocks import corrupt_block
from ..read.reader import Checkpoint
from ..save.writer import ChunkWriter
from .plan import TILE, CopyPlan, SlotCopy, Tile, TileRun, tiles

AHEAD: Final = 2  # batches of tiles that are read while another is written
_LONGEST_BATCH: Final = 1024  # tiles


class TileChange(Protocol):
    """A change of the values that are copied, tile by tile."""

    def changed(self, tile: Tile, values: Array) -> Array:
        """Returns the values to be written for a tile: 1-D, in the target's dtype, as those that were read."""

    def require_unchanged(self) -> None:
        """Raises CheckpointError if what the change reads beside the source was written meanwhile."""

    def facts(self) -> Mapping[str, Any]:
        """Returns numbers about the changes that were made, as plain data."""

    def sentence(self) -> str:
        """Returns the same for people."""


def run_copy(
    plan: CopyPlan,
    source: Checkpoint,
    folder: Path,
    on_bytes: Callable[[int], None] = lambda _: None,
    tile_bytes: int = TILE,
    change: "TileChange | None" = None,
) -> list[Part]:
    """Writes the plan's files into `folder`, durably.

    Args:
        plan: the copies to make.
        source: the checkpoint to copy from.
        folder: the folder to write in.
        on_bytes: called with the source bytes of some tiles once they are written.
        tile_bytes: the largest size of a tile in bytes, as stored at the source.
        change: a change of the values between reading and writing; None = they are copied.

    Returns:
        One part per writer; the parts are not written yet.

    Raises:
        ShardCorrupt: bytes of the source do not match their checksum.
        OSError: the disk is full or fails.
    """
    with ExitStack() as stack:
        headers = {file.name: file.header for files in plan.files for file in files}
        target = _Target(plan, stack.enter_context(NewFiles(folder, headers)))
        reader = stack.enter_context(TileReader(source))
        pool = stack.enter_context(ThreadPoolExecutor(1, "tk-copy-reader"))
        stack.callback(pool.shutdown, cancel_futures=True)
        todo = _batches(tiles(plan, tile_bytes), tile_bytes)
        ready: deque[tuple[list[Tile], Future[list[Array]]]] = deque()
        ready.extend((batch, pool.submit(reader.load_all, batch)) for batch in islice(todo, AHEAD))
        while ready:
            batch, future = ready.popleft()
            loaded = future.result()
            ready.extend((later, pool.submit(reader.load_all, later)) for later in islice(todo, 1))
            for tile, values in zip(batch, loaded, strict=True):
                target.store(tile, change.changed(tile, values) if change else values)
            on_bytes(sum(map(_source_bytes, batch)))
        return target.finish()


def _batches(todo: Iterable[Tile], num_bytes: int) -> Iterator[list[Tile]]:
    """Yields tiles in groups of at most that many bytes: small tensors are handed from thread to thread together."""
    batch: list[Tile] = []
    size = 0
    for tile in todo:
        if batch and (size + _source_bytes(tile) > num_bytes or len(batch) == _LONGEST_BATCH):
            yield batch
            batch, size = [], 0
        batch.append(tile)
        size += _source_bytes(tile)
    if batch:
        yield batch


def _source_bytes(tile: Tile) -> int:
    return tile.region.size * tile.slot_copy.selection.source_dtype.itemsize


class TileReader:
    """Reads tiles in order; each chunk's bytes are read once, front to back, and checked block by block."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files = DataFiles(checkpoint.folder.open_data)
        self._crcs: dict[int, BlockCrcs] = {}
        self._slot_copy: SlotCopy | None = None

    def __enter__(self) -> "TileReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.__exit__()

    def load_all(self, batch: Sequence[Tile]) -> list[Array]:
        """Returns the values of tiles in order; see `load`."""
        return [self.load(tile) for tile in batch]

    def load(self, tile: Tile) -> Array:
        """Returns the tile's values, 1-D, in the target's dtype."""
        selection = tile.slot_copy.selection
        if tile.slot_copy is not self._slot_copy:
            self._slot_copy, self._crcs = tile.slot_copy, {}
        values = np.empty(tile.region.size, selection.source_dtype.numpy)
        for run in tile.reads:
            chunk = tile.slot_copy.sources[run.index]
            if run.at is not None:
                self._read(chunk, run, values[run.at : run.at + run.region.size])
                continue
            scratch = np.empty(run.region.size, values.dtype)
            self._read(chunk, run, scratch)
            copy_region(values, tile.region, scratch, run.region)
        return cast(values, selection.source_dtype, selection.target_dtype, selection.tensor)

    def _read(self, chunk: Chunk, run: TileRun, into: Array) -> None:
        path = self._checkpoint.path / chunk.file  # for messages only: following links for each run would cost 10 %
        at = (run.region.start - chunk.region.start) * into.itemsize
        data = as_bytes(into)
        storage.read_exact(self._files.open(chunk.file), data, chunk.offset + at, path, once=True)
        if chunk.crc is None:
            return
        crcs = self._crcs.setdefault(run.index, BlockCrcs())
        checked = len(crcs.blocks)
        crcs.update(data)
        if run.region.stop == chunk.region.stop:
            crcs.finish()
        for block in range(checked, len(crcs.blocks)):
            if crcs.blocks[block] != chunk.crc[block]:
                raise corrupt_block(path, chunk, block)


class _Target:
    """The files being written: every entry of every file, front to back."""

    def __init__(self, plan: CopyPlan, files: NewFiles) -> None:
        self._plan, self._files = plan, files
        self._runs = JoinedWriter(DirectWriter(), files.open)
        self._writers = {
            (file.name, entry.owned): ChunkWriter(partial(self._runs.put, file.name), file.name, entry)
            for of_writer in plan.files
            for file in of_writer
            for entry in file.entries
        }

    def store(self, tile: Tile, values: Array) -> None:
        """Writes a tile's values to all entries that hold some of them."""
        for run in tile.writes:
            target = tile.slot_copy.targets[run.index]
            if run.at is not None:
                elements = values[run.at : run.at + run.region.size]
            else:
                elements = np.empty(run.region.size, values.dtype)
                copy_region(elements, run.region, values, tile.region)
            self._writers[target.file, target.entry.owned].write(as_bytes(elements))

    def finish(self) -> list[Part]:
        """Makes the files durable and returns the part of each writer."""
        self._runs.flush()
        self._files.finish()
        parts = []
        for writer, files in enumerate(self._plan.files):
            chunks = [self._writers[file.name, entry.owned].finish() for file in files for entry in file.entries]
            parts.append(Part(writer, {file.name: file.digest for file in files}, tuple(chunks)))
        return parts
