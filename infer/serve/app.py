"""The server as a whole: its ports, the engine behind them, and its orderly shutdown."""

import asyncio
import logging
from collections.abc import Sequence, Set
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

from ...core.errors import WorkerDied
from .access.callers import Callers, TokenCallers
from .access.tokens import ADMIN
from .call.request_log import RequestLog
from .call.runner import RequestRunner
from .engine_protocol import ServedEngine
from .grpc.admin import ADMINISTRATION, AdminService
from .grpc.calls import GrpcService
from .grpc.health import Health
from .grpc.ports import GrpcPorts
from .grpc.reflection import known_names
from .grpc.service import GENERATION, GenerationService
from .metrics.observer import Observer, Observers
from .metrics.statistics import RequestStatistics
from .open_inference.service import OPEN_INFERENCE, OpenInferenceService
from .operations.lifecycle import Lifecycle
from .operations.reloads import Reloads
from .options import ServerOptions

if TYPE_CHECKING:
    from .metrics.traces import RequestTraces

# Seconds for the engine to drop aborted requests, which it does at once unless it is late itself.
ABORT_GRACE: Final = 1.0
# Seconds for callers to read that their requests failed.
ANSWER_GRACE: Final = 5.0
# Seconds in which a server without workers still answers UNAVAILABLE: gRPC cancels calls that reach a stopping server.
DEATH_NOTICE: Final = 1.0
_LOG: Final = logging.getLogger(__name__)


class Door(Protocol):
    """A port beside that of gRPC, on the same event loop."""

    @property
    def names(self) -> Set[str]:
        """The names of calls and fields in its protocol, which the log may have."""

    async def open(
        self, runner: RequestRunner, callers: Callers, log: RequestLog, statistics: RequestStatistics
    ) -> None:
        """Starts to listen, before the model is loaded; raises ConfigError if the address cannot be had.

        Args:
            runner: runs the requests.
            callers: identifies the callers by their tokens.
            log: the log of calls.
            statistics: counts the requests of all protocols.
        """

    def drain(self) -> None:
        """Ends what is idle; new requests are refused by the runner, and live ones end by themselves."""

    async def stop(self) -> None:
        """Closes the port and ends all connections."""


class Server:
    """A gRPC server around an engine that may still be loading, for one event loop; the caller closes the engine.

    Attributes:
        grpc: the ports of gRPC.
        is_late: whether the time of a drain has passed while requests were live.

    Args:
        engine: the engine.
        options: the options of the server.
        reloads: changes the weights of the engine; None = the server answers Reload with UNIMPLEMENTED.
        doors: the ports beside those of gRPC.
    """

    def __init__(
        self,
        engine: ServedEngine,
        options: ServerOptions,
        reloads: Reloads | None = None,
        doors: Sequence[Door] = (),
    ) -> None:
        options.validate()
        self._doors, self._callers = doors, Callers() if options.tokens is None else TokenCallers(options.tokens)
        self._engine, self._options, self._reloads = engine, options, reloads
        health = Health()
        self._lifecycle = Lifecycle(health.show)
        self._statistics = RequestStatistics()
        self._traces = _traces(engine, options)
        observer = self._observer()
        runner = self._runner = RequestRunner(engine, self._lifecycle, options.default_max_new_tokens, observer)
        names = known_names((GENERATION, OPEN_INFERENCE, ADMINISTRATION)).union(*(door.names for door in doors))
        log = self._log = RequestLog(options.log_prompts, observer, names)
        services = (
            GrpcService(GENERATION, GenerationService(runner, log)),
            GrpcService(OPEN_INFERENCE, OpenInferenceService(runner, log)),
            GrpcService(ADMINISTRATION, AdminService(runner, self.drain, reloads), ADMIN),
        )
        self.grpc = GrpcPorts(options, services, health, self._callers, log)
        self._dead = asyncio.Event()
        self.is_late = False

    def _observer(self) -> Observer:
        """Returns the observers of requests that the options ask for."""
        chosen: list[Observer] = []
        if self._doors:
            chosen.append(self._statistics)
        if self._traces is not None:
            chosen.append(self._traces)
        return Observers(chosen)

    async def start(self) -> str:
        """Starts to listen, and returns HOST:PORT. Requests are refused until `set_ready` is called.

        Raises:
            ConfigError: an address is in use or not available.
        """
        self._lifecycle.report()
        address = await self.grpc.open()
        for door in self._doors:
            await door.open(self._runner, self._callers, self._log, self._statistics)
        loop = asyncio.get_running_loop()

        def on_change(error: WorkerDied | None) -> None:
            with suppress(RuntimeError):  # the loop is closed: this server has ended already
                loop.call_soon_threadsafe(lambda: loop.create_task(self._follow(error)))

        self._engine.watch(on_change)
        return address

    async def set_ready(self) -> None:
        """Accepts requests from now on: the engine has loaded the model."""
        self._lifecycle.set_loaded()

    async def _follow(self, error: WorkerDied | None) -> None:
        """Reports the state of the workers: dead for good, starting again (`retry_after`), stalled, or well (None)."""
        self._lifecycle.set_death(error)
        if self._lifecycle.death is None:
            return
        with suppress(TimeoutError):  # the engine has failed all requests; their callers still read that
            async with asyncio.timeout(ANSWER_GRACE):  # wait_for may forget that this task is cancelled, and go on
                await self._runner.live.wait_empty()
        await asyncio.sleep(DEATH_NOTICE)
        self._dead.set()

    async def wait_dead(self) -> None:
        """Returns when a worker has died and the callers of all requests have been answered."""
        await self._dead.wait()

    @property
    def death(self) -> WorkerDied | None:
        """The error of the worker that died for good; None if none did."""
        return self._lifecycle.death

    async def drain(self, seconds: float | None = None) -> None:
        """Refuses new requests, and returns when the live ones have ended or the time has passed.

        Args:
            seconds: the longest time; None = the drain timeout of the options.
        """
        seconds, live = self._options.drain_timeout if seconds is None else seconds, self._runner.live
        self._refuse_new()
        _LOG.info("draining: %d live requests, %g s at most", len(live), seconds)
        try:
            async with asyncio.timeout(seconds):
                await live.wait_empty()
        except TimeoutError:
            self.is_late = True
            _LOG.warning("drain timeout: %d live requests are left", len(live))

    def _refuse_new(self) -> None:
        self._lifecycle.set_draining()
        for door in self._doors:
            door.drain()
        if self._reloads is not None:
            self._reloads.end_reloads()

    async def stop(self) -> None:
        """Ends the live requests, then all other calls, and closes the ports."""
        self._refuse_new()
        self._runner.end_live_requests()
        await asyncio.gather(self.grpc.stop(), *(door.stop() for door in self._doors))
        with suppress(TimeoutError):  # closing the engine ends the remaining requests
            async with asyncio.timeout(ABORT_GRACE):
                await self._runner.live.wait_empty()
        await self._runner.prompts.close()
        self._log.close()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)


def _traces(engine: ServedEngine, options: ServerOptions) -> "RequestTraces | None":
    """Returns the observer that exports spans, if they are wanted; otherwise nothing of OpenTelemetry is imported."""
    if options.otlp_endpoint is None:
        return None
    from .metrics.traces import RequestTraces

    return RequestTraces(options.otlp_endpoint, lambda: engine.info.name)
