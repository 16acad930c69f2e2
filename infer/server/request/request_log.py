"""The log of requests: one line for each at its end, with its id, status, tokens and times.

A record of `logging` carries the same values in `fields`, for formatters that write JSON.
"""

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from ....core.errors import TkError
from ...requests.events import Delta, Finished, SentEvent, Started

_LOG: Final = logging.getLogger(__name__)


@dataclass
class RequestRecord:
    """The values that the line of a request has.

    Attributes:
        method: the call.
        principal: the caller's name.
        request_id: the request's name; a request that is refused before it has one has the caller's.
        values: tokens, times in seconds, and the prompt if prompts are logged.
    """

    method: str
    principal: str
    request_id: str
    values: dict[str, Any] = field(default_factory=dict)

    def see(self, event: SentEvent) -> None:
        """Takes tokens and times from an event on its way to the caller."""
        values = self.values
        match event:
            case Delta():
                values["completion_tokens"] += len(event.token_ids)
            case Started():
                values |= {"prompt_tokens": event.prompt_tokens, "cached_tokens": event.cached_tokens}
                values["completion_tokens"] = 0
            case Finished() if "queue_seconds" not in values:
                values["queue_seconds"] = round(event.timing.queue_seconds, 6)
                values["first_token_seconds"] = round(event.timing.first_token_seconds, 6)


class RequestLog:
    """Writes the lines.

    Attributes:
        with_prompts: whether they have the prompts, which may be confidential.
    """

    def __init__(self, with_prompts: bool = False) -> None:
        self.with_prompts = with_prompts

    @contextmanager
    def request(self, method: str, principal: str, request_id: str, prompt: object) -> Iterator[RequestRecord]:
        """A context around a request, at the end of which its line is written; errors pass through it.

        Args:
            prompt: a text, token ids or messages, as JSON has them; it is left out unless prompts are logged.
        """
        record, begun = RequestRecord(method, principal, request_id), time.monotonic()
        if self.with_prompts:
            record.values["prompt"] = prompt
        status = "OK"
        try:
            yield record
        except TkError as error:
            status = error.grpc_status
            record.values["error"] = str(error)
            raise
        except (asyncio.CancelledError, grpc.aio.BaseError):  # the caller has gone, or its deadline has passed
            status = "CANCELLED"
            raise
        except BaseException:
            status = "INTERNAL"
            raise
        finally:
            record.values["total_seconds"] = round(time.monotonic() - begun, 6)
            _write(record, status)


def _write(record: RequestRecord, status: str) -> None:
    fields = {
        "request_id": record.request_id,
        "principal": record.principal,
        "method": record.method,
        "status": status,
        **record.values,
    }
    words = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
    _LOG.info("request %s", words, extra={"fields": fields})


def _shown(value: object) -> str:
    """Returns a value in one word, or in quotes on one line."""
    if isinstance(value, int | float):
        return str(value)
    text = value if isinstance(value, str) else json.dumps(value)
    return text if text.replace("-", "").isalnum() else json.dumps(text)
