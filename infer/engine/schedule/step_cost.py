"""The cost of a step: its duration in seconds as a + b * tokens + c * attended keys, measured and kept up to date.

A token attends to all keys up to its own position. The coefficients start from a few measured steps and follow later
ones: every observed step scales each term in proportion to the term's part of the prediction, so that steps which say
nothing about a term (decoding says little about long prompts) do not change it.

Below a bound on the duration there is a margin: how far one full step in a hundred passes its prediction. A prediction
is a mean, so half of the steps that are filled until it reaches the bound would take longer. The margin is the 99th
percentile of measured beside predicted durations and follows the machine: a step that is longer raises it, all others
lower it by a hundredth of that (Robbins and Monro, "A Stochastic Approximation Method", 1951).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

_GAIN: Final = 0.1  # how much of an error one step corrects
_LARGEST_ERROR: Final = 1.0  # relative; one step that took much longer says more about the machine than about tokens
_SWEEPS: Final = 2000  # over the steps that are measured at first
_TOKENS_PER_STEP: Final = 64  # a first guess: so many tokens, or so many keys below, cost as much as a step of none
_KEYS_PER_STEP: Final = 64 * 4096
_LATE_PART: Final = 0.01  # of the steps may pass the bound
_MARGIN_GAIN: Final = 0.02
_MOST_MARGIN: Final = 1.5  # a machine that is disturbed more than that leaves no time for prompts otherwise
_FULL: Final = 0.75  # of the bound: shorter steps, with the same disturbances, would be further off


@dataclass(frozen=True, slots=True)
class StepSize:
    """The tokens of a step, and the keys that they attend to, summed over tokens."""

    num_tokens: int = 0
    num_keys: int = 0

    @staticmethod
    def of(spans: Iterable[tuple[int, int]]) -> "StepSize":
        """Returns the size of tokens [start, start + length) of samples, given as (start, length)."""
        num_tokens = num_keys = 0
        for start, length in spans:
            num_tokens += length
            num_keys += length * start + length * (length + 1) // 2
        return StepSize(num_tokens, num_keys)

    def plus(self, start: int, length: int) -> "StepSize":
        """Returns the size with tokens [start, start + length) of one more sample."""
        return StepSize(self.num_tokens + length, self.num_keys + length * start + length * (length + 1) // 2)


class StepCost:
    """The predicted duration of steps.

    Attributes:
        margin: the durations that are planned are the bound divided by it, 1 to 1.5.
    """

    def __init__(self) -> None:
        self.margin = 1.0
        self._terms: tuple[float, float, float] | None = None  # seconds per step, per token, per key

    @property
    def is_known(self) -> bool:
        """Whether a step was observed; no duration can be predicted before."""
        return self._terms is not None

    def seconds(self, size: StepSize) -> float:
        """Returns the predicted duration of a step; 0 if none was observed yet."""
        return sum(self._parts(size)) if self._terms else 0.0

    def calibrate(self, measured: Iterable[tuple[StepSize, float]]) -> None:
        """Starts from measured steps of different sizes, given with their seconds."""
        steps: Sequence[tuple[StepSize, float]] = list(measured)
        for _ in range(_SWEEPS):
            for size, seconds in steps:
                self.observe(size, seconds)

    def observe(self, size: StepSize, seconds: float) -> None:
        """Corrects the coefficients by a step that took `seconds`."""
        if not size.num_tokens or seconds <= 0:
            return
        if self._terms is None:
            base = seconds / (1 + size.num_tokens / _TOKENS_PER_STEP + size.num_keys / _KEYS_PER_STEP)
            self._terms = (base, base / _TOKENS_PER_STEP, base / _KEYS_PER_STEP)
        (a, b, c), (base, of_tokens, of_keys) = self._terms, self._parts(size)
        total = base + of_tokens + of_keys
        step = _GAIN * min(seconds / total - 1, _LARGEST_ERROR) / total
        self._terms = (a * (1 + step * base), b * (1 + step * of_tokens), c * (1 + step * of_keys))

    def learn_margin(self, predicted: float, seconds: float, bound: float) -> None:
        """Learns the margin from a step with tokens of prompts, if it was filled up to the bound.

        Args:
            predicted: the duration that was predicted, in seconds.
            seconds: its duration.
        """
        expected = self.margin * predicted
        if expected >= _FULL * bound:
            moved = self.margin * (1 + _MARGIN_GAIN * ((seconds > expected) - _LATE_PART))
            self.margin = min(max(moved, 1.0), _MOST_MARGIN)

    def longest(self, size: StepSize, start: int, wanted: int, bound: float) -> int:
        """Returns how many tokens from `start` on a step of `size` can take within `bound` seconds.

        Returns:
            A number from 0 to `wanted`; all of `wanted` if no step was observed yet.
        """
        low, high = 0, wanted
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds(size.plus(start, middle)) <= bound:
                low = middle
            else:
                high = middle - 1
        return low

    def _parts(self, size: StepSize) -> tuple[float, float, float]:
        a, b, c = self._terms or (0.0, 0.0, 0.0)
        return a, b * size.num_tokens, c * size.num_keys


class StepBudget:
    """The part of a step's tokens and seconds that is left. Decoding takes its tokens first, then prompts, then
    proposals.

    Args:
        max_tokens: the largest number of tokens of the step.
        max_seconds: the bound on its predicted duration, or None. Decoding samples and one token of a prompt are
            computed even beyond it, so that everyone moves on.
        cost: predicts durations.
    """

    def __init__(self, max_tokens: int, max_seconds: float | None, cost: StepCost) -> None:
        self._num_left, self._max_seconds, self._cost = max_tokens, max_seconds, cost
        self._size = StepSize()
        self._has_prompt = False

    @property
    def num_reserved(self) -> int:
        """The number of tokens that were reserved."""
        return self._size.num_tokens

    def reserve(self, start: int, length: int) -> None:
        """Reserves tokens [start, start + length) of a sample."""
        self._num_left -= length
        self._size = self._size.plus(start, length)

    def room(self, start: int, wanted: int) -> int:
        """Returns how many of the `wanted` tokens of a prompt, from `start` on, the step can take."""
        length = self.rest(start, wanted)
        return length if self._has_prompt else max(length, min(1, wanted, self._num_left))

    def rest(self, start: int, wanted: int) -> int:
        """Returns how many of the `wanted` tokens, from `start` on, the step can take within all of its bounds."""
        length = min(wanted, self._num_left)
        if length <= 0 or self._max_seconds is None:
            return max(0, length)
        return self._cost.longest(self._size, start, length, self._max_seconds)

    def reserve_prompt(self, start: int, wanted: int) -> int:
        """Reserves as many of the `wanted` tokens as there is room for, and returns their number."""
        length = self.room(start, wanted)
        self.reserve(start, length)
        self._has_prompt = True
        return length
