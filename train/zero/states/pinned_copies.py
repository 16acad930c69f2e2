"""Copies between a device and the host, which go through pinned memory; on one device they are ordinary ones."""

import threading
from collections.abc import Iterator
from typing import Final

import torch

from ....parallel.streams import copy_between
from .buffer import PageBuffer

STAGE_BYTES: Final = 2**22  # as many at once as make a copy worth its start


class PinnedCopies:
    """Copies through one stage of pinned memory, made at the first copy that needs it. Threads take turns.

    Memory that is pinned itself is read and written directly. A copy has ended when its call returns.
    """

    def __init__(self) -> None:
        self._stage: PageBuffer | None = None
        self._turn = threading.Lock()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies values, 1-D of any dtype, to their place."""
        if target.device == source.device:
            target.copy_(source)
        elif source.device.type != "cpu":
            for begin, part in self.parts_on_host(source):
                target[begin : begin + part.numel()].copy_(part)
        elif source.is_pinned():
            copy_between(source, target, target.device)
        else:
            with self._turn:
                for begin, stage in self._parts(source):
                    stage.copy_(source[begin : begin + stage.numel()])
                    copy_between(stage, target[begin : begin + stage.numel()], target.device)

    def parts_on_host(self, values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields values, 1-D, on the host, in parts with the index of their first element, each until the next one."""
        if values.device.type == "cpu":
            yield 0, values
            return
        with self._turn:
            for begin, stage in self._parts(values):
                copy_between(values[begin : begin + stage.numel()], stage, values.device)
                yield begin, stage

    def moved(self, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns values on a device or the host: a copy, or the tensor itself if it is there."""
        if values.device == device:
            return values
        there = torch.empty(values.shape, dtype=values.dtype, device=device)
        self.copy(there.view(-1), values.reshape(-1))
        return there

    def _parts(self, values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields for each part of values the index of its first element, and the stage."""
        if self._stage is None:
            self._stage = PageBuffer(STAGE_BYTES, pinned=True)
        size = STAGE_BYTES // values.element_size()
        for begin in range(0, values.numel(), size):
            yield begin, self._stage.view(0, min(size, values.numel() - begin), values.dtype)
