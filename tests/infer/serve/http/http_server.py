"""A server with an HTTP port over a scripted engine, and a client of the standard library."""

import http.client
import json
import socket
from collections.abc import Mapping
from typing import Any

from tk.infer.serve.http.listener import Listener
from tk.infer.serve.openai.http_port import http_port_of
from tk.infer.serve.options import ServerOptions
from tk.tests.infer.serve.fake_engine import WAIT_SECONDS, ServerThread


class HttpServerThread(ServerThread):
    """A Server with both ports."""

    http: Listener

    def _ports(self, options: ServerOptions) -> list[Any]:
        self.http = http_port_of(options)
        return [self.http, *super()._ports(options)]

    @property
    def http_port(self) -> int:
        return int(self.http.address.rpartition(":")[2])

    def ask(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None, method: str = "") -> "Answer":
        """One request on a connection of its own; a body that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=WAIT_SECONDS)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            given = {"content-type": "application/json"} if data is not None else {}
            connection.request(method or ("GET" if data is None else "POST"), path, data, {**given, **(headers or {})})
            response = connection.getresponse()
            return Answer(response, response.read())
        finally:
            connection.close()

    def connect(self, data: bytes = b"") -> socket.socket:
        """A connection that has sent some bytes."""
        connection = socket.create_connection(("127.0.0.1", self.http_port), timeout=WAIT_SECONDS)
        connection.sendall(data)
        return connection


class Answer:
    """A complete answer."""

    def __init__(self, response: http.client.HTTPResponse, body: bytes) -> None:
        self.status, self.headers, self.body = response.status, response.headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, which has OpenAI's fields and no other."""
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Any]:
        """The values of a stream's events; the last of a complete one is "[DONE]"."""
        assert self.headers["content-type"] == "text/event-stream"
        datas = [part.removeprefix("data: ") for part in self.body.decode().split("\n\n") if part]
        return [data if data == "[DONE]" else json.loads(data) for data in datas]


def read_to_end(connection: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def post(path: str, body: bytes, *headers: str) -> bytes:
    """The bytes of a request."""
    lines = [
        f"POST {path} HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def read_until(connection: socket.socket, last: bytes) -> bytes:
    """What the server sends, which ends with these bytes."""
    received = b""
    while not received.endswith(last):
        part = connection.recv(65536)
        assert part, received
        received += part
    return received
