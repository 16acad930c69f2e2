"""Stop requests: the first SIGTERM or Ctrl-C stops the run after its step, the second ends the process at once."""

import os
import signal
import time
from types import FrameType


class StopRequest:
    """A request that a signal makes and that the training loop reads between steps.

    Args:
        echo_seconds: signals within this time after the first one count as the same signal. Slurm signals every process
            of a job step, and torchrun passes its signal on to the ranks as well.

    Attributes:
        requested: whether the run should stop after the current step.
    """

    def __init__(self, echo_seconds: float = 0.0) -> None:
        self.requested = False
        self.echo_seconds = echo_seconds
        self._first = 0.0

    def install(self) -> None:
        """Installs the handler for SIGTERM and SIGINT of this process; must be called from the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested = True
            self._first = time.monotonic()
        elif time.monotonic() - self._first > self.echo_seconds:
            signal.signal(number, signal.SIG_DFL)  # so that the signal itself ends the process, as its exit code shows
            os.kill(os.getpid(), number)
