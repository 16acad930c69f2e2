"""A server of grpc.aio that no call can stop.

In the loop that takes all calls, grpc.aio decodes the path of a call whose method is not registered. A path that is no
UTF-8 ends that loop, and with it the port: one frame of a client without a token is enough. So here all methods are
registered, and other calls are answered without a look at their paths.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import grpc
from grpc._cython import cygrpc

_Options = Sequence[tuple[str, int]]
# Older versions take calls of all methods in one way, which cannot be changed from here.
_TAKES_REGISTERED: Final = hasattr(cygrpc.AioServer, "_request_registered_call")


def make_grpc_server(interceptors: Sequence[grpc.aio.ServerInterceptor], options: _Options) -> grpc.aio.Server:
    """Returns a server of grpc.aio for the running loop; `add_methods` adds the methods."""
    server = grpc.aio.server(interceptors=interceptors, options=options)
    if _TAKES_REGISTERED:
        server._server = _SturdyServer(server._loop, tuple(interceptors), tuple(options))
    return server


def add_methods(server: grpc.aio.Server, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]) -> None:
    """Adds the methods of a service, by name, to a server that does not listen yet."""
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_registered_method_handlers(service, handlers)


class _SturdyServer(cygrpc.AioServer):  # type: ignore[misc]  # grpc has no annotations
    """The core of a server, which answers calls of unregistered methods by itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interceptors: tuple[Any, ...], options: _Options) -> None:
        super().__init__(loop, None, (), interceptors, options, None)
        self._refusing_loop, self._refusing = loop, interceptors  # which such calls pass before they are refused
        self._refusals = set[asyncio.Task[None]]()
        self._no_methods = cygrpc._MethodResolver([], {})

    async def _request_call(self) -> Any:
        """Answers calls of unregistered methods, UNIMPLEMENTED unless an interceptor objects; never returns."""
        while True:
            call = await super()._request_call()
            answer = cygrpc._handle_rpc("", self._no_methods, self._refusing, call, self._refusing_loop, False)
            task = self._refusing_loop.create_task(cygrpc._schedule_rpc_coro(answer, call, self._refusing_loop, ""))
            self._refusals.add(task)  # the loop's own reference to a task is a weak one
            task.add_done_callback(self._refusals.discard)
