"""Names of requests: given by the client or made here, unique among the live ones."""

import asyncio
import re
import uuid
from typing import Final

from ...core.errors import InvalidRequest
from .errors import DuplicateRequest
from .streams import EventStream

METADATA_KEY: Final = "x-request-id"
_VALID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def chosen_id(requested: str) -> str:
    """The client's id if it gave one, else a new one; InvalidRequest if the client's breaks the rules."""
    if not requested:
        return uuid.uuid4().hex
    if not _VALID.fullmatch(requested):
        raise InvalidRequest(
            f"request_id is {requested[:140]!r}; it must be at most 128 of the characters A-Z a-z 0-9 . _ : -",
            field="request_id",
        )
    return requested


class LiveRequests:
    """The requests that the engine works on or a handler answers, by name. For the event loop's thread only."""

    def __init__(self) -> None:
        self._streams: dict[str, EventStream] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def open(self, request_id: str) -> EventStream:
        """A stream under this name, until it closes or `discard` is called; raises DuplicateRequest."""
        if request_id in self._streams:
            raise DuplicateRequest(f"request_id {request_id!r} is in use by a live request; choose another.")
        stream = self._streams[request_id] = EventStream(on_close=lambda: self.discard(request_id))
        self._empty.clear()
        return stream

    def discard(self, request_id: str) -> None:
        """Forget a name; idempotent."""
        self._streams.pop(request_id, None)
        if not self._streams:
            self._empty.set()

    async def wait_empty(self) -> None:
        """Return when nothing is live."""
        await self._empty.wait()

    def __len__(self) -> int:
        return len(self._streams)

    def streams(self) -> list[EventStream]:
        """Those of all live requests."""
        return list(self._streams.values())
