"""An event loop that measures its turns."""

import asyncio
import time

# The limit is 20 ms of CPU time on a quiet machine; a busy one has caches full of other things.
MOST_SECONDS = 0.06


class ProbedLoop(asyncio.SelectorEventLoop):
    """An event loop that keeps the CPU time of its longest turn, in seconds."""

    longest = 0.0

    def _run_once(self) -> None:
        begun = time.thread_time()
        super()._run_once()  # type: ignore[misc]  # asyncio's own method, which no stub declares
        self.longest = max(self.longest, time.thread_time() - begun)
