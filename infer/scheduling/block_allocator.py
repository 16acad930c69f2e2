"""The allocator of KV cache blocks. Blocks are plain integers, so tests of all policies above it take microseconds."""

from collections import deque
from collections.abc import Iterable


class BlockAllocator:
    """Allocates blocks 1 to `num_blocks`. Block 0 is never allocated: it pads block tables and stays zero.

    Args:
        num_blocks: the number of blocks that can be allocated.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_touched = 0  # blocks 1 to this one were allocated before; a list of the others is not needed
        self._free: deque[int] = deque()  # the free ones among those
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        """The number of blocks that can be allocated now."""
        return self.num_blocks - self._num_touched + len(self._free)

    @property
    def num_used(self) -> int:
        """The number of allocated blocks."""
        return len(self._used)

    def allocate(self, count: int) -> list[int]:
        """Allocates `count` blocks; the caller has checked that as many are free."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        num_new = min(count, self.num_blocks - self._num_touched)
        blocks = [*range(self._num_touched + 1, self._num_touched + num_new + 1)]
        blocks += [self._free.popleft() for _ in range(count - num_new)]
        self._num_touched += num_new
        self._used.update(blocks)
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Frees allocated blocks."""
        for block in blocks:
            self._used.remove(block)
            self._free.append(block)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Checks that every block is either free or in `held`, exactly once; raises AssertionError otherwise."""
        holders = list(held)
        assert len(holders) == len(set(holders)), "a block has two holders"
        assert set(holders) == self._used, f"leaked blocks: {sorted(self._used.symmetric_difference(holders))}"
        assert len(self._free) == len(set(self._free)), "a block is free twice"
        assert self._used.isdisjoint(self._free), "a block is both free and used"
        assert self.num_free + self.num_used == self.num_blocks, "free + used is not the total"
