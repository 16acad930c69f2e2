"""Names and sites from which the port may be asked: pages of other sites get nothing, also by DNS rebinding."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tk.core.errors import ConfigError
from tk.infer.serve.access.tokens import Caller, line_of, token_digest
from tk.infer.serve.http.framing import HttpRequest
from tk.infer.serve.http.origins import Origins
from tk.infer.serve.http.problems import HttpProblem
from tk.infer.serve.options import ServerOptions
from tk.tests.infer.serve.fake_engine import FakeEngine
from tk.tests.infer.serve.http.http_server import HttpServerThread

BODY = {"model": "fake", "prompt": "hi"}


def status_for(options: ServerOptions, **headers: str) -> int:
    """The status with which a request is refused; 200 if it is not."""
    given = [(name.replace("_", "-"), value) for name, value in headers.items()]
    try:
        Origins.of(options).check(HttpRequest("POST", "/v1/completions", given))
    except HttpProblem as problem:
        return problem.status
    return 200


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "LocalHost"])
@pytest.mark.parametrize("port", ["", ":8000", ":1"])
def test_names_of_this_machine_may_be_asked_on_any_port(host: str, port: str) -> None:
    assert status_for(ServerOptions(), host=host + port) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "", "localhost:x"]
)
def test_other_names_may_not(host: str) -> None:
    assert status_for(ServerOptions(), host=host) == 421


def test_the_bound_address_is_one_of_the_names() -> None:
    assert status_for(ServerOptions(host="127.0.0.2"), host="127.0.0.2:8000") == 200
    assert status_for(ServerOptions(), host="127.0.0.2:8000") == 421
    assert status_for(ServerOptions(host="0:0:0:0:0:0:0:1"), host="[0:0:0:0:0:0:0:1]:8000") == 200


def test_a_server_with_tokens_or_for_other_machines_has_any_name(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(line_of(token_digest("one"), Caller("alice")))
    assert status_for(ServerOptions(tokens=tmp_path / "tokens"), host="tk.example") == 200
    assert status_for(ServerOptions(host="0.0.0.0", insecure=True), host="tk.example") == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:8000", 200),
        ("https://localhost:8000", 200),
        ("http://localhost", 403),
        ("http://localhost:8001", 403),
        ("http://evil.example", 403),
        ("http://evil.example/http://localhost:8000", 403),
        ("null", 403),
        ("", 403),
    ],
)
def test_the_page_of_a_browser_must_be_of_the_same_site(origin: str, status: int) -> None:
    assert status_for(ServerOptions(), host="localhost:8000", origin=origin) == status
    assert status_for(ServerOptions(), host="localhost:8000", origin=origin, sec_fetch_site="cross-site") == status


def test_a_browser_that_knows_the_page_as_ours_is_believed_behind_a_proxy_that_renames_the_server() -> None:
    origin = "https://tk.example"
    assert status_for(ServerOptions(), host="127.0.0.1:8000", origin=origin, sec_fetch_site="same-origin") == 200
    assert status_for(ServerOptions(), host="127.0.0.1:8000", origin=origin, sec_fetch_site="same-site") == 403


def test_nothing_reaches_the_engine_and_the_answer_says_why(server: HttpServerThread, engine: FakeEngine) -> None:
    for path, body in (("/v1/completions", BODY), ("/v1/models", None), ("/", None), ("/health", None)):
        rebound = server.ask(path, body, {"host": "evil.example:8000"})
        assert (rebound.status, rebound.error["code"]) == (421, "http_421")
        assert "'evil.example:8000'" in rebound.error["message"]
        assert "localhost or 127.0.0.1 or [::1]" in rebound.error["message"]
        foreign = server.ask(path, body, {"origin": "http://evil.example"})
        assert (foreign.status, foreign.error["code"]) == (403, "http_403")
        assert "'http://evil.example'" in foreign.error["message"]
        assert "access-control-allow-origin" not in foreign.headers
    assert engine.requests == []


def test_a_preflight_is_refused(server: HttpServerThread) -> None:
    asked = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    answer = server.ask("/v1/completions", None, asked, "OPTIONS")
    assert answer.status == 403
    assert not any(name.lower().startswith("access-control") for name in answer.headers)


@pytest.fixture
def open_to(engine: FakeEngine) -> Iterator[HttpServerThread]:
    """A server that pages of one other site may ask."""
    server = HttpServerThread(engine, http_port=0, cors_origins=("https://Chat.example", "http://localhost:3000"))
    yield server
    server.close()


@pytest.mark.parametrize("origin", ["https://chat.example", "http://localhost:3000"])
def test_pages_of_an_allowed_site_may_ask_and_read(open_to: HttpServerThread, origin: str) -> None:
    asked = {"origin": origin, "access-control-request-method": "POST"}
    answer = open_to.ask("/v1/completions", None, asked, "OPTIONS")
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["access-control-allow-origin"] == origin
    assert answer.headers["access-control-allow-methods"] == "GET, POST"
    assert "authorization" in answer.headers["access-control-allow-headers"]
    for body, status in ((BODY, 200), (BODY | {"stream": True}, 200), (BODY | {"temperature": -1}, 400)):
        said = open_to.ask("/v1/completions", body, {"origin": origin})
        assert (said.status, said.headers["access-control-allow-origin"], said.headers["vary"]) == (
            status,
            origin,
            "origin",
        )
        assert said.headers["access-control-expose-headers"] == "retry-after, x-request-id"
        assert "access-control-allow-methods" not in said.headers


@pytest.mark.parametrize(
    "origin", ["http://chat.example", "https://chat.example.evil.example", "https://chat.example:8443", "null"]
)
def test_pages_of_sites_beside_it_may_not(open_to: HttpServerThread, engine: FakeEngine, origin: str) -> None:
    for method, body in (("OPTIONS", None), ("POST", BODY)):
        asked = {"origin": origin, "access-control-request-method": "POST"}
        answer = open_to.ask("/v1/completions", body, asked, method)
        assert answer.status == 403
        assert "--cors-origin" in answer.error["message"]
        assert not any(name.startswith("access-control") for name in answer.headers)
        assert answer.headers["vary"] == "origin"
    assert engine.requests == []


@pytest.mark.parametrize("origin", ["*", "chat.example", "https://chat.example/", "https://a@b", "ftp://chat.example"])
def test_what_is_no_site_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="is no site"):
        ServerOptions(cors_origins=(origin,)).validate()


def test_two_origins_are_not_the_first_one(server: HttpServerThread) -> None:
    own = f"http://127.0.0.1:{server.http_port}"
    with server.connect(
        f"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1:{server.http_port}\r\norigin: {own}\r\n"
        "origin: http://evil.example\r\n\r\n".encode()
    ) as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 403")
