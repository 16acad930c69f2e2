"""The server as a whole: its ports, the engine behind them, its orderly shutdown, and its run as a process."""

import asyncio
import enum
import logging
import signal
from collections.abc import Callable, Coroutine, Sequence, Set
from contextlib import suppress
from typing import Any, Final, Protocol

from ...core.errors import WorkerDied
from .access.tokens import ADMIN, Callers, TokenCallers
from .call.call import Frontend, RequestRunner
from .call.request_log import RequestLog
from .engine_protocol import EngineProtocol, Reloads
from .grpc.admin import ADMINISTRATION, AdminService
from .grpc.calls import GrpcService
from .grpc.health import Health
from .grpc.ports import GrpcPorts
from .grpc.service import GENERATION, GenerationService
from .metrics.observer import Observer, Observers
from .metrics.statistics import RequestStatistics
from .open_inference.service import OPEN_INFERENCE, OpenInferenceService
from .operations.lifecycle import Lifecycle
from .operations.model_switch import warm_up
from .options import ServerOptions

# Seconds for the engine to drop aborted requests, which it does at once unless it is late itself.
ABORT_GRACE: Final = 1.0
# Seconds for callers to read that their requests failed.
ANSWER_GRACE: Final = 5.0
# Seconds in which a server without workers still answers UNAVAILABLE: gRPC cancels calls that reach a stopping server.
DEATH_NOTICE: Final = 1.0
_LOG: Final = logging.getLogger(__name__)


class Port(Protocol):
    """A protocol on a port of its own, or on several, on the server's event loop."""

    @property
    def names(self) -> Set[str]:
        """The names of calls and fields in the protocol, which the log may have."""

    async def open(self, frontend: Frontend) -> None:
        """Starts to listen, before the model is loaded; raises ConfigError if the address cannot be had."""

    def drain(self) -> None:
        """Ends what is idle; new requests are refused by the runner, and live ones end by themselves."""

    async def stop(self) -> None:
        """Closes the port and ends all connections."""


class Server:
    """The protocols around an engine that may still be loading, for one event loop; the caller closes the engine.

    Attributes:
        grpc: the ports of gRPC.
        is_late: whether the time of a drain has passed while requests were live.

    Args:
        options: the options of the server.
        reloads: changes the weights of the engine; None = the server answers Reload with UNIMPLEMENTED.
        ports: the ports of other protocols.
    """

    def __init__(
        self,
        engine: EngineProtocol,
        options: ServerOptions,
        reloads: Reloads | None = None,
        ports: Sequence[Port] = (),
    ) -> None:
        options.validate()
        self._drain_timeout, self._reloads = options.drain_timeout, reloads
        health, statistics = Health(), RequestStatistics()
        services = (
            GrpcService(GENERATION, GenerationService),
            GrpcService(OPEN_INFERENCE, OpenInferenceService),
            GrpcService(ADMINISTRATION, lambda runner: AdminService(runner, self.drain, reloads), ADMIN),
        )
        self.grpc = GrpcPorts(options, services, health)
        self._ports = (self.grpc, *ports)
        observer = Observers([*([statistics] if ports else []), *_traces(engine, options)])
        names = frozenset[str]().union(*(port.names for port in self._ports))
        self._runner = RequestRunner(engine, Lifecycle(health.show), options.default_max_new_tokens, observer)
        callers = Callers() if options.tokens is None else TokenCallers(options.tokens)
        self._frontend = Frontend(callers, RequestLog(options.log_prompts, observer, names), self._runner, statistics)
        self._dead = asyncio.Event()
        self._notice: asyncio.Task[None] | None = None
        self._is_stopping = False
        self.is_late = False

    async def start(self) -> str:
        """Starts to listen, and returns HOST:PORT of gRPC. Requests are refused until `set_ready` is called.

        Raises:
            ConfigError: an address is in use or not available.
        """
        for port in self._ports:
            await port.open(self._frontend)
        loop = asyncio.get_running_loop()

        def on_change(error: WorkerDied | None) -> None:
            with suppress(RuntimeError):  # the loop is closed: this server has ended already
                loop.call_soon_threadsafe(self._set_death, error)

        self._runner.engine.watch(on_change)
        return self.grpc.address

    async def set_ready(self) -> None:
        """Accepts requests from now on: the engine has loaded the model."""
        self._runner.lifecycle.set_loaded()

    def _set_death(self, error: WorkerDied | None) -> None:
        """Reports the state of the workers: dead for good, starting again (`retry_after`), stalled, or well (None)."""
        self._runner.lifecycle.set_death(error)
        is_dead = self._runner.lifecycle.death is not None
        if is_dead and self._notice is None and not self._is_stopping:
            self._notice = asyncio.create_task(self._notice_death())  # the loop's own reference to a task is a weak one

    async def _notice_death(self) -> None:
        await self._runner.live.wait_empty(ANSWER_GRACE)  # the engine has failed all; their callers still read that
        await asyncio.sleep(DEATH_NOTICE)
        self._dead.set()

    async def wait_dead(self) -> None:
        """Returns when a worker has died and the callers of all requests have been answered."""
        await self._dead.wait()

    @property
    def death(self) -> WorkerDied | None:
        """The error of the worker that died for good; None if none did."""
        return self._runner.lifecycle.death

    async def drain(self, seconds: float | None = None) -> None:
        """Refuses new requests, and returns when the live ones have ended or the time has passed.

        Args:
            seconds: the longest time; None = the drain timeout of the options.
        """
        seconds, live = self._drain_timeout if seconds is None else seconds, self._runner.live
        self._refuse_new()
        _LOG.info("draining: %d live requests, %g s at most", len(live), seconds)
        if not await live.wait_empty(seconds):
            self.is_late = True
            _LOG.warning("drain timeout: %d live requests are left", len(live))

    def _refuse_new(self) -> None:
        self._runner.lifecycle.set_draining()
        for port in self._ports:
            port.drain()
        if self._reloads is not None:
            self._reloads.end_reloads()

    async def stop(self) -> None:
        """Ends the live requests, then all other calls, and closes the ports."""
        self._is_stopping = True
        self._refuse_new()
        self._runner.end_live_requests()
        await asyncio.gather(*(port.stop() for port in self._ports))
        await self._runner.live.wait_empty(ABORT_GRACE)  # closing the engine ends the remaining requests
        await self._runner.prompts.close()
        if self._notice is not None:
            self._notice.cancel()
        self._frontend.log.close()
        await asyncio.to_thread(self._runner.observer.close)


