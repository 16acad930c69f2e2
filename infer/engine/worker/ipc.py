"""Frames between the engine and its workers, without pickle, over a socket pair.

frame = 8 bytes of ASCII: the kind, padded with spaces | u32 bytes of values | u32 bytes of body | values | body
The values are UTF-8 JSON, absent if there are none; the body is binary (`StepMessage`, `SamplerOutput`).
"""

import json
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ....core.errors import TkError, WorkerDied, pack, unpack

_HEADER = struct.Struct("<8sII")


@dataclass(frozen=True, slots=True)
class Frame:
    """A message between the engine and a worker; `op` is its kind, up to 8 letters."""

    op: str
    values: Mapping[str, Any] = field(default_factory=dict)
    body: bytes | bytearray = b""

    def encode(self) -> bytes:
        """Returns the frame as bytes."""
        values = json.dumps(self.values).encode() if self.values else b""
        return _HEADER.pack(self.op.ljust(8).encode(), len(values), len(self.body)) + values + self.body


def send(connection: socket.socket, frame: Frame | bytes) -> None:
    """Sends a frame, or the bytes that `Frame.encode` returned.

    Raises:
        WorkerDied: the other process has ended or does not read.
    """
    try:
        connection.sendall(frame.encode() if isinstance(frame, Frame) else frame)
    except OSError as error:
        raise WorkerDied(f"An inference process cannot be reached: {error.strerror or error}.") from error


def no_wait() -> None:
    """Does nothing: a socket that blocks waits by itself."""


def receive(connection: socket.socket, wait: Callable[[], object] = no_wait) -> Frame | None:
    """Waits for the next whole frame; returns None if the other process has ended.

    Args:
        connection: the socket.
        wait: waits for more bytes, if the socket does not block.
    """
    header = _read(connection, _HEADER.size, wait)
    if header is None:
        return None
    op, num_values, num_body = _HEADER.unpack(header)
    rest = _read(connection, num_values + num_body, wait)
    if rest is None:
        return None
    values = json.loads(rest[:num_values]) if num_values else {}
    return Frame(op.decode().rstrip(), values, rest[num_values:] if num_values else rest)


def error_frame(error: TkError) -> Frame:
    """Packs an error for the engine."""
    return Frame("error", {"error": pack(error)})


def error_from(frame: Frame) -> TkError:
    """Unpacks the error that `error_frame` packed, in its own class."""
    return unpack(frame.values["error"])


def _read(connection: socket.socket, count: int, wait: Callable[[], object]) -> bytearray | None:
    data = bytearray(count)
    view = memoryview(data)
    while len(view):
        try:
            got = connection.recv_into(view)
        except BlockingIOError:
            wait()
            continue
        except ConnectionError:
            return None
        if not got:
            return None
        view = view[got:]
    return data
