"""Fixtures for every room."""

import signal
from collections.abc import Iterator

import pytest

from tk.tests.rank_pool import RankPool

# Background jobs of a script begin with Ctrl-C ignored, and so does all that they start: tests could not interrupt it.
# A handler of Python's own is not inherited: what is started from here begins with the system's default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with what takes long, so that at the end no worker waits for another's long test."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Processes for distributed tests, shared by the session."""
    pool = RankPool()
    yield pool
    pool.close()
