"""The room of one step: the tokens that it may have, and the seconds that it may take."""

from .cost import StepCost, StepSize


class StepBudget:
    """The part of a step's tokens and seconds that is left. Decoding takes its tokens first, then prompts, then
    proposals.

    Args:
        max_tokens: the largest number of tokens of the step.
        max_seconds: the bound on its predicted duration, or None. Decoding sequences and one token of a prompt are
            computed even beyond it, so that everyone moves on.
        cost: predicts durations.
    """

    def __init__(self, max_tokens: int, max_seconds: float | None, cost: StepCost) -> None:
        self._num_left = max_tokens
        self._max_seconds = max_seconds
        self._cost = cost
        self._size = StepSize()
        self._has_prompt = False

    @property
    def num_taken(self) -> int:
        """The number of tokens that were taken."""
        return self._size.num_tokens

    def take(self, start: int, length: int) -> None:
        """Takes tokens [start, start + length) of a sequence."""
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

    def take_prompt(self, start: int, wanted: int) -> int:
        """Takes as many of the `wanted` tokens as there is room for, and returns their number."""
        length = self.room(start, wanted)
        self.take(start, length)
        self._has_prompt = True
        return length
