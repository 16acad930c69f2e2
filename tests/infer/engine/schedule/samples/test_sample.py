"""A sample counts its tokens: known, computed, and the one that the worker has sampled but not yet reported."""

import pytest

from tk.infer.engine.schedule.samples.sample import UNKNOWN, Sample
from tk.tests.infer.engine.schedule.new_sample import new_sample

PROMPT = (10, 11, 12)


def sample(priority: int = 0, arrival: int = 0, index: int = 0) -> Sample:
    return new_sample(arrival, PROMPT, 9, index=index, priority=priority)


def test_a_new_sequence_has_its_prompt_to_compute() -> None:
    new = sample()
    assert (new.num_prompt, new.num_new, new.num_tokens, new.num_uncomputed, new.num_known) == (3, 0, 3, 3, 3)


def test_a_token_that_is_not_known_yet_is_a_token() -> None:
    running = sample()
    running.num_computed = 3
    running.output.tokens.append(20)
    assert (running.num_new, running.num_tokens, running.num_uncomputed, running.num_known) == (1, 4, 1, 4)
    running.output.tokens.append(UNKNOWN)
    assert (running.num_new, running.num_tokens, running.num_uncomputed, running.num_known) == (2, 5, 2, 4)
    running.output.tokens[-1] = 21
    assert running.num_known == 5


@pytest.mark.parametrize(("start", "stop"), [(start, stop) for start in range(6) for stop in range(start, 7)])
def test_tokens_run_from_the_prompt_into_the_output(start: int, stop: int) -> None:
    running = sample()
    for token in (20, 21):
        running.output.tokens.append(token)
    assert running.tokens(start, stop) == [10, 11, 12, 20, 21][start:stop]


def test_a_higher_priority_goes_first_then_the_older_request_then_the_lower_sample() -> None:
    keys = [(5, 2, 0), (5, 2, 1), (5, 3, 0), (0, 0, 0), (0, 1, 7), (-1, 0, 0)]
    ordered = [sample(*key) for key in keys]
    mixed = ordered[::-1]
    mixed.sort(key=lambda each: each.order)
    assert mixed == ordered


def test_equal_sequences_are_not_the_same() -> None:
    assert sample() != sample()
    assert len({sample(), sample()}) == 2
