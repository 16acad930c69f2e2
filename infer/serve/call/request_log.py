"""The log of calls: one line for each at its end, with its id, status, tokens and times.

Every call whose request the engine took has a line. A call that is refused before has one too, unless one of its kind
had one in the last minute: then it is counted, so that a client that floods the server does not fill a disk. Refusals
are counted for the metrics here too. No line has anything that a caller wrote but the id of his request and the name of
a loaded adapter: errors are named by class, field and type of value, and a caller alone reads their messages. A record
of `logging` carries the values of a line in `fields`, for formatters that write JSON.
"""

import asyncio
import datetime
import json
import logging
import re
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Final

from ....core.errors import InvalidRequest, TkError
from ....core.repeats import WINDOW, Repeats
from ...engine.request.prompts import Conversation, GivenPrompt
from ..errors import text_for_client
from ..metrics.observer import Observer
from ..metrics.request_record import RequestRecord

_LOG: Final = logging.getLogger(__name__)
# The caller has gone, or its deadline has passed.
_GONE: Final = (asyncio.CancelledError, ConnectionError, TimeoutError)
_INDEX: Final = re.compile(r"\[\d{1,6}\]")


class RequestLog:
    """Writes the lines, and reports the calls to an observer; for the event loop's thread.

    Args:
        with_prompts: whether lines have the prompts and the messages of errors, which may be confidential.
        observer: observes the refused calls and the ends of requests.
        names: the names of calls and fields in all protocols, which lines may have: none that a caller made up.
    """

    def __init__(
        self, with_prompts: bool = False, observer: Observer | None = None, names: Set[str] = frozenset()
    ) -> None:
        self._with_prompts, self._observer, self._names = with_prompts, observer or Observer(), names
        self._repeats = Repeats[RequestRecord]()
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def call(self, method: str, client: str = "", request_id: str = "") -> Iterator[RequestRecord]:
        """A context around a call, which fills the call's record; errors pass through it.

        The call has a line at its end if it is for a request, or if a TkError ends it.

        Args:
            method: the call.
            client: the address of the connection's other end.
            request_id: the caller's name for the call, or "".
        """
        record = RequestRecord(method, request_id=request_id, client=client)
        try:
            yield record
        except BaseException as error:
            if record.runs or isinstance(error, TkError):
                self._fail(record, error)
            raise
        finally:
            self._end(record)
            record.error = None  # whose traceback has the record: they would stay until garbage is searched for

    def _end(self, record: RequestRecord) -> None:
        if record.runs:
            record.values["total_seconds"] = round(record.seconds(), 6)
        if record.progress.admitted is None and record.error is not None:
            self._write_one_of_many(record)
        elif record.runs:
            _write(record)
        if record.runs:
            self._observer.end(record)

    def refuse(self, method: str, error: TkError, client: str = "", request_id: str = "") -> None:
        """Writes the line of a call that was refused before it could be read, and counts it."""
        record = RequestRecord(method, request_id=request_id, client=client)
        self._fail(record, error)
        self._write_one_of_many(record)
        record.error = None  # as above

    def describe(self, record: RequestRecord, *prompts: GivenPrompt) -> None:
        """Adds the kind of a call's prompts to its record and, if they are logged, the texts, token ids or messages."""
        if any(isinstance(prompt, Conversation) for prompt in prompts):
            record.terms.operation = "chat"
        if self._with_prompts:
            shown = [_prompt_in_json(prompt) for prompt in prompts]
            record.values["prompt"] = shown[0] if len(shown) == 1 else shown

    def known(self, name: str) -> str:
        """Returns the name of a call, or the path of a field, if all of it is known; "" otherwise."""
        words = _INDEX.sub("", name[:200]).split(".")
        return name[:200] if set(words) <= self._names else ""

    def close(self) -> None:
        """Writes what is left to be written."""
        if self._timer is not None:
            self._timer.cancel()
        self._report_repeats(at_end=True)

    def _fail(self, record: RequestRecord, error: BaseException) -> None:
        record.error = error
        if isinstance(error, TkError):
            record.status = error.grpc_status
            record.values |= {"error": text_for_client(error)} if self._with_prompts else self._named(error)
        elif isinstance(error, _GONE):  # at the deadline gRPC and the client cancel, too
            record.status = "DEADLINE_EXCEEDED" if record.is_late else "CANCELLED"
        else:
            record.status = "INTERNAL"
        if record.is_refused:
            self._observer.refuse(record)

    def _named(self, error: TkError) -> dict[str, str]:
        """Returns what a line says of an error: nothing that the caller wrote."""
        found = {"error": error.log_form}
        if isinstance(error, InvalidRequest):
            found |= {"error_field": self.known(error.field), "error_value": error.kind}
        return {name: value for name, value in found.items() if value}

    def _write_one_of_many(self, record: RequestRecord) -> None:
        """Writes the line of a call that no engine took, or counts it, if one of its kind was written lately."""
        error, field = record.error, record.values.get("error_field", "")
        name = error.log_form if isinstance(error, TkError) else type(error).__name__
        kind = record.principal, record.method, record.status, name, field
        held = self._repeats.see(kind, record)
        if held is not None:
            _write(record, held)
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WINDOW, self._report_repeats)

    def _report_repeats(self, at_end: bool = False) -> None:
        """Writes a line for each kind of refusals that were counted: the newest, with the number of those before it."""
        for record, others in self._repeats.due(at_end):
            _write(record, others)
        self._timer = None
        if self._repeats.is_holding:
            self._timer = asyncio.get_running_loop().call_later(WINDOW, self._report_repeats)


def _prompt_in_json(prompt: GivenPrompt) -> str | dict[str, Any]:
    match prompt:
        case str():
            return prompt
        case Conversation():
            return {"messages": [dict(message) for message in prompt.messages], **asdict(prompt.form)}
    return {"ids": list(prompt)}


def _write(record: RequestRecord, repeats: int = 0) -> None:
    fields: dict[str, Any] = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        "request_id": record.request_id,
        "principal": record.principal,
        "client": record.client,
        "method": record.method,
        "status": record.status,
        **record.limits,
        **record.values,
    }
    progress = record.progress
    if progress.samples:
        fields |= {"finish_reasons": ",".join(progress.reasons), "preemptions": progress.preemptions}
    if progress.step is not None:
        fields["step"] = progress.step
    if progress.adapter:
        fields |= {"adapter": progress.adapter, "adapter_sha256": progress.adapter_sha256}
    if repeats:
        fields["repeats"] = repeats
    words = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
    _LOG.info("request %s", words, extra={"fields": fields})


def _shown(value: object) -> str:
    """Returns a value in one word, or in quotes on one line."""
    if isinstance(value, int | float):
        return str(value)
    text = value if isinstance(value, str) else json.dumps(value)
    return text if text.replace("-", "").isalnum() else json.dumps(text)
