"""The allocator of KV cache blocks: reference counts, and the blocks that are kept because they may be wanted again.

A block is free, used (it has holders) or cached: it has no holder, and its key finds it. When free blocks run out, the
cached block that was unused for longest is taken. Blocks are plain integers, so tests of all policies take
microseconds. No operation costs more than the blocks that it is given, but for `copy` without a free copy.

A cache of 4 bits has copies of some blocks in 8 bits, of which there are fewer than blocks (see KVFormat.num_copied).
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence

from ..samples.prefix_keys import BlockKey


class BlockAllocator:
    """Allocates blocks 1 to `num_blocks`. Block 0 is never allocated: it pads block tables and stays zero.

    Args:
        num_blocks: the number of blocks that can be allocated.
        num_copies: the number of copies, 1 to this one; 0: blocks have none, or each has its own.
    """

    def __init__(self, num_blocks: int, num_copies: int = 0) -> None:
        self.num_blocks, self.num_copies = num_blocks, num_copies
        self._free_copies = list(range(num_copies, 0, -1))
        self._copies: dict[int, int] = {}  # of used and cached blocks
        self._num_touched = 0  # blocks 1 to this one were allocated before; a list of the others is not needed
        self._free: deque[int] = deque()  # the free ones among those
        self._holders: dict[int, int] = {}  # the number of holders of every used block
        self._cached: OrderedDict[int, None] = OrderedDict()  # the one that was unused for longest comes first
        self._blocks: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}  # of used and cached blocks

    @property
    def num_free(self) -> int:
        """The number of blocks that hold nothing of use."""
        return self.num_blocks - self._num_touched + len(self._free)

    @property
    def num_used(self) -> int:
        """The number of blocks with holders."""
        return len(self._holders)

    @property
    def num_cached(self) -> int:
        """The number of blocks without holders whose keys find them."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """The number of blocks that can be allocated now: the free and the cached ones."""
        return self.num_blocks - len(self._holders)

    def allocate(self, count: int) -> list[int]:
        """Allocates `count` blocks for one holder; the caller has checked that as many are available."""
        assert count <= self.num_available, f"{count} blocks wanted, {self.num_available} available"
        num_new = min(count, self.num_blocks - self._num_touched)
        blocks = [*range(self._num_touched + 1, self._num_touched + num_new + 1)]
        self._num_touched += num_new
        blocks += [self._free.popleft() if self._free else self._evict() for _ in range(count - num_new)]
        self._holders.update(dict.fromkeys(blocks, 1))
        return blocks

    def find(self, key: BlockKey) -> int | None:
        """Returns the block with this content, or None."""
        return self._blocks.get(key)

    def is_used(self, block: int) -> bool:
        """Returns whether a block has holders."""
        return block in self._holders

    def num_freed(self, tables: Iterable[Iterable[int]]) -> int:
        """Returns how many blocks would be available in addition if these tables, of one holder each, were freed."""
        held = Counter(block for table in tables for block in table)
        return sum(count == self._holders[block] for block, count in held.items())

    def hold(self, blocks: Iterable[int]) -> None:
        """Gives used or cached blocks one more holder each."""
        for block in blocks:
            self._cached.pop(block, None)
            self._holders[block] = self._holders.get(block, 0) + 1

    def publish(self, block: int, key: BlockKey) -> None:
        """Lets a key find a used block. If it finds another block already, nothing changes."""
        assert block in self._holders, "a block without holders is published"
        if self._blocks.setdefault(key, block) == block:
            self._keys[block] = key

    def free(self, blocks: Sequence[int], keep: bool = True) -> None:
        """Takes one holder from each block of a table.

        Args:
            blocks: a table, or its end. Its last blocks will be evicted first: without those before, they are useless.
            keep: whether blocks without further holders stay cached, if their keys find them.
        """
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            del self._holders[block]
            if keep and block in self._keys:
                self._cached[block] = None
            else:
                self._forget(block)
                self._free.append(block)

    def copy(self, block: int) -> int | None:
        """Gives a used block a copy; returns its number, or None if the block has one already, or needs none.

        If no copy is free, a cached block that has one is given up, which costs the time to find it.
        """
        if not self.num_copies or block in self._copies:
            return None
        if not self._free_copies:
            found = next((other for other in self._cached if other in self._copies), None)
            assert found is not None, "more copies are used than sequences and steps need"
            del self._cached[found]
            self._forget(found)
            self._free.append(found)
        self._copies[block] = self._free_copies.pop()
        return self._copies[block]

    def has_copy(self, block: int) -> bool:
        """Returns whether a used or cached block has a copy."""
        return block in self._copies

    def drop_copy(self, block: int) -> None:
        """Takes a block's copy away, if it has one."""
        if copy := self._copies.pop(block, None):
            self._free_copies.append(copy)

    def flush(self) -> None:
        """Makes cached blocks free: no key finds a block any more, because the cache has lost its content."""
        for block in self._cached:
            self.drop_copy(block)
        self._free.extend(self._cached)
        self._cached.clear()
        self._blocks.clear()
        self._keys.clear()

    def check_integrity(self, held: Iterable[int]) -> None:
        """Checks that free + used + cached blocks are all, and that `held` has each used block once per holder.

        Raises:
            AssertionError: the books are not balanced.
        """
        holders = Counter(held)
        wrong = {block for block in {*holders, *self._holders} if holders[block] != self._holders.get(block)}
        assert not wrong, f"leaked blocks, or wrong numbers of holders: {sorted(wrong)}"
        free, used, cached = set(self._free), set(self._holders), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert used.isdisjoint(free), "a block is both free and used"
        assert cached.isdisjoint(used | free), "a cached block is free or used"
        assert self.num_free + self.num_used + self.num_cached == self.num_blocks, "free + used + cached is not all"
        assert len(used | free | cached) == self._num_touched, "a block is lost"
        assert {block: key for key, block in self._blocks.items()} == self._keys, "keys and blocks differ"
        assert cached <= set(self._keys) <= used | cached, "a cached block without a key, or a free one with a key"
        copies = [*self._free_copies, *self._copies.values()]
        assert sorted(copies) == [*range(1, self.num_copies + 1)], "a copy is lost, or has two owners"
        assert set(self._copies) <= used | cached, "a free block has a copy"

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        self.drop_copy(block)
        key = self._keys.pop(block, None)
        if key is not None:
            del self._blocks[key]
