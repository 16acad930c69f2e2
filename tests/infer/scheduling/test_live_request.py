"""A request at work: the rows that it asks for, the events that come of their results."""

import math
from typing import Any

import numpy as np
import pytest

from tk.core.errors import Cancelled
from tk.infer.requests.events import (
    Delta,
    Done,
    Event,
    Failed,
    Finished,
    FinishReason,
    Request,
    Started,
    TokenLogprob,
    TopLogprob,
)
from tk.infer.requests.sampling_params import SamplingParams
from tk.infer.scheduling.live_request import LiveRequest, Served, sampling_row
from tk.infer.scheduling.scheduler import ScheduledChunk
from tk.infer.scheduling.sequence import Sequence
from tk.infer.scheduling.step_plan import SAMPLE, SamplerOutput, SamplingRow

SERVED = Served(tokenizer=None, eos_token_ids=frozenset({9}), max_model_len=20)
PROMPT = (1, 2, 3)


def live(events: list[Event] | None = None, prompt: tuple[int, ...] = PROMPT, **params: Any) -> LiveRequest:
    """Returns a request whose events go to a list."""
    request = Request("r", prompt, SamplingParams(**params), priority=2)
    return LiveRequest(request, 4, 77, SERVED, ([] if events is None else events).append)


def chosen(token: int) -> SamplerOutput:
    """Returns the sampler's answer for one row."""
    return SamplerOutput(
        token_ids=np.array([token], np.int32),
        finite=np.ones(1, np.uint8),
        logprob=np.array([-0.5], np.float32),
        rank=np.array([2], np.int32),
        top_ids=np.array([[8, token]], np.int32),
        top_logprobs=np.array([[-0.25, -0.5]], np.float32),
    )


def step(request: LiveRequest, token: int, index: int = 0) -> bool:
    """Computes all known tokens of a sample and chooses a token; returns whether the sample is complete."""
    sequence = request.sequences[index]
    rows = request.want(ScheduledChunk(sequence, 0, len(sequence.tokens)), 0)
    return request.take(sequence, rows[-1], chosen(token), 0)


def test_samples_share_all_but_their_index() -> None:
    request = live(n=3, max_new_tokens=5)
    assert [sequence.index for sequence in request.sequences] == [0, 1, 2]
    for sequence in request.sequences:
        assert (sequence.tokens, sequence.num_prompt, sequence.max_tokens) == ([1, 2, 3], 3, 8)
        assert (sequence.arrival, sequence.seed, sequence.priority) == (4, 77, 2)
    assert request.sequences[0].tokens is not request.sequences[1].tokens


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(3, 20), (19, 20), (20, 21), (25, 26)])
def test_without_a_limit_the_models_length_is_used(num_prompt: int, max_tokens: int) -> None:
    request = live(prompt=(1,) * num_prompt)
    assert request.sequences[0].max_tokens == max_tokens, "a prompt that leaves no room is refused as too long"


def test_only_the_last_chunk_of_a_prompt_asks_for_a_token() -> None:
    request = live()
    sequence = request.sequences[0]
    assert request.want(ScheduledChunk(sequence, 0, 2), 10) == []
    (row,) = request.want(ScheduledChunk(sequence, 2, 1), 10)
    assert (row.token, row.target, row.seed) == (10, SAMPLE, 77)


def test_the_prompt_is_scored_where_that_was_asked_for() -> None:
    events: list[Event] = []
    request = live(events, prompt_logprobs=1, max_new_tokens=1)
    sequence = request.sequences[0]
    rows = request.want(ScheduledChunk(sequence, 0, 3), 10)
    assert [(row.token, row.target) for row in rows] == [(10, 2), (11, 3), (12, SAMPLE)]
    request.deliver()
    assert events == [], "a request starts with the scores of its prompt"
    for row, token in zip(rows, (2, 3, 5), strict=True):
        request.take(sequence, row, chosen(token), 0)
    request.deliver()
    top = (TopLogprob(8, -0.25, b""),)
    scores = (TokenLogprob(1, None, 0, b""), TokenLogprob(2, -0.5, 2, b"", top), TokenLogprob(3, -0.5, 2, b"", top))
    assert events[0] == Started("r", 3, 0, 77, scores)


