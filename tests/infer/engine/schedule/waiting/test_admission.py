"""Limits on queued tokens and quotas of principals; test_bounds.py and test_scheduler.py have the other checks."""

from dataclasses import replace

import pytest

from tk.core.errors import DeadlinePassed, Overloaded
from tk.infer.engine.schedule.samples.sample import Sample
from tk.infer.engine.schedule.scheduler import Scheduler
from tk.infer.engine.schedule.step_cost import StepSize
from tk.infer.engine.schedule.waiting.admission import Limits
from tk.tests.infer.engine.schedule.new_sample import new_sample

LIMITS = Limits(max_running=4, max_queued=100, max_batched_tokens=16, max_model_len=400)


def samples(arrival: int, num_prompt: int, principal: str = "", n: int = 1) -> list[Sample]:
    return [
        new_sample(arrival, [arrival] * num_prompt, num_prompt + 20, index=index, principal=principal)
        for index in range(n)
    ]


def step(policy: Scheduler) -> None:
    for chunk in policy.schedule():
        last = chunk.is_last
        policy.advance(chunk)
        if last:
            chunk.sample.output.tokens.append(0)
    policy.check_integrity()


def refusal(policy: Scheduler, new: list[Sample]) -> Overloaded:
    before = policy.allocator.num_free, policy.num_live, policy.num_queued_tokens
    with pytest.raises(Overloaded) as caught:
        policy.add(new)
    assert (policy.allocator.num_free, policy.num_live, policy.num_queued_tokens) == before
    policy.check_integrity()
    return caught.value


def test_queued_tokens_are_bounded_and_what_is_computed_makes_room() -> None:
    policy = Scheduler(replace(LIMITS, max_queued_tokens=100), 64, 16)
    policy.add(samples(0, 300))  # an idle engine takes any request that fits
    assert policy.num_queued_tokens == 300
    assert refusal(policy, samples(1, 1)).subject == "queue"
    for _ in range(13):
        step(policy)
    assert policy.num_queued_tokens == 300 - 13 * 16
    text = str(refusal(policy, samples(1, 9)))
    assert "no room for the 9 prompt tokens of this request; it takes 100 of all callers" in text
    assert "92" not in text, "a refusal says nothing of others' tokens"
    policy.add(samples(1, 8, n=3))
    assert policy.num_queued_tokens == 100, "samples share their prompt"
    for _ in range(20):
        step(policy)
    assert policy.num_queued_tokens == 0, "decoding sequences are not queued"


def test_a_refused_caller_waits_for_the_backlog() -> None:
    policy = Scheduler(replace(LIMITS, max_queued_tokens=100), 64, 16)
    policy.add(samples(0, 300))
    assert refusal(policy, samples(1, 100)).retry_after == 1.0, "no step was measured"
    policy.cost.calibrate((StepSize().plus(0, n), 0.1 * n) for n in (1, 16))
    assert refusal(policy, samples(1, 100)).retry_after == pytest.approx(300 * 0.1, rel=0.05)
    policy.cost.calibrate((StepSize().plus(0, n), 10.0 * n) for n in (1, 16))
    assert refusal(policy, samples(1, 100)).retry_after == 60.0


def test_a_principal_has_a_quota_of_sequences_of_its_own() -> None:
    policy = Scheduler(replace(LIMITS, quota_sequences=3), 64, 16)
    policy.add(samples(0, 10, "alice", n=5))  # the first request of a principal may be larger
    policy.add(samples(1, 10, "bob", n=2))
    for _ in range(2):
        error = refusal(policy, samples(2, 10, "alice"))
        assert (error.subject, error.retry_after) == ("principal:alice", 1.0)
        assert "5 sequences of 'alice' are live" in str(error)
        assert refusal(policy, samples(3, 10, "bob", n=2)).subject == "principal:bob"
        step(policy)
    policy.add(samples(3, 10, "bob"))
    policy.add(samples(4, 10, "carol"))


def test_a_principal_has_a_quota_of_queued_tokens_of_its_own() -> None:
    policy = Scheduler(replace(LIMITS, quota_tokens=50), 64, 16)
    policy.add(samples(0, 40, "alice"))
    policy.add(samples(1, 40))
    error = refusal(policy, samples(2, 11, "alice"))
    assert error.subject == "principal:alice"
    assert "40 prompt tokens of 'alice' are queued" in str(error)
    assert refusal(policy, samples(2, 11)).subject == "principal:"
    policy.add(samples(2, 10, "alice"))
    step(policy)
    policy.add(samples(3, 16, "alice"))


