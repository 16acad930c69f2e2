"""A scripted engine behind a server with an HTTP port."""

from collections.abc import Iterator

import pytest

from tk.tests.infer.serve.fake_engine import FakeEngine
from tk.tests.infer.serve.http.http_server import HttpServerThread


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close()


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[HttpServerThread]:
    server = HttpServerThread(engine, http_port=0, metrics_port=0)
    yield server
    server.close()
