"""A draft proposes as many tokens as give most tokens per second, and none where that is none."""

import random
from collections.abc import Callable

import pytest

from tk.infer.engine.schedule.proposing.draft_policy import DraftPolicy
from tk.infer.engine.schedule.proposing.proposals import ProposalPolicy, RowCost
from tk.infer.engine.schedule.samples.draft_record import DraftRecord
from tk.infer.engine.schedule.samples.sample import Sample
from tk.tests.infer.engine.schedule.new_sample import new_sample

FLAT = RowCost({1: 1.0, 48: 1.0})  # weights take all of the time
STEEP = RowCost({1: 1.0, 2: 2.0, 48: 48.0})  # products do


class World:
    """Samples whose proposals come true with some chances, and the time that the steps of model and draft take.

    Args:
        chances: returns the chance of a sample at a step.
        num_samples: the number of samples.
        cost: the model's rows.
        draft_part: the time of a draft's step, as a part of the model's of as many rows.
    """

    def __init__(
        self,
        chances: Callable[[int, int], float],
        num_samples: int,
        cost: RowCost,
        draft_part: float,
        most: int = 8,
        context: int = 10**6,
    ) -> None:
        proposals = ProposalPolicy()
        proposals.row_cost, proposals.overhead = cost, 0.02
        self.policy = DraftPolicy(most, context, proposals)
        self.policy.row_cost = RowCost({rows: draft_part * cost.seconds(rows) for rows in (1, 2, 4, 8, 16, 32, 48)})
        self.cost, self.draft_part, self.chances = cost, draft_part, chances
        self.samples = [made(i) for i in range(num_samples)]
        self.random = random.Random(5)
        self.seconds, self.num_tokens, self.counts = 0.0, 0, list[int]()

    def run(self, steps: int) -> float:
        """Returns the tokens per second of so many steps, as a part of those without a draft."""
        self.seconds, self.num_tokens, width = 0.0, 0, len(self.samples)
        alone = self.cost.seconds(width)
        for step in range(steps):
            found = self.policy.choose(self.samples, width)
            count = max(found.values(), default=0)
            self.counts.append(count)
            if found:
                drafting = count * self.draft_part * self.cost.seconds(len(found))
                self.policy.observe(len(found), count, drafting)
                self.policy.spend(len(found), count, drafting)
                self.seconds += drafting + self.cost.seconds(width + sum(found.values())) + 0.02 * alone
            else:
                self.seconds += alone
            for i, sample in enumerate(self.samples):
                self.num_tokens += 1 + self.take(sample, found.get(sample, 0), self.chances(i, step))
        return self.num_tokens / self.seconds / (width / alone)

    def take(self, sample: Sample, count: int, chance: float) -> int:
        """Gives a sample its results; returns how many proposals came true."""
        assert sample.output.draft is not None
        if count:
            sample.output.draft.propose(count)
        right = 0
        while right < count and self.random.random() < chance:
            sample.output.draft.accept()
            right += 1
        return right


def made(number: int, longest: int = 10**6) -> Sample:
    sample = new_sample(number, [1, 2, 3], longest)
    sample.output.draft = DraftRecord(num_computed=4)
    sample.output.tokens = [5]
    return sample


def formula(a: float, k: int, c: float) -> float:
    """Leviathan et al., arXiv 2211.17192, theorem 3.8."""
    return (1 - a ** (k + 1)) / ((1 - a) * (1 + k * c))


