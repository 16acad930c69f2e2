"""A scripted engine behind a real server on a loopback port, and a stub connected to it."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tk.proto.v1 import generation_pb2_grpc as pb_grpc
from tk.tests.infer.serve.fake_engine import FakeEngine, ServerThread


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close()


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[ServerThread]:
    server = ServerThread(engine)
    yield server
    server.close()


@pytest.fixture
def channel(server: ServerThread) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.target) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> Any:
    return pb_grpc.GenerationStub(channel)
