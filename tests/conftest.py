"""Fixtures for every room."""

from collections.abc import Iterator

import pytest

from tk.tests.rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Processes for distributed tests, shared by the session."""
    pool = RankPool()
    yield pool
    pool.close()
