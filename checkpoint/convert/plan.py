"""The copy plan: pure arithmetic from stored chunks and a target layout to tiles that read and write strictly forward.

A tile is a run of a logical tensor's row-major order. It meets every stored chunk, and every target entry, in one run
that begins where the previous tile ended, along any dims that either side is cut. So each byte is read once and written
once, in order; the rest is an interleave in memory.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ...core import dtypes
from ...core.dtypes import DType
from ...core.errors import CheckpointError
from ...core.geometry import Box
from ...core.layout import Layout
from ...core.ownership import owned
from ...core.tensors import Table
from ..format.chunk import Chunk
from ..format.chunk_index import ChunkIndex
from ..format.manifest import StoredTensor
from ..format.region import Region, count_before, position_of
from ..save.writer import PlannedEntry, PlannedFile, plan_files

TILE: Final = 2**22  # bytes as stored at the source; about five tiles are in memory at once


@dataclass(frozen=True, slots=True)
class Selection:
    """One slot of the target, the stored slot that it is copied from, and the dtypes of both."""

    tensor: str
    slot: str
    source_slot: str
    source_dtype: DType
    target_dtype: DType


@dataclass(frozen=True, slots=True)
class TargetEntry:
    """An entry of a target file, and its writer."""

    writer: int
    file: str
    entry: PlannedEntry


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """The copy of one slot of one tensor: from all chunks that hold it, to all entries that will hold it."""

    selection: Selection
    shape: tuple[int, ...]
    sources: Sequence[Chunk]
    targets: tuple[TargetEntry, ...]


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The files to write and the copies that fill them, in order.

    Attributes:
        files: the planned files of each writer.
        slot_copies: the copies, in the order in which the source stores them.
    """

    files: tuple[tuple[PlannedFile, ...], ...]
    slot_copies: tuple[SlotCopy, ...]

    @property
    def bytes_read(self) -> int:
        """The bytes of tensor data to be read."""
        return sum(chunk.nbytes for slot_copy in self.slot_copies for chunk in slot_copy.sources)

    @property
    def bytes_written(self) -> int:
        """The bytes of safetensors files to be written."""
        return sum(file.size for files in self.files for file in files)


@dataclass(frozen=True, slots=True)
class TileRun:
    """The run of a chunk or an entry that a tile meets.

    Attributes:
        index: the index of the chunk or entry in the slot copy's sources or targets.
        region: the run.
        at: the number of the tile's elements before the run; None if the run is interleaved with others.
    """

    index: int
    region: Region
    at: int | None


@dataclass(frozen=True, slots=True)
class Tile:
    """Elements [start, stop) of a logical tensor, and the runs to read and write for them."""

    slot_copy: SlotCopy
    region: Region
    reads: tuple[TileRun, ...]
    writes: tuple[TileRun, ...]


def select(
    tensors: Mapping[str, StoredTensor], names: Sequence[str], dtype: DType | None, weights_only: bool
) -> tuple[Selection, ...]:
    """Chooses the slots of a copy, and the stored slot that each is copied from.

    A weight whose dtype changes is cast from `master`, if it has one. fp32 weights need no `master`; if fp32 weights
    with optimizer state are cast to a narrower dtype, their old values become `master`, so that training loses nothing.
    Integers and booleans keep their dtype.

    Args:
        tensors: the stored tensors by name.
        names: the tensors to copy.
        dtype: the dtype of the target's weights; None = as stored.
        weights_only: whether to leave out the optimizer's slots.

    Raises:
        CheckpointError: a tensor's dtype has no cast to `dtype`.
    """
    result: list[Selection] = []
    for name in names:
        stored = {slot: dtypes.by_code(code) for slot, code in tensors[name].slots.items()}
        weight = stored["weight"]
        target = _cast_to(name, weight, dtype)
        origin = "master" if target != weight and "master" in stored else "weight"
        result.append(Selection(name, "weight", origin, stored[origin], target))
        if weights_only:
            continue
        states = {slot: slot for slot in stored if slot not in ("weight", "master")}
        if "master" in stored and target != dtypes.FP32:
            states["master"] = "master"
        elif states and weight == dtypes.FP32 and target != dtypes.FP32:
            states["master"] = "weight"
        result += [Selection(name, slot, source, stored[source], stored[source]) for slot, source in states.items()]
    return tuple(result)


def _cast_to(name: str, weight: DType, dtype: DType | None) -> DType:
    if dtype is None or weight.is_integer:
        return weight
    if weight != dtype and weight not in dtypes.COMPUTE_DTYPES:
        raise CheckpointError(
            f"{name} is stored as {weight.code}, which tk cannot cast to {dtype.name} (quantized values mean nothing "
            f"without their scales); leave out --dtype."
        )
    return dtype


