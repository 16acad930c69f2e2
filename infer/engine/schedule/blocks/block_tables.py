"""The block tables of sequences: they grow as tokens come, and begin with blocks that hold the same tokens already.

Every full block whose tokens are computed is published under its key. A sequence that is admitted shares the published
blocks of its leading tokens, whichever sequence computed them, in use or not. Only full blocks are shared between
requests; the tokens after the last shared one are computed.

Samples of one request share the block of the prompt's last token too, full or not. Each of them computes that token
again, for its logits, which stores the same bytes. A sample that has a token of its own to store first takes a copy of
a block that is not full: a fork. Nothing else is written to blocks that others hold or can find.

A preempted sequence gives its blocks up like one that ended, and finds those left when it is admitted again.

Workers carry out steps in order. So a block whose tokens a step in flight computes can be shared by the next step, and
a block that it reads can be given away: the step that overwrites it comes later.
"""

from collections import Counter
from collections.abc import Iterable

from .....core.integers import ceil_div
from ..samples.prefix_keys import BlockKey, next_key
from ..samples.sequence import UNKNOWN, Sequence
from .block_allocator import BlockAllocator


class BlockTables:
    """The blocks of all sequences.

    Args:
        num_blocks: the number of blocks of the cache.
        block_size: the number of tokens of a block.
        num_twins: see `BlockAllocator`.
    """

    def __init__(self, num_blocks: int, block_size: int, num_twins: int = 0) -> None:
        self.block_size = block_size
        self.allocator = BlockAllocator(num_blocks, num_twins)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the whole cache holds."""
        return self.allocator.num_blocks * self.block_size

    def missing(self, sequence: Sequence, num_more: int = 0) -> int:
        """Returns the number of blocks that the sequence's tokens and so many more need and that it does not have."""
        missing = max(0, ceil_div(sequence.num_tokens + num_more, self.block_size) - len(sequence.blocks))
        return missing + (sequence.shares_last and self._must_fork(sequence, num_more))

    def room(self, sequence: Sequence, spare: int) -> int:
        """Returns how many more tokens a sequence can have if `spare` blocks must be available afterwards."""
        num_blocks = len(sequence.blocks) + max(0, self.allocator.num_available - spare)
        return num_blocks * self.block_size - sequence.num_tokens

    def num_cached(self, sequence: Sequence) -> int:
        """Returns how many leading tokens of a waiting sequence need not be computed if it is admitted now."""
        return self._num_found(sequence, len(self._find(sequence)))

    def is_coming(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Returns whether a running sequence has yet to compute a block that a waiting one would share next."""
        place = len(self._find(sequence))
        key = self._key(sequence, place) if place < self._num_reusable(sequence) else None
        return key is not None and any(
            other.num_published <= place < other.num_prompt // self.block_size and self._key(other, place) == key
            for other in running
        )

    def num_lacking(self, sequence: Sequence) -> int:
        """Returns how many blocks more than are available a waiting sequence needs; negative: so many are left."""
        return self._num_lacking(sequence, self._find(sequence))

    def admit(self, sequence: Sequence, spare: int) -> bool:
        """Gives a sequence without blocks all that its known tokens need, shared ones first.

        Args:
            sequence: the sequence; its number of computed tokens becomes that of the shared blocks.
            spare: the number of blocks that must be available afterwards.

        Returns:
            Whether there were enough blocks; if not, nothing has changed.
        """
        shared, needed = self._find(sequence), self.missing(sequence)
        if self._num_lacking(sequence, shared) + spare > 0:
            return False
        self.allocator.hold(shared)
        sequence.blocks = shared + self.allocator.allocate(needed - len(shared))
        sequence.num_computed = self._num_found(sequence, len(shared))
        sequence.num_published = min(len(shared), sequence.num_tokens // self.block_size)
        sequence.shares_last = len(shared) > sequence.num_published
        sequence.first_twin, sequence.stop_twin = max(1, sequence.num_computed // self.block_size), len(shared)
        return True

    def grow(self, sequence: Sequence, num_more: int = 0) -> None:
        """Gives a sequence the blocks for its tokens and so many more; the caller knows that they are available."""
        if sequence.shares_last and self._must_fork(sequence, num_more):
            self._fork(sequence)
        if missing := self.missing(sequence, num_more):
            self.publish(sequence)
            sequence.blocks += self.allocator.allocate(missing)

    def give_twins(self, sequence: Sequence, start: int, stop: int) -> None:
        """Gives twins to the blocks of tokens that are computed next, [start, stop) of a running sequence.

        The first block keeps its twin as long as it is used or cached, the others until all their tokens are computed.
        """
        for i in range(start // self.block_size, ceil_div(stop, self.block_size)):
            if number := self.allocator.give_twin(sequence.blocks[i]):
                assert i * self.block_size >= start, "a block's twin was dropped before all its tokens were computed"
                sequence.twins += (sequence.blocks[i], number)
                sequence.stop_twin = i + 1

    def drop_twins(self, running: Iterable[Sequence]) -> None:
        """Takes the twins of all blocks but the first whose tokens are computed, and of those without such a token.

        The latter were for proposals that did not come true, or for a chunk that was not sent.
        """
        for sequence in running if self.allocator.num_twins else ():
            full, begun = sequence.num_computed // self.block_size, ceil_div(sequence.num_computed, self.block_size)
            for block in sequence.blocks[sequence.first_twin : full]:
                self.allocator.drop_twin(block)
            sequence.first_twin = max(sequence.first_twin, full)
            if sequence.stop_twin > begun:
                for block in sequence.blocks[begun : sequence.stop_twin]:
                    self.allocator.drop_twin(block)
                sequence.stop_twin, sequence.twins = begun, []

    def publish(self, sequence: Sequence) -> None:
        """Lets others find the full blocks of a sequence whose tokens are computed."""
        for i in range(sequence.num_published, sequence.num_computed // self.block_size):
            key = self._key(sequence, i)
            if key is None:
                return
            self.allocator.publish(sequence.blocks[i], key)
            sequence.num_published = i + 1

    def share_last(self, sequence: Sequence) -> None:
        """Lets the other samples of a request find the block of its prompt's last token, which was just computed."""
        if sequence.num_prompt % self.block_size:
            self.allocator.publish(sequence.blocks[sequence.num_prompt // self.block_size], self._last_key(sequence))
            sequence.shares_last = True

    def release(self, sequence: Sequence, keep: bool = True) -> None:
        """Takes all blocks from a sequence; `keep` says whether its full blocks can be found as long as they last."""
        self.publish(sequence)
        for block in sequence.blocks[sequence.first_twin :]:
            if not sequence.shares_last or block != sequence.blocks[sequence.num_prompt // self.block_size]:
                self.allocator.drop_twin(block)
        self.allocator.free(sequence.blocks, keep)
        sequence.blocks, sequence.twins, sequence.fork = [], [], None
        sequence.num_computed = sequence.num_published = 0
        sequence.shares_last = False

    def num_leaked(self, live: Iterable[Sequence]) -> int:
        """Returns the number of used blocks that none of the live sequences holds."""
        held = {block for sequence in live for block in sequence.blocks}
        return self.allocator.num_used - sum(map(self.allocator.is_used, held))

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Checks the books against the tables of all live sequences; raises AssertionError if they do not agree."""
        sequences = list(live)
        holders = Counter(block for sequence in sequences for block in sequence.blocks)
        self.allocator.check_integrity(holders.elements())
        for sequence in sequences:
            table, num_full = sequence.blocks, sequence.num_computed // self.block_size
            assert len(table) == len(set(table)), "a table has a block twice"
            assert sequence.num_computed <= len(table) * self.block_size, "computed tokens without a block"
            is_own = sequence.num_computed > sequence.num_prompt
            first_own = num_full if is_own else ceil_div(sequence.num_prompt, self.block_size)
            assert all(holders[block] == 1 for block in table[first_own:]), "a block with own tokens is shared"
            assert sequence.num_published * self.block_size <= sequence.num_computed + 1, "a block was found too early"
            twinned = {i for i, block in enumerate(table) if self.allocator.has_twin(block)}
            begun = {0, sequence.num_computed // self.block_size} if sequence.num_computed % self.block_size else {0}
            assert not self.allocator.num_twins or not sequence.num_computed or begun <= twinned, "a twin is missing"
            assert twinned.isdisjoint(range(1, sequence.first_twin)), "a full block has a twin"
            found = map(self.allocator.find, (*sequence.prompt_keys, *sequence.output_keys))
            strangers = {block for block in found if block is not None}.intersection(table[sequence.num_published :])
            assert not strangers, "a block is found that was not published"

    def _find(self, sequence: Sequence) -> list[int]:
        """Returns the blocks of a waiting sequence's leading tokens, as far as they can be found."""
        found: list[int] = []
        for i in range(self._num_reusable(sequence)):
            key = self._key(sequence, i)
            block = None if key is None else self.allocator.find(key)
            if block is None:
                break
            found.append(block)
        place = (sequence.num_prompt - 1) // self.block_size
        if sequence.index and not sequence.output and len(found) == place and self._may_share_last(sequence):
            last = self.allocator.find(self._last_key(sequence))
            if last is not None and sequence.max_reused >= sequence.num_prompt - 1:
                found.append(last)
        return found

    def _num_lacking(self, sequence: Sequence, shared: Iterable[int]) -> int:
        return self.missing(sequence) - sum(map(self.allocator.is_used, shared)) - self.allocator.num_available

    def _num_found(self, sequence: Sequence, num_blocks: int) -> int:
        """Returns how many leading tokens are in so many blocks that were found; the last token is always computed."""
        return min(num_blocks * self.block_size, sequence.num_tokens - 1)

    def _may_share_last(self, sequence: Sequence) -> bool:
        """Returns whether samples share the block of the prompt's last token; a full one may have lost its twin."""
        return not self.allocator.num_twins or sequence.num_prompt % self.block_size > 0

    def _last_key(self, sequence: Sequence) -> BlockKey:
        """Returns the key of the block of the prompt's last token; no first sample looks for one that is not full."""
        place = (sequence.num_prompt - 1) // self.block_size
        if sequence.num_prompt % self.block_size == 0:
            key = self._key(sequence, place)
            assert key is not None, "the tokens of prompts are known"
            return key
        before = self._key(sequence, place - 1) if place else None
        tokens = sequence.tokens(place * self.block_size, sequence.num_prompt)
        return next_key(before.digest if before else sequence.root, tokens)

    def _must_fork(self, sequence: Sequence, num_more: int) -> bool:
        """Returns whether the next step stores a token behind the prompt, known or a proposal."""
        return sequence.num_prompt < sequence.num_tokens + num_more and sequence.num_tokens < sequence.max_tokens

    def _fork(self, sequence: Sequence) -> None:
        """Gives a sequence a block of its own instead of the shared one of its prompt's last token."""
        place = sequence.num_prompt // self.block_size
        shared, (own,) = sequence.blocks[place], self.allocator.allocate(1)
        sequence.blocks[place], sequence.fork, sequence.shares_last = own, (place, shared, own), False
        if number := self.allocator.give_twin(own):
            sequence.twins += (own, number)
        # The first sample makes room for its own token before the others are admitted, which then find the block.
        self.allocator.free([shared], keep=not sequence.index or not sequence.is_private)

    def _num_reusable(self, sequence: Sequence) -> int:
        """Returns how many leading blocks may be shared: the logits of the last token are wanted."""
        return min(sequence.max_reused, sequence.num_tokens - 1) // self.block_size

    def _key(self, sequence: Sequence, index: int) -> BlockKey | None:
        """Returns the key of a block of the sequence; None if one of the tokens up to its end is not known."""
        of_prompt, of_output, size = sequence.prompt_keys, sequence.output_keys, self.block_size
        while index >= len(of_prompt) + len(of_output):
            start = (len(of_prompt) + len(of_output)) * size
            tokens = sequence.tokens(start, start + size)
            if UNKNOWN in tokens:
                return None
            before = of_output or of_prompt
            key = next_key(before[-1].digest if before else sequence.root, tokens)
            (of_prompt if start + size <= sequence.num_prompt else of_output).append(key)
        return of_prompt[index] if index < len(of_prompt) else of_output[index - len(of_prompt)]
