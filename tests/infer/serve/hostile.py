"""What hostile clients send: mutated messages, frames of HTTP/2 by hand; and what a server process holds meanwhile."""

import os
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tk.proto.open_inference import open_inference_pb2 as oip
from tk.proto.v1 import generation_pb2 as pb
from tk.tests.infer.serve.serving import Serving

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 8, 9
END_STREAM, END_HEADERS = 1, 4
RESET: Final = struct.pack("ii", 1, 0)
GENERATION, ADMIN = "/tk.v1.Generation/", "/tk.v1.Admin/"
OPEN_INFERENCE: Final = "/inference.GRPCInferenceService/"
_GENERATE: Final = pb.GenerateRequest(
    text="hostile",
    request_id="same",
    model="model",
    sampling=pb.Sampling(temperature=0.5, top_k=5, logit_bias={5: 1.5, 7: -1}, seed=7, n=2, regex="[a-z]+"),
    stopping=pb.Stopping(max_new_tokens=3, stop=["x", "yz"], stop_token_ids=[1, 2]),
    output=pb.OutputOptions(logprobs=2, prompt_logprobs=2),
    cache=pb.CacheOptions(salt="salt"),
)
_PLAIN: Final = pb.GenerateRequest(tokens=pb.TokenIds(ids=range(20)), stopping=pb.Stopping(max_new_tokens=3))
_CHAT: Final = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")] * 3))
_SCORE: Final = pb.ScoreRequest(text="a prompt", continuation_text="its end", top=3)
_INFER: Final = oip.ModelInferRequest(
    id="same",
    inputs=[
        oip.ModelInferRequest.InferInputTensor(
            name="text_input",
            datatype="BYTES",
            shape=[1],
            contents=oip.InferTensorContents(bytes_contents=[b"hostile"]),
        )
    ],
    parameters={"max_tokens": oip.InferParameter(int64_param=3)},
)
_REFLECT: Final = (b"\x3a\x00", b"\x22\x10tk.v1.Generation", b"\x1a\x0aempty.proto")
# The paths of calls with right messages for them.
MESSAGES: Final[tuple[tuple[str, bytes], ...]] = (
    *(
        (f"{GENERATION}{name}", message.SerializeToString())
        for name in ("Generate", "GenerateOnce")
        for message in (_GENERATE, _PLAIN, _CHAT)
    ),
    (f"{GENERATION}Score", _SCORE.SerializeToString()),
    (f"{GENERATION}Tokenize", pb.TokenizeRequest(text="some text").SerializeToString()),
    (f"{GENERATION}Detokenize", pb.TokenIds(ids=range(50, 90)).SerializeToString()),
    (f"{GENERATION}GetModelInfo", b""),
    *((f"{ADMIN}{name}", b"") for name in ("GetLoad", "FlushPrefixCache", "CheckCache")),
    (f"{ADMIN}Abort", pb.AbortRequest(request_id="other", principal="eve").SerializeToString()),
    (f"{ADMIN}Drain", pb.DrainRequest(timeout_seconds=-1).SerializeToString()),
    (f"{ADMIN}Reload", pb.ReloadRequest(checkpoint="/no/such/step-00000100").SerializeToString()),
    (f"{ADMIN}LoadAdapter", pb.LoadAdapterRequest(name="x", checkpoint="/no/such/missing").SerializeToString()),
    (f"{ADMIN}UnloadAdapter", pb.UnloadAdapterRequest(name="x").SerializeToString()),
    (f"{ADMIN}ListAdapters", b""),
    *((f"{OPEN_INFERENCE}{name}", _INFER.SerializeToString()) for name in ("ModelInfer", "ModelStreamInfer")),
    *((f"{OPEN_INFERENCE}{name}", b"\x0a\x05model") for name in ("ModelMetadata", "ModelReady")),
    *((f"{OPEN_INFERENCE}{name}", b"") for name in ("ServerLive", "ServerReady", "ServerMetadata")),
    ("/grpc.health.v1.Health/Check", b"\x0a\x10tk.v1.Generation"),
    *((f"/grpc.reflection.{v}.ServerReflection/ServerReflectionInfo", m) for v in ("v1alpha", "v1") for m in _REFLECT),
)
_NASTY: Final = (
    *(
        b"\xff" * 10,
        b"\x80" * 11,
        b"\xff\xff\xff\xff\x0f",
        b"\xff" * 8 + b"\x7f",
        b"\x00",
        b"\x0b\x0c",
        b"\x3a\x01\x0d",
    ),
    *(b"\x0a\xff\xff\xff\x7f", b"\x2a\x02\x0a\x00" * 300, b"\x0a" * 2000, b"\xc0\x80", b"\xed\xa0\x80"),
)


