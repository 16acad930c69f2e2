"""The plan of a shared load by the ranks of one host: every needed block is read once, by one rank, in rounds.

The plan is pure arithmetic: the ranks exchange their needs, and then each computes the same rounds.
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

AREA: Final = 2 * BLOCK  # bytes that a rank reads in a round; each rank has two of these areas in shared memory
ALIGNMENT: Final = 64  # bytes
WORTH_SHARING: Final = 1.02  # ranks share reads only if reading alone would read more than this factor


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A part of a tensor that a rank needs: the arguments of `Checkpoint.read`."""

    tensor: str
    box: Box
    slot: str = "weight"
    flat: tuple[int, int] | None = None
    dtype: dtypes.DType | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [low, high) of a stored chunk, within one of its blocks.

    Attributes:
        tensor: the stored tensor's name.
        slot: the stored slot.
        chunk: the chunk's index in the chunks of that slot of that tensor.
        low, high: the elements, counted from the chunk's first.
    """

    tensor: str
    slot: str
    chunk: int
    low: int
    high: int


Block: TypeAlias = tuple[str, str, int, int]  # tensor, slot, index of the chunk, index of the block in the chunk


@dataclass(frozen=True, slots=True)
class Read:
    """A span that one rank reads into its area, starting at byte `at`."""

    span: Span
    rank: int
    at: int


class ReadPlanner:
    """Plans the reads of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def spans(self, request: ReadRequest) -> tuple[Span, ...]:
        """Returns the spans to read for a part of a tensor.

        Raises:
            CheckpointError: the checkpoint lacks the tensor or slot, or their metadata is damaged.
        """
        name, slot, stored = self.checkpoint.resolve(request.tensor, request.slot, request.dtype)
        chunks, region = self.checkpoint.chunks[name, slot], Region.of(request.box, request.flat)
        return tuple(
            Span(name, slot, index, low, high)
            for index, chunk in chunks.find_indexed(region)
            for low, high in spans_to_read(chunk, region, stored.itemsize)
        )

    def chunk(self, span: Span) -> Chunk:
        """Returns the chunk to which a span belongs."""
        return self.checkpoint.chunks[span.tensor, span.slot][span.chunk]

    def dtype(self, span: Span) -> dtypes.DType:
        """Returns the stored dtype of a span's elements."""
        return dtypes.by_code(self.checkpoint.tensors[span.tensor].slots[span.slot])

    def nbytes(self, span: Span) -> int:
        """Returns the number of bytes of a span."""
        return (span.high - span.low) * self.dtype(span).itemsize

    def block(self, span: Span) -> Block:
        """Returns the block in which a span lies."""
        return (span.tensor, span.slot, span.chunk, span.low * self.dtype(span).itemsize // BLOCK)

    def union(self, needs: Iterable[Sequence[Span]]) -> list[Span]:
        """Merges the needs of several ranks: each block once, tensor by tensor, in the order on disk."""
        merged: dict[Block, Span] = {}
        for span in (span for spans in needs for span in spans):
            block = self.block(span)
            other = merged.get(block, span)
            merged[block] = replace(span, low=min(span.low, other.low), high=max(span.high, other.high))
        return sorted(merged.values(), key=self._place)

    def assign_rounds(self, spans: Sequence[Span], num_ranks: int) -> list[list[Read]]:
        """Assigns spans to ranks, in rounds; in each round every rank fills its area at most once."""
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
        """Returns whether the ranks would read clearly more if each read its own requests alone.

        Args:
            needs: by rank, the spans of all its requests; a span that two requests share is listed twice.
        """
        alone = sum(self.nbytes(span) for spans in needs for span in spans)
        return alone > WORTH_SHARING * sum(map(self.nbytes, self.union(needs)))

    def _place(self, span: Span) -> tuple[Any, ...]:
        first, chunk = self.checkpoint.chunks[span.tensor, span.slot][0], self.chunk(span)
        return (span.slot != "weight", span.slot, first.file, first.offset, chunk.file, chunk.offset, span.low)


def to_rows(spans: Iterable[Span]) -> list[list[Any]]:
    """Returns spans as plain data for other ranks."""
    return [list(astuple(span)) for span in spans]


def from_rows(rows: Iterable[Sequence[Any]]) -> list[Span]:
    """Returns the spans from the data that `to_rows` made."""
    return [Span(*row) for row in rows]
