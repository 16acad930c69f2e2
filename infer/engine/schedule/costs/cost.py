"""The cost of a step: its duration in seconds as a + b * tokens + c * attended keys, measured and kept up to date.

A token attends to all keys up to its own position. The coefficients start from a few measured steps and follow later
ones: every observed step scales each term in proportion to the term's part of the prediction, so that steps which say
nothing about a term (decoding says little about long prompts) do not change it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

_GAIN: Final = 0.1  # how much of an error one step corrects
_LARGEST_ERROR: Final = 1.0  # relative; one step that took much longer says more about the machine than about tokens
_SWEEPS: Final = 2000  # over the steps that are measured at first
_TOKENS_PER_STEP: Final = 64  # a first guess: so many tokens, or so many keys below, cost as much as a step of none
_KEYS_PER_STEP: Final = 64 * 4096


@dataclass(frozen=True, slots=True)
class StepSize:
    """The tokens of a step, and the keys that they attend to, summed over tokens."""

    num_tokens: int = 0
    num_keys: int = 0

    def plus(self, start: int, length: int) -> "StepSize":
        """Returns the size with tokens [start, start + length) of one more sequence."""
        return StepSize(self.num_tokens + length, self.num_keys + length * start + length * (length + 1) // 2)


class StepCost:
    """The predicted duration of steps."""

    def __init__(self) -> None:
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
        parts = self._parts(size)
        total = sum(parts)
        step = _GAIN * min(seconds / total - 1, _LARGEST_ERROR) / total
        a, b, c = (term * (1 + step * part) for term, part in zip(self._terms, parts, strict=True))
        self._terms = (a, b, c)

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
