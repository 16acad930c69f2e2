"""The numbers of a step on their way to the device, all in one copy that nothing waits for, and the one copy back.

On a GPU the host packs them into pinned memory, which torch gives to a later step only after the copy has ended. The
tensors are views of one run of the device's memory: while it does not grow, the same shapes in the same order have the
same addresses in each step, as CUDA graphs need. On a CPU there is nothing to copy.
"""

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from ....core.casts import Array
from ....core.integers import round_up

_ALIGNED: Final = 16  # bytes: each array begins at a multiple of it
_LEAST: Final = 2**16  # bytes of the device's memory at first, which doubles when a step needs more


@dataclass(slots=True, eq=False)
class SentArray:
    """An array of a step, and where it is on the device."""

    values: Array
    _tensor: torch.Tensor | None = field(default=None, repr=False)

    @property
    def tensor(self) -> torch.Tensor:
        """The array on the device, of its dtype and shape, from `StepTensors.send` to the next one."""
        assert self._tensor is not None, "the numbers of a step are sent before they are read"
        return self._tensor


class StepTensors:
    """Sends the arrays of each step to a device.

    Args:
        device: where they are needed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._waiting: list[SentArray] = []
        self._there = torch.empty(0, dtype=torch.uint8, device=device)

    def add(self, values: Any, dtype: type[np.generic] = np.int64) -> SentArray:
        """Takes numbers, of any shape, along with the next `send`, after which `tensor` has them in that dtype."""
        sent = SentArray(np.array(values, dtype, order="C"))
        self._waiting.append(sent)
        return sent

    def send(self) -> None:
        """Copies all arrays that were added since the last call. Those of earlier calls may not be read any more."""
        waiting, self._waiting = self._waiting, []
        if self.device.type == "cpu":
            for sent in waiting:
                sent._tensor = torch.from_numpy(sent.values)
            return
        begins = np.cumsum([0, *(round_up(sent.values.nbytes, _ALIGNED) for sent in waiting)]).tolist()
        packed = torch.empty(begins[-1], dtype=torch.uint8, pin_memory=True)
        self._reserve(begins[-1])
        bytes_here = packed.numpy()
        for sent, begin in zip(waiting, begins, strict=False):
            size, like = sent.values.nbytes, torch.from_numpy(sent.values)
            bytes_here[begin : begin + size] = sent.values.reshape(-1).view(np.uint8)
            sent._tensor = self._there[begin : begin + size].view(like.dtype).view(like.shape)
        if len(packed):
            self._there[: len(packed)].copy_(packed, non_blocking=True)

    def _reserve(self, nbytes: int) -> None:
        if nbytes > len(self._there):
            size = max(_LEAST, 1 << (nbytes - 1).bit_length())
            self._there = torch.empty(size, dtype=torch.uint8, device=self.device)


def on_host(values: torch.Tensor) -> Array:
    """Returns values of a device as an array: one copy into pinned memory, and one wait for all that it depends on."""
    if values.device.type == "cpu":
        found: Array = values.numpy()
        return found
    there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    there.copy_(values, non_blocking=True)
    torch.cuda.current_stream(values.device).synchronize()
    found = there.numpy()
    return found
