"""Fixtures of all tests."""

import gc
import signal
from collections.abc import Iterator

import pytest

from tk.tests.rank_pool import RankPool

pytest_plugins = ("tk.tests.tokenizer_fixtures",)  # used in data/, text/ and cli/

# Background jobs of a script ignore SIGINT, and so do the processes that they start: tests could not interrupt those.
# A handler of Python is not inherited, so that processes started from here have the system's default action.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until all test files are imported: see `pytest_collection_finish`


def pytest_report_header(config: pytest.Config) -> str:
    """Says which tests are left out."""
    return f"tests selected: {config.option.markexpr or 'all'} (`make real` and `make test-all` run others)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts slow tests first, so that at the end no worker waits for another one's slow test."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Keeps the modules that all tests import from the searches for garbage, as `lasting_imports` does."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Processes for distributed tests, which all tests of the session share."""
    pool = RankPool()
    yield pool
    pool.close()
