"""Proposals are made where they pay: by the width of the batch, the cost of its rows and what came true before."""

import random
from dataclasses import dataclass, field

import pytest

from tk.infer.engine.schedule.batch_writer import BatchWriter
from tk.infer.engine.schedule.proposing.proposals import ProposalPolicy, RowCost, worthwhile
from tk.infer.engine.schedule.samples.proposer import Proposer
from tk.infer.engine.schedule.samples.sample import UNKNOWN, Sample, ScheduledChunk
from tk.infer.engine.schedule.scheduler import Scheduler
from tk.infer.engine.schedule.waiting.admission import Limits
from tk.infer.engine.step.step_message import NextTokens
from tk.tests.infer.engine.schedule.new_sample import new_sample

# Milliseconds of SmolLM2-135M on two cores with AVX2: groups of 6 rows, then products take the time.
MEASURED = RowCost(
    {1: 8.8, 2: 11.1, 4: 13.0, 6: 13.6, 7: 19.6, 9: 20.2, 12: 28.0, 16: 35.6, 24: 52.0, 32: 67.0, 48: 105.0}
)
FLAT = RowCost({1: 1.0})


def test_one_sequence_has_room_for_unlikely_proposals_and_a_wide_batch_for_none() -> None:
    assert MEASURED.least_chance(1) < 0.15
    assert 0.7 < MEASURED.least_chance(12) < 0.9
    assert MEASURED.least_chance(32) > 0.98


@pytest.mark.parametrize(
    ("chances", "num_sequences", "expected"),
    [
        ([[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]], 1, [5]),  # up to the 6 rows of a group
        ([[0.1, 0.01]], 1, [0]),
        ([[0.5, 0.25], [0.3, 0.1]], 8, [0, 0]),
        ([[0.99] * 4], 8, [1]),  # the ninth row is almost free, the tenth is not
        ([[0.99] * 8] * 32, 32, [0] * 32),
        ([], 3, []),
    ],
)
def test_as_many_as_pay(chances: list[list[float]], num_sequences: int, expected: list[int]) -> None:
    assert worthwhile(chances, num_sequences, MEASURED, num_sequences, 0.05) == expected


def test_the_likely_ones_come_first() -> None:
    counts = worthwhile([[0.5, 0.2], [0.95, 0.9, 0.85, 0.1], [0.01]], 3, RowCost(), 3, 0.05)
    assert counts == [2, 3, 0], "no more than the 8 rows that take as long as one, and none that is not worth planning"
    assert worthwhile([[0.9] * 8] * 3, 3, FLAT, 3, 0.05) == [8] * 3


def test_proposals_pay_for_the_step_that_waits_for_them() -> None:
    chances = [[0.3, 0.1]]
    assert worthwhile(chances, 1, FLAT, 1, 0.05) == [2]
    assert worthwhile(chances, 1, FLAT, 1, 0.35) == [2]
    assert worthwhile(chances, 1, FLAT, 1, 0.45) == [0]


def test_rows_of_prompts_are_not_paid_by_proposals() -> None:
    chances = [[0.9, 0.8, 0.7]]
    assert worthwhile(chances, 1, MEASURED, 1, 0.05) == [3]
    assert worthwhile(chances, 501, MEASURED, 1, 0.05) == [3]
    assert worthwhile(chances, 501, RowCost({1: 1.0, 500: 1.0, 600: 200.0}), 1, 0.05) == [0]


@dataclass
class Decoding:
    """A scheduler whose samples decode given texts."""

    texts: list[list[int]]
    cost: RowCost
    num_prompt: int = 1
    widths: list[int] = field(default_factory=list)  # of the steps, in tokens

    def run(self) -> list[Sample]:
        policy = Scheduler(Limits(len(self.texts), 0, 2000, 2000), 2000, 16)
        policy.proposals.row_cost = self.cost
        samples = [
            new_sample(i, text[: self.num_prompt], len(text), proposer=Proposer(8)) for i, text in enumerate(self.texts)
        ]
        policy.add(samples)
        while policy.num_live:
            chunks = policy.schedule()
            self.widths.append(sum(chunk.length for chunk in chunks))
            for chunk in chunks:
                is_last = chunk.is_last
                policy.advance(chunk)
                if is_last:
                    self._take(policy, chunk)
        return samples

    def _take(self, policy: Scheduler, chunk: ScheduledChunk) -> None:
        sample = chunk.sample
        text = self.texts[sample.arrival]
        sample.output.tokens.append(text[sample.num_tokens])
        for proposal in chunk.proposals:
            if sample.output.tokens[-1] != proposal or sample.num_tokens == len(text):
                break
            policy.accept(sample)
            sample.output.tokens[-1] = text[sample.num_tokens - 1]
        if sample.num_tokens == len(text):
            policy.finish(sample)


LOOP = list(range(10, 30)) * 8
NOISE = random.Random(1).choices(
    range(20), k=160
)  # two tokens often stand together again, and are followed by anything


