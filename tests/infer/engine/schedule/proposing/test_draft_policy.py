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
def test_where_drafts_do_not_pay_they_cost_little(width: int, a: float, c: float, cost: RowCost) -> None:
    world = World(lambda sample, step: a, width, cost, c)
    assert world.run(4000) > 0.97
    assert sum(map(bool, world.counts[-1000:])) < 50


def test_a_draft_that_became_good_is_tried_again() -> None:
    world = World(lambda sample, step: 0.05 if step < 500 else 0.9, 1, FLAT, 0.1)
    world.run(500)
    assert sum(world.counts[-100:]) < 20
    world.run(3000)
    assert sum(world.counts[-100:]) > 300


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
    assert world.policy.scale > 4
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
