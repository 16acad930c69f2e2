"""Which blocks of the KV cache are free: plain integers, so that every policy above it is tested in microseconds."""

from collections import deque
from collections.abc import Iterable


class BlockAllocator:
    """Hands out blocks 1 to `num_blocks`. Block 0 belongs to nobody: it pads block tables and stays all zero.

    Args:
        num_blocks: blocks that can be handed out.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_touched = 0  # blocks from 1 that were ever handed out: no list of the others is needed
        self._free: deque[int] = deque()  # of those
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return self.num_blocks - self._num_touched + len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return len(self._used)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, which the caller has checked to be free."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        num_new = min(count, self.num_blocks - self._num_touched)
        blocks = [*range(self._num_touched + 1, self._num_touched + num_new + 1)]
        blocks += [self._free.popleft() for _ in range(count - num_new)]
        self._num_touched += num_new
        self._used.update(blocks)
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Takes back blocks that `allocate` gave out."""
        for block in blocks:
            self._used.remove(block)
            self._free.append(block)

    def check(self, held: Iterable[int]) -> None:
        """Raises AssertionError unless every block is either free or in `held`, exactly once."""
        holders = list(held)
        assert len(holders) == len(set(holders)), "a block has two holders"
        assert set(holders) == self._used, f"leaked blocks: {sorted(self._used.symmetric_difference(holders))}"
        assert len(self._free) == len(set(self._free)), "a block is free twice"
        assert self._used.isdisjoint(self._free), "a block is both free and used"
        assert self.num_free + self.num_used == self.num_blocks, "free + used is not the total"
