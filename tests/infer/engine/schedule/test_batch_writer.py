"""The engine's half of the persistent batch: slots, and messages that hold changes only."""

import collections.abc
from typing import Any, cast

import pytest

from tk.infer.engine.grammar.grammar import Matcher
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.infer.engine.schedule.batch_writer import BatchWriter, count_tokens
from tk.infer.engine.schedule.samples.sample import UNKNOWN, Sample, ScheduledChunk, Status
from tk.infer.engine.step.sampling_rows import ScoredRow
from tk.infer.engine.step.step_message import GivenTokens, NextTokens, StepMessage
from tk.tests.infer.engine.schedule.new_sample import new_sample

PROMPT = (10, 11, 12, 13, 10)


def running(**params: Any) -> Sample:
    """Returns a sample with three blocks."""
    sample = new_sample(0, PROMPT, 9, SamplingParams(**params))
    sample.seed, sample.output.stopping = 5, frozenset((3, 4))
    sample.status, sample.table.blocks = Status.RUNNING, [7, 8, 9]
    return sample


def writer(num_slots: int = 2) -> BatchWriter:
    return BatchWriter(num_slots)


def changes(
    batch: BatchWriter, chunks: collections.abc.Sequence[ScheduledChunk], scored: tuple[ScoredRow, ...] = ()
) -> StepMessage:
    """Writes a step that is not the plain continuation of the step before."""
    message = batch.write(chunks, scored)
    assert isinstance(message, StepMessage)
    return message


def going(batch: BatchWriter, chunks: collections.abc.Sequence[ScheduledChunk]) -> GivenTokens:
    """Writes a step of the sequences of the step before, with tokens that the engine knows."""
    message = batch.write(chunks)
    assert isinstance(message, GivenTokens)
    return message


def chunk(sample: Sample) -> ScheduledChunk:
    """Returns a chunk of all tokens that are not computed, and counts them as computed."""
    found = ScheduledChunk(sample, sample.num_computed, sample.num_uncomputed)
    sample.num_computed = sample.num_tokens
    return found


def test_a_sequence_is_opened_once_and_its_blocks_are_sent_once() -> None:
    batch, sample = writer(), running(temperature=0.5, top_k=9)
    first = changes(batch, [chunk(sample)])
    assert (first.tokens.tolist(), first.blocks.tolist()) == (list(PROMPT), [7, 8, 9])
    assert first.opened[["slot", "temperature", "top_k", "seed"]].tolist() == [(0, 0.5, 9, 5)]
    sample.output.tokens.append(20)
    sample.table.blocks.append(6)
    second = going(batch, [chunk(sample)])
    assert (second.tokens.tolist(), second.blocks.tolist()) == ([20], [[0, 3, 6]])
    assert second.spans.tolist() == [[5, 1, 1, 1]]
    sample.output.tokens.append(21)
    assert not len(going(batch, [chunk(sample)]).blocks)


def test_a_token_that_only_the_worker_knows_is_not_sent() -> None:
    batch, sample = writer(), running()
    changes(batch, [chunk(sample)])
    sample.output.tokens.append(UNKNOWN)
    assert going(batch, [chunk(sample)]).tokens.tolist() == [-1], "the token that it sampled"
    other = running()
    sample.output.tokens.append(UNKNOWN)
    message = changes(batch, [chunk(sample), chunk(other)])
    assert message.tokens.tolist() == list(PROMPT)
    assert message.spans[:, 2:4].tolist() == [[1, 0], [5, 5]], "one token, of which the message holds none"


def test_a_part_of_a_prompt_samples_nothing() -> None:
    message = changes(writer(), [ScheduledChunk(running(), 0, 3)])
    assert message.tokens.tolist() == list(PROMPT[:3])
    assert message.spans[:, 5].tolist() == [0]


def test_proposals_follow_the_last_token_and_are_sampled_behind() -> None:
    batch, sample = writer(), running()
    changes(batch, [chunk(sample)])
    sample.output.tokens.append(20)
    message = going(batch, [ScheduledChunk(sample, 5, 3, (30, 31))])
    assert message.tokens.tolist() == [20, 30, 31]
    assert message.spans.tolist() == [[5, 3, 1, 3]]
    other = running()
    sample.output.tokens.append(30)
    changed = changes(batch, [ScheduledChunk(sample, 6, 2, (31,)), chunk(other)])
    assert changed.tokens.tolist() == [30, 31, *PROMPT]
    assert changed.spans.tolist()[0] == [0, 6, 2, 2, 2, 2, 0, -1]


def test_a_constraint_s_proposals_are_no_plain_continuation() -> None:
    batch, sample = writer(), running()
    sample.output.matcher = cast(Matcher, object())
    changes(batch, [chunk(sample)])
    sample.output.tokens.append(20)
    changes(batch, [ScheduledChunk(sample, 5, 2, (30,))])


def test_a_preempted_sequence_is_opened_again_with_all_its_blocks() -> None:
    batch, sample = writer(), running()
    changes(batch, [chunk(sample)])
    sample.output.tokens.append(UNKNOWN)
    assert batch.can_write(ScheduledChunk(sample, 5, 1))
    sample.preemptions, sample.num_computed, sample.table.blocks = 1, 0, [1, 2, 3]
    assert not batch.can_write(ScheduledChunk(sample, 0, 6)), "the worker's slot holds its last token"
    sample.output.tokens[-1] = 20
    assert batch.can_write(ScheduledChunk(sample, 0, 6))
    message = changes(batch, [chunk(sample)])
    assert (message.blocks.tolist(), message.opened["slot"].tolist()) == ([1, 2, 3], [0])


