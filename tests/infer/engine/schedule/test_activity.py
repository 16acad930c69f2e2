"""Counts of tokens, against a clock of the test."""

from tk.infer.engine.schedule.activity import Activity
from tk.infer.engine.schedule.samples.sample import Source
from tk.tests.clock import Clock


def test_rates_are_those_of_the_last_ten_seconds() -> None:
    clock = Clock(100.5)
    activity = Activity(clock)
    assert activity.rates() == (0.0, 0.0)
    for second in range(30):
        clock.now = 101.0 + second
        activity.step(num_prompt=40)
        activity.step(num_prompt=60)
        for _ in range(5):
            activity.new_token()
    clock.now = 130.999
    prefill, decode = activity.rates()
    assert abs(prefill - 100) < 0.1
    assert abs(decode - 5) < 0.01
    clock.now = 135.0
    assert activity.rates()[0] == 500 / 9, "126 to 130 of the window 126 to 135"
    clock.now = 141.0
    assert activity.rates() == (0.0, 0.0)


def test_a_young_engine_divides_by_its_age_and_by_a_second_at_least() -> None:
    clock = Clock(100.5)
    activity = Activity(clock)
    activity.step(num_prompt=10)
    activity.new_token()
    clock.now += 0.001
    assert activity.rates() == (10.0, 1.0)
    clock.now = 104.5
    assert activity.rates() == (2.5, 0.25)


def test_the_hit_rate_is_over_all_prompts() -> None:
    activity = Activity(Clock(100.5))
    assert activity.hit_rate == 0.0
    activity.admit(num_prompt=100, num_cached=0)
    activity.admit(num_prompt=300, num_cached=100)
    assert activity.hit_rate == 0.25


def test_gains_are_the_proposals_of_the_last_ten_seconds() -> None:
    clock = Clock(100.5)
    activity = Activity(clock)
    assert activity.gains() == (0.0, 0.0)
    for second in range(20):
        clock.now = 101.0 + second
        activity.step(num_prompt=0)
        activity.propose(Source.DRAFT, 4)
        activity.propose(Source.CONSTRAINT, 2)
        kept = 3 if second >= 10 else 0
        for source in [*[Source.DRAFT] * kept, *[Source.CONSTRAINT] * 2]:
            activity.accept(source)
        for _ in range(1 + kept + 2):
            activity.new_token()
    share, tokens = activity.gains()
    assert share == 3 / 4, "forced tokens are sure, and no proposals of a draft"
    assert tokens == 6, "three of the draft, two that were forced and one that was chosen"
    clock.now = 141.0
    assert activity.gains() == (0.0, 0.0)
