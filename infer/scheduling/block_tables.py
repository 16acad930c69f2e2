"""The block tables of sequences: they grow as tokens come, and preempted sequences lose them from the tail.

A preempted sequence is *parked*: it keeps its blocks until others need them, and then loses only as many as they need,
the last first, so that it computes again no more than it must.
"""

from collections.abc import Iterable

from ...core.integers import ceil_div
from .block_allocator import BlockAllocator
from .lazy_heap import LazyHeap
from .sequence import Sequence


class BlockTables:
    """The blocks of all sequences.

    Args:
        num_blocks: the number of blocks of the cache.
        block_size: the number of tokens of a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.allocator = BlockAllocator(num_blocks)
        self._parked: LazyHeap[Sequence] = LazyHeap()  # those with blocks; the first to lose some comes first
        self._num_parked_blocks = 0

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the whole cache holds."""
        return self.allocator.num_blocks * self.block_size

    def missing(self, sequence: Sequence) -> int:
        """Returns the number of blocks that the sequence's known tokens need and that it does not have."""
        return max(0, ceil_div(sequence.num_tokens, self.block_size) - len(sequence.blocks))

    def available(self, sequence: Sequence) -> int:
        """Returns the number of blocks that `grow` could give the sequence: free ones, and those of others parked."""
        own = len(sequence.blocks) if sequence in self._parked else 0
        return self.allocator.num_free + self._num_parked_blocks - own

    def grow(self, sequence: Sequence) -> list[Sequence]:
        """Gives a sequence the blocks that its known tokens need; the caller has checked that as many are available.

        Returns:
            The parked sequences that lost computed tokens.
        """
        self._unpark(sequence)
        missing = self.missing(sequence)
        losers = []
        while missing > self.allocator.num_free:
            loser = self._parked.first()
            assert loser is not None, f"{missing} blocks wanted, {self.allocator.num_free} free, none parked"
            self._cut(loser, missing - self.allocator.num_free)
            losers.append(loser)
        sequence.blocks += self.allocator.allocate(missing)
        return losers

    def park(self, sequence: Sequence) -> None:
        """Lets others take the blocks of a sequence."""
        if sequence.blocks:
            self._parked.push(sequence, tuple(-part for part in sequence.order))
            self._num_parked_blocks += len(sequence.blocks)

    def release(self, sequence: Sequence) -> None:
        """Frees all blocks of a sequence."""
        self._unpark(sequence)
        self.allocator.free(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = 0

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Checks that live sequences hold exactly the used blocks, each once; raises AssertionError otherwise."""
        tables = {sequence: sequence.blocks for sequence in live}
        self.allocator.check_integrity(block for table in tables.values() for block in table)
        for sequence, table in tables.items():
            assert sequence.num_computed <= len(table) * self.block_size, "computed tokens without a block"
        assert all(sequence in tables and sequence.blocks for sequence in self._parked), "parked without blocks"
        assert self._num_parked_blocks == sum(len(s.blocks) for s in self._parked), "the number of parked blocks"

    def _unpark(self, sequence: Sequence) -> None:
        if sequence in self._parked:
            self._parked.discard(sequence)
            self._num_parked_blocks -= len(sequence.blocks)

    def _cut(self, sequence: Sequence, wanted: int) -> None:
        """Frees up to `wanted` blocks at the tail of a parked sequence."""
        kept = max(0, len(sequence.blocks) - wanted)
        self.allocator.free(sequence.blocks[kept:])
        self._num_parked_blocks -= len(sequence.blocks) - kept
        del sequence.blocks[kept:]
        sequence.num_computed = min(sequence.num_computed, kept * self.block_size)
        if not sequence.blocks:
            self._parked.discard(sequence)