def test_a_queue_that_one_principal_has_filled_takes_others_up_to_their_shares() -> None:
    policy = Scheduler(replace(LIMITS, max_queued=8, max_queued_tokens=120), 64, 16)
    for arrival in range(12):
        policy.add(samples(arrival, 10, "many"))
    assert refusal(policy, samples(12, 10, "many")).subject == "queue"
    for arrival in range(20, 26):  # half of 12 samples, and of 120 tokens
        policy.add(samples(arrival, 10, "few"))
    refusal(policy, samples(26, 1, "few"))
    policy.add(samples(30, 100, "third"))
    refusal(policy, samples(31, 1, "third"))
    refusal(policy, samples(40, 121, "fourth"))
    policy.add(samples(41, 1, "fourth", n=12))
    refusal(policy, samples(42, 1, "fifth", n=13))
    refusal(policy, samples(43, 1, "many"))


def test_shares_of_the_queue_follow_weights() -> None:
    policy = Scheduler(replace(LIMITS, max_queued=6), 64, 16)

    def weighted(arrival: int, principal: str, weight: float) -> list[Sample]:
        new = samples(arrival, 10, principal)
        for sample in new:
            sample.request = replace(sample.request, weight=weight)
        return new

    for arrival in range(10):
        policy.add(weighted(arrival, "many", 1.0))
    for arrival in range(10, 18):
        policy.add(weighted(arrival, "heavy", 4.0))
    refusal(policy, weighted(18, "heavy", 4.0))
    policy.add(weighted(19, "light", 0.01))
    refusal(policy, weighted(20, "light", 0.01))


def test_one_above_its_share_learns_when_its_own_requests_end() -> None:
    policy = Scheduler(replace(LIMITS, max_running=2, max_queued=0), 64, 16)
    policy.cost.calibrate([(StepSize().plus(0, 1), 0.5), (StepSize().plus(0, 16), 0.5)])
    policy.add(samples(0, 10, "long"))
    [short] = samples(1, 10, "short")
    short.output.max_tokens = 15
    policy.add([short])
    for _ in range(3):
        step(policy)
    assert refusal(policy, samples(2, 1, "short")).retry_after == pytest.approx(0.5 * 3, rel=0.3)
    assert refusal(policy, samples(2, 1, "long")).retry_after == pytest.approx(0.5 * 18, rel=0.3)


def test_one_above_its_share_of_tokens_waits_for_its_own() -> None:
    policy = Scheduler(replace(LIMITS, max_queued_tokens=100), 64, 16)
    policy.cost.calibrate((StepSize().plus(0, n), 0.1 * n) for n in (1, 16))
    policy.add(samples(0, 300, "many"))
    policy.add(samples(1, 40, "few"))
    waited = refusal(policy, samples(2, 20, "few")).retry_after  # 60 tokens are the half of 120, which are 20 too many
    assert waited == pytest.approx(20 * 0.1, rel=0.05)


def test_a_deadline_counts_prompts_of_others_up_to_the_share() -> None:
    policy = Scheduler(replace(LIMITS, max_model_len=4000), 1000, 16)
    policy.cost.calibrate([(StepSize().plus(0, 1), 0.01), (StepSize().plus(0, 16), 0.01)])
    for arrival in range(3):
        policy.add(samples(arrival, 3000, "many"), now=0.0)
    step(policy)
    needed = 1.5 * 2 * 32 * 0.01 / 16
    [own] = samples(3, 32, "many")
    own.request = replace(own.request, deadline=10 * needed)
    with pytest.raises(DeadlinePassed):
        policy.add([own], now=0.0)
    [late] = samples(4, 32, "few")
    late.request = replace(late.request, deadline=0.8 * needed)
    with pytest.raises(DeadlinePassed):
        policy.add([late], now=0.0)
    [other] = samples(5, 32, "few")
    other.request = replace(other.request, deadline=1.2 * needed)
    policy.add([other], now=0.0)
    for _ in range(4):
        step(policy)
    assert other.num_new > 0
