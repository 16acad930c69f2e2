"""No request of 4 MiB, whatever its shape, holds up the event loop: the longest turn is measured in CPU time."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from tk.infer.engine.engine import Engine
from tk.infer.engine.options import EngineOptions
from tk.infer.engine.request.events import (
    PROMPT_LOGPROBS_PER_EVENT,
    Delta,
    Done,
    Event,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from tk.infer.engine.request.request import Request
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import GenerationStub
from tk.tests.infer.serve.fake_engine import INFO, WAIT_SECONDS, FakeEngine, ServerThread, finished, started
from tk.tests.infer.serve.probed_loop import ProbedLoop, most_seconds
from tk.tests.infer.serve.tiny_model import write_tiny_model

SIZE = (4 << 20) - 64
BOUND = 0.02  # seconds of CPU time


@pytest.fixture
def served(engine: FakeEngine) -> Iterator[tuple[ProbedLoop, str]]:
    """A server's loop and address."""
    engine.info = replace(INFO, max_model_len=1 << 17)
    loop = ProbedLoop()
    server = ServerThread(engine, loop=loop)
    yield loop, server.target
    server.close()


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def part(number: int, payload: bytes) -> bytes:
    """A length-delimited field."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def filled(piece: bytes) -> bytes:
    return piece * (SIZE // len(piece))


TEXT = filled("é".encode())
HOSTILE = {
    "unknown numbers": filled(varint(77 << 3) + b"\1"),
    "unknown texts": filled(part(77, b"")),
    "empty messages": part(5, filled(part(1, b""))),
    "roles": part(5, filled(part(1, part(1, b"a")))),
    "map entries": part(7, filled(part(8, b"\x08\x05"))),
    "the same number": filled(b"\x58\1"),
    "packed ids": part(4, part(1, filled(b"\1"))),
    "ids one by one": part(4, filled(b"\x08\1")),
    "long ids": part(4, part(1, filled(varint(2**32 - 1)))),
    "stop tokens": part(3, b"a") + part(8, part(4, filled(b"\1"))),
    "stop strings": part(3, b"a") + part(8, filled(part(3, b"a"))),
    "a stop string": part(3, b"a") + part(8, part(3, TEXT)),
    "a text": part(3, TEXT),
    "a name": part(3, b"a") + part(2, TEXT),
    "a request id": part(3, b"a") + part(1, TEXT),
    "a salt": part(3, b"a") + part(10, part(2, TEXT)),
    "a schema": part(3, b"a") + part(7, part(11, TEXT)),
    "a role": part(5, part(1, part(1, TEXT))),
    "damage": filled(b"\xff"),
    "one message in parts": filled(part(7, part(8, b"\x08\x05"))),
}
NAMED = part(1, b"text_input") + part(2, b"BYTES") + part(3, b"\1")
ONE = part(5, NAMED + part(5, part(8, b"a")))
HOSTILE_TENSORS = {
    "inputs": filled(part(5, b"")),
    "outputs": ONE + filled(part(6, b"")),
    "a shape": part(5, NAMED[:-3] + part(3, filled(b"\1"))),
    "a shape one by one": part(5, NAMED[:-3] + filled(b"\x18\1")),
    "a text": part(5, NAMED + part(5, part(8, TEXT))),
    "a raw text": part(5, NAMED) + part(7, len(TEXT).to_bytes(4, "little") + TEXT),
    "texts": part(5, NAMED + part(5, filled(part(8, b"")))),
    "raw texts": part(5, NAMED) + filled(part(7, b"")),
    "other contents": part(5, NAMED + part(5, part(2, filled(b"\1")))),
    "parameters": ONE + filled(part(4, part(1, b"a") + part(2, part(2, b"")))),
    "a parameter": ONE + part(4, part(1, TEXT) + part(2, b"\x10\1")),
    "a stop string": ONE + part(4, part(1, b"stop") + part(2, part(3, TEXT))),
    "a list": ONE + part(4, part(1, b"stop") + part(2, part(3, filled(b"[")))),
    "a name": ONE + part(3, TEXT),
    "unknown numbers": HOSTILE["unknown numbers"],
    "damage": HOSTILE["damage"],
}

HOSTILE_PROBES = {
    "a text": part(1, TEXT),
    "a symbol": part(4, TEXT),
    "unknown numbers": HOSTILE["unknown numbers"],
    "damage": HOSTILE["damage"],
}


def test_no_shape_of_a_large_request_holds_up_the_loop(served: tuple[ProbedLoop, str]) -> None:
    (loop, target), longest = served, {}
    with grpc.insecure_channel(target) as channel:
        for method, shapes in (
            ("tk.v1.Generation/GenerateOnce", HOSTILE),
            ("tk.v1.Generation/Score", {name: HOSTILE[name] for name in ("unknown numbers", "packed ids", "damage")}),
            ("tk.v1.Generation/Tokenize", {"a text": part(1, TEXT), "unknown numbers": HOSTILE["unknown numbers"]}),
            ("tk.v1.Generation/Detokenize", {"packed ids": part(1, filled(b"A")), "ids one by one": filled(b"\x08A")}),
            ("inference.GRPCInferenceService/ModelInfer", HOSTILE_TENSORS),
            ("grpc.health.v1.Health/Check", HOSTILE_PROBES),
            ("grpc.health.v1.Health/Watch", HOSTILE_PROBES),
            ("grpc.reflection.v1.ServerReflection/ServerReflectionInfo", HOSTILE_PROBES),
        ):
            call: Any = channel.unary_unary(f"/{method}")
            for name, raw in shapes.items():
                turns: list[float] = []
                while not turns or (turns[-1] > BOUND and len(turns) < 20):  # a busy machine may be slow
                    loop.longest = 0.0
                    call.future(raw, timeout=WAIT_SECONDS).exception()  # most are refused
                    turns.append(loop.longest)
                longest[method, name] = min(turns)
    slow = {shape: seconds for shape, seconds in longest.items() if seconds > most_seconds(BOUND)}
    assert not slow, slow


ENTRY = TokenLogprob(5, -0.5, 1, b"a", tuple(TopLogprob(token, -1.5, b"b") for token in range(20)))
NUMBER = 10_240


def scored(request: Request) -> list[Event]:
    """An answer with 20 alternatives for each token of the prompt, and for each of as many new tokens.

    The engine sends all of them at once: the server joins the new tokens.
    """
    parts = range(0, NUMBER, PROMPT_LOGPROBS_PER_EVENT)
    scores = [PromptLogprobs(start, (ENTRY,) * PROMPT_LOGPROBS_PER_EVENT) for start in parts]
    deltas = [Delta(0, "a", (5,), (ENTRY,))] * NUMBER
    return [started(request), *scores, *deltas, finished(), Done()]


@pytest.mark.parametrize("method", ["Generate", "GenerateOnce"])
def test_no_number_of_log_probabilities_holds_up_the_loop(
    served: tuple[ProbedLoop, str], engine: FakeEngine, method: str
) -> None:
    loop, target = served
    engine.script = scored
    request = pb.GenerateRequest(tokens={"ids": [5] * NUMBER}, stopping={"max_new_tokens": 1})
    with grpc.insecure_channel(target, options=[("grpc.max_receive_message_length", 16 << 20)]) as channel:
        stub: Any = GenerationStub(channel)
        if method == "Generate":
            responses = list(stub.Generate(request, timeout=WAIT_SECONDS))
            assert sum(len(response.delta.logprobs) for response in responses) == NUMBER
        else:
            assert len(stub.GenerateOnce(request, timeout=WAIT_SECONDS).prompt_logprobs) == NUMBER
    assert loop.longest < most_seconds()


def test_no_prompt_that_the_engine_takes_holds_up_the_loop(tmp_path: Path) -> None:
    longest = 1 << 20
    options = EngineOptions(write_tiny_model(tmp_path / "model", longest), kv_blocks=longest // 16)
    engine, loop = Engine.begin(options), ProbedLoop()  # requests wait for the workers: the test needs no tokens
    server = ServerThread(engine, loop=loop)
    try:
        for ids in ([5] * (longest - 1), [5] * (longest - 2) + [999]):
            request = pb.GenerateRequest(tokens={"ids": ids}, stopping={"max_new_tokens": 1})
            with grpc.insecure_channel(server.target) as channel:
                stub: Any = GenerationStub(channel)
                loop.longest = 0.0
                call = stub.Generate(request, timeout=WAIT_SECONDS)
                if ids[-1] == 5:
                    assert "x-request-id" in dict(call.initial_metadata()), "the engine has the request"
                    call.cancel()
                else:
                    assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert loop.longest < most_seconds()
    finally:
        engine.kill()
        engine.close()
        server.close()
