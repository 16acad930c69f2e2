"""Copies between a device and the host, which go through pinned memory; on one device they are ordinary ones."""

import threading
from collections.abc import Iterator
from typing import Any, Final

import torch

from ....parallel.streams import copy_between, start_copy_up
from .buffer import PageBuffer

STAGE_BYTES: Final = 2**22  # as many at once as make a copy worth its start


class _PinnedStage:
    """Pinned memory with the copy that reads it at present, if there is one."""

    def __init__(self) -> None:
        self._buffer = PageBuffer(STAGE_BYTES, pinned=True)
        self.read_until: Any = None

    def free(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns room for elements, once nothing reads it any more."""
        if self.read_until is not None:
            self.read_until.synchronize()
            self.read_until = None
        return self._buffer.view(0, count, dtype)


class PinnedCopies:
    """Copies through two stages of pinned memory, made at the first copy that needs them. Threads take turns.

    Memory that is pinned itself is read and written directly. When a call returns, what it read may be written again:
    a copy to the host has ended then, and one to a device precedes all that is begun there later.
    """

    def __init__(self) -> None:
        self._stages: list[_PinnedStage] = []
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
                for begin, count in self._parts(source):
                    stage = self._next_stage()  # the copy that reads the other one goes on
                    values = stage.free(count, source.dtype)
                    values.copy_(source[begin : begin + count])
                    stage.read_until = start_copy_up(values, target[begin : begin + count])

    def parts_on_host(self, values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields values, 1-D, on the host, in parts with the index of their first element, each until the next one."""
        if values.device.type == "cpu":
            yield 0, values
            return
        with self._turn:
            for begin, count in self._parts(values):
                stage = self._next_stage().free(count, values.dtype)
                copy_between(values[begin : begin + count], stage, values.device)
                yield begin, stage

    def moved(self, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns values on a device or the host: a copy, or the tensor itself if it is there."""
        if values.device == device:
            return values
        there = torch.empty(values.shape, dtype=values.dtype, device=device)
        self.copy(there.view(-1), values.reshape(-1))
        return there

    def _next_stage(self) -> _PinnedStage:
        """Returns the stage that was used longest ago."""
        if not self._stages:
            self._stages = [_PinnedStage(), _PinnedStage()]
        self._stages.reverse()
        return self._stages[0]

    def _parts(self, values: torch.Tensor) -> Iterator[tuple[int, int]]:
        """Yields for each part of values the index of its first element, and the number of elements."""
        size = STAGE_BYTES // values.element_size()
        for begin in range(0, values.numel(), size):
            yield begin, min(size, values.numel() - begin)
