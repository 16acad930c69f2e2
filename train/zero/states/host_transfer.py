"""Copies between a device and the host, through pinned memory; a copy has ended when the call returns."""

import torch

from ....parallel.streams import copy_between
from .buffer import PageBuffer


class HostTransfer:
    """Gives values of a device on the host; values that are there already are given as they are.

    Args:
        device: the device of the values.
        host: the device on which they are needed.
        nbytes: the most bytes of values that are given under one name.
    """

    def __init__(self, device: torch.device, host: torch.device, nbytes: int) -> None:
        self._device, self._nbytes = device, nbytes
        self._host = host
        self._stages: dict[str, PageBuffer] = {}

    def down(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Returns values, 1-D, on the host, until values are asked for under that name again."""
        if values.device == self._host:
            return values
        if name not in self._stages:
            self._stages[name] = PageBuffer(self._nbytes, pinned=True)
        stage = self._stages[name].view(0, values.numel(), values.dtype)
        copy_between(values, stage, self._device)
        return stage

    def up(self, given: torch.Tensor, values: torch.Tensor) -> None:
        """Copies what `down` returned for `values`, and what changed in it since, back to `values`."""
        if given is not values:
            copy_between(given, values, self._device)

    def close(self) -> None:
        """Gives the memory back. Idempotent."""
        for stage in self._stages.values():
            stage.close()
        self._stages.clear()
