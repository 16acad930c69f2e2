"""Request messages from bytes: their fields are checked and counted before protobuf makes objects of them.

A message of 4 MiB can hold two million empty messages, map entries or unknown fields, on which protobuf would
spend seconds of the event loop. So the bytes are walked first, long ones on another thread, and only so far.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import MappingProxyType
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from ....core.errors import InvalidRequest

MAX_FIELDS: Final = 20_000  # of one message, at any depth; a packed list, like a text, is one
MAX_NAME_BYTES: Final = 16_384  # of a text that is none of _TEXTS
SHORT_BYTES: Final = 1000  # of a message that only names something
MESSAGE_SECONDS: Final = 30.0  # from the begin of a call until its message is here
INLINE_BYTES: Final = 4096  # shorter messages are read at once, which takes less than another thread would
# Fields that may be long. Every read of a text converts all its bytes, and most fields are read on the event loop.
_TEXTS: Final = frozenset(
    (
        *("tk.v1.GenerateRequest.text", "tk.v1.ChatMessage.content", "tk.v1.TokenizeRequest.text"),
        *("tk.v1.ScoreRequest.text", "tk.v1.ScoreRequest.continuation_text"),
        *("tk.v1.Sampling.json_schema", "tk.v1.Sampling.regex", "tk.v1.Sampling.grammar"),
        "inference.InferParameter.string_param",
    )
)
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# Answers a call, whose messages come from the iterator, or from the context.
ServeCall = Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext], Awaitable[Any]]
_FIXED_SIZES: Final = MappingProxyType({_FIXED64: 8, _FIXED32: 4})
# How the values of a type are encoded, where that is not as a _VARINT.
_OWN_TYPES: Final = MappingProxyType(
    {
        **dict.fromkeys(
            (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES), _BYTES
        ),
        **dict.fromkeys(
            (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64), _FIXED64
        ),
        **dict.fromkeys(
            (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32), _FIXED32
        ),
    }
)


def make_handler(method: MethodDescriptor, serve: ServeCall) -> grpc.RpcMethodHandler:
    """Returns the handler of a method. One of a single message takes it from a stream, as it can wait for it then.

    grpc.aio's own handlers of a single message wait forever, and end a call without one with no status at all.
    """
    to_bytes = GetMessageClass(method.output_type).SerializeToString
    is_stream = method.server_streaming
    make = grpc.stream_stream_rpc_method_handler if is_stream else grpc.stream_unary_rpc_method_handler
    return make(serve, response_serializer=to_bytes)


async def only_message(context: grpc.aio.ServicerContext) -> bytes:
    """Returns the first message of a call that has one; raises InvalidRequest if none comes, or not in time.

    An iterator over the call's messages, which would not be read to its end, keeps the last one until a search for
    garbage finds it: it is in a ring with the object that gives it.
    """
    try:
        async with asyncio.timeout(MESSAGE_SECONDS):
            raw: Any = await context.read()
    except TimeoutError as error:
        raise InvalidRequest(f"The call's message did not come within {MESSAGE_SECONDS:g} s.") from error
    if raw is grpc.aio.EOF:
        raise InvalidRequest("The call has no message; send one, which may be empty.")
    message: bytes = raw
    return message


def read_message(kind: type[Message], raw: bytes) -> Message:
    """Returns the message that bytes hold.

    Raises:
        InvalidRequest: the bytes are no such message, or it has an unknown field at any depth, which the error names by
            path and number, or more than MAX_FIELDS fields.
    """
    try:
        _Walk(raw).check(kind.DESCRIPTOR, 0, len(raw), "")
        return kind.FromString(raw)
    except (IndexError, DecodeError) as error:  # IndexError: the bytes end within a number
        raise InvalidRequest(f"The request is no {kind.DESCRIPTOR.full_name}: its bytes are damaged.") from error


def read_short_message(kind: type[Message], raw: bytes) -> Message:
    """Returns the message that bytes hold, which are few enough for the event loop.

    Raises:
        InvalidRequest: see `read_message`; or there are more than SHORT_BYTES.
    """
    if len(raw) > SHORT_BYTES:
        raise InvalidRequest(f"A {kind.DESCRIPTOR.full_name} has at most {SHORT_BYTES} bytes; this has {len(raw)}.")
    return read_message(kind, raw)


class _Walk:
    """A walk over the fields of an encoded message, without objects for them."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._left = MAX_FIELDS

    def check(self, kind: Descriptor, at: int, end: int, path: str) -> None:
        """Checks the fields of a message in raw[at:end]."""
        numbers: dict[int, int] = {}
        known = kind.fields_by_number
        while at < end:
            self._left -= 1
            if self._left < 0:
                raise InvalidRequest(f"The request has more than {MAX_FIELDS} fields; send fewer, or packed lists.")
            tag, at = self._varint(at)
            number, wire = tag >> 3, tag & 7
            field = known.get(number)
            if field is None or wire not in _wire_types(field):
                _refuse(kind, field, number, path)
            start, at = self._value(wire, at)
            if at > end:
                raise IndexError
            if field.type == FieldDescriptor.TYPE_STRING and at - start > MAX_NAME_BYTES:
                _check_long(field, at - start, path)
            if field.message_type is not None:
                index = numbers[number] = numbers.get(number, -1) + 1
                place = f"[{index}]" if field.is_repeated else ""
                self.check(field.message_type, start, at, f"{path}{field.name}{place}.")

    def _value(self, wire: int, at: int) -> tuple[int, int]:
        """Returns where the content of a value begins and ends."""
        if wire == _VARINT:
            return at, self._varint(at)[1]
        if (fixed := _FIXED_SIZES.get(wire)) is not None:
            return at, at + fixed
        size, at = self._varint(at)
        return at, at + size

    def _varint(self, at: int) -> tuple[int, int]:
        """Returns a number and where it ends."""
        value = shift = 0
        while True:
            byte = self._raw[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7
            if shift > 63:
                raise IndexError


def _wire_types(field: FieldDescriptor) -> tuple[int, ...]:
    """Returns the ways in which a field may be encoded: numbers of a list one by one, or packed."""
    own = _OWN_TYPES.get(field.type, _VARINT)
    return (own, _BYTES) if field.is_repeated else (own,)


def _check_long(field: FieldDescriptor, size: int, path: str) -> None:
    if field.full_name not in _TEXTS:
        name = f"{path}{field.name}"
        raise InvalidRequest(f"{name} has {size} bytes; it must have at most {MAX_NAME_BYTES}.", field=name)


def _refuse(kind: Descriptor, field: FieldDescriptor | None, number: int, path: str) -> NoReturn:
    name = f"{path}{number}" if field is None else f"{path}{field.name}"
    raise InvalidRequest(
        f"{kind.full_name} holds field number {number} ({name}) in a way unknown to this server, which may be older "
        "than the client; leave it unset.",
        field=name,
    )
