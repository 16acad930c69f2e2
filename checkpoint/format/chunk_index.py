"""The chunks of each slot of each tensor: checked to hold every element exactly once, and found by region."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import TypeAlias, overload

from ...core import dtypes
from ...core.errors import ManifestError
from ...core.geometry import Box, covers_exactly
from .chunk import Chunk, Part
from .region import Region, shared_span


class TensorChunks(Sequence[Chunk]):
    """The chunks of one slot of one tensor, in the order of their first element; they hold each element exactly once.

    A slot has few boxes (one per tensor-parallel rank), and each box is cut into many runs (one per data-parallel
    rank). So a search bisects along the dim that separates the boxes, and then bisects the runs of each box.
    """

    def __init__(self, what: str, chunks: Iterable[Chunk], shape: tuple[int, ...], dtype: dtypes.DType) -> None:
        """Checks and sorts the chunks.

        Args:
            what: tensor and slot, for messages.
            chunks: the chunks in any order.
            shape: the tensor's shape.
            dtype: the dtype of the stored elements.

        Raises:
            ManifestError: a chunk lies outside the tensor or has the wrong length, two chunks overlap, or no chunk
                holds some element.
        """
        self._chunks = sorted(chunks, key=lambda chunk: (chunk.box.offset, chunk.box.shape, chunk.start))
        groups = [(box, list(of_box)) for box, of_box in groupby(self._chunks, key=lambda chunk: chunk.box)]
        _check_cover(what, groups, shape, dtype.itemsize)
        lengths = [len(of_box) for _, of_box in groups]
        self._firsts = {box: at for (box, _), at in zip(groups, accumulate(lengths, initial=0), strict=False)}
        boxes = [box for box, _ in groups]
        self._dim = max(range(len(shape)), key=lambda dim: len({box.offset[dim] for box in boxes}), default=None)
        if self._dim is not None:
            groups.sort(key=lambda group: group[0].offset[self._dim])
            self._lows = [box.offset[self._dim] for box, _ in groups]
            self._highs = list(accumulate((box.end[self._dim] for box, _ in groups), max))
        self._groups = [(box, [chunk.start for chunk in of_box], of_box) for box, of_box in groups]

    def find(self, region: Region) -> Iterator[Chunk]:
        """Yields all chunks that share elements with a region, and perhaps others; O(log n + number found)."""
        return (chunk for _, chunk in self.find_indexed(region))

    def find_indexed(self, region: Region) -> Iterator[tuple[int, Chunk]]:
        """Yields (index, chunk) for the chunks of `find`."""
        first, last = 0, len(self._groups)
        if self._dim is not None:
            first = bisect_right(self._highs, region.box.offset[self._dim])
            last = bisect_left(self._lows, region.box.end[self._dim])
        for box, starts, chunks in self._groups[first:last]:
            span = shared_span(Region.of(box), region)
            if span is not None:
                found = range(max(bisect_right(starts, span[0]) - 1, 0), bisect_left(starts, span[1]))
                yield from ((self._firsts[box] + index, chunks[index]) for index in found)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...

    @overload
    def __getitem__(self, index: slice) -> list[Chunk]: ...

    def __getitem__(self, index: int | slice) -> Chunk | list[Chunk]:
        return self._chunks[index]

    def __len__(self) -> int:
        return len(self._chunks)


ChunkIndex: TypeAlias = Mapping[tuple[str, str], TensorChunks]


def _check_cover(what: str, groups: list[tuple[Box, list[Chunk]]], shape: tuple[int, ...], itemsize: int) -> None:
    whole = Box.whole(shape)
    boxes: list[Box] = []
    for box, chunks in groups:
        if box != whole and (len(box.shape) != len(shape) or not whole.contains(box)):
            raise ManifestError(f"{what}: box {box.bounds()} in {chunks[0].file} lies outside shape {list(shape)}.")
        for chunk in chunks:
            if (chunk.stop - chunk.start) * itemsize != chunk.nbytes:
                size = chunk.stop - chunk.start
                raise ManifestError(
                    f"{what}: a chunk in {chunk.file} has {chunk.nbytes} bytes; its {size} elements take "
                    f"{size * itemsize}."
                )
        if _is_contiguous(box, chunks):
            boxes.append(box)
        else:  # the runs of another box may hold the missing elements
            boxes += [part for chunk in chunks for part, _ in chunk.region.parts()]
    if boxes != [whole] and not covers_exactly(boxes, whole):
        stored = sum(chunk.stop - chunk.start for _, chunks in groups for chunk in chunks)
        raise ManifestError(
            f"{what}: its chunks ({stored} elements) do not hold each of {whole.size} exactly once: some are missing "
            "or stored twice."
        )


def _is_contiguous(box: Box, chunks: list[Chunk]) -> bool:
    """Returns whether the sorted runs of one box follow each other from its first element to its last."""
    end = 0
    for chunk in chunks:
        if chunk.start != end:
            return False
        end = chunk.stop
    return end == box.size


def index_chunks(
    parts: Iterable[Part], shapes: Mapping[str, tuple[int, ...]], slots: Mapping[str, Mapping[str, str]]
) -> dict[tuple[str, str], TensorChunks]:
    """Returns the chunks of all parts by (tensor, slot), checked to hold each element of each slot exactly once.

    Args:
        parts: the parts of all writers.
        shapes: the shape of every stored tensor.
        slots: the dtype code of each slot of every stored tensor.

    Raises:
        ManifestError: a chunk names an unknown tensor or slot, two parts list one file, or the chunks break a rule of
            `TensorChunks`.
    """
    found: dict[tuple[str, str], list[Chunk]] = {(name, slot): [] for name, of in slots.items() for slot in of}
    owner: dict[str, int] = {}
    for part in parts:
        add_part(part, found, owner)
    return {
        (name, slot): TensorChunks(f"{name}, slot {slot}", chunks, shapes[name], dtypes.by_code(slots[name][slot]))
        for (name, slot), chunks in found.items()
    }


def add_part(part: Part, found: Mapping[tuple[str, str], list[Chunk]], owner: dict[str, int]) -> None:
    """Adds a part's chunks to the lists of their (tensor, slot); `owner` maps each file to its writer."""
    for name in part.files:
        if owner.setdefault(name, part.writer) != part.writer:
            raise ManifestError(f"{name} is in the parts of writers {owner[name]} and {part.writer}.")
    for chunk in part.chunks:
        try:
            found[chunk.tensor, chunk.slot].append(chunk)
        except KeyError:
            raise ManifestError(
                f"{chunk.file} holds {chunk.tensor}, slot {chunk.slot}, which is unknown to the manifest."
            ) from None
