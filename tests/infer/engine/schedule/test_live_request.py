"""A request at work: the rows that it asks for, the events that come of their results."""

import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tk.core.errors import Cancelled
from tk.infer.engine.options import EngineOptions
from tk.infer.engine.planning.model_source import ModelSource
from tk.infer.engine.request.events import (
    Delta,
    Done,
    Event,
    Failed,
    Finished,
    FinishReason,
    PromptLogprobs,
    Started,
    TokenLogprob,
    TopLogprob,
)
from tk.infer.engine.request.request import Request
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.infer.engine.schedule.live_request import LiveRequest, has_candidates
from tk.infer.engine.schedule.samples.sample import ScheduledChunk
from tk.infer.engine.step.sampler_output import SamplerOutput
from tk.tests.infer.serve.fake_engine import INFO


def source_of(max_model_len: int = 20, step: int = 0) -> ModelSource:
    """A model without a tokenizer, for which token 9 ends a text."""
    info = replace(INFO, eos_token_ids=(9,), max_model_len=max_model_len, step=step)
    options = EngineOptions(Path("a model"))
    return cast(ModelSource, SimpleNamespace(tokenizer=None, info=info, options=options))


MODEL = source_of()
PROMPT = (1, 2, 3)


def live(events: list[Event] | None = None, prompt: tuple[int, ...] = PROMPT, **params: Any) -> LiveRequest:
    """Returns a request whose events go to a list."""
    request = Request(prompt, SamplingParams(seed=77, **params), "r", priority=2)
    return LiveRequest(request, 4, MODEL, ([] if events is None else events).append)


def chosen(token: int) -> SamplerOutput:
    """Returns the sampler's answer for one row."""
    return SamplerOutput(
        token_ids=np.array([token], np.int32),
        finite=np.ones(1, np.uint8),
        logprob=np.array([-0.5], np.float32),
        rank=np.array([2], np.int32),
        top_ids=np.array([[8, token]], np.int32),
        top_logprobs=np.array([[-0.25, -0.5]], np.float32),
        candidates=np.zeros((1, 0), np.int32),
    )


def step(request: LiveRequest, token: int, index: int = 0) -> bool:
    """Computes all known tokens of a sample and chooses a token; returns whether the sample is complete."""
    sample = request.samples[index]
    assert request.begin_chunk(ScheduledChunk(sample, 0, sample.num_tokens), 0) == []
    sample.output.tokens.append(-1)
    return request.add_token(sample, sample.num_tokens - 1, token, chosen(token), 0)


def test_samples_share_all_but_their_index() -> None:
    request = live(n=3, max_new_tokens=5)
    assert [sample.index for sample in request.samples] == [0, 1, 2]
    for sample in request.samples:
        assert (sample.tokens(0, 9), sample.num_prompt, sample.output.max_tokens) == ([1, 2, 3], 3, 8)
        assert (sample.arrival, sample.seed, sample.request.priority) == (4, 77, 2)
        assert sample.request.prompt is request.request.prompt


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1}, True),
        ({"repetition_penalty": 1.2, "presence_penalty": 0.5}, True),
        ({"top_p": 0.9}, False),
        ({"top_k": 5}, False),
        ({"min_p": 0.1}, False),
        ({"logprobs": 0}, False),
        ({"logit_bias": {3: 1.0}}, False),
    ],
)
def test_a_constraint_chooses_among_candidates_where_the_mask_would_change_nothing_else(
    options: dict[str, Any], expected: bool
) -> None:
    assert has_candidates(SamplingParams(regex="a", **options)) is expected
    assert [sample.output.has_candidates for sample in live(**options).samples] == [False], "it has no constraint"


def test_samples_take_no_memory_for_the_prompt() -> None:
    params = SamplingParams(n=16, repetition_penalty=1.2, prompt_logprobs=0)
    one, many = (Request((5,) * 1_000_000, replace(params, n=n), "r") for n in (1, 16))
    tracemalloc.start()
    try:
        LiveRequest(one, 0, MODEL, print)
        alone = tracemalloc.get_traced_memory()[1]
        tracemalloc.clear_traces()
        samples = LiveRequest(many, 0, MODEL, print).samples
        assert tracemalloc.get_traced_memory()[1] - alone < 200_000, "a list of the tokens has 8 MB"
    finally:
        tracemalloc.stop()
    for token, sample in enumerate(samples):
        sample.output.tokens.append(token)
    assert [sample.tokens(999_999, 1_000_001) for sample in samples] == [[5, token] for token in range(16)]


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(3, 20), (19, 20), (20, 21), (25, 26)])
def test_without_a_limit_the_models_length_is_used(num_prompt: int, max_tokens: int) -> None:
    request = live(prompt=(1,) * num_prompt)
    assert request.samples[0].output.max_tokens == max_tokens, "a prompt that leaves no room is refused as too long"


def test_the_prompt_is_scored_where_that_was_asked_for() -> None:
    events: list[Event] = []
    request = live(events, prompt_logprobs=1, max_new_tokens=1)
    sample = request.samples[0]
    chunks = (ScheduledChunk(sample, 0, 2), 10), (ScheduledChunk(sample, 2, 1), 30)
    rows = [row for chunk, first in chunks for row in request.begin_chunk(chunk, first)]
    assert [(row.token, row.target, row.num_top) for row in rows] == [(10, 2, 1), (11, 3, 1)]
    assert request.begin_chunk(ScheduledChunk(sample, 0, 3), 10) == [], "after a preemption"
    request.deliver()
    assert events == [], "a request starts with the scores of its prompt"
    for row, token in zip(rows, (2, 3), strict=True):
        request.add_score(row, chosen(token), 0)
    sample.output.tokens.append(-1)
    request.add_token(sample, 3, 5, chosen(5), 0)
    request.deliver()
    top = (TopLogprob(8, -0.25, b""),)
    scores = (TokenLogprob(1, None, 0, b""), TokenLogprob(2, -0.5, 2, b"", top), TokenLogprob(3, -0.5, 2, b"", top))
    assert events[0] == Started("r", 3, 0, 77, scores)


def test_scores_of_a_long_prompt_are_sent_as_they_are_computed() -> None:
    events: list[Event] = []
    prompt = tuple(range(700))
    request = Request(prompt, SamplingParams(prompt_logprobs=0, max_new_tokens=1), "r")
    long = LiveRequest(request, 0, source_of(1000, step=12), events.append)
    sample, seen = long.samples[0], []
    for start in range(0, 700, 100):
        for row in long.begin_chunk(ScheduledChunk(sample, start, 100), 0):
            long.add_score(row, chosen(row.target), 0)
        long.deliver()
        seen.append(len(events))
    sample.output.tokens.append(-1)
    long.add_token(sample, 700, 5, chosen(5), 0)
    long.deliver()
    begin, second, third, *rest = events
    assert seen == [0, 0, 1, 1, 1, 2, 2], "each as soon as it has 256 entries"
    assert isinstance(begin, Started)
    assert isinstance(second, PromptLogprobs)
    assert isinstance(third, PromptLogprobs)
    assert begin.step == 12
    assert [second.start, third.start] == [256, 512]
    entries = [*begin.prompt_logprobs, *second.logprobs, *third.logprobs]
    assert [entry.token_id for entry in entries] == list(prompt)
    assert [type(event) for event in rest] == [Delta, Finished, Done]


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

    request = LiveRequest(Request(PROMPT, SamplingParams(), "r"), 0, MODEL, sink)
    for token in (5, 6):
        step(request, token)
        request.deliver()
    assert len(calls) == 1
    assert "The callback of request r failed and gets no more events" in caplog.text
