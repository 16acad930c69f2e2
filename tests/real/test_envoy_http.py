"""Envoy's HTTP/1.1 connections to a server, which all callers share: no byte of one runs under another's token.

One caller sends 1,000 random framings, with requests hidden in them, while others ask honestly on the same connections.
"""

import asyncio
import json
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tk.infer.serve.access.tokens import GENERATE, Caller, line_of, token_digest
from tk.tests.infer.serve.http.framings import Framings, judged
from tk.tests.infer.serve.serving import WAIT_SECONDS, Serving
from tk.tests.real.test_envoy import free_port

pytestmark = pytest.mark.real
COUNT: Final = 1000
ATTACKERS: Final = 24  # connections at a time
HONEST: Final = ("alice", "bob")
EACH: Final = 6  # connections of each honest caller
QUIET_SECONDS: Final = 0.1  # after which nothing more is expected of a connection


# A proxy that takes what it can make sense of, and keeps four connections to the server at PORT.
CONFIG: Final = """
static_resources:
  listeners:
    - name: http
      address: { socket_address: { address: 127.0.0.1, port_value: LISTEN } }
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": type.googleapis.com/PACKAGE.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: tk
                codec_type: HTTP1
                stream_error_on_invalid_http_message: true
                http_protocol_options:
                  accept_http_10: true
                  default_host_for_http_10: tk
                  allow_chunked_length: true
                  enable_trailers: true
                http_filters:
                  - name: envoy.filters.http.router
                    typed_config: { "@type": type.googleapis.com/PACKAGE.filters.http.router.v3.Router }
                route_config:
                  virtual_hosts:
                    - { name: tk, domains: ["*"], routes: [{ match: { prefix: / }, route: { cluster: tk } }] }
  clusters:
    - name: tk
      connect_timeout: 1s
      type: STATIC
      circuit_breakers: { thresholds: [{ max_connections: 4, max_pending_requests: 4096, max_requests: 4096 }] }
      typed_extension_protocol_options:
        PACKAGE.upstreams.http.v3.HttpProtocolOptions:
          "@type": type.googleapis.com/PACKAGE.upstreams.http.v3.HttpProtocolOptions
          explicit_http_config: { http_protocol_options: { allow_chunked_length: true, enable_trailers: true } }
      load_assignment:
        cluster_name: tk
        endpoints:
          - lb_endpoints:
              - endpoint: { address: { socket_address: { address: 127.0.0.1, port_value: PORT } } }
"""


@dataclass
class Shared:
    """A server whose HTTP port is asked directly and through Envoy.

    Attributes:
        direct: the port of the server.
        pooled: the port of Envoy, which has four connections to the server.
        log: the file with the server's log.
    """

    serving: Serving
    direct: int
    pooled: int
    log: Path


@pytest.fixture
def shared(envoy: Path, tiny: Path, tmp_path: Path) -> Iterator[Shared]:
    callers = [Caller(name, frozenset({GENERATE})) for name in ("mallory", *HONEST)]
    tokens = tmp_path / "tokens"
    tokens.write_text("".join(line_of(token_digest(f"token-of-{each.principal}"), each) for each in callers))
    port = free_port()
    with (tmp_path / "server.log").open("w") as log, (tmp_path / "envoy.log").open("w") as envoy_log:
        options = "--tokens", str(tokens), "--http", "0", "--log-format", "json", "--kv-blocks", "128"
        serving = Serving(str(tiny), *options, log=log.fileno())
        try:
            serving.wait_ready()
            assert serving.process.stdout is not None
            direct = int(serving.process.stdout.readline().rpartition(":")[2])
            config = tmp_path / "envoy.yaml"
            text = CONFIG.replace("LISTEN", str(port)).replace("PORT", str(direct))
            config.write_text(text.replace("PACKAGE", "envoy.extensions"))
            command = [str(envoy), "--config-path", str(config), "--use-dynamic-base-id", "--concurrency", "1"]
            proxy = subprocess.Popen([*command, "--log-level", "warning"], stdout=envoy_log, stderr=envoy_log)
            try:
                wait_listening(port, proxy, tmp_path / "envoy.log")
                yield Shared(serving, direct, port, tmp_path / "server.log")
            finally:
                proxy.kill()
                proxy.wait()
        finally:
            serving.close()


