"""A step from its schedule to its results: its rows of logits, the masks that they need, and the tokens that count."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from tk.core.errors import CheckpointError, InvalidRequest
from tk.infer.engine.grammar.grammar import Matcher
from tk.infer.engine.options import MAX_HEAD_ROWS
from tk.infer.engine.request.events import Delta, Event, Started
from tk.infer.engine.schedule.batch_writer import BatchWriter
from tk.infer.engine.schedule.live_request import LiveRequest
from tk.infer.engine.schedule.samples.sample import UNKNOWN, ScheduledChunk, Status
from tk.infer.engine.schedule.scheduler import Scheduler
from tk.infer.engine.schedule.step_in_flight import StepInFlight, WantedRow, prepare_step, record_step, take_token
from tk.infer.engine.schedule.waiting.admission import Limits
from tk.infer.engine.step.sampler_output import SamplerOutput
from tk.infer.engine.step.step_message import StepMessage, decode_message
from tk.tests.infer.engine.schedule.test_live_request import PROMPT, chosen, live


class OneToken:
    """A matcher that allows one token, or that has failed."""

    num_words = 2

    def __init__(self, token: int, error: InvalidRequest | None = None) -> None:
        self.token, self.error = token, error
        self.looked_ahead = 0

    def look_ahead(self) -> None:
        self.looked_ahead += 1

    def first_allowed(self, candidates: Sequence[int]) -> int | None:
        return self.token if self.token in candidates else None

    def write_mask(self, mask_W: np.ndarray[Any, Any]) -> None:
        mask_W[:] = 0
        mask_W[self.token // 32] = 1 << self.token % 32


class Served:
    """A scheduler and the writer of its steps, with some requests of one sample."""

    def __init__(self, *requests: LiveRequest, size: int = 4) -> None:
        self.scheduler = Scheduler(Limits(size, 2 * size, 64 * size, 20), 4 * size, 2)
        self.batch = BatchWriter(size, lambda sample: ())
        self.live = {}
        for number, request in enumerate(requests):
            for sample in request.samples:
                sample.request = replace(sample.request, request_id=str(number))
            self.live["", str(number)] = request
            self.scheduler.add(request.samples)

    def step(self, chunks: Sequence[ScheduledChunk] | None = None) -> StepInFlight:
        """Prepares and records a step."""
        chunks = self.scheduler.schedule() if chunks is None else chunks
        step = prepare_step(chunks, self.live, self.batch)
        record_step(step, self.scheduler)
        return step


def test_a_prompt_is_computed_and_its_sample_gets_an_unknown_token() -> None:
    events: list[Event] = []
    served = Served(live(events))
    step = served.step()
    [row], [sample] = step.rows, served.live["", "0"].samples
    assert (row.sample, row.position, row.scored, row.is_void) == (sample, len(PROMPT), None, False)
    assert sample.output.tokens == [UNKNOWN]
    assert sample.num_computed == len(PROMPT)
    assert [type(event) for event in events] == [Started]
    message = decode_message(step.message)
    assert isinstance(message, StepMessage)
    assert message.tokens.tolist() == list(PROMPT)
    take_token(row, chosen(7), 0, served.scheduler)
    assert sample.output.tokens == [7]


def test_rows_of_a_prompt_come_before_the_one_that_chooses() -> None:
    served = Served(live(prompt_logprobs=1))
    rows = served.step().rows
    assert [row.scored.target if row.scored else None for row in rows] == [*PROMPT[1:], None]


def test_a_complete_sample_is_finished() -> None:
    events: list[Event] = []
    served = Served(live(events, max_new_tokens=2))
    rows: list[WantedRow] = []
    for token in (5, 6):
        rows += served.step().rows
        take_token(rows[-1], chosen(token), 0, served.scheduler)
    assert rows[-1].sample.status is Status.FINISHED
    assert not served.scheduler.running
    served.live["", "0"].deliver()
    assert [event.token_ids for event in events if isinstance(event, Delta)] != []
    assert all(row.is_void for row in rows), "the sequence has ended"


def test_a_token_without_a_text_is_the_error_of_its_request_alone() -> None:
    class NoText:
        def take(self, *given: object) -> bool:
            raise CheckpointError("the decoder fails")

    served = Served(live())
    [row] = served.step().rows
    error = take_token(replace(row, request=cast(LiveRequest, NoText())), chosen(7), 0, served.scheduler)
    assert isinstance(error, CheckpointError)
    assert row.sample.status is Status.RUNNING


@pytest.mark.parametrize(("came_true", "taken"), [(0, [5]), (1, [5, 6]), (2, [5, 6, 7])])
def test_a_proposal_counts_if_all_before_it_came_true(came_true: int, taken: list[int]) -> None:
    served = Served(live(max_new_tokens=9))
    [sample] = served.live["", "0"].samples
    [first] = served.step().rows
    take_token(first, chosen(4), 0, served.scheduler)
    [chunk] = served.scheduler.schedule()
    chunk = replace(chunk, length=chunk.length + 2, proposals=(5, 6))
    step = served.step([chunk])
    assert step.has_proposals
    assert [row.proposal for row in step.rows] == [None, 5, 6]
    for row, token in zip(step.rows, (5 if came_true else 3, 6 if came_true > 1 else 3, 7), strict=True):
        if not row.is_void:
            take_token(row, chosen(token), 0, served.scheduler)
    expected = [*taken[:came_true], 3] if came_true < 2 else taken
    assert sample.output.tokens == [4, *expected]
    assert sample.output.num_accepted == came_true


def _row(request: LiveRequest) -> WantedRow:
    [sample] = request.samples
    return WantedRow(request, sample, sample.num_tokens)


def test_masks_are_those_of_the_rows_with_a_constraint() -> None:
    free, bound, failed, ended = (live() for _ in range(4))
    error = InvalidRequest("too complex")
    for request, matcher in ((bound, OneToken(33)), (failed, OneToken(1, error)), (ended, OneToken(2))):
        request.samples[0].output.matcher = cast(Matcher, matcher)
    ended.samples[0].status = Status.FINISHED
    found = StepInFlight(b"", (), [_row(request) for request in (free, bound, failed, ended)]).masks()
    assert found is not None
    assert found.rows.tolist() == [1, 2, 3]
    assert found.words.tolist()[0] == [0, 2]
    assert found.words.tolist()[2] == [2**32 - 1] * 2, "every token is allowed to a sample that has ended"
    assert found.failed == [(failed, error)]
    assert StepInFlight(b"", (), [_row(free)]).masks() is None


def _bound(token: int, is_asked: bool = True, prompt: tuple[int, ...] = PROMPT) -> tuple[LiveRequest, OneToken]:
    """Returns a request whose constraint allows one token."""
    request, matcher = live(prompt=prompt), OneToken(token)
    request.samples[0].output.matcher, request.samples[0].output.has_candidates = cast(Matcher, matcher), is_asked
    return request, matcher


def test_a_row_with_candidates_gets_a_mask_only_if_none_of_them_may_follow() -> None:
    bound = [_bound(token) for token in (33, 5, 6, 7)] + [_bound(8, is_asked=False)]
    ended, not_finite = bound[2][0], 3
    ended.samples[0].status = Status.FINISHED
    rows = [_row(request) for request, _ in bound]
    step = StepInFlight(b"", (), [*rows, _row(live())], asked=range(4))
    ahead = step.masks()
    assert ahead is not None
    assert ahead.rows.tolist() == [4]
    assert [matcher.looked_ahead for _, matcher in bound] == [1, 1, 0, 1, 0]
    candidates = np.array([[40, 33, 9], [40, 33, 9], [40, 33, 9], *[[-1] * 3] * 3], np.int32)
    result = SamplerOutput.of_tokens(np.array([40, 40, 40, 0, 8, 2], np.int32), np.ones(6, np.uint8), candidates)
    result.finite[not_finite] = 0
    tokens, refused = step.choose(result)
    assert tokens.tolist() == [33, 40, 40, 0, 8, 2]
    assert refused == [1], "a sample that has ended or has no finite logits needs no mask"
    assert step.masks_of(refused).words.tolist() == [[1 << 5, 0]]
    assert StepInFlight(b"", (), rows).masks() is not None, "with more rows than logits are kept of, all have masks"


def test_rows_have_candidates_while_their_logits_are_kept() -> None:
    for num_requests, asks in ((MAX_HEAD_ROWS, True), (MAX_HEAD_ROWS + 1, False)):
        requests = [_bound(5, prompt=(1,))[0] for _ in range(num_requests)]
        served = Served(*requests, size=num_requests)
        assert served.step().asked == (list(range(num_requests)) if asks else [])