@pytest.mark.parametrize("a", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("c", [0.05, 0.15])
def test_one_sample_is_as_fast_as_the_best_number_makes_it(a: float, c: float) -> None:
    world = World(lambda sample, step: a, 1, FLAT, c)
    best = max(formula(a, k, c) for k in range(9))
    assert world.run(4000) > 0.92 * best


@pytest.mark.parametrize(
    ("width", "a", "c", "cost"),
    [(1, 0.05, 0.15, FLAT), (8, 0.3, 0.9, FLAT), (32, 0.7, 0.15, STEEP), (8, 0.5, 0.5, STEEP)],
)
def test_where_drafts_do_not_pay_trials_take_a_hundredth_of_the_time(
    width: int, a: float, c: float, cost: RowCost
) -> None:
    world = World(lambda sample, step: a, width, cost, c)
    assert world.run(200) > 0.94
    assert 0.985 < world.run(4000) < 1.0, "they are tried, but seldom"


def test_a_trial_that_reads_much_is_paid_back_for_long() -> None:
    world = World(lambda sample, step: 0.05, 1, FLAT, 0.15)
    world.run(1000)
    while not world.policy.choose(world.samples, 1):
        pass
    world.policy.spend(1, 4, 20.0)
    world.counts.clear()
    world.run(1900)
    assert not any(world.counts[1:])
    world.run(400)
    assert any(world.counts[1:])


def test_drafts_that_pay_owe_nothing_for_the_prompts_that_they_read() -> None:
    world = World(lambda sample, step: 0.9, 1, FLAT, 0.1)
    world.run(100)
    world.policy.spend(1, 4, 1000.0)
    world.counts.clear()
    world.run(20)
    assert all(world.counts)


def test_drafts_that_seem_to_pay_and_do_not_rest() -> None:
    world = World(lambda sample, step: 0.5, 1, FLAT, 0.9)
    world.policy.observe = lambda *given: None  # type: ignore[method-assign]  # so the policy never learns
    world.policy.scale = 0.3
    assert world.policy.choose(world.samples, 1)
    assert world.run(4000) > 0.97


def test_a_draft_that_became_good_is_tried_again() -> None:
    world = World(lambda sample, step: 0.05, 1, FLAT, 0.1)
    world.run(500)
    assert sum(world.counts[-100:]) < 20
    world.chances = lambda sample, step: 0.9
    world.run(300)
    assert sum(world.counts[-100:]) > 300, "within some 200 steps"


def test_in_a_wide_batch_drafts_that_became_good_are_found_by_trials_of_one_sample() -> None:
    cost = RowCost({1: 1.0, 8: 1.0, 48: 1.5})
    world = World(lambda sample, step: 0.05, 8, cost, 0.05)
    world.run(500)
    assert sum(world.counts[-100:]) < 20
    world.chances = lambda sample, step: 0.95
    world.run(1500)
    assert sum(world.counts[-100:]) > 200


def test_a_sample_that_ends_is_no_reason_to_rest() -> None:
    world = World(lambda sample, step: 0.9, 1, FLAT, 0.1)
    world.run(100)
    world.policy.spend(1, 4, 0.3)
    assert world.policy.choose([made(1, longest=8)], 1) == {}
    assert world.policy.choose([made(2)], 1), "the next one gains as much as those before"


def test_a_new_number_of_samples_is_no_reason_to_rest() -> None:
    world = World(lambda sample, step: 0.7, 32, RowCost({1: 1.0, 8: 1.0, 48: 41.0}), 0.15)
    world.run(100)
    assert sum(world.counts[-50:]) < 40
    assert world.policy.choose(world.samples[:1], 1), "alone, it gains"


def test_samples_whose_drafts_are_wrong_get_none_beside_others() -> None:
    world = World(lambda sample, step: 0.02 if sample else 0.95, 4, RowCost({1: 1.0, 4: 1.0, 16: 1.5}), 0.05)
    world.run(300)
    found = world.policy.choose(world.samples, 4)
    assert world.samples[0] in found
    assert len(found) < 4


def test_the_time_of_drafts_is_learned() -> None:
    world = World(lambda sample, step: 0.6, 1, FLAT, 3.0)
    world.policy.row_cost = RowCost({1: 0.05})  # it was measured as far quicker than it is
    assert world.policy.choose(world.samples, 1)
    world.run(200)
    assert world.policy.scale > 3
    assert sum(world.counts[-100:]) < 10


def test_a_sample_that_soon_ends_or_is_too_long_for_the_draft_gets_none() -> None:
    world = World(lambda sample, step: 0.9, 1, FLAT, 0.05, context=100)
    assert world.policy.choose([made(0)], 1)
    short, lagging = made(1, longest=8), made(2, longest=60)
    lagging.output.draft = DraftRecord()
    lagging.output.tokens = [5] * 40
    assert world.policy.choose([short], 1) == {}
    assert world.policy.choose([lagging], 1) != {}, "it has 43 tokens to read, and 17 to come"
    lagging.output.max_tokens = 48
    assert world.policy.choose([lagging], 1) == {}
    long = made(3)
    long.output.tokens = [5] * 95
    assert world.policy.choose([long], 1) == {long: 2}
    new = made(4)
    new.output.tokens = []
    assert world.policy.choose([new], 1) == {}, "its prompt comes first"
    assert world.policy.choose([new_sample(5, [1], 9)], 1) == world.policy.choose([], 0) == {}
