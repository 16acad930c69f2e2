"""A scripted engine behind a server with an HTTP port."""

from collections.abc import Iterator

import openai
import pytest

from tk.tests.infer.http.http_server import HttpServerThread
from tk.tests.infer.server.fake_engine import WAIT_SECONDS, FakeEngine


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


@pytest.fixture
def client(server: HttpServerThread) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{server.http_port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", timeout=WAIT_SECONDS, max_retries=0) as client:
        yield client
