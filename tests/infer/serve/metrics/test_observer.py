"""Observers: the one that ignores requests, several at once, and refusals."""

from tk.core.errors import InvalidRequest
from tk.infer.engine.request.events import Done, Event
from tk.infer.engine.request.request import Request
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.infer.serve.metrics.observer import Observer, Observers, OnEvent
from tk.infer.serve.metrics.request_record import RequestRecord


class Recorder(Observer):
    """Writes a line for all that it observes."""

    def __init__(self, name: str, lines: list[str]) -> None:
        self.name, self.lines = name, lines

    def begin(self, request: Request, on_event: OnEvent) -> OnEvent:
        self.lines.append(f"{self.name} begins {request.request_id}")

        def observe(event: Event) -> None:
            self.lines.append(f"{self.name} sees {type(event).__name__}")
            on_event(event)

        return observe

    def refuse(self, record: RequestRecord) -> None:
        self.lines.append(f"{self.name} refuses: {record.error}")

    def end(self, record: RequestRecord) -> None:
        self.lines.append(f"{self.name} sees the end of {record.method}: {record.status}")


def test_the_first_observer_is_nearest_to_the_reader() -> None:
    lines: list[str] = []
    observers = Observers([Recorder("one", lines), Recorder("two", lines)])
    observers.begin(Request((1,), SamplingParams(), "r"), lambda event: lines.append("read"))(Done())
    assert lines == ["one begins r", "two begins r", "two sees Done", "one sees Done", "read"]


def test_refusals_and_ends_reach_all_observers() -> None:
    lines: list[str] = []
    observers = Observers([Recorder("one", lines), Recorder("two", lines)])
    observers.refuse(RequestRecord("Generate", error=InvalidRequest("no prompt", field="prompt")))
    observers.end(RequestRecord("Generate", status="CANCELLED"))
    assert lines == [
        "one refuses: no prompt",
        "two refuses: no prompt",
        "one sees the end of Generate: CANCELLED",
        "two sees the end of Generate: CANCELLED",
    ]


def test_no_observer_adds_nothing_to_an_event() -> None:
    events: list[Event] = []
    push = events.append
    assert Observer().begin(Request((1,), SamplingParams(), "r"), push) is push
