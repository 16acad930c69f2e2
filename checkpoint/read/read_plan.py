"""Who reads what when ranks of one host load together: every block that any of them needs, once, dealt out in rounds.

Pure: ranks plan their own needs, exchange them, and come to the same rounds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Final, TypeAlias

from ...core import dtypes
from ...core.geometry import Box
from ...core.integers import round_up
from ..format.chunk import BLOCK, Chunk
from ..format.region import Region
from .chunk_blocks import spans_to_read
from .reader import Checkpoint

AREA: Final = 2 * BLOCK  # bytes that a rank reads in a round; it has two such areas in shared memory
ALIGNMENT: Final = 64  # bytes
WORTH_SHARING: Final = 1.02  # where reading want by want reads no more than this, it is done


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Part of a tensor that a rank needs: the arguments of `Checkpoint.read`."""

    tensor: str
    box: Box
    slot: str = "weight"
    flat: tuple[int, int] | None = None
    dtype: dtypes.DType | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [low, high) of a stored chunk, within one of its blocks.

    Attributes:
        chunk: index among those of its slot of its tensor.
    """

    tensor: str
    slot: str
    chunk: int
    low: int
    high: int


Block: TypeAlias = tuple[str, str, int, int]  # tensor, slot, chunk, and which of the chunk's blocks


@dataclass(frozen=True, slots=True)
class Read:
    """A span that one rank reads into its area, from byte `at` on."""

    span: Span
    rank: int
    at: int


class ReadPlanner:
    """Plans over one checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def spans(self, request: ReadRequest) -> tuple[Span, ...]:
        """What has to be read for a part of a tensor.

        Raises:
            CheckpointError: the checkpoint has no such tensor or slot, or what it says of them is damaged.
        """
        name, slot, stored = self.checkpoint.resolve(request.tensor, request.slot, request.dtype)
        chunks, region = self.checkpoint.chunks[name, slot], Region.of(request.box, request.flat)
        return tuple(
            Span(name, slot, index, low, high)
            for index, chunk in chunks.find_indexed(region)
            for low, high in spans_to_read(chunk, region, stored.itemsize)
        )

    def chunk(self, span: Span) -> Chunk:
        """The chunk that a span is of."""
        return self.checkpoint.chunks[span.tensor, span.slot][span.chunk]

    def dtype(self, span: Span) -> dtypes.DType:
        """What the elements are stored as."""
        return dtypes.by_code(self.checkpoint.tensors[span.tensor].slots[span.slot])

    def nbytes(self, span: Span) -> int:
        """Bytes to be read."""
        return (span.high - span.low) * self.dtype(span).itemsize

    def block(self, span: Span) -> Block:
        """The block that a span lies in."""
        return (span.tensor, span.slot, span.chunk, span.low * self.dtype(span).itemsize // BLOCK)

    def union(self, needs: Iterable[Sequence[Span]]) -> list[Span]:
        """What several ranks need, each block once, tensor by tensor in the order in which they are stored."""
        merged: dict[Block, Span] = {}
        for span in (span for spans in needs for span in spans):
            block = self.block(span)
            other = merged.get(block, span)
            merged[block] = replace(span, low=min(span.low, other.low), high=max(span.high, other.high))
        return sorted(merged.values(), key=self._place)

    def assign_rounds(self, spans: Sequence[Span], num_ranks: int) -> list[list[Read]]:
        """Rounds of reads in order; in each, every rank fills its area at most once."""
        rounds: list[list[Read]] = [[]]
        rank = used = 0
        for span in spans:
            nbytes = self.nbytes(span)
            if used + nbytes > AREA:
                rank, used = rank + 1, 0
            if rank == num_ranks:
                rounds.append([])
                rank = 0
            rounds[-1].append(Read(span, rank, used))
            used += round_up(nbytes, ALIGNMENT)
        return rounds

    def is_worth_sharing(self, needs: Sequence[Sequence[Span]]) -> bool:
        """Whether want by want more would be read than is needed.

        Args:
            needs: by rank, the spans of every want, again where two wants share one.
        """
        alone = sum(self.nbytes(span) for spans in needs for span in spans)
        return alone > WORTH_SHARING * sum(map(self.nbytes, self.union(needs)))

    def _place(self, span: Span) -> tuple[Any, ...]:
        first, chunk = self.checkpoint.chunks[span.tensor, span.slot][0], self.chunk(span)
        return (span.slot != "weight", span.slot, first.file, first.offset, chunk.file, chunk.offset, span.low)


def to_rows(spans: Iterable[Span]) -> list[list[Any]]:
    """Plain data for other ranks."""
    return [list(astuple(span)) for span in spans]


def from_rows(rows: Iterable[Sequence[Any]]) -> list[Span]:
    """Reads what `to_rows` made."""
    return [Span(*row) for row in rows]
