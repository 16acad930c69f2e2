"""The allocator of KV cache blocks: reference counts, and the blocks that are kept because they may be wanted again.

A block is free, used (it has holders) or cached: it has no holder, and its key finds it. When free blocks run out, the
cached block that was unused for longest is taken. Blocks are plain integers, so tests of all policies take
microseconds. No operation costs more than the blocks that it is given, but for `assign_twin` without a free twin.

A cache of 4 bits has twins of some blocks, the same in int8, of which there are fewer (see KVFormat.num_twins).
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence

from .samples.block_table import BlockKey


class BlockAllocator:
    """Allocates blocks 1 to `num_blocks`. Block 0 is never allocated: it pads block tables and stays zero.

    Args:
        num_blocks: the number of blocks that can be allocated.
        num_twins: the number of twins, 1 to this one; 0: blocks have none, or each has its own.
    """

    def __init__(self, num_blocks: int, num_twins: int = 0) -> None:
        self.num_blocks, self.num_twins = num_blocks, num_twins
        self._free_twins = list(range(num_twins, 0, -1))
        self._twins: dict[int, int] = {}  # of used and cached blocks
        self._num_touched = 0  # blocks 1 to this one were allocated before; a list of the others is not needed
        self._free: deque[int] = deque()  # the free ones among those
        self._holders: dict[int, int] = {}  # the number of holders of every used block
        self._cached: OrderedDict[int, None] = OrderedDict()  # the one that was unused for longest comes first
        self._blocks: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}  # of used and cached blocks
        self._drafted: set[int] = set()

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
        self._drafted.difference_update(blocks)
        return blocks

    def is_drafted(self, block: int) -> bool:
        """Returns whether a draft model's cache has the keys of all tokens of a full block, too."""
        return block in self._drafted

    def add_drafted(self, blocks: Iterable[int]) -> None:
        """Records full blocks whose keys a draft model's cache has now, as long as they hold the same tokens."""
        self._drafted.update(blocks)

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

    def assign_twin(self, block: int) -> int | None:
        """Gives a used block a twin; returns its number, or None if the block has one already, or needs none.

        If no twin is free, a cached block that has one is given up, which costs the time to find it.
        """
        if not self.num_twins or block in self._twins:
            return None
        if not self._free_twins:
            found = next((other for other in self._cached if other in self._twins), None)
            assert found is not None, "more twins are used than samples and steps need"
            del self._cached[found]
            self._forget(found)
            self._free.append(found)
        self._twins[block] = self._free_twins.pop()
        return self._twins[block]

    def has_twin(self, block: int) -> bool:
        """Returns whether a used or cached block has a twin."""
        return block in self._twins

    def drop_twin(self, block: int) -> None:
        """Takes a block's twin away, if it has one."""
        if twin := self._twins.pop(block, None):
            self._free_twins.append(twin)

    def flush(self) -> None:
        """Makes cached blocks free: no key finds a block any more, because the cache has lost its content."""
        for block in self._cached:
            self.drop_twin(block)
        self._free.extend(self._cached)
        self._cached.clear()
        self._blocks.clear()
        self._keys.clear()
        self._drafted.clear()

    def check_integrity(self, held: Iterable[int]) -> None:
        """Checks that free + used + cached blocks are all, and that `held` has each used block once per holder.

        Raises:
            AssertionError: the counts do not agree.
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
        twins = [*self._free_twins, *self._twins.values()]
        assert sorted(twins) == [*range(1, self.num_twins + 1)], "a twin is lost, or has two owners"
        assert set(self._twins) <= used | cached, "a free block has a twin"

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        self.drop_twin(block)
        key = self._keys.pop(block, None)
        if key is not None:
            del self._blocks[key]
