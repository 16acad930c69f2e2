"""The ids of requests, given by the client or made here, and the table of live requests."""

import asyncio
import re
import uuid
from typing import Final

from ....core.errors import InvalidRequest
from ...engine.request.streams import EventStream, Wakeups
from ..errors import DuplicateRequest

METADATA_KEY: Final = "x-request-id"
_VALID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def is_id(text: str) -> bool:
    """Returns whether a text can be the id of a request, which the log shows."""
    return _VALID.fullmatch(text) is not None


def made_id() -> str:
    """Returns a new id."""
    return uuid.uuid4().hex


def check_id(requested: str) -> None:
    """Checks a client's id; raises InvalidRequest if it is too long or has wrong characters."""
    if not is_id(requested):
        raise InvalidRequest(
            f"request_id is {requested[:140]!r}; it must be at most 128 of the characters A-Z a-z 0-9 . _ : -",
            field="request_id",
            given=requested,
        )


class LiveRequests:
    """The requests that the engine computes or a handler answers; only the event loop's thread uses it.

    Each caller has ids of its own: it neither sees those of others nor is refused because of them.

    Args:
        wakeups: wakes the readers of their events.
    """

    def __init__(self, wakeups: Wakeups) -> None:
        self._wakeups = wakeups
        self._streams: dict[tuple[str, str], EventStream] = {}  # by principal and id
        self._empty = asyncio.Event()
        self._empty.set()

    def open(self, request_id: str, principal: str = "") -> EventStream:
        """Opens a stream under this id, which is live until the stream closes or `discard` is called.

        Raises:
            DuplicateRequest: another live request of the principal has the id.
        """
        key = principal, request_id
        if key in self._streams:
            raise DuplicateRequest(f"request_id {request_id!r} is in use by a live request; choose another.")
        stream = self._streams[key] = EventStream(self._wakeups, lambda: self.discard(request_id, principal))
        self._empty.clear()
        return stream

    def find(self, request_id: str, principal: str) -> EventStream | None:
        """Returns the stream of a live request; None if it is not live."""
        return self._streams.get((principal, request_id))

    def discard(self, request_id: str, principal: str = "") -> None:
        """Removes a principal's id; does nothing if it is not live."""
        self._streams.pop((principal, request_id), None)
        if not self._streams:
            self._empty.set()

    async def wait_empty(self, seconds: float) -> bool:
        """Waits until no request is live; returns False if the time passes before."""
        try:
            async with asyncio.timeout(seconds):  # wait_for may forget that its task is cancelled, and go on
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def __len__(self) -> int:
        return len(self._streams)

    def streams(self) -> list[EventStream]:
        """Returns the streams of all live requests."""
        return list(self._streams.values())
