"""The first SIGTERM or Ctrl-C asks the run to stop after its step; the second ends the process at once."""

import os
import signal
from types import FrameType


class StopRequest:
    """Set by a signal, read by the training loop at step boundaries."""

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> None:
        """Takes over SIGTERM and SIGINT of this process; call from the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = True
