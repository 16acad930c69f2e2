"""The loop of the engine's thread: schedule -> send -> consume, one step ahead of the workers.

Beside it are the constraints: what may follow is found while workers compute logits, or after they have sampled. A mask
costs as much time as a tenth of a row of a small model. So workers send the best tokens of a row without a mask, where
the first of them that may follow is the token that the mask would lead to. Only if none may, a mask is made.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from .schedule.live_request import LiveRequest
from .schedule.live_table import LiveTable
from .schedule.step_in_flight import StepInFlight, prepare_step
from .step.sampler_output import SamplerOutput
from .worker.draft_model import DraftModel
from .worker.worker_group import WorkerGroup

# A worker that computes reads nothing: a longer message would wait for it, and it for the reader of its result.
MAX_BYTES_AHEAD: Final = 2**16


class StepLoop:
    """The steps of an engine; only its thread uses it.

    Attributes:
        draft: makes proposals; None without a draft model.

    Args:
        live: the live requests.
    """

    def __init__(self, live: LiveTable, workers: WorkerGroup, draft: DraftModel | None = None) -> None:
        self._live, self._workers, self.draft = live, workers, draft
        self._in_flight: StepInFlight | None = None
        self._due: dict[LiveRequest, None] = {}  # those with events that are not sent yet
        self._errands: deque[Callable[[], object]] = deque()
        self._begun = 0.0  # when the workers began to compute it
        self._consumed: float | None = None  # when they had computed the one before; None: they had nothing to do

    def forget(self) -> None:
        """Forgets the step in flight, of workers that are dead."""
        self._in_flight = None

    def between_steps(self, errand: Callable[[], object]) -> None:
        """Lets the next turn call a function when no step is in flight, from any thread; if it raises, the loop ends.

        The caller wakes the thread.
        """
        self._errands.append(errand)

    def turn(self) -> bool:
        """Sends the next step, consumes the results of the one before it, or sleeps if there is neither.

        So the workers compute while this thread sends events and plans. Steps are carried out in order: blocks that one
        in flight touches can be given away. One with proposals is consumed first, and one behind which a draft goes on;
        then events are sent while the draft or the next step is computed. Returns False at the end.
        """
        before, self._in_flight = self._in_flight, None
        if before is not None and (before.has_proposals or self._errands or self._awaits_tokens()):
            self._consume(before)
            before = None
        while self._errands:
            self._errands.popleft()()
            self._consumed = None
        self._live.end_unwanted()
        planned = self._live.schedule()
        if planned is None:
            return False
        if planned and self.draft is not None:
            planned = self.draft.fill(planned, self._deliver)
        if planned:
            step = prepare_step(planned, self._live.batch)
            self._live.record_step(step)
            if before is not None and len(step.message) > MAX_BYTES_AHEAD:
                self._consume(before)
                before = None
            if before is None:
                self._begin(step)
            self._workers.send(step.message)
            self._in_flight = step
            if before is None:
                self._send_masks()
        self._deliver()
        if before is not None:
            self._consume(before)
            self._deliver()
        elif not planned:
            self._consumed = None
            self._workers.watch.rest()
            self._workers.sleep()
        return True

    def _awaits_tokens(self) -> bool:
        return self.draft is not None and self._live.await_tokens()

    def _begin(self, step: StepInFlight) -> None:
        """Records that the workers compute a step from now on."""
        self._begun = time.monotonic()
        self._workers.watch.begin(partial(self._live.predict, step.chunks))

    def _consume(self, step: StepInFlight) -> None:
        """Waits for the results of a step and takes them; its events are due then, but for those of ended requests."""
        result = self._receive(step)
        now = time.monotonic()
        drafting = 0.0 if self.draft is None else self.draft.seconds  # before this step, with results at hand
        period = None if self._consumed is None else now - self._consumed - drafting
        self._live.observe(step.chunks, now - self._begun, period)
        self._consumed = now
        if self._in_flight is not None:  # the workers know it already
            self._begin(self._in_flight)
        for index, row in enumerate(step.rows):
            if row.is_void:
                continue
            self._due[request := row.request] = None
            if index in step.failed:
                self._live.fail(request, step.failed[index])
            elif not result.finite[index]:
                self._live.fail(request, request.not_finite())
            elif row.scored is not None:
                request.add_score(row.scored, result, index)
            else:
                self._live.add_token(row, result, index)
        self._send_masks()
        for request in [each for each in self._due if each.is_over]:
            self._live.end(request)

    def _deliver(self) -> None:
        """Sends the events that are due."""
        due, self._due = self._due, {}
        for request in due:
            request.deliver()
        self._live.events_sent()

    def _send_masks(self) -> None:
        """Makes the masks that the step that was sent last needs before its rows are sampled, and sends them.

        All tokens before it are known, and workers wait for the masks.
        """
        made = None if self._in_flight is None else self._in_flight.masks()
        if made is not None:
            self._workers.send_masks(made.words)

    def _receive(self, step: StepInFlight) -> SamplerOutput:
        """Waits for the results of the oldest step without them, and chooses tokens among candidates.

        Raises:
            WorkerDied: see `WorkerGroup.receive`.
        """
        result = self._workers.receive()
        if not result.candidates.size:
            self._workers.send_tokens(result.token_ids)
            return result
        tokens, refused = step.choose(result)
        if refused:
            masks = step.masks_of(refused)
            self._workers.sample_again(masks.rows, masks.words)
            tokens[refused] = self._workers.receive().token_ids[refused]
        self._workers.send_tokens(tokens, are_chosen=True)
        return replace(result, token_ids=tokens)