def test_a_complete_sequence_waits_for_its_last_token() -> None:
    batch, sample = writer(), running()
    changes(batch, [chunk(sample)])
    for _ in range(2):
        sample.output.tokens.append(20)
    sample.output.tokens.append(UNKNOWN)
    assert batch.can_write(ScheduledChunk(sample, 7, 1))
    sample.output.max_tokens = 8
    assert not batch.can_write(ScheduledChunk(sample, 7, 1))


def test_sequences_that_all_go_on_send_their_new_blocks_alone() -> None:
    batch, samples = writer(), [running(), running()]
    changes(batch, [chunk(each) for each in samples])
    for each in samples:
        each.output.tokens.append(20)
    going(batch, [chunk(each) for each in samples])
    for each in samples:
        each.output.tokens.append(UNKNOWN)
    samples[1].table.blocks.append(6)
    message = batch.write([chunk(each) for each in samples])
    assert isinstance(message, NextTokens)
    assert message.blocks.tolist() == [[1, 6]]
    samples[0].output.tokens.append(UNKNOWN)
    changes(batch, [chunk(samples[0])])  # the other one is not in this step


@pytest.mark.parametrize("params", [{"logit_bias": {3: 1.0}}, {"presence_penalty": 0.5}])
def test_rows_with_bias_or_counts_are_never_a_plain_continuation(params: dict[str, Any]) -> None:
    batch, sample = writer(), running(**params)
    changes(batch, [chunk(sample)])
    sample.output.tokens.append(20)
    for _ in range(2):
        changes(batch, [chunk(sample)])
        sample.output.tokens[-1] = 20
        sample.output.tokens.append(UNKNOWN)


def test_rows_of_constraints_have_masks_or_candidates() -> None:
    samples = [running() for _ in range(4)]
    for each in samples[1:]:
        each.output.matcher = cast(Matcher, object())
    samples[2].output.has_candidates = True
    for asks, masks in ((False, [-1, 0, 1, 2]), (True, [-1, 0, -2, 1])):
        message = writer(4).write([chunk(each) for each in samples], with_candidates=asks)
        assert isinstance(message, StepMessage)
        assert message.spans[:, 7].tolist() == masks


def test_slots_are_used_again() -> None:
    batch = writer(2)
    samples = [running() for _ in range(4)]
    assert changes(batch, [chunk(each) for each in samples[:2]]).opened["slot"].tolist() == [0, 1]
    batch.release(samples[0])
    batch.release(samples[0])
    assert changes(batch, [chunk(samples[2])]).opened["slot"].tolist() == [0]
    samples[1].status = Status.WAITING  # preempted: its slot goes to another if there is no free one
    assert changes(batch, [chunk(samples[3])]).opened["slot"].tolist() == [1]


def test_stop_tokens_are_banned_where_there_is_a_least_number_of_tokens() -> None:
    batch = writer()
    message = changes(batch, [chunk(running()), chunk(running(min_new_tokens=2, logit_bias={8: -1.5}))])
    assert message.opened["num_banned"].tolist() == [0, 2]
    assert message.banned.tolist() == [3, 4]
    assert (message.bias_token.tolist(), message.bias_value.tolist()) == ([8], [-1.5])


def test_scored_rows_and_twins_are_part_of_the_message() -> None:
    batch, sample = writer(), running()
    sample.table.twins = [7, 0]
    message = changes(batch, [chunk(sample)], (ScoredRow(1, target=12, num_top=3),))
    assert message.scored.tolist() == [[1, 12, 3]]
    assert message.twins.tolist() == [[7, 0]]
    assert sample.table.twins == []


def test_a_block_that_replaces_a_shared_one_is_sent_once_and_never_with_next_tokens() -> None:
    batch, sample = writer(), running()
    changes(batch, [chunk(sample)])
    sample.output.tokens.append(UNKNOWN)
    sample.table.blocks[2], sample.table.fork = 6, (2, 9, 6)
    message = changes(batch, [chunk(sample)])
    assert (message.forks.tolist(), message.blocks.tolist()) == ([[0, 2, 9, 6]], [])
    sample.output.tokens.append(UNKNOWN)
    assert not len(changes(batch, [chunk(sample)]).forks), "a plan with forks does not advance"
    sample.output.tokens.append(UNKNOWN)
    assert isinstance(batch.write([chunk(sample)]), NextTokens)


@pytest.mark.parametrize(
    ("params", "counts"),
    [
        ({}, None),
        ({"presence_penalty": 0.5}, {20: 2, 10: 1}),
        ({"frequency_penalty": -0.5}, {20: 2, 10: 1}),
        ({"repetition_penalty": 1.5}, {10: 1, 11: 0, 12: 0, 13: 0, 20: 2}),
    ],
)
def test_tokens_are_counted_for_penalties_alone(params: dict[str, float], counts: dict[int, int] | None) -> None:
    sample = running(**params)
    sample.output.tokens = [20, 10, 20]
    found = count_tokens(sample)
    assert (found and dict(zip(*(column.tolist() for column in found.columns()), strict=True))) == counts