def wait_listening(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
    raise AssertionError(log.read_text())


async def attack(port: int, stream: bytes) -> None:
    """Sends bytes and reads until nothing more comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(stream)
        while await asyncio.wait_for(reader.read(65536), QUIET_SECONDS):
            pass
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort()


async def attack_all(port: int, streams: dict[str, bytes]) -> None:
    left = iter(streams.values())

    async def attacker() -> None:
        for stream in left:
            await attack(port, stream)

    await asyncio.gather(*(attacker() for _ in range(ATTACKERS)))


async def ask_honestly(port: int, name: str, of: int, until: asyncio.Event) -> int:
    """Asks one request after the other, each of which must get its own answer; returns their number."""
    number = 0
    while not until.is_set():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(20):
            number += 1
            mine = f"{name}-{of}-{number}"
            body = json.dumps({"model": "tiny-llama", "prompt": mine, "max_tokens": 1}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: tk\r\nauthorization: Bearer token-of-{name}\r\n"
            head += f"content-type: application/json\r\nx-request-id: {mine}\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_SECONDS)
            lines = answer.decode().lower().split("\r\n")
            [length] = [int(line.split(":")[1]) for line in lines if line.startswith("content-length:")]
            text = await asyncio.wait_for(reader.readexactly(length), WAIT_SECONDS)
            assert lines[0].startswith("http/1.1 200 "), (lines, text)
            assert json.loads(text)["id"] == f"cmpl-{mine}", "the answer is to this caller's own request"
        writer.close()
    return number


async def besieged(shared: Shared, streams: dict[str, bytes], direct: dict[str, bytes]) -> list[int]:
    """Sends the framings through Envoy and directly; returns the number of honest answers to each caller meanwhile."""
    over = asyncio.Event()
    pairs = [(name, of) for name in HONEST for of in range(EACH)]
    honest = [asyncio.create_task(ask_honestly(shared.pooled, name, of, over)) for name, of in pairs]
    try:
        await attack_all(shared.pooled, streams)
        await attack_all(shared.direct, direct)
    finally:
        over.set()
    numbers = await asyncio.gather(*honest)
    return [sum(numbers[:EACH]), sum(numbers[EACH:])]


def test_no_byte_of_one_caller_runs_under_the_token_of_another(shared: Shared) -> None:
    framings = Framings(7, "token-of-mallory", "tk")
    streams = {f"e{number}": framings.stream(f"e{number}") for number in range(COUNT)}
    direct = {f"d{number}": framings.stream(f"d{number}") for number in range(COUNT)}
    answered = asyncio.run(besieged(shared, streams, direct))
    assert all(number > 50 for number in answered), answered
    shared.serving.process.terminate()
    assert shared.serving.wait()[0] == 0
    lines = (line for line in shared.log.read_text().splitlines() if line.startswith("{"))
    ran = defaultdict[str, list[str]](list)
    for fields in map(json.loads, lines):
        if fields.get("status") in ("OK", "CANCELLED"):  # refusals that repeat have no lines of their own
            ran[fields["principal"]].append(fields["request_id"])
    for name, number in zip(HONEST, answered, strict=True):
        assert sum(each.startswith(f"{name}-") for each in ran[name]) == len(ran[name]) == number
    assert set(ran) == {"mallory", *HONEST}
    found = {each.name for data in direct.values() for each in judged(data)}
    assert all(each in found or each.partition("-")[0] in streams for each in ran["mallory"])
    for ways in (streams, direct):
        assert sum(each.partition("-")[0] in ways for each in ran["mallory"]) > 20, "some run"
