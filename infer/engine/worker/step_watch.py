"""The watch over the workers of an engine: those that hang are reported soon, and count as dead in the end.

A prediction alone does not part a worker that hangs from a slow one: the first long prompt can take many times as
long as it was expected to. So a step that is late is reported only if the kernel says that a worker does not compute.
Only the time that the watch itself sees counts: a job that is stopped and continued as a whole, or a virtual machine
that is paused, loses no worker.
Workers without a step hang if the kernel has stopped one: the next step would wait for it.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

from ....core.errors import WorkerDied, WorkerStalled
from .process_state import ProcessState, describe_ranks

LOOK_SECONDS: Final = 0.25  # between two looks at a step, if it may be late soon
LONGEST_GAP: Final = 1.0  # seconds between two looks; in a longer one this process was stopped, too, or had other work
IDLE_SECONDS: Final = 0.75  # between two looks at workers that have nothing to do
TIMES_LATE: Final = 2.0  # a step is late after so many times its predicted duration,
SECONDS_LATE: Final = 1.0  # and so many seconds more
TIMES_DEAD: Final = 20.0  # without a timeout: its workers are dead after so many times its predicted duration,
SECONDS_DEAD: Final = 120.0  # at least so many seconds: a machine that swaps or is full loses no worker
_LOG: Final = logging.getLogger(__name__)


class StepWatch:
    """The watch; the engine's thread looks while it waits for its workers.

    Args:
        timeout: the seconds after which the workers of a step are dead; None = as the prediction says.
        report: is called with an error when they hang, and with None when they answer again.
        clock: returns the time in seconds.
        state_of: returns the state of the process with an id.
    """

    def __init__(
        self,
        timeout: float | None,
        report: Callable[[WorkerStalled | None], None],
        clock: Callable[[], float] = time.monotonic,
        state_of: Callable[[int], ProcessState] = ProcessState.of,
    ) -> None:
        self._timeout, self._report, self._clock, self._state_of = timeout, report, clock, state_of
        self._seen: tuple[ProcessState, ...] = ()
        self._reported_at: float | None = None  # None: they do not hang, as far as is known
        self._predict: Callable[[], float] | None = None  # of the step; None: there is none
        self._looked_at = self._seconds = 0.0

    def begin(self, predict: Callable[[], float]) -> None:
        """Begins to watch a step, which the workers compute from now on.

        Args:
            predict: returns its expected duration in seconds, if that is needed; 0 = not known.
        """
        self._predict, self._expected = predict, -1.0
        self._seconds, self._counted_at = 0.0, self._clock()  # how long it has taken, until when
        self._looked_at, self._seen = 0.0, ()

    @property
    def _soonest(self) -> float:
        """The seconds before which no step is late."""
        return SECONDS_LATE if self._timeout is None else min(SECONDS_LATE, self._timeout)

    @property
    def seconds_to_look(self) -> float:
        """The time until the next look: most steps are answered before the first, and cost nothing here."""
        return max(LOOK_SECONDS, self._soonest - LOOK_SECONDS - self._seconds)

    def rest(self) -> None:
        """Records that the workers compute nothing."""
        if self._predict is not None:
            self._predict, self._seen = None, ()

    def forget(self) -> None:
        """Begins anew, for other workers."""
        self._reported_at = None
        self.rest()

    def answered(self) -> None:
        """Records that the workers have answered, if only a part of what they owe."""
        if self._reported_at is not None:
            seconds, self._reported_at, self._seen = self._clock() - self._reported_at, None, ()
            _LOG.warning("The inference workers answer again, %.1f s after it was reported that they do not.", seconds)
            self._report(None)

    def look_at_idle(self, process_ids: tuple[int, ...]) -> None:
        """Reports workers that are stopped while they have nothing to compute, and their return."""
        before, self._seen = self._seen, tuple(map(self._state_of, process_ids))
        if not any(state.is_stopped for state in self._seen):
            self.answered()
        elif self._reported_at is None and any(state.is_stopped for state in before):
            ranks = describe_ranks(process_ids)
            self._stalled(WorkerStalled(f"The inference workers cannot compute the next step: {ranks}."))

    def look(self, process_ids: tuple[int, ...]) -> None:
        """Reports workers that hang; a call costs little before their step is late.

        Args:
            process_ids: the process ids of the workers, in rank order.

        Raises:
            WorkerDied: the step has taken longer than it may.
        """
        if self._predict is None:
            return
        self._count()
        if self._seconds < self._soonest:
            return
        if self._expected < 0:
            self._expected = self._predict()
        limit = max(SECONDS_DEAD, TIMES_DEAD * self._expected) if self._timeout is None else self._timeout
        if self._seconds >= limit:
            raise WorkerDied(
                f"The inference workers did not answer for {self._seconds:.1f} s ({self._expectation}) and are killed: "
                f"{describe_ranks(process_ids)}."
            )
        late = TIMES_LATE * self._expected + SECONDS_LATE
        if self._reported_at is None and self._seconds >= late and self._hang(process_ids):
            self._stalled(
                WorkerStalled(
                    f"The inference workers do not answer for {self._seconds:.1f} s ({self._expectation}): "
                    f"{describe_ranks(process_ids)}. After {limit:g} s they are killed."
                )
            )

    def _stalled(self, error: WorkerStalled) -> None:
        self._reported_at = self._clock()
        _LOG.warning("%s", error)
        self._report(error)

    def _count(self) -> None:
        """Adds the time since the last look; if that was too long ago, what was seen then says nothing about now."""
        gap, self._counted_at = self._clock() - self._counted_at, self._clock()
        self._seconds += min(gap, LONGEST_GAP)
        if gap > LONGEST_GAP:
            self._seen = ()

    @property
    def _expectation(self) -> str:
        return f"their step was expected to take {max(self._expected, 0.001):.3f} s"

    def _hang(self, process_ids: tuple[int, ...]) -> bool:
        """Returns whether a worker hangs or all wait for something, since the last look, which was long enough ago."""
        now = self._clock()
        if self._seen and now - self._looked_at < LOOK_SECONDS / 2:
            return False  # a wait was ended early
        states = tuple(map(self._state_of, process_ids))
        before, seconds = self._seen, now - self._looked_at
        self._seen, self._looked_at = states, now
        if len(before) != len(states):
            return False
        idle = [state for state, last in zip(states, before, strict=True) if not state.has_computed(last, seconds)]
        return len(idle) == len(states) or any(state.hangs for state in idle)