def _traces(engine: EngineProtocol, options: ServerOptions) -> list[Observer]:
    """Returns the observer that exports spans, if they are wanted; otherwise nothing of OpenTelemetry is imported."""
    if options.otlp_endpoint is None:
        return []
    from .metrics.traces import RequestTraces

    return [RequestTraces(options.otlp_endpoint, lambda: engine.info.name)]


class End(enum.Enum):
    """The reason for the end of a server's run."""

    DRAINED = "drained"  # after a signal; live requests had their time
    SECOND_SIGNAL = "second signal"  # while it drained
    TERMINATED = "terminated"  # by SIGTERM, before it was ready
    INTERRUPTED = "interrupted"  # by Ctrl-C, before it was ready


def serve_until_signal(
    engine: EngineProtocol,
    options: ServerOptions,
    on_ready: Callable[[str], None],
    reloads: Reloads | None = None,
    ports: Sequence[Port] = (),
    on_signal: Callable[[End], object] = lambda end: None,
) -> End:
    """Serves until SIGTERM or Ctrl-C; a second signal ends the draining that the first began, whatever is computed.

    The ports are open while the engine loads. A signal that this process ignores, as under nohup, stays ignored.

    Args:
        engine: an engine that is loading; the caller closes it.
        options: the options of the server.
        on_ready: is called with HOST:PORT when the server accepts requests.
        reloads: see `Server`.
        ports: the ports of other protocols.
        on_signal: is called at the first signal and at the second one with the end that it leads to, before anything
            ends: what is under way may hang, as a thread that waits for a disk does, and the process must end in time.

    Raises:
        WorkerDied: a worker has died; all requests have failed.
        TkError: the engine cannot be started; see `Engine.start`.
    """

    async def serve() -> End:  # gRPC's server belongs to the running loop
        return await _serve(Server(engine, options, reloads, ports), engine, on_ready, on_signal)

    return asyncio.run(serve())


async def _serve(
    server: Server, engine: EngineProtocol, on_ready: Callable[[str], None], on_signal: Callable[[End], object]
) -> End:
    received = list[End]()
    first, second, is_ready = asyncio.Event(), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_number(number: int) -> None:
        if received:
            end = End.SECOND_SIGNAL
        elif is_ready.is_set():
            end = End.DRAINED
        else:
            end = End.INTERRUPTED if number == signal.SIGINT else End.TERMINATED
        received.append(end)
        if len(received) <= 2:
            on_signal(end)
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, on_number, number)
    try:
        address = await server.start()
        await _first_of(_make_ready(engine, server), first.wait())
        if first.is_set():
            engine.kill()
            await asyncio.to_thread(engine.close)  # it ends the wait for the model
            return received[0]
        is_ready.set()
        on_ready(address)
        await _first_of(first.wait(), server.wait_dead())
        await _first_of(server.drain(), second.wait(), server.wait_dead())
    finally:
        if second.is_set():
            engine.kill()
        await server.stop()
        if server.is_late:
            engine.kill()  # a worker may hang, and the callers have their answers
    if server.death is not None and not second.is_set():
        raise server.death
    return End.SECOND_SIGNAL if second.is_set() else End.DRAINED


async def _make_ready(engine: EngineProtocol, server: Server) -> None:
    """Waits for the model, lets it answer a request, and then accepts those of others."""
    await asyncio.to_thread(engine.wait_ready)
    await asyncio.to_thread(warm_up, engine)
    await server.set_ready()


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
