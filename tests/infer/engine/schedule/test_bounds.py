"""Bounds in time, on a machine whose steps take a known time: the longest step, and the first token's deadline."""

import random

import pytest

from tk.core.errors import DeadlinePassed, Overloaded
from tk.infer.engine.schedule.samples.sample import Sample, Status
from tk.infer.engine.schedule.scheduler import Scheduler
from tk.infer.engine.schedule.step_cost import StepSize
from tk.infer.engine.schedule.waiting.admission import Limits
from tk.tests.infer.engine.schedule.new_sample import new_sample


def seconds(size: StepSize) -> float:
    return 0.002 + 1e-4 * size.num_tokens + 1e-7 * size.num_keys


def make(arrival: int, num_prompt: int, num_new: int = 4, deadline: float | None = None) -> Sample:
    return new_sample(arrival, [arrival] * num_prompt, num_prompt + num_new, deadline=deadline)


def measured(max_step_seconds: float | None = None, max_running: int = 8) -> Scheduler:
    policy = Scheduler(Limits(max_running, 1000, 256, 4096, max_step_seconds), 512, 16)
    sizes = [StepSize().plus(0, 1), StepSize().plus(0, 256), StepSize().plus(2000, 64), StepSize().plus(2000, 1)]
    policy.cost.calibrate((size, seconds(size)) for size in sizes)
    return policy


def step(policy: Scheduler, factor: float = 1.0) -> float:
    """Carries out one step, which takes `factor` times as long as usual, and returns its duration."""
    chunks = policy.schedule()
    size = StepSize()
    for chunk in chunks:
        size = size.plus(chunk.start, chunk.length)
        last = chunk.is_last
        policy.advance(chunk)
        if last:
            chunk.sample.output.tokens.append(0)
            if chunk.sample.num_tokens == chunk.sample.output.max_tokens:
                policy.finish(chunk.sample)
    policy.observe(chunks, factor * seconds(size))
    policy.check_integrity()
    return factor * seconds(size)


def test_a_long_prompt_never_holds_up_a_stream_beyond_the_bound() -> None:
    policy = measured(max_step_seconds=0.01)
    stream, long = make(0, 4, 900), make(1, 3000)
    policy.add([stream])
    step(policy)
    policy.add([long])
    steps = 0
    while long.num_uncomputed > 1:
        tokens = stream.num_new
        assert step(policy) <= 0.01 * 1.01
        assert stream.num_new == tokens + 1
        steps += 1
    assert steps < 100, "the chunks use the time that there is"


def test_full_steps_keep_the_bound_on_a_machine_whose_steps_vary() -> None:
    policy, draw, durations = measured(max_step_seconds=0.02), random.Random(0), list[float]()
    for arrival in range(40):
        policy.add([prompt := make(arrival, 3000, 1)])
        while prompt.status is not Status.FINISHED:
            durations.append(step(policy, draw.gauss(1.0, 0.1)))
    late = [each > 0.02 for each in durations]
    assert sum(late[:20]) > 4, "the prediction is a mean"
    assert sum(late[300:]) / len(late[300:]) < 0.03
    assert sorted(durations[300:])[len(durations[300:]) // 2] > 0.014, "the steps stay full"


def test_a_prompt_moves_on_even_if_every_step_is_over_the_bound() -> None:
    policy = measured(max_step_seconds=0.001)
    stream, prompt = make(0, 1, 100), make(1, 30)
    policy.add([stream])
    policy.add([prompt])
    for _ in range(40):
        step(policy)
    assert prompt.num_new > 0
    assert stream.num_new > 0


def test_a_first_token_that_comes_too_late_is_refused_before_it_waits() -> None:
    policy = measured()
    policy.add([make(0, 3000)])
    policy.add([make(1, 3000)])
    step(policy)
    needed = 1.5 * (6000 - 256 + 20) * seconds(StepSize().plus(0, 256)) / 256
    with pytest.raises(DeadlinePassed, match=r"request r2 .* the queue before it, and then 20 tokens of its prompt"):
        policy.add([make(2, 20, deadline=100 + 0.9 * needed)], now=100.0)
    assert policy.num_live == 2
    policy.add([make(3, 20, deadline=100 + 1.1 * needed)], now=100.0)
    assert policy.num_live == 3


def test_tokens_that_the_cache_has_take_no_time() -> None:
    policy = measured()
    policy.add([first := make(0, 3000)])
    while first.status is not Status.FINISHED:
        step(policy)
    needed = 1.5 * 3000 * seconds(StepSize().plus(0, 256)) / 256
    again, other = make(0, 3000, deadline=0.5 * needed), make(1, 3000, deadline=0.5 * needed)
    policy.add([again], now=0.0)
    assert policy.expire(0.01) == []
    policy.finish(again)
    with pytest.raises(DeadlinePassed, match="and then 3000 tokens of its prompt"):
        policy.add([other], now=0.0)


def test_one_whose_time_has_become_too_short_ends_without_a_block() -> None:
    policy = measured(max_running=1)
    running, late, later = make(0, 16, 50), make(1, 2000, deadline=2.0), make(2, 2000, deadline=9.0)
    policy.add([running], now=0.0)
    step(policy)
    policy.add([late], now=0.0)
    policy.add([later], now=0.0)
    assert policy.expire(0.1) == []
    used = policy.allocator.num_used
    assert policy.expire(1.7) == [late]
    assert (late.status, late.table.blocks, policy.allocator.num_used) == (Status.FINISHED, [], used)
    assert policy.expire(1.7) == []


def test_a_deadline_ends_a_sequence_in_any_state() -> None:
    policy = measured(max_running=1)
    running, waiting, free = make(0, 16, 50, deadline=5.0), make(1, 16, 50, deadline=5.0), make(2, 16, 50)
    for sample in (running, waiting, free):
        policy.add([sample], now=0.0)
    step(policy)
    assert running.status is Status.RUNNING
    assert set(policy.expire(5.0)) == {running, waiting}
    policy.check_integrity()
    step(policy)
    assert free.status is Status.RUNNING


def test_without_measurements_only_passed_deadlines_count() -> None:
    policy = Scheduler(Limits(8, 1000, 256, 4096), 512, 16)
    policy.add([make(0, 4000)], now=0.0)
    policy.add([make(1, 4000, deadline=0.001)], now=0.0)
    with pytest.raises(DeadlinePassed):
        policy.add([make(2, 1, deadline=0.0)], now=0.0)
    assert policy.num_live == 2


def test_a_refused_caller_learns_when_a_place_may_be_free() -> None:
    policy = Scheduler(Limits(2, 0, 256, 4096), 512, 16)
    policy.add([make(0, 16, 3000), make(1, 16, 2000)])
    with pytest.raises(Overloaded) as unknown:
        policy.add([make(2, 1)])
    assert unknown.value.retry_after == 1.0, "no step was measured"
    policy.cost.calibrate((size, seconds(size)) for size in (StepSize().plus(0, 1), StepSize().plus(0, 256)))
    for _ in range(10):
        step(policy)
    with pytest.raises(Overloaded) as known:
        policy.add([make(2, 1)])
    decode = StepSize().plus(25, 1).plus(25, 1)
    assert known.value.retry_after == pytest.approx((2016 - 25) * policy.cost.seconds(decode), rel=0.02)
    for _ in range(1800):
        step(policy)
    with pytest.raises(Overloaded) as soon:
        policy.add([make(2, 1)])
    assert soon.value.retry_after == 1.0, "the least"
