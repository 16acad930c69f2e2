"""All that a server knows of one call when it ends: its caller, tokens, times and status."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ....core.errors import TkError
from ...engine.request.events import Delta, Finished, SentEvent, Started
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
class RequestTerms:
    """What a caller asks for beside the prompts of his requests.

    Attributes:
        trace: the caller's trace context, by the names of its headers; empty if it sent none.
        deadline: the value of time.monotonic() at which the caller stops waiting; None = it does not.
        operation: the kind of the requests: text_completion, chat or score.
        params: the sampling options, once they are read.
    """

    trace: Mapping[str, str] = field(default_factory=dict)
    deadline: float | None = None
    operation: str = "text_completion"
    params: SamplingParams | None = None


@dataclass
class RequestProgress:
    """How far the requests of a call came; times are in seconds from the begin of the call, None = not so far.

    Attributes:
        admitted: the time at which the engine took the requests.
        started: the time of the caller's first event.
        first_token: the time of its first tokens.
        step: the training step of the weights.
        adapter, adapter_sha256: the name of the adapter of requests that the engine took, and its digest; "" = none.
        samples: the ends of the samples that completed.
    """

    admitted: float | None = None
    started: float | None = None
    first_token: float | None = None
    step: int | None = None
    adapter: str = ""
    adapter_sha256: str = ""
    samples: list[Finished] = field(default_factory=list)

    @property
    def reasons(self) -> list[str]:
        """The reasons for the ends of the samples."""
        return [sample.reason.value for sample in self.samples]

    @property
    def preemptions(self) -> int:
        """The number of times that the samples were preempted."""
        return sum(sample.timing.preemptions for sample in self.samples)


@dataclass
class RequestRecord:
    """A call from its begin to its end.

    Attributes:
        method: the call.
        principal: the caller's name.
        request_id: the request's name; a request that is refused before it has one has the caller's.
        client: the address of the connection's other end.
        runs: whether the call is for a request to the engine.
        terms: what the caller asks for.
        progress: how far its requests came.
        values: tokens, times in seconds, and the prompt if prompts are logged.
        status: the name of the status that the call ended with.
        error: the error that ended it, if one did.
        begun_ns: the time of the begin in nanoseconds since 1970.
    """

    method: str
    principal: str = ""
    request_id: str = ""
    client: str = ""
    runs: bool = False
    terms: RequestTerms = field(default_factory=RequestTerms)
    progress: RequestProgress = field(default_factory=RequestProgress)
    values: dict[str, Any] = field(default_factory=dict)
    status: str = "OK"
    error: BaseException | None = None
    begun_ns: int = field(default_factory=time.time_ns)
    _begun: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        """Returns the seconds since the begin."""
        return time.monotonic() - self._begun

    @property
    def is_late(self) -> bool:
        """Whether the caller's deadline has passed, by its clock or ours."""
        return self.terms.deadline is not None and time.monotonic() >= self.terms.deadline - _CLOCKS_DIFFER

    def run(self, headers: Iterable[tuple[str, str | bytes]], deadline: float | None) -> None:
        """Records that the call is for a request to the engine; its headers or metadata may have a trace context."""
        self.runs, self.terms = True, RequestTerms(trace_of(headers), deadline)

    def admit(self, request_id: str, adapter: str = "") -> None:
        """Records that the engine has taken the request, its id, and the name of its adapter."""
        self.request_id, self.progress.admitted, self.progress.adapter = request_id, self.seconds(), adapter

    @property
    def limits(self) -> dict[str, float]:
        """The limits that the caller asked for, by name."""
        deadline, params = self.terms.deadline, self.terms.params
        found = {
            "deadline_seconds": None if deadline is None else round(deadline - self._begun, 3),
            "max_new_tokens": None if params is None else params.max_new_tokens,
            "n": None if params is None else params.n,
        }
        return {name: value for name, value in found.items() if value is not None}

    @property
    def is_refused(self) -> bool:
        """Whether an error for the caller ended the call before the engine took a request."""
        return self.progress.admitted is None and isinstance(self.error, TkError)

    def see(self, event: SentEvent) -> None:
        """Takes tokens and times from an event on its way to the caller; a call may have several prompts."""
        progress, values = self.progress, self.values
        match event:
            case Delta():
                if progress.first_token is None:
                    progress.first_token = self.seconds()
                values["completion_tokens"] += len(event.token_ids)
            case Started():
                progress.step, progress.started = event.step, self.seconds()
                progress.adapter_sha256 = event.adapter_sha256
                values["prompt_tokens"] = values.get("prompt_tokens", 0) + event.prompt_tokens
                values["cached_tokens"] = values.get("cached_tokens", 0) + event.cached_tokens
                values.setdefault("completion_tokens", 0)
            case Finished():
                if not progress.samples:
                    values["queue_seconds"] = round(event.timing.queue_seconds, 6)
                    values["first_token_seconds"] = round(event.timing.first_token_seconds, 6)
                progress.samples.append(event)
