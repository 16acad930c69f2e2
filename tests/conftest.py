"""Fixtures of all tests."""

import gc
import logging
import os
import signal
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

from tk.tests.rank_pool import RankPool

pytest_plugins = ("tk.tests.tokenizer_fixtures",)  # used in data/, text/ and cli/

# Background jobs of a script ignore SIGINT, and so do the processes that they start: tests could not interrupt those.
# A handler of Python is not inherited, so that processes started from here have the system's default action.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A machine under load is slow: that is no failure of a property.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

FROM_THE_END: Final = os.environ.get("PYTEST_XDIST_WORKER") == "gw1"
gc.disable()  # until all test files are imported: see `pytest_collection_finish`


def pytest_report_header(config: pytest.Config) -> str:
    """Says which tests are left out."""
    return f"tests selected: {config.option.markexpr or 'all'} (`make real` and `make test-all` run others)"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Has the second worker import the last test files first.

    In a fresh clone imports compile the tests, and pytest rewrites their assertions. So each worker does that for half
    of the files, and finds the other half done.
    """
    report = yield
    if FROM_THE_END and isinstance(collector, pytest.Dir):
        report.result.reverse()
    return report


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves `every` n-th row to `make test`, and the others to the matrix.

    Sorts files by name, slow ones first, so that at the end no worker waits for another one's slow test.
    """
    rows = Counter[str]()
    for item in items:
        every = item.get_closest_marker("every")
        if every and not item.get_closest_marker("matrix"):
            name = item.nodeid.partition("[")[0]
            if rows[name] % every.args[0]:
                item.add_marker(pytest.mark.matrix)
            rows[name] += 1
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, item.path.parts))


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


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """Takes away what a test has done to the log of tk: commands that it runs in this process show theirs."""
    logger = logging.getLogger("tk")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
