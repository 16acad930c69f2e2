"""OpenAI's client for a server with an HTTP port around a scripted engine."""

from collections.abc import Iterator

import openai
import pytest

from tk.tests.infer.serve.fake_engine import WAIT_SECONDS
from tk.tests.infer.serve.http.conftest import engine, server
from tk.tests.infer.serve.http.http_server import HttpServerThread

__all__ = ("client", "engine", "server")


@pytest.fixture
def client(server: HttpServerThread) -> Iterator[openai.OpenAI]:  # the fixture
    url = f"http://127.0.0.1:{server.http_port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", timeout=WAIT_SECONDS, max_retries=0) as client:
        yield client
