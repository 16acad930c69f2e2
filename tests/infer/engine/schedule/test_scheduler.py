"""The scheduler and its blocks under random histories: books always balanced, every request served, none overtaken."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk.core.errors import Overloaded, PromptTooLong
from tk.infer.engine.schedule.samples.sample import Sample, ScheduledChunk, Status
from tk.infer.engine.schedule.scheduler import Scheduler
from tk.infer.engine.schedule.waiting.admission import Limits
from tk.tests.example_counts import examples
from tk.tests.infer.engine.schedule.new_sample import new_sample

BLOCK = 4


def make(arrival: int, num_prompt: int, num_new: int, **options: Any) -> Sample:
    """A sample; `options` are fields of Sample."""
    return new_sample(arrival, range(num_prompt), num_prompt + num_new, **options)


def scheduler(num_blocks: int = 8, max_running: int = 4, max_queued: int = 100, budget: int = 8) -> Scheduler:
    return Scheduler(Limits(max_running, max_queued, budget, num_blocks * BLOCK), num_blocks, BLOCK)


def compute(policy: Scheduler) -> tuple[ScheduledChunk, ...]:
    """Carries out one step: every sample that reaches its end gets a token, complete ones leave."""
    chunks = policy.schedule()
    policy.check_integrity()
    assert sum(chunk.length for chunk in chunks) <= policy.limits.max_batched_tokens
    for chunk in chunks:
        assert chunk.start == chunk.sample.num_computed
        assert chunk.length >= 1
        assert (chunk.start + chunk.length) <= len(chunk.sample.table.blocks) * BLOCK
    for chunk in chunks:
        last = chunk.is_last
        assert policy.advance(chunk)
        if last:
            chunk.sample.output.tokens.append(0)
            if chunk.sample.num_tokens == chunk.sample.output.max_tokens:
                policy.finish(chunk.sample)
    policy.check_integrity()
    return chunks


@examples(60)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(2, 12),
    max_running=st.integers(1, 5),
    budget=st.integers(5, 20),
)
def test_any_history_keeps_the_books_and_ends(seed: int, num_blocks: int, max_running: int, budget: int) -> None:
    choose = random.Random(seed)
    policy = scheduler(num_blocks, max_running, budget=budget)
    capacity = num_blocks * BLOCK
    alive: list[Sample] = []
    for now in range(60):
        for _ in range(choose.choice((0, 0, 1, 3))):
            num_prompt = choose.randint(1, capacity - 1)
            num_new = choose.randint(1, capacity - num_prompt)
            deadline = now + choose.randint(0, 30) if choose.random() < 0.2 else None
            priority, principal = choose.randint(-1, 1), choose.choice("aab")
            new = make(len(alive), num_prompt, num_new, priority=priority, deadline=deadline, principal=principal)
            policy.add([new])
            alive.append(new)
        if alive and choose.random() < 0.15:
            policy.finish(choose.choice(alive))
        policy.expire(now)
        compute(policy)
    steps = 0
    while policy.num_live:
        assert compute(policy), "a sequence is live and nothing is computed"
        steps += 1
        assert steps < 60 * 3 * capacity * 4, "the queue does not drain"
    assert all(sample.status is Status.FINISHED for sample in alive)
    assert policy.allocator.num_available == num_blocks


@examples(60)
@given(sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=2, max_size=12))
def test_first_come_first_served(sizes: list[tuple[int, int]]) -> None:
    policy = scheduler()
    samples = [make(i, prompt, new) for i, (prompt, new) in enumerate(sizes)]
    for sample in samples:
        policy.add([sample])
    begun: list[int] = []
    while policy.num_live:
        for chunk in compute(policy):
            if chunk.sample.arrival not in begun:
                begun.append(chunk.sample.arrival)
    assert begun == sorted(begun)


def test_a_long_prompt_is_cut_and_does_not_hold_up_decoding() -> None:
    policy = scheduler(num_blocks=16, budget=6)
    short, long = make(0, 2, 20), make(1, 30, 1)
    policy.add([short])
    policy.add([long])
    lengths = []
    for _ in range(7):
        chunks = {chunk.sample: chunk.length for chunk in compute(policy)}
        assert chunks.get(short), "the short one waits for the long one"
        lengths.append(chunks.get(long, 0))
    assert lengths == [4, 5, 5, 5, 5, 5, 1]


def test_priority_goes_first_and_the_last_is_preempted() -> None:
    policy = scheduler(num_blocks=4, max_running=3)
    low, high = make(0, 4, 8, priority=0), make(1, 4, 8, priority=1)
    policy.add([low])
    policy.add([high])
    assert [chunk.sample for chunk in compute(policy)] == [high, low]
    while not low.preemptions and policy.num_live:
        compute(policy)
    assert high.status is Status.RUNNING
    assert (low.status, low.table.blocks, low.num_computed) == (Status.WAITING, [], 0)
    assert policy.allocator.num_cached == 1, "its last block was taken, and the others can be found"
    known = list(low.output.tokens)
    while policy.num_live:
        compute(policy)
    assert high.preemptions == 0
    assert low.output.tokens[: len(known)] == known
    assert low.num_new == 8


def test_a_sequence_that_can_never_fit_is_refused() -> None:
    policy = scheduler(num_blocks=8)
    with pytest.raises(PromptTooLong, match=r"30 prompt tokens and 3 new ones are 33.*= 32") as error:
        policy.add([make(0, 30, 3)])
    assert error.value.field == "max_new_tokens"
    with pytest.raises(PromptTooLong) as error:
        policy.add([make(0, 40, 1)])
    assert error.value.field == "prompt"
    policy.add([make(0, 30, 2)])
    assert policy.num_live == 1


def test_a_full_queue_refuses_all_samples_or_none() -> None:
    policy = scheduler(max_running=1, max_queued=2)
    policy.add([make(0, 1, 1)])
    with pytest.raises(Overloaded):
        policy.add([make(1, 1, 1), make(1, 1, 1), make(1, 1, 1)])
    assert policy.num_live == 1
    policy.add([make(1, 1, 1), make(1, 1, 1)])
    with pytest.raises(Overloaded, match=r"no room for . sequences more; the limits are 1 that run and 2 that wait"):
        policy.add([make(2, 1, 1)])


def test_a_chunk_of_a_finished_sequence_counts_for_nothing() -> None:
    policy = scheduler()
    sample = make(0, 3, 3)
    policy.add([sample])
    (chunk,) = policy.schedule()
    policy.finish(sample)
    assert not policy.advance(chunk)
    assert policy.allocator.num_available == 8
    policy.finish(sample)
    policy.check_integrity()
