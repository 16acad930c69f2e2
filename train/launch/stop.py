"""The first SIGTERM or Ctrl-C asks the run to stop after its step; the second ends the process at once."""

import os
import signal
import time
from types import FrameType


class StopRequest:
    """Set by a signal, read by the training loop at step boundaries.

    Args:
        echo_seconds: so long after the first a signal is taken for the same one: Slurm signals every process of a job
            step, and torchrun passes on its own as well.
    """

    def __init__(self, echo_seconds: float = 0.0) -> None:
        self.requested = False
        self.echo_seconds = echo_seconds
        self._first = 0.0

    def install(self) -> None:
        """Takes over SIGTERM and SIGINT of this process; call from the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested = True
            self._first = time.monotonic()
        elif time.monotonic() - self._first > self.echo_seconds:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
