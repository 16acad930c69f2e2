"""Nothing that a caller sends is in the log, in a span or in a metric: a search finds no word of thousands of calls."""

import asyncio
import json
import random
import re
import select
import signal
import socket
import ssl
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

pytest.importorskip("opentelemetry", reason="the extra otel is not installed")

from tk.tests.infer.serve.http.http_server import read_to_end
from tk.tests.infer.serve.metrics.collector import Collector
from tk.tests.infer.serve.openai.marked_calls import MARK, grpc_calls, http_calls
from tk.tests.infer.serve.serving import Serving
from tk.tests.infer.serve.tiny_model import write_tiny_model

TEMPLATE = "{% if messages[0].role != 'user' %}{{ raise_exception(messages[0].content) }}{% endif %}{{ messages }}"
CERTIFICATES = Path(__file__).parents[1] / "certificates"
# The ends of an answer that is no refusal.
FINE = re.compile(rb"HTTP/1\.1 (100|200) ")


def asked(port: int, data: bytes) -> bytes:
    """The answer to some bytes, on a connection of its own."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection, suppress(ConnectionError):
        connection.sendall(data)
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        if not poll.poll(1000):  # it is half a request
            connection.shutdown(socket.SHUT_WR)
        return read_to_end(connection)
    return b""


async def call_all(target: str, calls: Iterator[tuple[str, bytes, Any]]) -> Counter[str]:
    """Makes calls over gRPC, some at a time; returns how often each status ended one."""
    ends: Counter[str] = Counter()
    async with grpc.aio.insecure_channel(target) as channel:

        async def caller() -> None:
            for path, message, metadata in calls:
                ended = channel.unary_stream(path)(message, timeout=60, metadata=metadata)
                with suppress(grpc.RpcError):
                    async for _ in ended:
                        pass
                ends[(await ended.code()).name] += 1

        await asyncio.gather(*(caller() for _ in range(8)))
    return ends


def id_of(answer: bytes) -> str:
    found = re.search(rb"\r\nx-request-id: ([0-9A-Za-z._:-]+)\r\n", answer)
    assert found is not None, answer
    return found[1].decode()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("form", "count"),
    [
        ("json", 120),
        pytest.param("json", 2000, marks=pytest.mark.matrix),
        pytest.param("text", 2000, marks=pytest.mark.matrix),
    ],
)
def test_no_word_of_a_caller_is_in_log_spans_or_metrics(
    tmp_path: Path, collector: Collector, form: str, count: int
) -> None:
    folder = write_tiny_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    serving = Serving(
        *(str(folder), "--http", "0", "--metrics-port", "0", "--otlp-endpoint", collector.url, "--log-format", form),
        *("--kv-blocks", "64", "--threads", "1", "--default-max-new-tokens", "2"),
    ).wait_ready()
    draw, refused = random.Random(count), list[str]()
    try:
        assert serving.process.stdout is not None
        port = int(serving.process.stdout.readline().rpartition(":")[2])
        for data in http_calls(draw, count // 2):
            answer = asked(port, data)
            if answer and not FINE.match(answer):
                refused.append(id_of(answer))
        ends = asyncio.run(call_all(serving.target, grpc_calls(draw, count // 2)))
        metrics = asked(port, b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").decode()
    finally:
        code, _, log = serving.end(signal.SIGTERM)
        serving.close()
    assert code == 0
    assert len(refused) > count / 4
    assert ends["INVALID_ARGUMENT"] > count / 10, ends
    assert "INTERNAL" not in ends, log
    lines = log.splitlines()
    assert [line for line in lines if MARK in line.lower()] == []
    assert MARK not in metrics.lower()
    spans = collector.spans(1)
    assert [span for span in spans if MARK in str(span).lower()] == []
    check_ids(lines, form, refused)


@pytest.mark.matrix
def test_no_word_of_a_handshake_is_printed(tmp_path: Path) -> None:
    """gRPC printed the name that a client asked for, and a line for each handshake that failed."""
    tls = ("--tls-cert", str(CERTIFICATES / "server.pem"), "--tls-key", str(CERTIFICATES / "server.key"))
    folder = write_tiny_model(tmp_path / "model")
    serving = Serving(str(folder), "--http", "0", "--kv-blocks", "16", *tls).wait_ready()
    assert serving.process.stdout is not None
    context = ssl.create_default_context(cafile=str(CERTIFICATES / "ca.pem"))
    for address in (serving.target, serving.process.stdout.readline().split()[1]):
        port = int(address.rpartition(":")[2])
        for data in (MARK.encode() * 20, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + MARK.encode() * 80):
            asked(port, data)
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection, pytest.raises(ssl.SSLError):
            context.wrap_socket(connection, server_hostname=f"{MARK}.example")
    code, _, log = serving.end(signal.SIGTERM)
    serving.close()
    assert code == 0
    assert MARK not in log
    assert "ssl_transport_security" not in log


def check_ids(lines: list[str], form: str, refused: list[str]) -> None:
    """Every refusal over HTTP is in a line with the id that its caller got, or counted in one."""
    assert len(set(refused)) == len(refused)
    if form == "json":
        shown = [line for line in map(json.loads, (line for line in lines if line.startswith("{"))) if "method" in line]
    else:
        shown = [
            dict(re.findall(r'(\w+)=("[^"]*"|\S+)', line)) | {"line": line}
            for line in lines
            if line.startswith("request ")
        ]
    by_id = {line["request_id"].strip('"') for line in shown}
    seen = [name for name in refused if name in by_id]
    repeats = sum(int(line.get("repeats", 0)) for line in shown if " " in line["method"] or "HTTP" in line["method"])
    assert len(seen) + repeats >= len(refused)
    assert len(seen) > 10
