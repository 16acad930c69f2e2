"""The observer of a server's requests: the one place through which their events pass, whatever the protocol."""

from collections.abc import Callable, Sequence

from ...engine.request.events import Event
from ...engine.request.request import Request
from .request_record import RequestRecord

OnEvent = Callable[[Event], None]


class Observer:
    """Observes the requests of a server; this one ignores them, at no cost per event."""

    def begin(self, request: Request, on_event: OnEvent) -> OnEvent:
        """Returns the callback that receives the events of a request, which the engine may still refuse.

        Args:
            on_event: the callback that must receive every event; the engine's thread calls it.
        """
        return on_event

    def refuse(self, record: RequestRecord) -> None:
        """Observes a call that an error for its caller ends before the engine takes its request."""

    def end(self, record: RequestRecord) -> None:
        """Observes the end of a call that was to run a request, whatever that end is; on the event loop's thread."""

    def close(self) -> None:
        """Ends what the observer does in the background, within a second."""


class Observers(Observer):
    """Several observers; the first is the nearest to the reader of the events."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def begin(self, request: Request, on_event: OnEvent) -> OnEvent:
        for observer in self._observers:
            on_event = observer.begin(request, on_event)
        return on_event

    def refuse(self, record: RequestRecord) -> None:
        for observer in self._observers:
            observer.refuse(record)

    def end(self, record: RequestRecord) -> None:
        for observer in self._observers:
            observer.end(record)

    def close(self) -> None:
        for observer in self._observers:
            observer.close()
