"""The guard before all calls: without a valid token and the right role only health answers."""

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE

from ....core.errors import TkError
from ..access.callers import Callers
from ..access.tokens import ADMIN, GENERATE
from ..status import answered, client_of
from .known_names import known_name
from .request_log import RequestLog

_ROLES_BY_SERVICE: Final = (
    ("/tk.v1.Generation/", GENERATE),
    ("/inference.GRPCInferenceService/", GENERATE),
    ("/tk.v1.Admin/", ADMIN),
)


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no annotations
    """Refuses calls, before their messages are read, of callers that are unknown or lack the service's role."""

    def __init__(self, callers: Callers, log: RequestLog) -> None:
        self._callers, self._log = callers, log

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """Returns the handler of a call: its own, or one that refuses it."""
        if details.method.startswith(f"/{HEALTH_SERVICE}/"):
            return await continuation(details)
        principal = ""
        try:
            caller = self._callers.identify(details.invocation_metadata)
            principal = caller.principal
            for service, role in _ROLES_BY_SERVICE:
                if details.method.startswith(service):
                    caller.require(role)
        except TkError as error:
            return self._refusal(details.method, principal, error)
        return await continuation(details)

    def _refusal(self, method: str, principal: str, error: TkError) -> Any:
        """Returns a handler that ends a call of any kind with an error; as one of streams it reads no message first."""

        async def refuse(messages: object, context: grpc.aio.ServicerContext) -> None:
            try:
                async with answered(context):
                    with self._log.refusals(known_name(method.rpartition("/")[2]), principal, client_of(context)):
                        raise error
            finally:
                error.__traceback__ = None  # it has this frame, which has the error: only a search would find them

        return grpc.stream_stream_rpc_method_handler(refuse)
