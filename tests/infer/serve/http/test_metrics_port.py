"""The port of metrics: what it answers, and the limits that it shares with the HTTP port."""

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tk.core.errors import ConfigError
from tk.infer.serve.http.metrics_port import MAX_CONNECTIONS, metrics_port_of
from tk.infer.serve.options import ServerOptions
from tk.tests.infer.serve.fake_engine import WAIT_SECONDS, FakeEngine, ServerThread
from tk.tests.infer.serve.hostile import connection, wait_until
from tk.tests.infer.serve.http.http_server import read_to_end

GET = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[ServerThread]:
    server = ServerThread(engine, is_loaded=False, metrics_port=0)
    yield server
    server.close()


def test_it_answers_in_the_text_format_while_the_model_is_loaded(server: ServerThread) -> None:
    with urllib.request.urlopen(server.metrics_url, timeout=WAIT_SECONDS) as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        names = {family.name for family in text_string_to_metric_families(response.read().decode())}
    assert "tk_num_requests_running" in names
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(server.metrics_url.replace("/metrics", "/load"), timeout=WAIT_SECONDS)
    assert caught.value.code == 404
    caught.value.close()


def test_an_address_in_use_is_an_error(server: ServerThread, engine: FakeEngine) -> None:
    assert server.metrics is not None
    number = int(server.metrics.address.rpartition(":")[2])
    second = metrics_port_of(ServerOptions(metrics_port=number))
    with pytest.raises(ConfigError, match=rf"{number}.*in use"):
        server.run(second.open(server.server._frontend))


def test_half_requests_take_no_threads_and_a_bounded_number_of_connections(server: ServerThread) -> None:
    assert server.metrics is not None
    urllib.request.urlopen(server.metrics_url, timeout=WAIT_SECONDS).close()  # starts the thread that makes the text
    before = threading.active_count()
    held = [connection(server.metrics.address, GET[:-2]) for _ in range(MAX_CONNECTIONS)]
    for each in held:
        each.__enter__()
    wait_until(lambda: server.metrics is not None and len(server.metrics._connections) == MAX_CONNECTIONS)
    assert threading.active_count() <= before
    with connection(server.metrics.address, b"") as one_more:
        assert read_to_end(one_more).startswith(b"HTTP/1.1 503")
    for each in held:
        each.__exit__(None, None, None)
    wait_until(lambda: server.metrics is not None and not server.metrics._connections)
    urllib.request.urlopen(server.metrics_url, timeout=WAIT_SECONDS).close()


def test_a_request_that_never_comes_to_an_end_has_a_moment_only(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tk.infer.serve.http.connection.HEADER_SECONDS", 0.1)
    assert server.metrics is not None
    with connection(server.metrics.address, GET[:-2]) as half:
        assert read_to_end(half).startswith(b"HTTP/1.1 408")
