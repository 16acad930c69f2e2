"""A call over gRPC that ends while it is answered."""

import asyncio
import logging
from typing import Any, cast

import grpc
import pytest

from tk.infer.serve.access.tokens import Callers
from tk.infer.serve.call.call import Frontend, RequestRunner
from tk.infer.serve.call.request_log import RequestLog
from tk.infer.serve.grpc.calls import GrpcCall, GrpcService
from tk.infer.serve.grpc.service import GENERATION
from tk.infer.serve.metrics.statistics import RequestStatistics
from tk.infer.serve.operations.lifecycle import Lifecycle
from tk.tests.infer.serve.fake_engine import FakeEngine


class LeftCall:
    """A call whose client has left when it is answered."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def time_remaining(self) -> None:
        """Returns no time: there is no deadline."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5"

    async def read(self) -> bytes:
        return b""


def test_a_message_that_cannot_be_sent_ends_a_request_as_cancelled(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tk")

    async def answer(message: Any, call: GrpcCall) -> None:
        call.expect("mine")
        raise grpc.aio.InternalError("Failed execute_batch")

    async def run() -> None:
        frontend = Frontend(Callers(), RequestLog(), RequestRunner(engine, Lifecycle()), RequestStatistics())
        service = GrpcService(GENERATION, lambda runner: None)
        method = GENERATION.methods_by_name["GenerateOnce"]
        await service._served(method, answer, frontend)(cast(Any, None), cast(Any, LeftCall()))

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    [line] = [vars(record)["fields"] for record in caplog.records]
    assert (line["status"], line["request_id"], line["client"]) == ("CANCELLED", "mine", "127.0.0.1:5")
