"""Fixtures for every room."""

import signal
from collections.abc import Iterator

import pytest

from tk.tests.rank_pool import RankPool

# A script's background jobs begin with Ctrl-C ignored, and so does all that they start: commands under test could not be
# interrupted. A handler of Python's own is not inherited, so they begin with the system's default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Processes for distributed tests, shared by the session."""
    pool = RankPool()
    yield pool
    pool.close()
