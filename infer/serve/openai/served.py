"""The model behind the HTTP port, and a call's requests to it: one for each prompt, all in the engine together."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from ...engine.request.events import ModelInfo, SentEvent
from ...engine.request.request import Request
from ...engine.request.streams import EventStream
from ...engine.schedule.books import EngineLoad
from ..call.call import RequestRunner, ServerCall
from ..metrics.request_record import RequestRecord
from ..operations.lifecycle import ServerState

Numbered = tuple[int, SentEvent]


class ServedModel:
    """The model and the way to it, which all protocols share.

    Args:
        runner: runs the requests of the server.
    """

    def __init__(self, runner: RequestRunner) -> None:
        self._runner = runner

    @property
    def info(self) -> ModelInfo:
        """The description of the model; raises Loading before it is loaded."""
        self._runner.lifecycle.check_loaded()
        return self._runner.engine.info

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be asked for; raises Loading before the model is loaded."""
        self._runner.lifecycle.check_loaded()
        return self._runner.prompts.has_chat_template

    @property
    def load(self) -> EngineLoad:
        """The load of the engine; raises Loading before it is loaded."""
        self._runner.lifecycle.check_loaded()
        return self._runner.engine.books.load()

    @property
    def state(self) -> ServerState:
        """The state of the server."""
        return self._runner.lifecycle.state

    @property
    def retry_after(self) -> float | None:
        """The seconds until a server that takes no requests may take some again, if it knows."""
        return self._runner.lifecycle.retry_after


@asynccontextmanager
async def running_all(requests: Sequence[Request], call: ServerCall) -> AsyncIterator[AsyncIterator[Numbered]]:
    """Runs the requests of a call while the body runs, and yields their events with the number of each event's request.

    Raises:
        TkError: a request is refused; those before it end.
    """
    async with call.run(*requests) as streams:
        if len(streams) == 1:
            yield _seen(_numbered(streams[0]), call.record)
            return
        queue: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue(maxsize=1)
        pumps = [asyncio.create_task(_pump(number, stream, queue)) for number, stream in enumerate(streams)]
        try:
            yield _seen(_merged(queue, len(pumps)), call.record)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)


async def _seen(events: AsyncIterator[Numbered], record: RequestRecord) -> AsyncIterator[Numbered]:
    async for number, event in events:
        record.see(event)
        yield number, event


async def _numbered(stream: EventStream) -> AsyncIterator[Numbered]:
    async for event in stream:
        yield 0, event


async def _pump(number: int, stream: EventStream, queue: asyncio.Queue[Numbered | Exception | None]) -> None:
    """Moves the events of a stream into the queue of all; one that waits there lets the stream join its deltas."""
    try:
        async for event in stream:
            await queue.put((number, event))
        await queue.put(None)
    except Exception as error:
        await queue.put(error)


async def _merged(queue: asyncio.Queue[Numbered | Exception | None], num_streams: int) -> AsyncIterator[Numbered]:
    while num_streams:
        taken = await queue.get()
        if isinstance(taken, Exception):
            raise taken
        if taken is None:
            num_streams -= 1
        else:
            yield taken
