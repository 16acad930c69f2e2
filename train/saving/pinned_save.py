"""The memory of a writer process as the target of a GPU's copies, which go on beside its computation."""

import logging
import weakref
from collections.abc import Callable, Mapping

import torch

from ...core.casts import Array
from ...core.ownership import Owned
from ...parallel.streams import SideStream, pin_in_place
from .snapshot import Snapshot

_log = logging.getLogger(__name__)


class PinnedSave:
    """Pinned memory of a writer, and the stream of the copies to it.

    Args:
        unpin: takes the memory back from CUDA.
        device: the device that is copied from.

    Attributes:
        close: calls `unpin`, once; so does the end of this object.
    """

    def __init__(self, unpin: Callable[[], object], device: torch.device) -> None:
        self._stream = SideStream(device)
        self.close = weakref.finalize(self, unpin)

    @staticmethod
    def of(memory: memoryview, device: torch.device) -> "PinnedSave | None":
        """Pins a writer's memory; returns None on a CPU, and where CUDA pins no more memory."""
        if device.type == "cpu" or not memory.nbytes:
            return None
        code, unpin = pin_in_place(torch.frombuffer(memory, dtype=torch.uint8))
        if code:
            _log.warning(
                "CUDA cannot pin the %d bytes of memory for saves (error %d), so training waits while they are copied "
                "in parts. Raise the limit of locked memory (ulimit -l).",
                memory.nbytes,
                code,
            )
            return None
        return PinnedSave(unpin, device)

    def start(self, snapshot: Snapshot, targets: Mapping[Owned, Array]) -> None:
        """Starts to copy items; until `wait`, they must not change, and the copies must not be read."""
        snapshot.optimizer.finish()  # on the stream that computes, which needs the gathers too
        with self._stream.beside():
            for item, target in targets.items():
                snapshot.start_copy(item, target)

    def wait(self) -> None:
        """Returns once all copies have ended."""
        self._stream.wait()
