"""The server as a whole: its port, the engine behind it, and its orderly shutdown."""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import grpc

from ...core.errors import WorkerDied
from ...proto.v1 import generation_pb2_grpc as pb_grpc
from .callers import Callers, TokenCallers
from .engine_protocol import ServedEngine
from .guard import Guard
from .health import HEALTH_SERVICE, READINESS, Health
from .options import ServerOptions, not_ours
from .reflection import add_reflection
from .service import GenerationService

MAX_REQUEST_BYTES: Final = 4 << 20
MAX_RESPONSE_BYTES: Final = 16 << 20
# Seconds for calls other than requests (health watchers, reflection) to end by themselves when no request is live.
STOP_GRACE: Final = 0.5
# Seconds for the engine to drop aborted requests, which it does between two steps.
ABORT_GRACE: Final = 5.0
# Seconds in which a server without workers still answers UNAVAILABLE: gRPC cancels calls that reach a stopping server.
DEATH_NOTICE: Final = 1.0
_CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_RESPONSE_BYTES),
    ("grpc.so_reuseport", 0),  # two servers on one port are a mistake, which must fail at once
    # By default gRPC closes the connection, and every call on it, of a client that pings during a long decode.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A client whose machine has failed does not close its connection: pings detect it, so that its requests end.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
_LOG: Final = logging.getLogger(__name__)


class Server:
    """A gRPC server around a started engine, for one event loop; the caller closes the engine."""

    def __init__(self, engine: ServedEngine, options: ServerOptions) -> None:
        options.validate()
        self._engine, self._options = engine, options
        self._health = Health()
        callers = Callers() if options.tokens is None else TokenCallers(options.tokens)
        self._service = GenerationService(engine, options.default_max_new_tokens, callers)
        self._dead = asyncio.Event()
        self._death: WorkerDied | None = None
        self._server = grpc.aio.server(interceptors=[Guard(callers)], options=_CHANNEL_OPTIONS)
        pb_grpc.add_GenerationServicer_to_server(self._service, self._server)
        self._health.add_to(self._server)
        add_reflection(self._server, (READINESS, HEALTH_SERVICE))

    async def start(self) -> str:
        """Starts to listen and to accept requests; returns HOST:PORT.

        Raises:
            ConfigError: the address is in use or not available.
        """
        try:
            port = self._add_port()
        except RuntimeError as error:
            raise not_ours(self._options, error) from error
        await self._health.set_ready()
        await self._server.start()
        loop = asyncio.get_running_loop()

        def on_change(error: WorkerDied | None) -> None:
            with suppress(RuntimeError):  # the loop is closed: this server has ended already
                loop.call_soon_threadsafe(lambda: loop.create_task(self._follow(error)))

        self._engine.watch(on_change)
        return replace(self._options, port=port).address

    def _add_port(self) -> int:
        address, certificates = self._options.address, self._options.certificates
        if certificates is None:
            return int(self._server.add_insecure_port(address))
        return int(self._server.add_secure_port(address, certificates.credentials()))

    async def _follow(self, error: WorkerDied | None) -> None:
        """Reports the state of the workers: dead for good, starting again (`retry_after`), or started again (None)."""
        if error is None and not self._service.is_draining:
            await self._health.set_ready()
        elif error is not None and error.retry_after is not None:
            await self._health.set_unready()
        elif error is not None:
            await self._die(error)

    async def _die(self, error: WorkerDied) -> None:
        self._death = error
        await self._health.set_dead()
        with suppress(TimeoutError):  # the engine has failed all requests; their callers still read that
            await asyncio.wait_for(self._service.live.wait_empty(), ABORT_GRACE)
        await asyncio.sleep(DEATH_NOTICE)
        self._dead.set()

    async def wait_dead(self) -> None:
        """Returns when a worker has died and the callers of all requests have been answered."""
        await self._dead.wait()

    @property
    def death(self) -> WorkerDied | None:
        """The error of the worker that died; None if none did."""
        return self._death

    async def drain(self) -> None:
        """Refuses new requests, and returns when the live ones have ended or the drain timeout has passed."""
        self._service.start_draining()
        await self._health.set_unready()
        _LOG.info("draining: %d live requests, %g s at most", len(self._service.live), self._options.drain_timeout)
        try:
            await asyncio.wait_for(self._service.live.wait_empty(), self._options.drain_timeout)
        except TimeoutError:
            _LOG.warning("drain timeout: ending %d live requests", len(self._service.live))

    async def stop(self) -> None:
        """Ends the live requests, then all other calls, and closes the port."""
        self._service.start_draining()
        self._service.end_live_requests()
        await self._server.stop(STOP_GRACE)
        with suppress(TimeoutError):  # the engine hangs; closing it ends the remaining requests
            await asyncio.wait_for(self._service.live.wait_empty(), ABORT_GRACE)
        await self._service.prompts.close()


def serve_until_signal(engine: ServedEngine, options: ServerOptions, on_ready: Callable[[str], None]) -> bool:
    """Serves until SIGTERM or Ctrl-C; a second signal ends the draining that the first began, whatever is computed.

    A signal that this process ignores, as under nohup, stays ignored.

    Args:
        engine: the started engine; the caller closes it.
        options: the options of the server.
        on_ready: is called with HOST:PORT when the server accepts requests.

    Returns:
        Whether the shutdown was orderly: False after a second signal.

    Raises:
        WorkerDied: a worker has died; all requests have failed.
    """
    return asyncio.run(_serve(engine, options, on_ready))


async def _serve(engine: ServedEngine, options: ServerOptions, on_ready: Callable[[str], None]) -> bool:
    server = Server(engine, options)
    first, second = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, lambda: (second if first.is_set() else first).set())
    try:
        on_ready(await server.start())
        await _first_of(first.wait(), server.wait_dead())
        await _first_of(server.drain(), second.wait(), server.wait_dead())
    finally:
        if second.is_set():
            engine.kill()
        await server.stop()
    if server.death is not None and not second.is_set():
        raise server.death
    return not second.is_set()


async def _first_of(*works: Coroutine[Any, Any, object]) -> None:
    """Runs all coroutines until one is done, and cancels the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()
