"""The results of steps on their way to the host: one copy of each, and an event that says when it has ended."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ......core.casts import Array
from ......parallel.streams import mark


class ResultCopy:
    """A copy of results to the host that is under way.

    Attributes:
        result: tokens and finite flags as the kernel of the sampler writes them, int32 [2, R]; after `wait`.
        logits: the logits of the rows that the host samples, fp32 [N, V]; after `wait`.
    """

    def __init__(self, result: torch.Tensor, logits: torch.Tensor, event: Any) -> None:
        self._result, self._logits, self._event = result, logits, event

    def wait(self) -> tuple[Array, Array]:
        """Waits for the copy; returns `result` and `logits`, which a later copy overwrites."""
        if self._event is not None:
            self._event.synchronize()
        return self._result.numpy(), self._logits.numpy()


class ResultCopies:
    """Copies of results to pinned memory; two may be under way at the same time.

    Args:
        device: where results come from.
        vocab_size: the logits of a row.
    """

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self._device, self._vocab_size = device, vocab_size
        self._results = [self._memory(0, torch.int32) for _ in range(2)]
        self._logits = self._memory(0, torch.float32)

    def start(self, result_2R: torch.Tensor, logits_RV: torch.Tensor, others: Array) -> ResultCopy:
        """Starts to copy results, and the logits of some rows, whose numbers ascend: int64 [N].

        At most one copy under way has logits.
        """
        self._results.reverse()
        needed = result_2R.numel()
        if len(self._results[0]) < needed:
            self._results[0] = self._memory(2 * needed, torch.int32)
        result = self._results[0][:needed].view(2, -1)
        result.copy_(result_2R, non_blocking=True)
        values = len(others) * self._vocab_size
        if len(self._logits) < values:
            self._logits = self._memory(values, torch.float32)
        logits = self._logits[:values].view(-1, self._vocab_size)
        done = 0
        for rows in runs(others):
            count = rows.stop - rows.start
            logits[done : done + count].copy_(logits_RV[rows], non_blocking=True)
            done += count
        return ResultCopy(result, logits, mark(self._device))

    def _memory(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=self._device.type != "cpu")


def runs(numbers: Array) -> Sequence[slice]:
    """Returns the runs of consecutive numbers among ascending ones."""
    ends = np.flatnonzero(np.diff(numbers) != 1) + 1
    return [slice(int(part[0]), int(part[-1]) + 1) for part in np.split(numbers, ends) if len(part)]
