"""A step from its schedule to its results: its rows of logits, the masks that they need, and the tokens that count."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from tk.core.errors import CheckpointError, InvalidRequest
from tk.infer.engine.grammar.grammar import Matcher
from tk.infer.engine.options import MAX_HEAD_ROWS
from tk.infer.engine.request.events import Delta, Event, Failed, Started
from tk.infer.engine.schedule.live_request import LiveRequest, has_candidates
from tk.infer.engine.schedule.live_table import LiveTable
from tk.infer.engine.schedule.samples.sample import UNKNOWN, Source, Status
from tk.infer.engine.schedule.scheduler import Scheduler
from tk.infer.engine.schedule.step_in_flight import StepInFlight, WantedRow, prepare_step
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


class Steps:
    """The steps of some requests of one sample.

    Attributes:
        scheduler: the scheduler.
        table: the live requests.
    """

    def __init__(self, *requests: LiveRequest, size: int = 4) -> None:
        self.scheduler = Scheduler(Limits(size, 2 * size, 64 * size, 20), 4 * size, 2)
        self.table = LiveTable(self.scheduler, threading.Lock())
        for number, request in enumerate(requests):
            request.request = replace(request.request, request_id=str(number))
            for sample in request.samples:
                sample.request = request.request
            self.table.add(request)

    def step(self, proposals: tuple[int, ...] = (), source: Source = Source.TEXT) -> StepInFlight:
        """Prepares and records a step, of which each sample has these proposals."""
        planned = self.table.schedule()
        assert planned is not None
        more = len(proposals)
        planned = [
            (replace(chunk, length=chunk.length + more, proposals=proposals, source=source), each)
            for chunk, each in planned
        ]
        step = prepare_step(planned, self.table.batch)
        self.table.record_step(step)
        return step


def test_a_prompt_is_computed_and_its_sample_gets_an_unknown_token() -> None:
    events: list[Event] = []
    request = live(events)
    steps = Steps(request)
    step = steps.step()
    [row], [sample] = step.rows, request.samples
    assert (row.sample, row.position, row.scored, row.is_void) == (sample, len(PROMPT), None, False)
    assert sample.output.tokens == [UNKNOWN]
    assert sample.num_computed == len(PROMPT)
    assert [type(event) for event in events] == [Started]
    message = decode_message(step.message)
    assert isinstance(message, StepMessage)
    assert message.tokens.tolist() == list(PROMPT)
    steps.table.add_token(row, chosen(7), 0)
    assert sample.output.tokens == [7]


def test_rows_of_a_prompt_come_before_the_one_that_chooses() -> None:
    steps = Steps(live(prompt_logprobs=1))
    rows = steps.step().rows
    assert [row.scored.target if row.scored else None for row in rows] == [*PROMPT[1:], None]


def test_a_complete_sample_is_finished() -> None:
    events: list[Event] = []
    request = live(events, max_new_tokens=2)
    steps = Steps(request)
    rows: list[WantedRow] = []
    for token in (5, 6):
        rows += steps.step().rows
        steps.table.add_token(rows[-1], chosen(token), 0)
    assert rows[-1].sample.status is Status.FINISHED
    assert not steps.scheduler.running
    request.deliver()
    assert [event.token_ids for event in events if isinstance(event, Delta)] != []
    assert all(row.is_void for row in rows), "the sequence has ended"


def test_a_token_without_a_text_is_the_error_of_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_text(*given: object) -> bool:
        raise CheckpointError("the decoder fails")

    events: list[Event] = []
    request, other = live(events), live(prompt=(7, 8, 9))
    steps = Steps(request, other)
    rows = steps.step().rows
    monkeypatch.setattr(request, "add_token", no_text)
    for index, row in enumerate(rows):
        steps.table.add_token(row, chosen(7), 0)
        assert row.request.is_over == (index == 0)
    assert isinstance(events[-1], Failed)
    assert isinstance(events[-1].error, CheckpointError)
    assert [row.sample.status for row in rows] == [Status.FINISHED, Status.RUNNING]
    assert len(steps.table) == 1


@pytest.mark.parametrize(("came_true", "taken"), [(0, [5]), (1, [5, 6]), (2, [5, 6, 7])])
def test_a_proposal_counts_if_all_before_it_came_true(came_true: int, taken: list[int]) -> None:
    request = live(max_new_tokens=9)
    steps, [sample] = Steps(request), request.samples
    [first] = steps.step().rows
    steps.table.add_token(first, chosen(4), 0)
    step = steps.step((5, 6))
    assert step.has_proposals
    assert [row.proposal for row in step.rows] == [None, 5, 6]
    for row, token in zip(step.rows, (5 if came_true else 3, 6 if came_true > 1 else 3, 7), strict=True):
        if not row.is_void:
            steps.table.add_token(row, chosen(token), 0)
    expected = [*taken[:came_true], 3] if came_true < 2 else taken
    assert sample.output.tokens == [4, *expected]
    assert sample.output.num_accepted == came_true


@pytest.mark.parametrize(
    ("most", "options", "taken"),
    [
        (9, {}, [4, 5, 6, 7]),
        (3, {}, [4, 5, 6]),
        (9, {"stop_token_ids": (6,)}, [4, 5, 6]),
    ],
)
def test_sure_tokens_come_with_the_row_behind_them(most: int, options: dict[str, Any], taken: list[int]) -> None:
    request = live(max_new_tokens=most, **options)
    steps, [sample] = Steps(request), request.samples
    sample.output.has_candidates = True
    [first] = steps.step().rows
    steps.table.add_token(first, chosen(4), 0)
    step = steps.step((5, 6), Source.CONSTRAINT)
    [row] = step.rows
    assert (row.position, row.sure) == (len(PROMPT) + 1, (5, 6))
    message = decode_message(step.message)
    assert isinstance(message, StepMessage)
    _, start, length, _, number, num_rows, *_ = message.spans[0].tolist()
    assert (start, length, number, num_rows) == (len(PROMPT), 3, 3, 1), "the fourth new token is sampled"
    steps.table.add_token(row, chosen(7), 0)
    assert sample.output.tokens == taken
    assert sample.num_computed == (len(PROMPT) + 3 if len(taken) == 4 else 0), "one that has ended has no blocks"
    assert (sample.status is Status.FINISHED) == (len(taken) == 3)
    assert request.is_over == (len(taken) == 3)


@pytest.mark.parametrize("params", [{"logprobs": 0}, {"presence_penalty": 0.5}])
def test_forced_tokens_whose_logits_are_wanted_have_rows_of_their_own(params: dict[str, Any]) -> None:
    request = live(**params)
    steps, [sample] = Steps(request), request.samples
    sample.output.has_candidates = has_candidates(request.request.params)
    steps.table.add_token(steps.step().rows[0], chosen(4), 0)
    assert [row.proposal for row in steps.step((5, 6), Source.CONSTRAINT).rows] == [None, 5, 6]


def _row(request: LiveRequest) -> WantedRow:
    [sample] = request.samples
    return WantedRow(request, sample, sample.num_tokens)


def test_masks_are_those_of_the_rows_with_a_constraint() -> None:
    free, bound, failed, ended = (live() for _ in range(4))
    error = InvalidRequest("too complex")
    for request, matcher in ((bound, OneToken(33)), (failed, OneToken(1, error)), (ended, OneToken(2))):
        request.samples[0].output.matcher = cast(Matcher, matcher)
    ended.samples[0].status = Status.FINISHED
    step = StepInFlight(b"", (), [_row(request) for request in (free, bound, failed, ended)])
    found = step.masks()
    assert found is not None
    assert found.rows.tolist() == [1, 2, 3]
    assert found.words.tolist()[0] == [0, 2]
    assert found.words.tolist()[2] == [2**32 - 1] * 2, "every token is allowed to a sample that has ended"
    assert step.failed == {2: error}
    assert StepInFlight(b"", (), [_row(free)]).masks() is None


def _bound(token: int, has_candidates: bool = True, prompt: tuple[int, ...] = PROMPT) -> tuple[LiveRequest, OneToken]:
    """Returns a request whose constraint allows one token."""
    request, matcher = live(prompt=prompt), OneToken(token)
    request.samples[0].output.matcher, request.samples[0].output.has_candidates = cast(Matcher, matcher), has_candidates
    return request, matcher


def test_a_row_with_candidates_gets_a_mask_only_if_none_of_them_may_follow() -> None:
    bound = [_bound(token) for token in (33, 5, 6, 7)] + [_bound(8, has_candidates=False)]
    ended, not_finite = bound[2][0], 3
    ended.samples[0].status = Status.FINISHED
    rows = [_row(request) for request, _ in bound]
    step = StepInFlight(b"", (), [*rows, _row(live())], with_candidates=range(4))
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


class Count(OneToken):
    """A matcher that allows the number of its tokens so far, and fails behind `last`."""

    def __init__(self, token: int, last: int) -> None:
        super().__init__(token, InvalidRequest("too complex") if token > last else None)
        self.last = last

    def forced_chain(self, most: int) -> list[int]:
        return []

    def after(self, token: int) -> "Count":
        return Count(token + 1, self.last)


def chosen_of(step: StepInFlight, result: SamplerOutput) -> tuple[list[int], list[int]]:
    tokens, refused = step.choose(result)
    return tokens.tolist(), refused


@pytest.mark.parametrize("has_candidates", [True, False])
def test_rows_behind_proposals_choose_as_if_these_came_true(has_candidates: bool) -> None:
    request = live(max_new_tokens=9)
    steps, [sample] = Steps(request), request.samples
    [first] = steps.step().rows
    steps.table.add_token(first, chosen(4), 0)
    sample.output.matcher, sample.output.has_candidates = cast(Matcher, Count(5, last=7)), has_candidates
    step = steps.step((5, 6, 7))
    masks = step.masks()
    message = decode_message(step.message)
    assert isinstance(message, StepMessage)
    if not has_candidates:
        assert masks is not None
        assert masks.rows.tolist() == [0, 1, 2, 3]
        assert masks.words[:, 0].tolist() == [1 << 5, 1 << 6, 1 << 7, 1 << 8]
        assert list(step.failed) == [3], "this request fails if all proposals come true"
        return
    assert masks is None
    candidates = np.array([[9, 5], [9, 6], [9, 8], [9, 8]], np.int32)
    result = SamplerOutput.of_tokens(np.full(4, 9, np.int32), np.ones(4, np.uint8), candidates)
    assert chosen_of(step, result) == ([5, 6, 9, 8], [2])
    assert step.masks_of([2]).words[:, 0].tolist() == [1 << 7]
    result.candidates[1, 1] = 3
    assert chosen_of(step, result)[1] == [1, 2], "rows behind one without a token yet may count"
    result.candidates[0, 1] = 3
    sample.output.matcher = cast(Matcher, Count(3, last=7))
    assert chosen_of(step, result) == ([3, 9, 9, 9], []), "no row behind a wrong proposal needs a mask"


def test_rows_have_candidates_while_their_logits_are_kept() -> None:
    for num_requests, asks in ((MAX_HEAD_ROWS, True), (MAX_HEAD_ROWS + 1, False)):
        requests = [_bound(5, prompt=(1,))[0] for _ in range(num_requests)]
        steps = Steps(*requests, size=num_requests)
        assert steps.step().with_candidates == (list(range(num_requests)) if asks else [])
