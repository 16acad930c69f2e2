"""What the server needs of an engine: the seam that infer/engine.py fills and that tests fill with a script."""

from collections.abc import Callable, Sequence
from typing import Protocol

from ..events import Event, ModelInfo, Request


class ServedTokenizer(Protocol):
    """The part of a tokenizer that the server uses."""

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the tokenizer's special tokens unless told otherwise."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids unknown to the tokenizer give no text."""


class ServedEngine(Protocol):
    """An engine that runs requests on a thread of its own and tells of them by events on that thread."""

    @property
    def info(self) -> ModelInfo:
        """What is served."""

    @property
    def tokenizer(self) -> ServedTokenizer | None:
        """The checkpoint's tokenizer, or None where it came without one."""

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None:
        """Take in a request, from any thread; raises InvalidRequest, Overloaded or WorkerDied at once.

        `on_event` gets its events on the engine's thread, the last being Done or Failed, and must not block.
        """

    def abort(self, request_id: str) -> bool:
        """End a request, from any thread; its last event is Failed. False if there is no such live request."""

    def on_death(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once, on the engine's thread, when a worker dies."""
