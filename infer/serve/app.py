"""The server as a whole: its ports, the engine behind them, and its orderly shutdown."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

from ...core.errors import WorkerDied
from ...proto.v1 import generation_pb2 as pb
from .access.callers import Callers, TokenCallers
from .access.tokens import ADMIN, GENERATE
from .call.request_log import RequestLog
from .call.runner import RequestRunner
from .engine_protocol import ServedEngine
from .grpc.admin import ADMIN_SERVICE, AdminService
from .grpc.calls import Calls
from .grpc.ports import listen, make_health_port, make_port
from .grpc.service import GenerationService
from .health import READINESS, Health
from .metrics.observer import Observer, Observers
from .metrics.tally import RequestTally
from .open_inference.service import OPEN_INFERENCE, OpenInferenceService
from .operations.lifecycle import Lifecycle
from .operations.reloads import Reloads
from .options import ServerOptions

if TYPE_CHECKING:
    from .metrics.traces import RequestTraces

# Seconds for calls other than requests (health watchers, reflection) to end by themselves when no request is live.
STOP_GRACE: Final = 0.5
# Seconds for the engine to drop aborted requests, which it does at once unless it is late itself.
ABORT_GRACE: Final = 1.0
# Seconds for callers to read that their requests failed.
ANSWER_GRACE: Final = 5.0
# Seconds in which a server without workers still answers UNAVAILABLE: gRPC cancels calls that reach a stopping server.
DEATH_NOTICE: Final = 1.0
_LOG: Final = logging.getLogger(__name__)


class Door(Protocol):
    """A port beside that of gRPC, on the same event loop."""

    async def open(self, runner: RequestRunner, callers: Callers, log: RequestLog, tally: RequestTally) -> None:
        """Starts to listen, before the model is loaded; raises ConfigError if the address cannot be had.

        Args:
            runner: runs the requests.
            callers: identifies the callers by their tokens.
            log: the log of calls.
            tally: counts the requests of all protocols.
        """

    def drain(self) -> None:
        """Ends what is idle; new requests are refused by the runner, and live ones end by themselves."""

    async def stop(self) -> None:
        """Closes the port and ends all connections."""


class Server:
    """A gRPC server around an engine that may still be loading, for one event loop; the caller closes the engine.

    Attributes:
        health_address: HOST:PORT of the port for health alone, from `start` on; "" if the options have none.
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
        callers = self._callers
        self._lifecycle = Lifecycle(health)
        self._tally = RequestTally()
        self._traces = _traces(engine, options)
        observer = self._observer()
        log = self._log = RequestLog(options.log_prompts, observer)
        self._runner = RequestRunner(engine, self._lifecycle, options.default_max_new_tokens, observer)
        self._dead = asyncio.Event()
        self.is_late = False
        self.health_address, most = "", options.max_connections
        self._health_port = make_health_port(health, most)
        alone = options.admin_port is None
        names = (READINESS, OPEN_INFERENCE.full_name, *((ADMIN_SERVICE,) if alone else ()))
        self._port = make_port(callers, health, names, log, most)
        self._admin_port = self._port if alone else make_port(callers, health, (ADMIN_SERVICE,), log, most)
        services = pb.DESCRIPTOR.services_by_name
        generating, operating = Calls(callers, log, GENERATE), Calls(callers, log, ADMIN)
        generating.add_service(self._port, services["Generation"], GenerationService(self._runner, log))
        generating.add_service(self._port, OPEN_INFERENCE, OpenInferenceService(self._runner, log))
        admin = AdminService(self._runner, self.drain, reloads)
        operating.add_service(self._admin_port, services["Admin"], admin)

    def _observer(self) -> Observer:
        """Returns the observers of requests that the options ask for."""
        chosen: list[Observer] = []
        if self._doors:
            chosen.append(self._tally)
        if self._traces is not None:
            chosen.append(self._traces)
        return Observers(chosen)

    async def start(self) -> str:
        """Starts to listen, and returns HOST:PORT. Requests are refused until `set_ready` is called.

        Raises:
            ConfigError: an address is in use or not available.
        """
        self._lifecycle.report()
        address = await listen(self._port, self._options, self._options.port)
        _LOG.info("listening on %s", address)
        if self._options.admin_port is not None:
            _LOG.info("admin on %s", await listen(self._admin_port, self._options, self._options.admin_port))
        if self._options.health_port is not None:
            self.health_address = await listen(self._health_port, self._options, self._options.health_port, False)
            _LOG.info("health, without encryption, on %s", self.health_address)
        for door in self._doors:
            await door.open(self._runner, self._callers, self._log, self._tally)
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
        stops = [port.stop(STOP_GRACE) for port in {self._port, self._admin_port, self._health_port}]
        stops += [door.stop() for door in self._doors]
        await asyncio.gather(*stops)
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