def test_events_come_in_order() -> None:
    events: list[Event] = []
    request = live(events, n=2, max_new_tokens=2, logprobs=0)
    request.deliver()
    assert events == []
    assert not step(request, 5)
    request.deliver()
    assert events == [Started("r", 3, 0, 77), Delta(0, "", (5,), (TokenLogprob(5, -0.5, 2, b""),))]
    assert step(request, 9, index=1), "9 ends a text"
    over = [request.is_over]
    assert step(request, 6)
    assert [*over, request.is_over] == [False, True]
    request.deliver()
    kinds = [(type(event), getattr(event, "index", None)) for event in events[2:]]
    assert kinds == [(Delta, 1), (Finished, 1), (Delta, 0), (Finished, 0), (Done, None)]
    ends = [event for event in events if isinstance(event, Finished)]
    assert [end.reason for end in ends] == [FinishReason.EOS, FinishReason.LENGTH]
    assert [end.usage.completion_tokens for end in ends] == [1, 2]
    assert all(0 <= e.timing.queue_seconds <= e.timing.first_token_seconds <= e.timing.total_seconds for e in ends)


def test_an_end_token_can_be_ignored() -> None:
    assert not step(live(ignore_eos=True), 9)
    assert step(live(ignore_eos=True, stop_token_ids=(9,)), 9)


def test_a_failure_is_the_last_event() -> None:
    events: list[Event] = []
    request, error = live(events), Cancelled("enough")
    request.fail(error)
    request.deliver()
    assert request.is_over
    assert events == [Failed(error)]


def test_a_callback_that_raises_gets_no_more_events(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Event] = []

    def sink(event: Event) -> None:
        calls.append(event)
        raise RuntimeError("no room")

    request = LiveRequest(Request("r", PROMPT, SamplingParams()), 0, 0, SERVED, sink)
    for token in (5, 6):
        step(request, token)
        request.deliver()
    assert len(calls) == 1
    assert "The callback of request r failed and gets no more events" in caplog.text


def test_a_row_has_the_requests_parameters_and_the_samples_counter() -> None:
    request = live(n=2, temperature=0.5, top_k=3, logprobs=4, logit_bias={6: 1.0})
    sequence = request.sequences[1]
    sequence.append(5)
    row = sampling_row(sequence, 8, frozenset({9}))
    assert row == SamplingRow(
        8, SAMPLE, 4, temperature=0.5, top_k=3, seed=77, sample_index=1, new_number=1, bias={6: 1.0}
    )


def test_end_tokens_are_banned_until_the_least_number_of_tokens() -> None:
    sequence = live(min_new_tokens=1, logit_bias={9: 5.0}).sequences[0]
    assert sampling_row(sequence, 0, frozenset({9, 4})).bias == {9: -math.inf, 4: -math.inf}
    sequence.append(5)
    assert sampling_row(sequence, 0, frozenset({9, 4})).bias == {9: 5.0}


def counts_of(sequence: Sequence) -> dict[int, int] | None:
    counts = sampling_row(sequence, 0, frozenset()).counts
    return None if counts is None else dict(zip(*(column.tolist() for column in counts.columns()), strict=True))


def test_penalties_count_the_output_and_know_the_prompt() -> None:
    cases: list[tuple[dict[str, Any], dict[int, int] | None, dict[int, int] | None]] = [
        ({"presence_penalty": 0.5}, {5: 2}, {5: 2, 3: 1}),
        ({"frequency_penalty": 0.5}, {5: 2}, {5: 2, 3: 1}),
        ({"repetition_penalty": 1.5}, {1: 0, 2: 0, 3: 0, 5: 2}, {1: 0, 2: 0, 3: 1, 5: 2}),
        ({}, None, None),
    ]
    for params, early, late in cases:
        sequence = live(**params).sequences[0]
        sequence.append(5)
        sequence.append(5)
        assert counts_of(sequence) == early
        sequence.append(3)
        assert counts_of(sequence) == late
