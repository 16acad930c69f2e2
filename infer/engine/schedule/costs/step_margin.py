"""The margin below a bound on the duration of steps: how far one full step in a hundred passes its prediction.

A prediction is a mean, so half of the steps that are filled until it reaches the bound would take longer. The margin is
the 99th percentile of measured beside predicted durations and follows the machine: a step that is longer raises it, all
others lower it by a hundredth of that (Robbins and Monro, "A Stochastic Approximation Method", 1951).
"""

from typing import Final

_PART: Final = 0.01  # of the steps may pass the bound
_GAIN: Final = 0.02
_MOST: Final = 1.5  # a machine that is disturbed more than that leaves no time for prompts otherwise
_FULL: Final = 0.75  # of the bound: shorter steps, with the same disturbances, would be further off


class StepMargin:
    """The learned margin.

    Attributes:
        factor: the durations that are planned are the bound divided by it, 1 to 1.5.
    """

    def __init__(self) -> None:
        self.factor = 1.0

    def observe(self, predicted: float, seconds: float, bound: float) -> None:
        """Learns from a step with tokens of prompts, if it was filled up to the bound.

        Args:
            predicted: the duration that was predicted, in seconds.
            seconds: its duration.
            bound: the bound.
        """
        expected = self.factor * predicted
        if expected >= _FULL * bound:
            moved = self.factor * (1 + _GAIN * ((seconds > expected) - _PART))
            self.factor = min(max(moved, 1.0), _MOST)
