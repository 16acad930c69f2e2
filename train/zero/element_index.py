"""The places of a run's elements in their logical tensor, and the key of their random bits (no torch).

An element keeps its place when tensor parallelism, the pipeline or ZeRO cut the tensor in another way. So random bits
that depend on the place are the same at every layout.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

from ...core.buckets import Shard, UpdateRun
from ...core.local_params import Piece


@dataclass(frozen=True, slots=True)
class ElementIndex:
    """Indexes of the elements of a run in the row-major order of their logical tensor.

    Element i of the run has the index first + j // run * stride + j % run, with j = start + i.

    Attributes:
        first: the index of the first element of the box that the run is part of.
        run: the number of elements of the box that are neighbours in the tensor.
        stride: the difference between the indexes of two such neighbourhoods' first elements.
        start: the number of the box's elements before the run.
    """

    first: int
    run: int
    stride: int
    start: int

    @classmethod
    def of(cls, piece: Piece, start: int) -> Self:
        """Returns the indexes of a run that begins at element `start` of a piece, in the row-major order of its box.

        A box is a whole tensor, or cut along one dim.
        """
        shape, box = piece.tensor.shape, piece.box
        cut = [dim for dim, extent in enumerate(box.shape) if extent != shape[dim]]
        assert len(cut) <= 1, f"{piece.tensor.name}: a box that is cut along {len(cut)} dims"
        if not cut:
            return cls(0, box.size, box.size, start)
        inner = math.prod(shape[cut[0] + 1 :])
        return cls(box.offset[cut[0]] * inner, box.shape[cut[0]] * inner, shape[cut[0]] * inner, start)


@dataclass(frozen=True, slots=True)
class RandomBits:
    """The random bits of a run's elements; each depends on seed, tensor, index and step alone.

    Attributes:
        seed: the seed of all tensors.
        tensor: the name of the logical tensor. A tied tensor has that of its original, so that copies stay equal.
        index: the places of the elements in the tensor.
    """

    seed: int
    tensor: str
    index: ElementIndex

    @classmethod
    def of(cls, seed: int, piece: Piece, start: int) -> Self:
        """Returns the random bits of a run that begins at element `start` of a piece."""
        return cls(seed, piece.tensor.alias or piece.tensor.name, ElementIndex.of(piece, start))

    def from_element(self, number: int) -> Self:
        """Returns the random bits of the run's elements from one on."""
        return replace(self, index=replace(self.index, start=self.index.start + number))

    def key(self, step: int) -> tuple[int, int]:
        """Returns two words of 32 bits, which differ by seed, tensor and step."""
        digest = hashlib.sha256(f"{self.seed}/{step}/{self.tensor}".encode()).digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def runs_of_tensors(
    runs: Sequence[UpdateRun], shards: Sequence[Shard], begin: int, seed: int
) -> Iterator[tuple[UpdateRun, RandomBits]]:
    """Cuts runs at the borders of logical tensors, and yields each part with its random bits; padding is in no part.

    Args:
        runs: runs of a part of this rank's range of a bucket, counted from that part's begin.
        shards: what this rank updates of the bucket.
        begin: the number of elements of this rank's range before the part.
        seed: the seed of the random bits.
    """
    for run in runs:
        for shard in shards:
            place = shard.start - begin
            low, high = max(run.begin, place), min(run.end, place + shard.flat[1] - shard.flat[0])
            if low < high:
                yield UpdateRun(low, high, run.decay), RandomBits.of(seed, shard.piece, shard.flat[0] + low - place)
