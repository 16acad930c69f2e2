"""The rows of a step that the host samples, beside those that the device has sampled, and their answers together."""

import numpy as np

from ......core.casts import Array
from ....step.sampler_output import SamplerOutput
from ....step.sampling_rows import SamplingRows
from ...sampler.sampler import best_sampler, run_sampler


class HostRows:
    """The host's sampler, and the logits of the last step's rows that have candidates and may be sampled again."""

    def __init__(self) -> None:
        self._sample = best_sampler()
        self._rows: SamplingRows | None = None
        self._numbers: list[Array] = []
        self._logits: list[Array] = []

    def begin(self, rows: SamplingRows) -> None:
        """Forgets the last step for one with these rows."""
        self._rows, self._numbers, self._logits = rows, [], []

    def output(
        self, part: slice, others: Array, result_2R: Array, logits_NV: Array, masks: Array | None
    ) -> SamplerOutput:
        """Returns the answers of a part of the rows.

        Args:
            part: the numbers of these rows in the step.
            others: the numbers of the rows that the host samples, counted from the first one of the part.
            result_2R: the device's tokens and finite flags; those of the others do not count.
            logits_NV: the logits of the others.
            masks: the masks of the step.
        """
        assert self._rows is not None, "a step has begun"
        plain = SamplerOutput.of_tokens(result_2R[0].copy(), result_2R[1].astype(np.uint8))
        if not len(others):
            return plain
        own = self._rows.taken(others + part.start)
        if own.have_candidates:
            self._numbers.append(others + part.start)
            self._logits.append(logits_NV.copy())
        return plain.replaced(others, run_sampler(logits_NV, own, masks, self._sample))

    def sample_again(self, masks: Array, rows: Array) -> SamplerOutput:
        """Samples the rows of the last step again, some of them with masks: see `Backend`."""
        assert self._rows is not None, "a step has begun"
        count, numbers = len(self._rows), np.concatenate(self._numbers)
        own = self._rows.taken(numbers).masked(np.searchsorted(numbers, rows))
        found = run_sampler(np.concatenate(self._logits), own, masks, self._sample)
        return SamplerOutput.of_tokens(np.zeros(count, np.int32), np.zeros(count, np.uint8)).replaced(numbers, found)