@pytest.mark.parametrize(
    ("width", "text", "most", "least"), [(1, NOISE, 32, 1), (8, NOISE, 3, 0), (1, LOOP, 160, 100), (32, LOOP, 0, 0)]
)
def test_a_batch_that_is_wide_or_does_not_repeat_stops_proposing(
    width: int, text: list[int], most: int, least: int
) -> None:
    for sample in Decoding([text] * width, MEASURED).run():
        assert least <= sample.output.num_proposed <= most
        assert sample.output.tokens == text[1:]


def test_those_that_repeat_are_proposed_beside_those_that_do_not() -> None:
    *noise, loop = Decoding([NOISE, NOISE, NOISE, LOOP], MEASURED).run()
    assert loop.output.num_accepted > 60
    assert sum(sample.output.num_proposed for sample in noise) < 40


def test_a_batch_that_becomes_narrow_proposes_again() -> None:
    short, *_, loop = Decoding([NOISE[:50]] * 31 + [LOOP], MEASURED).run()
    assert short.output.num_proposed == 0
    assert loop.output.num_accepted > 60


def test_sequences_in_a_wide_batch_need_not_read_their_tokens() -> None:
    sample = new_sample(0, [1, 2, 3] * 20, 100, proposer=Proposer(8))
    policy = ProposalPolicy()
    policy.row_cost = MEASURED
    assert policy.choose([sample] * 32, 32) == {}
    assert sample.proposer is not None
    assert len(sample.proposer) == 0
    assert policy.choose([sample], 1)[sample] == [1, 2, 3, 1, 2]
    sample.proposer = None
    assert policy.choose([sample], 1) == {}


@pytest.mark.parametrize("cost", [MEASURED, FLAT])
def test_steps_without_proposals_just_go_on(cost: RowCost) -> None:
    policy, writer = Scheduler(Limits(4, 0, 64, 64), 16, 16), BatchWriter(4)
    policy.proposals.row_cost = cost
    samples = [new_sample(i, [i], 20, proposer=Proposer(8)) for i in range(4)]
    policy.add(samples)
    messages = []
    for step in range(12):
        chunks = policy.schedule()
        messages.append(writer.write(chunks))
        for chunk in chunks:
            policy.advance(chunk)
            if chunk.sample.output.tokens:
                chunk.sample.output.tokens[-1] = 100 * chunk.sample.arrival + step
            chunk.sample.output.tokens.append(UNKNOWN)
    assert [isinstance(message, NextTokens) for message in messages[-6:]] == [True] * 6
    assert all(sample.output.num_proposed == 0 and sample.num_new > 6 for sample in samples)


def test_the_cost_of_rows_is_straight_between_measured_steps_and_behind_them() -> None:
    cost = RowCost({2: 1.0, 4: 2.0, 8: 6.0})
    assert [cost.seconds(rows) for rows in range(10)] == [1.0, 1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert cost.horizon == 8


def test_a_step_that_took_longer_than_one_of_more_rows_was_disturbed() -> None:
    cost = RowCost({1: 3.0, 2: 9.0, 4: 2.0, 8: 4.0})
    assert [cost.seconds(rows) for rows in (1, 2, 3, 4, 8)] == [2.0, 2.0, 2.0, 2.0, 4.0]


def test_one_measured_step_makes_all_alike() -> None:
    assert {RowCost({1: 2.5}).seconds(rows) for rows in (0, 1, 2, 100)} == {2.5}


@pytest.mark.parametrize(("rows", "more"), [(1, 8), (16, 32)])
def test_the_guess_is_flat_and_then_straight(rows: int, more: int) -> None:
    guess = RowCost()
    assert guess.seconds(more) / guess.seconds(rows) == (1 if more <= 8 else more / rows)


def planned() -> ProposalPolicy:
    """A policy under which one row takes 10 seconds and two take 12."""
    policy = ProposalPolicy()
    policy.row_cost = RowCost({1: 10.0, 2: 12.0})
    return policy


def test_the_cost_of_planning_is_learned_from_steps_with_proposals_beside_those_without() -> None:
    cost = planned()
    assert cost.overhead == 0.05
    for _ in range(60):
        cost.observe(1, 9.0, False)
        cost.observe(2, 13.5, True)
    assert cost.overhead == pytest.approx(0.25, abs=0.02)


def test_a_disturbed_step_counts_little_for_planning() -> None:
    cost = planned()
    cost.observe(1, 10.0, False)
    cost.observe(1, 10_000.0, False)
    cost.observe(1, 10_000.0, True)
    assert cost.overhead < 0.15
    cost.observe(1, 1e-6, True)
    assert cost.overhead >= 0


def test_without_a_step_that_has_none_nothing_is_learned() -> None:
    cost = planned()
    cost.observe(1, 30.0, True)
    assert cost.overhead == 0.05


def test_a_high_cost_is_forgotten_so_that_proposals_are_tried_again() -> None:
    cost = planned()
    cost.observe(1, 10.0, False)
    for _ in range(100):
        cost.observe(1, 20.0, True)
    assert cost.overhead > 0.9
    for _ in range(2000):
        cost.observe(1, 10.0, False)
    assert cost.overhead < 0.1
