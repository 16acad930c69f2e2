"""Block tables: full blocks are shared, the rest is computed, and what a preempted sequence gave up is found again."""

from tk.infer.engine.request.sampling_params import SamplingParams
from tk.infer.engine.schedule.blocks.block_tables import BlockTables
from tk.infer.engine.schedule.samples.sequence import UNKNOWN, Sequence

PROMPT = list(range(100, 110))


def make(arrival: int, prompt: list[int]) -> Sequence:
    return Sequence(f"r{arrival}", 0, arrival, SamplingParams(), 0, prompt, 100)


def admitted(tables: BlockTables, arrival: int, prompt: list[int]) -> Sequence:
    """A sequence with all of its tokens computed."""
    made = make(arrival, prompt)
    assert tables.admit(made, 0)
    made.num_computed = len(prompt)
    tables.publish(made)
    return made


def test_a_second_sequence_shares_the_full_blocks_and_computes_the_rest() -> None:
    tables = BlockTables(8, 4)
    first, second = admitted(tables, 0, PROMPT), make(1, [*PROMPT[:9], 7, 8])
    assert tables.num_cached(second) == 8
    assert tables.admit(second, 0)
    assert (second.blocks[:2], second.num_computed) == (first.blocks[:2], 8)
    assert second.blocks[2] not in first.blocks
    tables.check_integrity([first, second])
    assert tables.allocator.num_used == 4


def test_room_is_that_of_own_blocks_and_of_those_left_by_others() -> None:
    tables = BlockTables(6, 4)
    sequence = admitted(tables, 0, PROMPT)
    assert [tables.room(sequence, spare) for spare in (0, 1, 3, 9)] == [14, 10, 2, 2]
    tables.grow(sequence, 3)
    assert len(sequence.blocks) == 4
    assert tables.missing(sequence, 6) == 0, "blocks of tokens that do not come stay"
    sequence.num_computed -= 2
    tables.check_integrity([sequence])


def test_the_last_token_is_always_computed() -> None:
    tables = BlockTables(8, 4)
    admitted(tables, 0, PROMPT[:8])
    whole, longer = make(1, PROMPT[:8]), make(2, PROMPT[:9])
    assert (tables.num_cached(whole), tables.num_cached(longer)) == (4, 8)


def test_wanted_logits_are_computed() -> None:
    tables = BlockTables(8, 4)
    admitted(tables, 0, PROMPT)
    found = []
    for max_reused in (0, 3, 4, 7, 8, 9):
        sequence = make(1, PROMPT)
        sequence.max_reused = max_reused
        found.append(tables.num_cached(sequence))
    assert found == [0, 0, 4, 4, 8, 8]


def test_roots_are_never_crossed() -> None:
    tables = BlockTables(8, 4)
    admitted(tables, 0, PROMPT)
    other = make(1, PROMPT)
    other.root = b"another"
    assert tables.num_cached(other) == 0


def test_a_sequence_that_ended_is_found_until_its_blocks_are_needed() -> None:
    tables = BlockTables(4, 4)
    first = admitted(tables, 0, PROMPT)
    tables.release(first)
    assert (first.blocks, first.num_computed, tables.allocator.num_cached) == ([], 0, 2)
    second = make(1, PROMPT)
    assert tables.num_cached(second) == 8
    other = admitted(tables, 2, [1] * 12)
    assert tables.num_cached(second) == 4, "of the first one the last cached block went first"
    tables.check_integrity([other])
    assert not tables.admit(second, 0)
    assert (second.blocks, second.num_computed) == ([], 0)
    tables.release(other, keep=False)
    assert tables.allocator.num_cached == 1
    assert tables.admit(second, 1)
    assert second.num_computed == 4


def test_room_is_counted_without_the_blocks_that_are_shared() -> None:
    tables = BlockTables(4, 4)
    first = admitted(tables, 0, PROMPT)
    assert not tables.admit(make(1, PROMPT), 1)
    assert tables.admit(make(1, PROMPT), 0), "it shares two used blocks and takes the last one"
    tables = BlockTables(4, 4)
    first = admitted(tables, 0, PROMPT)
    tables.release(first)
    assert not tables.admit(make(1, PROMPT), 2), "two cached blocks are not to be had twice"
    assert tables.admit(make(1, PROMPT), 1)


def test_a_preempted_sequence_finds_its_blocks_again_and_those_of_its_output() -> None:
    tables = BlockTables(4, 4)
    sequence = admitted(tables, 0, PROMPT)
    for token in (1, 2, 3):
        sequence.append(token)
        tables.grow(sequence)
        sequence.num_computed += 1
    kept = sequence.blocks[:3]
    sequence.append(4)
    tables.release(sequence)
    assert tables.admit(sequence, 0)
    assert (sequence.blocks[:3], sequence.num_computed) == (kept, 12)
    tables.check_integrity([sequence])


def test_a_block_with_a_token_that_is_not_known_is_not_found() -> None:
    tables = BlockTables(4, 4)
    sequence = admitted(tables, 0, PROMPT)
    sequence.output += [1, UNKNOWN]
    sequence.num_computed = 12
    tables.release(sequence)
    assert tables.allocator.num_cached == 2
    sequence.output[1] = 5
    assert tables.num_cached(sequence) == 8


def test_samples_share_the_keys_of_their_prompt() -> None:
    tables = BlockTables(8, 4)
    first = admitted(tables, 0, PROMPT)
    second = make(1, PROMPT)
    second.prompt_keys = first.prompt_keys
    tables.admit(second, 0)
    second.output += [5, 6]
    second.num_computed = 12
    tables.publish(second)
    assert (len(first.prompt_keys), len(first.output_keys), len(second.output_keys)) == (2, 0, 1)
    tables.check_integrity([first, second])


def test_a_sample_copies_the_shared_block_at_its_first_own_token_and_not_before() -> None:
    tables = BlockTables(6, 4)
    first = admitted(tables, 0, PROMPT)
    tables.share_last(first)
    second, stranger = make(0, PROMPT), make(1, PROMPT)
    second.index = 1
    assert tables.num_cached(stranger) == 8, "other requests share full blocks only"
    assert tables.admit(second, 0)
    assert (second.blocks, second.num_computed, tables.allocator.num_used) == (first.blocks, 9, 3)
    shared = first.blocks[2]
    tables.grow(first)
    assert first.fork is None, "its next token is not known yet"
    for sequence, own in ((first, 4), (second, 5)):
        sequence.append(7)
        assert tables.missing(sequence) == 1
        tables.grow(sequence)
        assert sequence.fork == (2, shared, own)
        assert sequence.blocks == [1, 2, own]
        assert tables.missing(sequence) == 0
        tables.check_integrity([first, second])
    assert (tables.allocator.num_used, tables.allocator.num_cached) == (4, 1)
