"""The first request of an engine, which the server makes itself."""

import uuid
from queue import SimpleQueue
from typing import Final

from ...engine.request.events import Done, Event, Failed
from ...engine.request.request import CacheOptions, Request
from ...engine.request.sampling_params import SamplingParams
from ..engine_protocol import EngineProtocol

_ONE_TOKEN: Final = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)


def warm_up(engine: EngineProtocol) -> None:
    """Computes one token, so that the first caller does not wait for what happens only once; the thread waits.

    Raises:
        TkError: the engine cannot answer.
    """
    events: SimpleQueue[Event] = SimpleQueue()
    engine.submit(Request((0,), _ONE_TOKEN, uuid.uuid4().hex, cache=CacheOptions(bypass=True)), events.put)
    while not isinstance(event := events.get(), Done | Failed):
        pass
    if isinstance(event, Failed):
        raise event.error