def mutated(draw: random.Random) -> tuple[str, bytes]:
    """The path of a call, and a message for it with a few faults: flips, cuts, repetitions, lengths without an end."""
    path, seed = draw.choice(MESSAGES)
    data = bytearray(seed)
    for _ in range(draw.randint(1, 4)):
        start = draw.randrange(len(data) + 1)
        stop = min(len(data), start + draw.choice((0, 1, 1, 4, 30)))
        match draw.randrange(6):
            case 0:
                data[start:stop] = draw.choice(_NASTY)
            case 1:
                data[start:stop] = bytes(byte ^ 1 << draw.randrange(8) for byte in data[start:stop])
            case 2:
                data[start:start] = data[start:stop] * draw.choice((1, 1, 50))
            case 3:
                del data[start:stop]
            case 4:
                data += draw.choice(MESSAGES)[1][start:]
            case 5:
                del data[start:]
    if path == f"{ADMIN}Drain":  # a right one would drain the server
        data += b"\xff"
    return path, bytes(data)


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    """A frame of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def header(name: bytes, value: bytes) -> bytes:
    """A header as HPACK writes it without its tables; both have fewer than 127 bytes."""
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


def call_headers(path: str = f"{GENERATION}Tokenize") -> bytes:
    """The headers of a call."""
    return b"".join(
        header(name, value)
        for name, value in (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path.encode()),
            (b":authority", b"localhost"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
        )
    )


def call(stream: int, path: str, message: bytes) -> bytes:
    """The frames of a call with one message."""
    body = b"\0" + len(message).to_bytes(4, "big") + message
    return frame(HEADERS, call_headers(path), END_HEADERS, stream) + frame(DATA, body, END_STREAM, stream)


@dataclass(frozen=True)
class Footprint:
    """The open files and threads of a server's process, and the resident memory of it and its workers."""

    files: int
    threads: int
    resident: int


def footprint(serving: Serving) -> Footprint:
    pid = serving.process.pid
    pages = sum(int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in (pid, *serving.worker_ids()))
    count = [len(os.listdir(f"/proc/{pid}/{name}")) for name in ("fd", "task")]
    return Footprint(count[0], count[1], pages * os.sysconf("SC_PAGE_SIZE"))


def footprint_at_rest(serving: Serving) -> Footprint:
    """The footprint once the server has at most one connection: those of earlier clients may still be closing."""
    wait_until(lambda: connections(serving) <= 1)
    return footprint(serving)


def connections(serving: Serving) -> int:
    """Returns the number of connections that the server has, of which the clients may have closed some."""
    port, has_descriptor = f":{int(serving.target.rpartition(':')[2]):04X}", ("01", "08")  # ESTABLISHED, CLOSE_WAIT
    tables = (Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6"))
    rows = [line.split() for table in tables for line in table]
    return sum(row[1].endswith(port) and row[3] in has_descriptor for row in rows)


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Returns once a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the server never got there"
        time.sleep(0.02)


@contextmanager
def connection(target: str, data: bytes = PREFACE + frame(SETTINGS)) -> Iterator[socket.socket]:
    """A connection that has sent some bytes; it ends without a word."""
    host, _, port = target.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.sendall(data)
        yield connection