def with_selected(table: Table, selections: Sequence[Selection]) -> Table:
    """Returns the tensors of a table with the slots that a copy gives them."""
    states: dict[str, dict[str, str]] = {spec.name: {} for spec in table}
    weights: dict[str, str] = {}
    for chosen in selections:
        if chosen.slot == "weight":
            weights[chosen.tensor] = chosen.target_dtype.code
        else:
            states[chosen.tensor][chosen.slot] = chosen.target_dtype.code
    return tuple(replace(spec, dtype=weights[spec.name], states=states[spec.name]) for spec in table)


def plan_copy(
    chunks: ChunkIndex, table: Table, layout: Layout, selections: Sequence[Selection], *, marked: bool = True
) -> CopyPlan:
    """Plans a copy of the selected slots to `layout`, in the order in which the source stores them.

    Args:
        chunks: the source's chunks.
        table: the tensors with the slots that are selected (see `with_selected`); aliases are not needed.
        layout: the target's layout, without data parallelism.
        selections: the slots to copy.
        marked: whether the files' metadata says that they belong to a tk checkpoint.

    Raises:
        ParallelError: the layout does not fit a tensor.
    """
    shapes = {spec.name: spec.shape for spec in table}
    ordered = sorted(selections, key=lambda s: (s.slot != "weight", s.slot, *_place(chunks[s.tensor, s.source_slot])))
    ranks = {(selection.tensor, selection.slot): index for index, selection in enumerate(ordered)}
    files = []
    targets: list[list[TargetEntry]] = [[] for _ in ordered]
    for writer in range(layout.world_size):
        mine = sorted(owned(table, layout, writer), key=lambda item: ranks[item.tensor, item.slot])
        entries = [(item, ordered[ranks[item.tensor, item.slot]].target_dtype.code) for item in mine]
        files.append(plan_files(writer, entries, shapes, marked=marked))
        for file in files[-1]:
            for entry in file.entries:
                targets[ranks[entry.owned.tensor, entry.owned.slot]].append(TargetEntry(writer, file.name, entry))
    slot_copies = [
        SlotCopy(selection, shapes[selection.tensor], chunks[selection.tensor, selection.source_slot], tuple(into))
        for selection, into in zip(ordered, targets, strict=True)
    ]
    return CopyPlan(tuple(files), tuple(slot_copies))


def tiles(plan: CopyPlan, tile_bytes: int) -> Iterator[Tile]:
    """Yields the plan's tiles in order."""
    for slot_copy in plan.slot_copies:
        yield from slot_tiles(slot_copy, tile_bytes // slot_copy.selection.source_dtype.itemsize)


def slot_tiles(slot_copy: SlotCopy, num_elements: int) -> Iterator[Tile]:
    """Yields a slot copy's tiles of at most that many elements: whole rows, if at least one fits."""
    total, row, room = math.prod(slot_copy.shape), math.prod(slot_copy.shape[1:]), max(num_elements, 1)
    step = room // row * row if 0 < row <= room else room
    reads = _Cursor([chunk.region for chunk in slot_copy.sources], slot_copy.shape)
    writes = _Cursor([target.entry.region for target in slot_copy.targets], slot_copy.shape)
    box = Box.whole(slot_copy.shape)
    for start in range(0, total, step):
        stop = min(start + step, total)
        yield Tile(slot_copy, Region(box, start, stop), reads.advance(start, stop), writes.advance(start, stop))


class _Cursor:
    """Moves along the logical order, and keeps a list of the regions that the current tile can meet."""

    def __init__(self, regions: Sequence[Region], shape: tuple[int, ...]) -> None:
        self._shape = shape
        spans = [
            (position_of(r.box, shape, r.start), position_of(r.box, shape, r.stop - 1), index, r)
            for index, r in enumerate(regions)
            if r.size
        ]
        self._ahead = sorted(spans, key=lambda span: span[0], reverse=True)
        self._in_view: list[tuple[int, int, int, Region]] = []

    def advance(self, start: int, stop: int) -> tuple[TileRun, ...]:
        """Returns the runs that [start, stop) of the logical order meets."""
        while self._ahead and self._ahead[-1][0] < stop:
            self._in_view.append(self._ahead.pop())
        self._in_view = [span for span in self._in_view if span[1] >= start]
        runs = []
        for _, _, index, region in self._in_view:
            low = max(count_before(region.box, self._shape, start), region.start)
            high = min(count_before(region.box, self._shape, stop), region.stop)
            if low < high:
                first = position_of(region.box, self._shape, low)
                last = position_of(region.box, self._shape, high - 1)
                at = first - start if last - first + 1 == high - low else None
                runs.append(TileRun(index, Region(region.box, low, high), at))
        return tuple(runs)


def _place(chunks: Sequence[Chunk]) -> tuple[str, int]:
    return (chunks[0].file, chunks[0].offset) if chunks else ("", 0)
