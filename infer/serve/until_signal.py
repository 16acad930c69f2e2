"""The run of a server as a process: it loads, serves, drains on a signal, and ends."""

import asyncio
import enum
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from .app import Port, Server
from .engine_protocol import EngineProtocol, Reloads
from .operations.model_switch import warm_up
from .options import ServerOptions


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
