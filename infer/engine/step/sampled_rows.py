"""The rows of a step that sample: one after a slot's last token, and one after each of its proposals."""

from dataclasses import dataclass

import numpy as np

from ....core.casts import Array


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows in the order of their tokens; those of a slot stand together.

    Attributes:
        slot: the slot of each row.
        token: the row's token among the step's packed tokens.
        number: the number of the new token that it samples.
        mask: the number of its mask, or NO_MASK, as it is behind proposals.
        num_proposals: how many proposals stand between the slot's last token and the row's new one.
    """

    slot: Array  # int32 [N]
    token: Array  # int32 [N]
    number: Array  # int32 [N]
    mask: Array  # int32 [N]
    num_proposals: Array  # int32 [N]

    @staticmethod
    def of(first_rows: Array, num_rows: Array) -> "SampledRows":
        """Returns the rows of spans.

        Args:
            first_rows: slot, token, number and mask of the first row of each span: int32 [4, S].
            num_rows: the number of rows of each: int32 [S].
        """
        spans = np.flatnonzero(num_rows)
        first_rows, num_rows = first_rows[:, spans], num_rows[spans]
        if int(num_rows.max(initial=1)) == 1:
            slot, token, number, mask = np.ascontiguousarray(first_rows)
            return SampledRows(slot, token, number, mask, np.zeros(len(spans), np.int32))
        first = np.cumsum(num_rows, dtype=np.int32) - num_rows
        within = np.arange(int(num_rows.sum()), dtype=np.int32) - np.repeat(first, num_rows)
        slot, token, number, mask = np.repeat(first_rows, num_rows, axis=1)
        return SampledRows(slot, token + within, number + within, mask, within)

    def come_true(self, sampled: Array, given: Array) -> Array:
        """Returns which rows count, because the samples before them equal the proposals: bool [N].

        Args:
            sampled: the tokens that the rows sampled: int32 [N].
            given: the rows' own tokens, which are proposals but for the first of each slot: int32 [N].
        """
        is_wrong = self.num_proposals > 0
        is_wrong[1:] &= sampled[:-1] != given[1:]
        num_wrong = np.cumsum(is_wrong)
        found: Array = num_wrong == num_wrong[np.arange(len(num_wrong)) - self.num_proposals]
        return found
