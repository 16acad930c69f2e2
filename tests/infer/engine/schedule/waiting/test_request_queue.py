"""The samples that do not run: one of a request waits until its prompt is computed, another one if that ends before."""

import pytest

from tk.infer.engine.schedule.samples.sample import Sample
from tk.infer.engine.schedule.waiting.request_queue import RequestQueue
from tk.tests.infer.engine.schedule.new_sample import new_sample


def entered(count: int, arrival: int = 0) -> tuple[RequestQueue, list[Sample]]:
    queue, samples = RequestQueue(), [new_sample(arrival, [1], 2, index=index) for index in range(count)]
    queue.enter(list(samples))
    return queue, samples


def test_the_others_wait_when_the_first_has_computed_the_prompt_and_once() -> None:
    queue, (first, *others) = entered(3)
    assert (len(queue), set(queue), set(queue.waiting)) == (3, {first, *others}, {first})
    queue.waiting.discard(first)
    assert (len(queue), set(queue)) == (2, set(others))
    assert queue.release_group(first)
    assert set(queue.waiting) == set(others)
    assert not queue.release_group(first)
    assert (len(queue), set(queue)) == (2, set(others))
    queue.check_integrity([first, *others])


def test_one_sample_has_no_group() -> None:
    queue, (alone,) = entered(1)
    assert not queue.release_group(alone)
    queue.leave(alone)
    assert (len(queue), list(queue)) == (0, [])
    queue.check_integrity([])


def test_if_the_first_ends_the_next_one_waits_in_its_place() -> None:
    queue, (first, second, third, fourth) = entered(4)
    queue.leave(third)
    queue.leave(first)
    assert (set(queue.waiting), len(queue), set(queue)) == ({second}, 2, {second, fourth})
    queue.leave(second)
    assert (set(queue.waiting), len(queue), set(queue)) == ({fourth}, 1, {fourth})
    assert not queue.release_group(fourth)
    queue.leave(fourth)
    assert len(queue) == 0


def test_deadlines_are_those_of_live_samples() -> None:
    queue = RequestQueue()
    soon, late, never = (new_sample(i, [1], 2, deadline=deadline) for i, deadline in enumerate((1.0, 2.0, None)))
    for sample in (never, late, soon):
        queue.enter([sample])
    assert queue.first_expired(0.5) is None
    assert queue.first_expired(5.0) is soon
    queue.leave(soon)
    assert queue.first_expired(5.0) is late
    with pytest.raises(AssertionError, match="deadlines"):
        queue.check_integrity([never])
