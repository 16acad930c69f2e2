"""The part of a step's time that proposals cost beside their rows, as running steps show it.

A step without proposals is planned and sent while the workers compute the one before. One with proposals waits for the
results of the one before, and the next one waits for its results: then the workers wait for the engine. On a small
model that is a large part of a step, on a large one nothing.
"""

from typing import Final

_GUESS: Final = 0.05
_GAIN: Final = 0.1  # of the newest step
_FORGET: Final = 0.002  # with each step without proposals: without a new observation the guess comes back
_MOST: Final = 1.0  # a step that took longer was disturbed


class PlanningCost:
    """The learned cost.

    Attributes:
        overhead: the time that a step with proposals takes more than its rows do, as a part of a step without any.
    """

    def __init__(self) -> None:
        self.overhead = _GUESS
        self._plain: float | None = None

    def observe(self, expected: float, period: float, has_proposals: bool) -> None:
        """Learns from a step of decoding.

        Args:
            expected: the duration of its rows alone, in seconds.
            period: the time from the results of the step before to its own, in seconds.
            has_proposals: whether any of its rows is a proposal.
        """
        ratio = period / expected
        if not has_proposals:
            self._plain = (
                ratio if self._plain is None else self._plain + _GAIN * (min(ratio, 2 * self._plain) - self._plain)
            )
            self.overhead += _FORGET * (_GUESS - self.overhead)
        elif self._plain is not None:
            seen = min(max(ratio / self._plain - 1, 0.0), _MOST)
            self.overhead += _GAIN * (seen - self.overhead)
