"""Block tables: full blocks are shared, the rest is computed, and what a preempted sample gave up is found again."""

from tk.infer.engine.schedule.block_manager import BlockManager
from tk.infer.engine.schedule.samples.sample import UNKNOWN, Sample
from tk.tests.infer.engine.schedule.new_sample import new_sample

PROMPT = list(range(100, 110))


def make(arrival: int, prompt: list[int]) -> Sample:
    return new_sample(arrival, prompt, 100)


def admitted(tables: BlockManager, arrival: int, prompt: list[int]) -> Sample:
    """A sample with all of its tokens computed."""
    made = make(arrival, prompt)
    assert tables.admit(made, 0)
    made.num_computed = len(prompt)
    tables.publish(made)
    return made


def test_a_second_sequence_shares_the_full_blocks_and_computes_the_rest() -> None:
    tables = BlockManager(8, 4)
    first, second = admitted(tables, 0, PROMPT), make(1, [*PROMPT[:9], 7, 8])
    assert tables.num_cached(second) == 8
    assert tables.admit(second, 0)
    assert (second.table.blocks[:2], second.num_computed) == (first.table.blocks[:2], 8)
    assert second.table.blocks[2] not in first.table.blocks
    tables.check_integrity([first, second])
    assert tables.allocator.num_used == 4


def test_room_is_that_of_own_blocks_and_of_those_left_by_others() -> None:
    tables = BlockManager(6, 4)
    sample = admitted(tables, 0, PROMPT)
    assert [tables.room(sample, spare) for spare in (0, 1, 3, 9)] == [14, 10, 2, 2]
    tables.grow(sample, 3)
    assert len(sample.table.blocks) == 4
    assert tables.missing(sample, 6) == 0, "blocks of tokens that do not come stay"
    sample.num_computed -= 2
    tables.check_integrity([sample])


def test_the_last_token_is_always_computed() -> None:
    tables = BlockManager(8, 4)
    admitted(tables, 0, PROMPT[:8])
    whole, longer = make(1, PROMPT[:8]), make(2, PROMPT[:9])
    assert (tables.num_cached(whole), tables.num_cached(longer)) == (4, 8)


def test_wanted_logits_are_computed() -> None:
    tables = BlockManager(8, 4)
    admitted(tables, 0, PROMPT)
    found = []
    for max_reused in (0, 3, 4, 7, 8, 9):
        sample = make(1, PROMPT)
        sample.table.max_reused = max_reused
        found.append(tables.num_cached(sample))
    assert found == [0, 0, 4, 4, 8, 8]


def test_roots_are_never_crossed() -> None:
    tables = BlockManager(8, 4)
    admitted(tables, 0, PROMPT)
    other = make(1, PROMPT)
    other.table.root = b"another"
    assert tables.num_cached(other) == 0


def test_a_sequence_that_ended_is_found_until_its_blocks_are_needed() -> None:
    tables = BlockManager(4, 4)
    first = admitted(tables, 0, PROMPT)
    tables.release(first)
    assert (first.table.blocks, first.num_computed, tables.allocator.num_cached) == ([], 0, 2)
    second = make(1, PROMPT)
    assert tables.num_cached(second) == 8
    other = admitted(tables, 2, [1] * 12)
    assert tables.num_cached(second) == 4, "of the first one the last cached block went first"
    tables.check_integrity([other])
    assert not tables.admit(second, 0)
    assert (second.table.blocks, second.num_computed) == ([], 0)
    tables.release(other, keep=False)
    assert tables.allocator.num_cached == 1
    assert tables.admit(second, 1)
    assert second.num_computed == 4


def test_room_is_counted_without_the_blocks_that_are_shared() -> None:
    tables = BlockManager(4, 4)
    first = admitted(tables, 0, PROMPT)
    assert not tables.admit(make(1, PROMPT), 1)
    assert tables.admit(make(1, PROMPT), 0), "it shares two used blocks and takes the last one"
    tables = BlockManager(4, 4)
    first = admitted(tables, 0, PROMPT)
    tables.release(first)
    assert not tables.admit(make(1, PROMPT), 2), "two cached blocks are not to be had twice"
    assert tables.admit(make(1, PROMPT), 1)


def test_a_preempted_sequence_finds_its_blocks_again_and_those_of_its_output() -> None:
    tables = BlockManager(4, 4)
    sample = admitted(tables, 0, PROMPT)
    for token in (1, 2, 3):
        sample.output.tokens.append(token)
        tables.grow(sample)
        sample.num_computed += 1
    kept = sample.table.blocks[:3]
    sample.output.tokens.append(4)
    tables.release(sample)
    assert tables.admit(sample, 0)
    assert (sample.table.blocks[:3], sample.num_computed) == (kept, 12)
    tables.check_integrity([sample])


def test_a_block_with_a_token_that_is_not_known_is_not_found() -> None:
    tables = BlockManager(4, 4)
    sample = admitted(tables, 0, PROMPT)
    sample.output.tokens += [1, UNKNOWN]
    sample.num_computed = 12
    tables.release(sample)
    assert tables.allocator.num_cached == 2
    sample.output.tokens[1] = 5
    assert tables.num_cached(sample) == 8


def test_samples_share_the_keys_of_their_prompt() -> None:
    tables = BlockManager(8, 4)
    first = admitted(tables, 0, PROMPT)
    second = make(1, PROMPT)
    second.table.prompt_keys = first.table.prompt_keys
    tables.admit(second, 0)
    second.output.tokens += [5, 6]
    second.num_computed = 12
    tables.publish(second)
    assert (len(first.table.prompt_keys), len(first.table.output_keys), len(second.table.output_keys)) == (2, 0, 1)
    tables.check_integrity([first, second])


def test_a_sample_copies_the_shared_block_at_its_first_own_token_and_not_before() -> None:
    tables = BlockManager(6, 4)
    first = admitted(tables, 0, PROMPT)
    tables.share_last(first)
    second, stranger = make(0, PROMPT), make(1, PROMPT)
    second.index = 1
    assert tables.num_cached(stranger) == 8, "other requests share full blocks only"
    assert tables.admit(second, 0)
    assert (second.table.blocks, second.num_computed, tables.allocator.num_used) == (first.table.blocks, 9, 3)
    shared = first.table.blocks[2]
    tables.grow(first)
    assert first.table.fork is None, "its next token is not known yet"
    for sample, own in ((first, 4), (second, 5)):
        sample.output.tokens.append(7)
        assert tables.missing(sample) == 1
        tables.grow(sample)
        assert sample.table.fork == (2, shared, own)
        assert sample.table.blocks == [1, 2, own]
        assert tables.missing(sample) == 0
        tables.check_integrity([first, second])
    assert (tables.allocator.num_used, tables.allocator.num_cached) == (4, 1)
