"""An event loop that measures its turns."""

import asyncio
import time


def most_seconds() -> float:
    """The longest turn that is allowed: 20 ms of CPU time on a quiet machine, and three times that on any.

    A busy machine has caches full of other things. One on which 20 ms of Python's work take longer has more time.
    """
    begun = time.thread_time()
    sum(number * number for number in range(500_000))
    return max(0.06, 3 * (time.thread_time() - begun))


class ProbedLoop(asyncio.SelectorEventLoop):
    """An event loop that keeps the CPU time of its longest turn, in seconds."""

    longest = 0.0

    def _run_once(self) -> None:
        begun = time.thread_time()
        super()._run_once()  # type: ignore[misc]  # asyncio's own method, which no stub declares
        self.longest = max(self.longest, time.thread_time() - begun)
