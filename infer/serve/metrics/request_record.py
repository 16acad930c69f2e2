"""All that a server knows of one call when it ends: its caller, tokens, times and status."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ....core.errors import TkError
from ...engine.request.events import Delta, Finished, SentEvent, Started, Timing
from ...engine.request.sampling_params import SamplingParams

TRACE_HEADERS: Final = ("traceparent", "tracestate")  # https://www.w3.org/TR/trace-context/
_MAX_TRACE_LETTERS: Final = 512
# Seconds by which a client, or gRPC itself, may end a call before our own clock says that its deadline has passed.
_CLOCKS_DIFFER: Final = 0.05


def trace_of(headers: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """Returns the trace context among the headers or metadata of a call; what is too long for one is left out."""
    return {
        name: value
        for name, value in headers
        if name in TRACE_HEADERS and isinstance(value, str) and len(value) <= _MAX_TRACE_LETTERS
    }


@dataclass
class RequestRecord:
    """A call from its begin to its end.

    Attributes:
        method: the call.
        principal: the caller's name.
        request_id: the request's name; a request that is refused before it has one has the caller's.
        client: the address of the connection's other end.
        trace: the caller's trace context, by the names of its headers; empty if it sent none.
        runs: whether the call is for a request to the engine.
        operation: the kind of the request: text_completion, chat or score.
        params: the sampling options, once they are read.
        values: tokens, times in seconds, and the prompt if prompts are logged.
        status: the name of the status that the call ended with.
        error: the error that ended it, if one did.
        admitted: the seconds from the begin until the engine took the request; None = it did not.
        started: the seconds until the caller's first event; None = there was none.
        first_token: the seconds until its first tokens; None = there were none.
        timings: the times of the samples that completed.
        reasons: the reasons for the ends of samples.
        step: the training step of the weights.
        deadline: the value of time.monotonic() at which the caller stops waiting; None = it does not.
        begun_ns: the time of the begin in nanoseconds since 1970.
    """

    method: str
    principal: str = ""
    request_id: str = ""
    client: str = ""
    trace: Mapping[str, str] = field(default_factory=dict)
    runs: bool = False
    operation: str = "text_completion"
    params: SamplingParams | None = None
    values: dict[str, Any] = field(default_factory=dict)
    status: str = "OK"
    error: BaseException | None = None
    admitted: float | None = None
    started: float | None = None
    first_token: float | None = None
    timings: list[Timing] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    step: int | None = None
    deadline: float | None = None
    begun_ns: int = field(default_factory=time.time_ns)
    _begun: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        """Returns the seconds since the begin."""
        return time.monotonic() - self._begun

    @property
    def is_late(self) -> bool:
        """Whether the caller's deadline has passed, by its clock or ours."""
        return self.deadline is not None and time.monotonic() >= self.deadline - _CLOCKS_DIFFER

    def admit(self, request_id: str) -> None:
        """Records that the engine has taken the request, and its id."""
        self.request_id, self.admitted = request_id, self.seconds()

    @property
    def limits(self) -> dict[str, float]:
        """The limits that the caller asked for, by name."""
        found: dict[str, float | None] = {}
        if self.deadline is not None:
            found["deadline_seconds"] = round(self.deadline - self._begun, 3)
        if self.params is not None:
            found |= {"max_new_tokens": self.params.max_new_tokens, "n": self.params.n}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def is_refused(self) -> bool:
        """Whether an error for the caller ended the call before the engine took a request."""
        return self.admitted is None and isinstance(self.error, TkError)

    def see(self, event: SentEvent) -> None:
        """Takes tokens and times from an event on its way to the caller."""
        match event:
            case Delta():
                if self.first_token is None:
                    self.first_token = self.seconds()
                self._add("completion_tokens", len(event.token_ids))
            case Started():
                self.step, self.started = event.step, self.seconds()
                for name, count in (
                    ("prompt", event.prompt_tokens),
                    ("cached", event.cached_tokens),
                    ("completion", 0),
                ):
                    self._add(f"{name}_tokens", count)
            case Finished():
                self.reasons.append(event.reason.value)
                self.timings.append(event.timing)
                if len(self.timings) == 1:
                    self.values["queue_seconds"] = round(event.timing.queue_seconds, 6)
                    self.values["first_token_seconds"] = round(event.timing.first_token_seconds, 6)

    def _add(self, name: str, count: int) -> None:
        """Adds to a number of tokens; a call may have several prompts."""
        self.values[name] = self.values.get(name, 0) + count
