"""Calls over gRPC that run no request, with their callers and the lines of those that are refused."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from ..access.callers import Callers
from ..status import answered, client_of
from .deadline import deadline_of, ended_by
from .request_log import RequestLog


class PlainCalls:
    """Answers calls.

    Args:
        callers: identifies the callers.
        log: the log of calls.
    """

    def __init__(self, callers: Callers, log: RequestLog) -> None:
        self._callers, self._log = callers, log

    @asynccontextmanager
    async def call(self, method: str, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        """Answers a call in the body, whose errors become statuses, and lines of the log."""
        async with answered(context):
            caller = self._callers.identify(context.invocation_metadata())
            with self._log.refusals(method, caller.principal, client_of(context)):
                async with ended_by(deadline_of(context.time_remaining())):
                    yield
