"""What stock clients and two checkouts say to each other, byte for byte, but for ids and times: is any byte different?

    git worktree add /tmp/before COMMIT
    python scripts/real_parts.py                    # the clients
    pip install --target .build/real/hpack hpack    # reads the headers of HTTP/2
    python benchmarks/compare_sessions.py /tmp/before .

A proxy stands between client and server and keeps all bytes of both ways. HTTP/1.1 is compared as it is. Of HTTP/2,
whose frames depend on time, the headers, messages and trailers of each call are. Requests are greedy or have a seed,
and a step of the model takes long enough that two of its deltas are seldom joined; a call is equal if one of its
records on one side is one of those on the other.
"""

import difflib
import importlib
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import click

from tk.benchmarks.compare_checkouts import Checkout
from tk.benchmarks.random_model import random_model
from tk.tests.infer.serve.tiny_model import byte_tokenizer

ROOT: Final = Path(__file__).resolve().parents[1]
SESSIONS: Final = Path(__file__).with_name("sessions")
REAL: Final = ROOT / ".build" / "real"
TEMPLATE: Final = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
Lines = list[str]
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, CONTINUATION = 0, 1, 3, 9
PADDED, PRIORITY = 8, 32
# Ids and times, in HTTP and in the messages' JSON.
BLANKED: Final = (
    (rb"(?i)(date: )[^\r]*", rb"\1-"),
    (rb"(?i)(host: 127\.0\.0\.1:)\d+", rb"\1-"),
    (rb"(?i)(x-request-id: )[^\r]*", rb"\1-"),
    (rb'("id":\s*")[^"]*', rb"\1-"),
    (rb'("created":\s*)\d+', rb"\g<1>0"),
    (rb'("(?:request_id|\w+_seconds)": )("[^"]*"|[\d.e-]+)', rb"\1-"),
    (rb"(the request )[0-9a-f]{32}", rb"\1-"),
)
# What no client library sends.
BYTES: Final = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"DELETE /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /health HTTP/1.0\r\n\r\n",
    b"GET /health HTTP/2.0\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: elsewhere\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-length: 2\r\n\r\n{}",
    *(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-type: application/json\r\n%b\r\n\r\n%b" % each
        for each in (
            (b"content-length: 1", b"{"),
            (b"content-length: 2", b"[]"),
            (b"content-length: 9999999", b""),
            (b"content-length: 2\r\ntransfer-encoding: chunked", b"0\r\n\r\n"),
            (b"transfer-encoding: gzip", b""),
            (b"transfer-encoding: chunked", b"2\r\n{}\r\n0\r\n\r\n"),
        )
    ),
    b"\x16\x03\x01\x02\x00\x01",
)


@dataclass
class Talk:
    """The bytes of one connection."""

    up: bytearray = field(default_factory=bytearray)
    down: bytearray = field(default_factory=bytearray)


class Proxy:
    """Listens on a free port, passes all on to a server, and keeps it: `talks` has the connections in their order."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._to = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.talks: list[Talk] = []
        self._threads: list[threading.Thread] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Waits until all connections have ended."""
        for thread in self._threads:
            thread.join(30)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server, talk = socket.create_connection(self._to), Talk()
            self.talks.append(talk)
            for ends in ((client, server, talk.up), (server, client, talk.down)):
                self._threads.append(threading.Thread(target=_pass_on, args=ends, daemon=True))
                self._threads[-1].start()


def _pass_on(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
    with suppress(OSError):  # an end has closed: the bytes until then count
        while piece := source.recv(1 << 16):
            kept += piece
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)


def blanked(content: bytes) -> bytes:
    for pattern, instead in BLANKED:
        content = re.sub(pattern, instead, content)
    return content


def http1(talk: Talk) -> list[Lines]:
    """Returns the requests of a connection, each with its answer, line by line."""
    requests = [part for part in re.split(rb"(?=\b(?:GET|HEAD|POST|DELETE) /)", bytes(talk.up)) if part]
    answers = [part for part in re.split(rb"(?=HTTP/1\.1 \d{3} )", bytes(talk.down)) if part]
    return [
        [
            mark + repr(line)
            for mark, way in (("> ", up), ("< ", down))
            for line in blanked(way).splitlines(keepends=True)
        ]
        for up, down in zip_longest(requests, answers, fillvalue=b"")
    ]


