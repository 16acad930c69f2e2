"""The first request of an engine, which the server makes itself."""

import threading
import uuid
from typing import Final

from ...engine.request.events import Done, Event, Failed
from ...engine.request.request import CacheOptions, Request
from ...engine.request.sampling_params import SamplingParams
from ..engine_protocol import ServedEngine

_ONE_TOKEN: Final = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)


def warm_up(engine: ServedEngine) -> None:
    """Computes one token, so that the first caller does not wait for what happens only once; the thread waits.

    Raises:
        TkError: the engine cannot answer.
    """
    over = threading.Event()
    last: list[Event] = []

    def on_event(event: Event) -> None:
        if isinstance(event, Done | Failed):
            last.append(event)
            over.set()

    engine.submit(Request((0,), _ONE_TOKEN, uuid.uuid4().hex, cache=CacheOptions(bypass=True)), on_event)
    over.wait()
    for event in last:
        if isinstance(event, Failed):
            raise event.error
