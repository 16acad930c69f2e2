"""An event loop that measures its turns."""

import asyncio
import time


def most_seconds(bound: float = 0.06) -> float:
    """The longest turn that is allowed, in CPU time; by default thrice 20 ms, as a busy machine's caches are full.

    A machine on which 20 ms of Python's work take longer has as much more time.
    """
    begun = time.thread_time()
    sum(number * number for number in range(400_000))
    return max(bound, (time.thread_time() - begun) / 0.02 * bound)


class ProbedLoop(asyncio.SelectorEventLoop):
    """An event loop that keeps the CPU time of its longest turn, in seconds."""

    longest = 0.0

    def _run_once(self) -> None:
        begun = time.thread_time()
        super()._run_once()  # type: ignore[misc]  # asyncio's own method, which no stub declares
        self.longest = max(self.longest, time.thread_time() - begun)