def frames(content: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yields kind, stream and payload of each frame; what padding and priority add is left out, headers are whole."""
    at, open_headers = 0, b""
    while at + 9 <= len(content):
        size, kind, flags = int.from_bytes(content[at : at + 3]), content[at + 3], content[at + 4]
        stream, payload = int.from_bytes(content[at + 5 : at + 9]) & 0x7FFFFFFF, content[at + 9 : at + 9 + size]
        at += 9 + size
        if kind in (DATA, HEADERS) and flags & PADDED:
            payload = payload[1 : len(payload) - payload[0]]
        if kind == HEADERS and flags & PRIORITY:
            payload = payload[5:]
        if kind in (HEADERS, CONTINUATION):
            kind, payload = HEADERS, open_headers + payload
            open_headers = b"" if flags & 4 else payload
        if not open_headers:
            yield kind, stream, payload


def http2(talk: Talk) -> list[Lines]:
    """Returns headers, messages and trailers of each call of a connection."""
    hpack = importlib.import_module("hpack")
    calls: dict[int, Lines] = {}
    paths: dict[int, str] = {}
    for mark, way in (("> ", bytes(talk.up).removeprefix(PREFACE)), ("< ", bytes(talk.down))):
        decoder, data = hpack.Decoder(), dict[int, bytes]()
        for kind, stream, payload in frames(way):
            lines = calls.setdefault(stream, [])
            if kind == HEADERS:
                headers = decoder.decode(payload, raw=True)
                paths.setdefault(stream, dict(headers).get(b":path", b"").decode())
                lines += [mark + _header(*header) for header in headers]
            elif kind == RST_STREAM:
                lines.append(f"{mark}reset {payload.hex()}")
            elif kind == DATA:
                rest = data.get(stream, b"") + payload
                while len(rest) >= 5 and len(rest) >= 5 + int.from_bytes(rest[1:5]):
                    end = 5 + int.from_bytes(rest[1:5])
                    lines.append(f"{mark}{rest[0]} {_message(paths.get(stream, ''), mark == '> ', rest[5:end])}")
                    rest = rest[end:]
                data[stream] = rest
    return [calls[stream] for stream in sorted(calls) if stream]


def _header(name: bytes, value: bytes) -> str:
    varies = name in (b"date", b":authority", b"x-request-id", b"grpc-timeout")
    return f"{name!r}: {'-' if varies else blanked(value)!r}"


def _message(path: str, is_request: bool, content: bytes) -> str:
    """Returns a message with ids and times left out: its JSON, or its bytes where nothing of ours describes it."""
    from google.protobuf import json_format
    from google.protobuf.message_factory import GetMessageClass

    from tk.proto.open_inference import open_inference_pb2
    from tk.proto.v1 import generation_pb2

    service, _, name = path.removeprefix("/").partition("/")
    files = (generation_pb2.DESCRIPTOR, open_inference_pb2.DESCRIPTOR)
    for found in (file.services_by_name.get(service.rpartition(".")[2]) for file in files):
        if found is not None and found.full_name == service and name in found.methods_by_name:
            method = found.methods_by_name[name]
            kind = GetMessageClass(method.input_type if is_request else method.output_type)
            message = kind.FromString(content)
            form = "" if message.ByteSize() == len(content) else f" of {len(content)} bytes"  # maps have no order
            shown = json_format.MessageToDict(message, preserving_proto_field_name=True)
            return blanked(json.dumps(shown, sort_keys=True).encode()).decode() + form
    return content.hex()


def chat_model(folder: Path) -> Path:
    """Writes a random model with a tokenizer and a chat template; a step takes some milliseconds."""
    random_model(folder, vocab_size=264)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    return folder


@contextmanager
def serving(checkout: Checkout, model: Path) -> Iterator[tuple[str, str]]:
    """A server of a checkout; yields the addresses of gRPC and HTTP."""
    words = ["serve", str(model), "--port", "0", "--http", "0", "--kv-blocks", "512", "--max-model-len", "512"]
    command = [sys.executable, "-m", "tk", *words, "--threads", "2"]
    with (checkout.work / "log").open("w") as log:
        process = subprocess.Popen(command, env=checkout.environment, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline().split() for _ in range(2)]
            yield lines[0][1], lines[1][1]
        finally:
            process.terminate()
            process.wait(60)


def recorded(checkout: Checkout, model: Path) -> dict[str, list[Lines]]:
    """Returns the calls of each session with a server of a checkout."""
    clients, triton = (REAL / name / "venv" / "bin" / "python" for name in ("clients", "triton"))
    node = REAL / "node"
    client = ROOT / "examples" / "clients" / "node" / "client.js"
    sessions: dict[str, tuple[bool, list[Any]]] = {
        "openai": (True, [clients, SESSIONS / "openai_session.py"]),
        "tritonclient": (False, [triton, SESSIONS / "triton_session.py"]),
        "Node": (False, [node / "node", SESSIONS / "node_session.js"]),
        "reflection": (False, [clients, SESSIONS / "reflection_session.py"]),
    }
    found = {}
    environment = {"PATH": "/usr/bin:/bin", "NODE_PATH": str(node / "node_modules")}
    with serving(checkout, model) as (grpc, http):
        for name, (is_http, words) in sessions.items():
            proxy = Proxy(http if is_http else grpc)
            subprocess.run([*words, proxy.address, client], env=environment, check=True, timeout=300)
            proxy.close()
            found[name] = [call for talk in proxy.talks for call in (http1 if is_http else http2)(talk)]
        proxy = Proxy(http)
        for content in BYTES:
            with socket.create_connection(("127.0.0.1", int(proxy.address.rpartition(":")[2]))) as connection:
                connection.sendall(content)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass
        proxy.close()
        found["bytes of HTTP"] = [call for talk in proxy.talks for call in http1(talk)]
    return found


@click.command()
@click.argument("before", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("after", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--folder", type=click.Path(path_type=Path), default=Path(".build"), show_default=True)
@click.option("--records", default=3, show_default=True, help="Records of each session on each side.")
def main(before: Path, after: Path, folder: Path, records: int) -> None:
    """Print how many calls each session has, and those that differ. Exits with 1 if any does."""
    folder.mkdir(exist_ok=True)
    sys.path.insert(0, str(REAL / "hpack"))
    with TemporaryDirectory(dir=folder) as name:
        work = Path(name).resolve()
        model = chat_model(work / "random")
        sides = [Checkout(root, work, side, "fp32") for root, side in ((before, "before"), (after, "after"))]
        old, new = ([recorded(side, model) for _ in range(records)] for side in sides)
    differ = False
    for session, calls in old[0].items():
        wrong = 0
        for number in range(max(len(record[session]) for record in (*old, *new))):
            first, second = (
                [record[session][number] if number < len(record[session]) else [] for record in records]
                for records in (old, new)
            )
            if not any(call in second for call in first):
                wrong += 1
                print("\n".join(difflib.unified_diff(first[0], second[0], n=1, lineterm="")))
        print(f"{session}: {len(calls)} calls, {wrong} differ")
        differ = differ or bool(wrong)
    sys.exit(differ)


if __name__ == "__main__":
    main()
