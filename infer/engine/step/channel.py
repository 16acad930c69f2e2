"""The socket between the engine and a rank: frames, without pickle, and what those of steps hold.

frame = 8 bytes of ASCII: the kind, padded with spaces | u32 bytes of values | u32 bytes of body | values | body
The values are UTF-8 JSON, absent if there are none; the body is binary (`StepMessage`, `SamplerOutput`).
"""

import json
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ....core.casts import Array
from ....core.errors import TkError, WorkerDied, pack, unpack
from .sampler_output import SamplerOutput
from .step_message import NEXT_TOKENS

HEADER: Final = struct.Struct("<8sII")
_AT_ONCE: Final = 4096  # bytes: more than the results of most steps


@dataclass(frozen=True, slots=True)
class Frame:
    """A message between the engine and a worker; `op` is its kind, up to 8 letters."""

    op: str
    values: Mapping[str, Any] = field(default_factory=dict)
    body: bytes | bytearray = b""

    def encode(self) -> bytes:
        """Returns the frame as bytes."""
        values = json.dumps(self.values).encode() if self.values else b""
        return HEADER.pack(self.op.ljust(8).encode(), len(values), len(self.body)) + values + self.body


# The step that only computes the tokens that follow those of the step before, without a new block.
NEXT_STEP: Final = Frame("step", body=NEXT_TOKENS.encode()).encode()


@dataclass(frozen=True, slots=True)
class Channel:
    """A rank's end of its socket to the engine. While a backend decodes ahead, C reads and writes the frames itself.

    Attributes:
        connection: the socket; it blocks.
        answers: whether this rank sends results.
        waits: whether a backend that decodes ahead may wait for the engine's next frame.
    """

    connection: socket.socket
    answers: bool
    waits: bool = False

    def receive(self) -> Frame | None:
        """Waits for the next whole frame; returns None if the engine has ended."""
        return receive(self.connection)

    def receive_masks(self) -> Array:
        """Waits for the masks of the step that is computed: uint32 [M, W].

        Raises:
            WorkerDied: the engine has ended.
        """
        frame = self.receive()
        if frame is None:
            raise WorkerDied("The engine ended before it sent the masks of a step.")
        return masks_from(frame)[0]

    def take_next_step(self, wait: bool) -> bool:
        """Takes `NEXT_STEP` if that is the next frame; returns whether it was. Other frames stay.

        Args:
            wait: whether to wait for the next frame; else False if it is not there yet.
        """
        flags = socket.MSG_PEEK | (0 if wait else socket.MSG_DONTWAIT)
        try:
            begun = self.connection.recv(len(NEXT_STEP), flags)
        except BlockingIOError:
            return False
        except ConnectionError:
            return False  # as at its end: `receive` will say so
        if not begun or not NEXT_STEP.startswith(begun):
            return False
        return receive(self.connection) is not None

    def send_result(self, output: SamplerOutput) -> None:
        """Sends the results of a step, if this rank does.

        Raises:
            WorkerDied: the engine has ended.
        """
        if self.answers:
            send(self.connection, result_frame(output))


def send(connection: socket.socket, frame: Frame | bytes) -> None:
    """Sends a frame, or the bytes that `Frame.encode` returned.

    Raises:
        WorkerDied: the other process has ended or does not read.
    """
    try:
        connection.sendall(frame.encode() if isinstance(frame, Frame) else frame)
    except OSError as error:
        raise WorkerDied(f"An inference process cannot be reached: {error.strerror or error}.") from error


def receive(connection: socket.socket) -> Frame | None:
    """Waits for the next whole frame of a socket that blocks; returns None if the other process has ended."""
    header = _read(connection, HEADER.size)
    if header is None:
        return None
    op, num_values, num_body = HEADER.unpack(header)
    rest = _read(connection, num_values + num_body)
    if rest is None:
        return None
    values = json.loads(rest[:num_values]) if num_values else {}
    return Frame(op.decode().rstrip(), values, rest[num_values:] if num_values else rest)


class FrameReader:
    """The frames of a socket that does not block; as many bytes as are there are read at once.

    Args:
        connection: the socket.
        wait: waits for more bytes.
    """

    def __init__(self, connection: socket.socket, wait: Callable[[], object]) -> None:
        self._connection, self._wait = connection, wait
        self._data = b""  # behind the last frame

    @property
    def has_frame(self) -> bool:
        """Whether the next frame was read already, with the one before."""
        data = self._data
        return len(data) >= HEADER.size and len(data) >= _frame_bytes(data)

    def receive(self) -> Frame | None:
        """Waits for the next whole frame; returns None if the other process has ended."""
        data, size = self._data, HEADER.size
        while True:
            if len(data) >= size:
                size = _frame_bytes(data)
                if len(data) >= size:
                    break
            more = self._read(size - len(data))
            if more is None:
                return None
            data = data + more if data else more
        self._data = data[size:]
        op, num_values, _ = HEADER.unpack_from(data)
        body = HEADER.size + num_values
        values = json.loads(data[HEADER.size : body]) if num_values else {}
        return Frame(op.decode().rstrip(), values, data[body:size])

    def _read(self, missing: int) -> bytes | None:
        """Returns some bytes, perhaps more than those that are missing; None if the other process has ended."""
        while True:
            try:
                return self._connection.recv(max(missing, _AT_ONCE)) or None
            except BlockingIOError:
                self._wait()
            except OSError:  # it is reset, or closed by another thread
                return None


def _frame_bytes(data: bytes) -> int:
    """Returns the bytes of the frame that begins with these, which are at least its header."""
    _, num_values, num_body = HEADER.unpack_from(data)
    return HEADER.size + int(num_values) + int(num_body)


def error_frame(error: TkError, op: str = "error") -> Frame:
    """Packs an error for the engine: the worker's end, or what it refused to do."""
    return Frame(op, {"error": pack(error)})


def error_from(frame: Frame) -> TkError:
    """Unpacks the error that `error_frame` packed, in its own class."""
    return unpack(frame.values["error"])


def tokens_frame(tokens: Array) -> Frame:
    """Packs the tokens of a step, int32 [R], for the ranks that wait for them."""
    return Frame("tokens", body=tokens.tobytes())


def masks_frame(masks: Array, rows: Array | None = None) -> Frame:
    """Packs masks, uint32 [M, W]: those that a step waits for, or those with which rows of it are sampled again."""
    body = np.array(masks.shape, np.int32).tobytes() + masks.tobytes()
    return Frame("masks", body=body) if rows is None else Frame("again", body=body + rows.tobytes())


def masks_from(frame: Frame) -> tuple[Array, Array]:
    """Returns the masks of a frame, uint32 [M, W], and the numbers of rows behind them, int32."""
    shape = np.frombuffer(frame.body, np.int32, 2)
    masks: Array = np.frombuffer(frame.body, np.uint32, shape.prod(), shape.nbytes).reshape(shape)
    return masks, np.frombuffer(frame.body, np.int32, offset=shape.nbytes + masks.nbytes)


def result_frame(output: SamplerOutput) -> Frame:
    """Packs the results of a step for the engine.

    Without log-probabilities they end with the token of each row, whether its logits are finite, and its candidates.
    """
    return Frame("result", body=output.encode())


def _read(connection: socket.socket, count: int) -> bytearray | None:
    data = bytearray(count)
    view = memoryview(data)
    while len(view):
        try:
            got = connection.recv_into(view)
        except ConnectionError:
            return None
        if not got:
            return None
        view = view[got:]
    return data
