"""The block tables of all samples: they grow as tokens come, and begin with blocks that hold the same tokens already.

Every full block whose tokens are computed is published under its key. A sample that is admitted shares the published
blocks of its leading tokens, whichever sample computed them, in use or not. Only full blocks are shared between
requests; the tokens after the last shared one are computed.

Samples of one request share the block of the prompt's last token too, full or not. Each of them computes that token
again, for its logits, which stores the same bytes. A sample that has a token of its own to store first takes a copy of
a block that is not full: a fork. Nothing else is written to blocks that others hold or can find.

A preempted sample gives its blocks up like one that ended, and finds those left when it is admitted again.

Workers carry out steps in order. So a block whose tokens a step in flight computes can be shared by the next step, and
a block that it reads can be given away: the step that overwrites it comes later.
"""

from collections import Counter
from collections.abc import Iterable

from ....core.integers import ceil_div
from .block_allocator import BlockAllocator
from .samples.block_table import BlockKey, next_key
from .samples.sample import UNKNOWN, Sample


class BlockManager:
    """The blocks of all samples.

    Args:
        num_blocks: the number of blocks of the cache.
        block_size: the number of tokens of a block.
        num_twins: see `BlockAllocator`.
    """

    def __init__(self, num_blocks: int, block_size: int, num_twins: int = 0) -> None:
        self.block_size = block_size
        self.allocator = BlockAllocator(num_blocks, num_twins)

    def missing(self, sample: Sample, num_more: int = 0) -> int:
        """Returns the number of blocks that the sample's tokens and so many more need and that it does not have."""
        table = sample.table
        missing = max(0, ceil_div(sample.num_tokens + num_more, self.block_size) - len(table.blocks))
        return missing + (table.shares_last and self._must_fork(sample, num_more))

    def room(self, sample: Sample, spare: int) -> int:
        """Returns how many more tokens a sample can have if `spare` blocks must be available afterwards."""
        num_blocks = len(sample.table.blocks) + max(0, self.allocator.num_available - spare)
        return num_blocks * self.block_size - sample.num_tokens

    def num_cached(self, sample: Sample) -> int:
        """Returns how many leading tokens of a waiting sample need not be computed if it is admitted now."""
        return self._num_found(sample, len(self._find(sample)))

    def is_coming(self, sample: Sample, running: Iterable[Sample]) -> bool:
        """Returns whether a running sample has yet to compute a block that a waiting one would share next."""
        place = len(self._find(sample))
        key = self._key(sample, place) if place < self._num_reusable(sample) else None
        return key is not None and any(
            other.table.num_published <= place < other.num_prompt // self.block_size and self._key(other, place) == key
            for other in running
        )

    def num_lacking(self, sample: Sample) -> int:
        """Returns how many blocks more than are available a waiting sample needs; negative: so many are left."""
        return self._num_lacking(sample, self._find(sample))

    def admit(self, sample: Sample, spare: int) -> bool:
        """Gives a sample without blocks all that its known tokens need, shared ones first.

        Args:
            sample: the sample; its number of computed tokens becomes that of the shared blocks.
            spare: the number of blocks that must be available afterwards.

        Returns:
            Whether there were enough blocks; if not, nothing has changed.
        """
        shared, needed = self._find(sample), self.missing(sample)
        if self._num_lacking(sample, shared) + spare > 0:
            return False
        self.allocator.hold(shared)
        table = sample.table
        table.blocks = shared + self.allocator.allocate(needed - len(shared))
        sample.num_computed = self._num_found(sample, len(shared))
        table.num_published = min(len(shared), sample.num_tokens // self.block_size)
        table.shares_last = len(shared) > table.num_published
        table.first_twin, table.stop_twin = max(1, sample.num_computed // self.block_size), len(shared)
        return True

    def grow(self, sample: Sample, num_more: int = 0) -> None:
        """Gives a sample the blocks for its tokens and so many more; the caller knows that they are available."""
        if sample.table.shares_last and self._must_fork(sample, num_more):
            self._fork(sample)
        if missing := self.missing(sample, num_more):
            self.publish(sample)
            sample.table.blocks += self.allocator.allocate(missing)

    def assign_twins(self, sample: Sample, start: int, stop: int) -> None:
        """Gives twins to the blocks of tokens that are computed next, [start, stop) of a running sample.

        The first block keeps its twin as long as it is used or cached, the others until all their tokens are computed.
        """
        table = sample.table
        for i in range(start // self.block_size, ceil_div(stop, self.block_size)):
            if number := self.allocator.assign_twin(table.blocks[i]):
                assert i * self.block_size >= start, "a block's twin was dropped before all its tokens were computed"
                table.twins += (table.blocks[i], number)
                table.stop_twin = i + 1

    def drop_twins(self, running: Iterable[Sample]) -> None:
        """Takes the twins of all blocks but the first whose tokens are computed, and of those without such a token.

        The latter were for proposals that did not come true, or for a chunk that was not sent.
        """
        for sample in running if self.allocator.num_twins else ():
            table, full = sample.table, sample.num_computed // self.block_size
            begun = ceil_div(sample.num_computed, self.block_size)
            for block in table.blocks[table.first_twin : full]:
                self.allocator.drop_twin(block)
            table.first_twin = max(table.first_twin, full)
            if table.stop_twin > begun:
                for block in table.blocks[begun : table.stop_twin]:
                    self.allocator.drop_twin(block)
                table.stop_twin, table.twins = begun, []

    def publish(self, sample: Sample) -> None:
        """Lets others find the full blocks of a sample whose tokens are computed."""
        table = sample.table
        for i in range(table.num_published, sample.num_computed // self.block_size):
            key = self._key(sample, i)
            if key is None:
                return
            self.allocator.publish(table.blocks[i], key)
            table.num_published = i + 1

    def share_last(self, sample: Sample) -> None:
        """Lets the other samples of a request find the block of its prompt's last token, which was just computed."""
        if sample.num_prompt % self.block_size:
            self.allocator.publish(sample.table.blocks[sample.num_prompt // self.block_size], self._last_key(sample))
            sample.table.shares_last = True

    def release(self, sample: Sample, keep: bool = True) -> None:
        """Takes all blocks from a sample; `keep` says whether its full blocks can be found as long as they last."""
        self.publish(sample)
        table = sample.table
        for block in table.blocks[table.first_twin :]:
            if not table.shares_last or block != table.blocks[sample.num_prompt // self.block_size]:
                self.allocator.drop_twin(block)
        self.allocator.free(table.blocks, keep)
        table.blocks, table.twins, table.fork, table.shares_last = [], [], None, False
        sample.num_computed = table.num_published = 0

    def num_leaked(self, live: Iterable[Sample]) -> int:
        """Returns the number of used blocks that none of the live samples holds."""
        held = {block for sample in live for block in sample.table.blocks}
        return self.allocator.num_used - sum(map(self.allocator.is_used, held))

    def check_integrity(self, live: Iterable[Sample]) -> None:
        """Checks the allocator against the tables of all live samples; raises AssertionError if they do not agree."""
        samples = list(live)
        holders = Counter(block for sample in samples for block in sample.table.blocks)
        self.allocator.check_integrity(holders.elements())
        for sample in samples:
            table, blocks, num_full = sample.table, sample.table.blocks, sample.num_computed // self.block_size
            assert len(blocks) == len(set(blocks)), "a table has a block twice"
            assert sample.num_computed <= len(blocks) * self.block_size, "computed tokens without a block"
            is_own = sample.num_computed > sample.num_prompt
            first_own = num_full if is_own else ceil_div(sample.num_prompt, self.block_size)
            assert all(holders[block] == 1 for block in blocks[first_own:]), "a block with own tokens is shared"
            assert table.num_published * self.block_size <= sample.num_computed + 1, "a block was found too early"
            twinned = {i for i, block in enumerate(blocks) if self.allocator.has_twin(block)}
            begun = {0, sample.num_computed // self.block_size} if sample.num_computed % self.block_size else {0}
            assert not self.allocator.num_twins or not sample.num_computed or begun <= twinned, "a twin is missing"
            assert twinned.isdisjoint(range(1, table.first_twin)), "a full block has a twin"
            found = map(self.allocator.find, (*table.prompt_keys, *table.output_keys))
            strangers = {block for block in found if block is not None}.intersection(blocks[table.num_published :])
            assert not strangers, "a block is found that was not published"

    def _find(self, sample: Sample) -> list[int]:
        """Returns the blocks of a waiting sample's leading tokens, as far as they can be found."""
        found: list[int] = []
        for i in range(self._num_reusable(sample)):
            key = self._key(sample, i)
            block = None if key is None else self.allocator.find(key)
            if block is None:
                break
            found.append(block)
        place = (sample.num_prompt - 1) // self.block_size
        may_share = not self.allocator.num_twins or sample.num_prompt % self.block_size  # a full one may lack its twin
        if sample.index and not sample.output.tokens and len(found) == place and may_share:
            last = self.allocator.find(self._last_key(sample))
            if last is not None and sample.table.max_reused >= sample.num_prompt - 1:
                found.append(last)
        return found

    def _num_lacking(self, sample: Sample, shared: Iterable[int]) -> int:
        return self.missing(sample) - sum(map(self.allocator.is_used, shared)) - self.allocator.num_available

    def _num_found(self, sample: Sample, num_blocks: int) -> int:
        """Returns how many leading tokens are in so many blocks that were found; the last token is always computed."""
        return min(num_blocks * self.block_size, sample.num_tokens - 1)

    def _last_key(self, sample: Sample) -> BlockKey:
        """Returns the key of the block of the prompt's last token; no first sample looks for one that is not full."""
        place = (sample.num_prompt - 1) // self.block_size
        if sample.num_prompt % self.block_size == 0:
            key = self._key(sample, place)
            assert key is not None, "the tokens of prompts are known"
            return key
        before = self._key(sample, place - 1) if place else None
        tokens = sample.tokens(place * self.block_size, sample.num_prompt)
        return next_key(before.digest if before else sample.table.root, tokens)

    def _must_fork(self, sample: Sample, num_more: int) -> bool:
        """Returns whether the next step stores a token behind the prompt, known or a proposal."""
        return sample.num_prompt < sample.num_tokens + num_more and sample.num_tokens < sample.output.max_tokens

    def _fork(self, sample: Sample) -> None:
        """Gives a sample a block of its own instead of the shared one of its prompt's last token."""
        table, place = sample.table, sample.num_prompt // self.block_size
        shared, (own,) = table.blocks[place], self.allocator.allocate(1)
        table.blocks[place], table.fork, table.shares_last = own, (place, shared, own), False
        if number := self.allocator.assign_twin(own):
            table.twins += (own, number)
        # The first sample makes room for its own token before the others are admitted, which then find the block.
        self.allocator.free([shared], keep=not sample.index or not table.is_private)

    def _num_reusable(self, sample: Sample) -> int:
        """Returns how many leading blocks may be shared: the logits of the last token are wanted."""
        return min(sample.table.max_reused, sample.num_tokens - 1) // self.block_size

    def _key(self, sample: Sample, index: int) -> BlockKey | None:
        """Returns the key of a block of the sample; None if one of the tokens up to its end is not known."""
        of_prompt, of_output, size = sample.table.prompt_keys, sample.table.output_keys, self.block_size
        while index >= len(of_prompt) + len(of_output):
            start = (len(of_prompt) + len(of_output)) * size
            tokens = sample.tokens(start, start + size)
            if UNKNOWN in tokens:
                return None
            before = of_output or of_prompt
            key = next_key(before[-1].digest if before else sample.table.root, tokens)
            (of_prompt if start + size <= sample.num_prompt else of_output).append(key)
        return of_prompt[index] if index < len(of_prompt) else of_output[index - len(of_prompt)]
