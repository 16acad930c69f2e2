"""The allocator of blocks: counts of holders, the order of eviction, keys that find a block as long as it lasts."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk.infer.engine.schedule.block_allocator import BlockAllocator
from tk.infer.engine.schedule.samples.block_table import BlockKey, next_key
from tk.tests.example_counts import examples


def key(number: int) -> BlockKey:
    return next_key(b"", [number])


def found(allocator: BlockAllocator, count: int) -> dict[int, BlockKey]:
    """The blocks that the first keys find."""
    blocks = {key(number): allocator.find(key(number)) for number in range(count)}
    return {block: name for name, block in blocks.items() if block is not None}


@examples(100)
@given(st.integers(1, 20), st.lists(st.integers(0, 6), max_size=60), st.integers(0, 2**32))
def test_any_history_keeps_the_books(total: int, wishes: list[int], seed: int) -> None:
    choose = random.Random(seed)
    allocator = BlockAllocator(total)
    tables: list[list[int]] = []
    content: dict[int, BlockKey] = {}  # of a block, as its last owner published it
    for wish in wishes:
        kind = choose.random()
        if kind < 0.4 and wish <= allocator.num_available:
            tables.append(allocator.allocate(wish))
            for block in tables[-1]:
                content.pop(block, None)
        elif kind < 0.6 and tables:
            for block in choose.choice(tables):
                number = choose.randrange(12)
                if allocator.find(key(number)) is None and block not in content:
                    allocator.publish(block, key(number))
                    content[block] = key(number)
        elif kind < 0.8:
            shared = list(found(allocator, wish))
            allocator.hold(shared)
            tables.append(shared)
        elif tables:
            keep = choose.random() < 0.8
            gone = tables.pop(choose.randrange(len(tables)))
            allocator.free(gone, keep)
            held = {block for table in tables for block in table}
            content = {block: name for block, name in content.items() if keep or block in held or block not in gone}
        allocator.check_integrity(block for table in tables for block in table)
        used = Counter(block for table in tables for block in table)
        assert (allocator.num_used, allocator.num_available) == (len(used), total - len(used))
        assert all(1 <= block <= total for block in used)
        assert found(allocator, 12) == content


def test_no_memory_is_taken_for_blocks_that_were_never_wanted() -> None:
    allocator = BlockAllocator(1 << 60)
    assert allocator.allocate(2) == [1, 2]
    allocator.free([1])
    assert allocator.allocate(1) == [3], "what was freed goes to the end of the queue"
    assert allocator.num_free == (1 << 60) - 2
    allocator.check_integrity([2, 3])


def test_a_leak_is_seen_and_so_is_a_wrong_count() -> None:
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(2)
    with pytest.raises(AssertionError, match=r"leaked.*\[2\]"):
        allocator.check_integrity([1])
    allocator.hold(blocks[:1])
    allocator.check_integrity([1, 1, 2])
    with pytest.raises(AssertionError, match=r"leaked.*\[1\]"):
        allocator.check_integrity([1, 2])


def test_a_block_lasts_until_its_last_holder_and_then_as_long_as_nobody_needs_it() -> None:
    allocator = BlockAllocator(2)
    (block,) = allocator.allocate(1)
    allocator.publish(block, key(5))
    allocator.hold([block])
    allocator.free([block])
    assert (allocator.num_used, allocator.num_cached, allocator.is_used(block)) == (1, 0, True)
    allocator.free([block])
    assert (allocator.num_used, allocator.num_cached, allocator.num_free) == (0, 1, 1)
    assert allocator.find(key(5)) == block
    allocator.allocate(1)
    assert allocator.find(key(5)) == block, "a free block is taken first"
    assert allocator.allocate(1) == [block]
    assert allocator.find(key(5)) is None


def test_the_one_that_was_unused_for_longest_goes_first_and_the_end_of_a_table_before_its_start() -> None:
    allocator = BlockAllocator(6)
    old, new = allocator.allocate(3), allocator.allocate(3)
    for block in (*old, *new):
        allocator.publish(block, key(block))
    allocator.free(old)
    allocator.free(new)
    allocator.hold(old[:1])
    allocator.free(old[:1])
    assert [allocator.allocate(1)[0] for _ in range(6)] == [old[2], old[1], new[2], new[1], new[0], old[0]]


def test_what_is_not_kept_or_has_no_key_is_free_at_once() -> None:
    allocator = BlockAllocator(3)
    blocks = allocator.allocate(3)
    allocator.publish(blocks[0], key(0))
    allocator.publish(blocks[1], key(1))
    allocator.free(blocks[1:])
    allocator.free(blocks[:1], keep=False)
    assert (allocator.num_free, allocator.num_cached) == (2, 1)
    assert allocator.find(key(0)) is None
    assert allocator.find(key(1)) == blocks[1]


def test_a_flush_makes_cached_blocks_free_and_used_ones_unknown() -> None:
    allocator = BlockAllocator(3)
    blocks = allocator.allocate(3)
    for block in blocks:
        allocator.publish(block, key(block))
    allocator.free(blocks[1:])
    allocator.flush()
    allocator.check_integrity(blocks[:1])
    assert (allocator.num_used, allocator.num_cached, allocator.num_free) == (1, 0, 2)
    assert found(allocator, 4) == {}
    allocator.free(blocks[:1])
    allocator.check_integrity([])
    assert allocator.num_free == 3


def test_a_second_block_of_the_same_content_is_not_found() -> None:
    allocator = BlockAllocator(2)
    first, second = allocator.allocate(2)
    allocator.publish(first, key(0))
    allocator.publish(second, key(0))
    allocator.free([second])
    assert (allocator.find(key(0)), allocator.num_free, allocator.num_cached) == (first, 1, 0)


def test_tokens_are_compared_even_if_digests_are_equal() -> None:
    allocator = BlockAllocator(2)
    (block,) = allocator.allocate(1)
    allocator.publish(block, BlockKey(b"digest", b"tokens"))
    assert allocator.find(BlockKey(b"digest", b"others")) is None


def test_a_twin_lasts_as_long_as_its_block_and_cached_blocks_give_theirs_up() -> None:
    allocator = BlockAllocator(6, num_twins=2)
    first, second, third = allocator.allocate(3)
    assert [allocator.assign_twin(first), allocator.assign_twin(first)] == [1, None], "it has one already"
    allocator.publish(first, key(1))
    allocator.free([first])
    assert allocator.has_twin(first), "a cached block keeps its twin"
    assert allocator.assign_twin(second) == 2
    allocator.check_integrity([second, third])
    assert allocator.assign_twin(third) == 1, "none was free"
    assert allocator.find(key(1)) is None
    assert (allocator.num_free, allocator.num_cached) == (4, 0)
    allocator.check_integrity([second, third])
    allocator.drop_twin(second)
    allocator.free([third])
    assert allocator.assign_twin(second) == 1
    allocator.check_integrity([second])
    assert BlockAllocator(6).assign_twin(1) is None, "each block has its own"


def test_a_cache_that_lost_its_content_has_all_twins_again() -> None:
    allocator = BlockAllocator(4, num_twins=1)
    (block,) = allocator.allocate(1)
    assert allocator.assign_twin(block) == 1
    allocator.publish(block, key(1))
    allocator.free([block])
    allocator.flush()
    allocator.check_integrity([])
    assert allocator.assign_twin(allocator.allocate(1)[0]) == 1
