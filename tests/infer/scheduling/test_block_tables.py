"""Block tables: preempted sequences lose blocks from the tail, the least important first, and no more than needed."""

from tk.infer.requests.sampling_params import SamplingParams
from tk.infer.scheduling.block_tables import BlockTables
from tk.infer.scheduling.sequence import Sequence


def make(tables: BlockTables, arrival: int, length: int, priority: int = 0) -> Sequence:
    """A sequence with all of its tokens computed."""
    made = Sequence(f"r{arrival}", 0, arrival, SamplingParams(), 0, [0] * length, 100, priority=priority)
    assert tables.missing(made) <= tables.available(made)
    tables.grow(made)
    made.num_computed = length
    return made


def test_the_tail_of_the_newest_goes_first() -> None:
    tables = BlockTables(6, 4)
    old, new = make(tables, 0, 12), make(tables, 1, 12)
    tables.park(old)
    tables.park(new)
    third = make(tables, 2, 4)
    tables.check_integrity([old, new, third])
    assert (len(old.blocks), old.num_computed) == (3, 12)
    assert (len(new.blocks), new.num_computed) == (2, 8)
    fourth = make(tables, 3, 12)
    tables.check_integrity([old, new, third, fourth])
    assert (len(old.blocks), len(new.blocks)) == (2, 0)
    assert tables.available(fourth) == 2


def test_a_lower_priority_goes_before_a_newer_one() -> None:
    tables = BlockTables(2, 4)
    low, high = make(tables, 0, 4, priority=0), make(tables, 1, 4, priority=1)
    tables.park(low)
    tables.park(high)
    make(tables, 2, 4)
    assert (low.blocks, len(high.blocks)) == ([], 1)


def test_a_parked_sequence_that_grows_keeps_its_blocks() -> None:
    tables = BlockTables(4, 4)
    parked, other = make(tables, 0, 8), make(tables, 1, 8)
    tables.park(parked)
    tables.park(other)
    kept = list(parked.blocks)
    parked.output += [0] * 4
    assert tables.available(parked) == 2, "its own blocks are not to be had twice"
    assert tables.grow(parked) == [other]
    assert (parked.blocks[:2], parked.num_computed) == (kept, 8)
    tables.check_integrity([parked, other])
    tables.release(parked)
    tables.release(other)
    assert tables.allocator.num_free == 4
