"""The deadlines of calls by the server's own clock.

The engine looks at deadlines between two steps. A call may wait for something else, a long text's tokens or a grammar,
and an engine that hangs looks at nothing; so the event loop ends every call itself.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ....core.errors import DeadlinePassed


def deadline_of(seconds: float | None) -> float | None:
    """Returns the value of time.monotonic() after some seconds from now; None if none are given."""
    return None if seconds is None else time.monotonic() + seconds


@asynccontextmanager
async def ended_by(deadline: float | None) -> AsyncIterator[None]:
    """Ends the body at a deadline, whatever it waits for: the body is cancelled, as if its caller had left.

    Args:
        deadline: the value of time.monotonic() at which the caller stops waiting; None = never.

    Raises:
        DeadlinePassed: the deadline passed before the body had ended.
    """
    timer = asyncio.timeout(None if deadline is None else deadline - time.monotonic())
    try:
        async with timer:
            yield
    except TimeoutError as error:
        if not timer.expired():  # it is the body's own
            raise
        raise DeadlinePassed(
            "The call's deadline passed before its answer was complete. Allow more time, or ask for fewer tokens."
        ) from error
