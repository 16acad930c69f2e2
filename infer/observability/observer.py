"""The observer of a server's requests: the one place through which their events pass, whatever the protocol."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ...core.errors import TkError
from ..requests.events import Event, Request

OnEvent = Callable[[Event], None]


class Observer:
    """Observes the requests of a server; this one ignores them, at no cost per event."""

    def begin(self, request: Request, on_event: OnEvent) -> OnEvent:
        """Returns the callback that receives the events of a request, which the engine may still refuse.

        Args:
            request: the request.
            on_event: the callback that must receive every event; the engine's thread calls it.
        """
        return on_event

    def refuse(self, error: TkError) -> None:
        """Observes a call that is refused before the engine takes its request."""

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Reports a TkError of the body as a refusal; the error goes on."""
        try:
            yield
        except TkError as error:
            self.refuse(error)
            raise


class Observers(Observer):
    """Several observers; the first is the nearest to the reader of the events."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def begin(self, request: Request, on_event: OnEvent) -> OnEvent:
        for observer in self._observers:
            on_event = observer.begin(request, on_event)
        return on_event

    def refuse(self, error: TkError) -> None:
        for observer in self._observers:
            observer.refuse(error)
