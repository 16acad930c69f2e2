"""Frames between the engine and its workers: a JSON header and raw arrays, without pickle, over a socket pair.

frame = u32 header bytes | u32 payload bytes | header (UTF-8 JSON) | payload
header = {"op": ..., "arrays": [[name, dtype, shape], ...], ...}; the payload is the arrays end to end.
"""

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.errors import TkError, WorkerDied, pack, unpack
from ..scheduling.step_plan import Array

_LENGTHS = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class Frame:
    """A message between the engine and a worker."""

    op: str
    values: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)


def send(connection: socket.socket, frame: Frame) -> None:
    """Sends a frame.

    Raises:
        WorkerDied: the other process has ended or does not read.
    """
    arrays = {name: np.ascontiguousarray(array) for name, array in frame.arrays.items()}
    described = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
    header = json.dumps({"op": frame.op, "arrays": described, **frame.values}).encode()
    payload = b"".join(array.tobytes() for array in arrays.values())
    try:
        connection.sendall(_LENGTHS.pack(len(header), len(payload)) + header + payload)
    except OSError as error:
        raise WorkerDied(f"An inference process cannot be reached: {error.strerror or error}.") from error


def receive(connection: socket.socket) -> Frame | None:
    """Waits for the next whole frame; returns None if the other process has ended."""
    lengths = _read(connection, _LENGTHS.size)
    if lengths is None:
        return None
    header_bytes, payload_bytes = _LENGTHS.unpack(lengths)
    header_data, payload = _read(connection, header_bytes), _read(connection, payload_bytes)
    if header_data is None or payload is None:
        return None
    header = json.loads(header_data)
    arrays, offset = {}, 0
    for name, code, shape in header.pop("arrays"):
        dtype = np.dtype(code)
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(payload, dtype, count, offset).reshape(shape)
        offset += count * dtype.itemsize
    return Frame(header.pop("op"), header, arrays)


def error_frame(error: TkError) -> Frame:
    """Packs an error for the engine."""
    return Frame("error", {"error": pack(error)})


def error_from(frame: Frame) -> TkError:
    """Unpacks the error that `error_frame` packed, in its own class."""
    return unpack(frame.values["error"])


def _read(connection: socket.socket, count: int) -> bytearray | None:
    data = bytearray(count)
    view = memoryview(data)
    while len(view):
        try:
            got = connection.recv_into(view)
        except (ConnectionError, TimeoutError):
            return None
        if not got:
            return None
        view = view[got:]
    return data
