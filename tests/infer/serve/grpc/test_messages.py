"""Messages from bytes: fields that this server does not know are refused, wherever they are, and so is damage."""

import threading
from collections import Counter
from random import Random
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given
from hypothesis import strategies as st

from tk.core.errors import InvalidRequest
from tk.infer.serve.grpc import messages
from tk.infer.serve.grpc.messages import MAX_FIELDS, MAX_NAME_BYTES, SHORT_BYTES, read_message, read_short_message
from tk.proto.open_inference import open_inference_pb2 as oip
from tk.proto.v1 import generation_pb2 as pb


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field, for numbers below 2048 and payloads below 128 bytes."""
    key = number << 3 | 2
    head = bytes([key]) if key < 128 else bytes([key & 127 | 128, key >> 7])
    return head + bytes([len(payload)]) + payload


UNKNOWN = field(77, b"new")
MAP_ENTRY = bytes([0x08, 5, 0x15, 0, 0, 128, 63])


@pytest.mark.parametrize(
    ("wire", "number", "path"),
    [
        (UNKNOWN, 77, "77"),
        (field(7, UNKNOWN), 77, "sampling.77"),
        (field(4, UNKNOWN), 77, "tokens.77"),
        (field(5, field(1, b"") + field(1, UNKNOWN)), 77, "chat.messages[1].77"),
        (field(7, field(8, MAP_ENTRY) + field(8, MAP_ENTRY + UNKNOWN)), 77, "sampling.logit_bias[1].77"),
        (field(11, b"not an integer"), 11, "priority"),
    ],
)
def test_unknown_fields_are_refused_by_number_at_any_depth(wire: bytes, number: int, path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_message(pb.GenerateRequest, wire)
    assert caught.value.field == path
    assert f"number {number} " in str(caught.value)


@given(
    st.builds(
        pb.GenerateRequest,
        text=st.text(),
        priority=st.integers(-5, 5),
        sampling=st.builds(pb.Sampling, logit_bias=st.dictionaries(st.integers(0, 9), st.floats(-9, 9)), n=st.none()),
        stopping=st.builds(pb.Stopping, stop=st.lists(st.text())),
        cache=st.just(pb.CacheOptions(bypass=True)),
    )
)
def test_known_fields_pass(request_: pb.GenerateRequest) -> None:
    assert read_message(pb.GenerateRequest, request_.SerializeToString()) == request_


@pytest.mark.parametrize("kind", [pb.TokenizeRequest, pb.TokenIds, pb.GetModelInfoRequest])
def test_every_request_message_is_checked(kind: Any) -> None:
    with pytest.raises(InvalidRequest, match="number 77 "):
        read_message(kind, UNKNOWN)


def test_numbers_of_a_list_may_be_packed_or_not() -> None:
    for wire in (b"\x0a\x03\x05\xac\x02", b"\x08\x05\x08\xac\x02"):
        assert read_message(pb.TokenIds, wire) == pb.TokenIds(ids=[5, 300])


@pytest.mark.parametrize("wire", [b"\x08", b"\x0a\x05a", b"\x0a" + b"\xff" * 11, b"\x1a\x02\xff\xff", b"\x3a\x01\x0d"])
def test_damaged_bytes_are_refused(wire: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"damaged|unknown"):
        read_message(pb.GenerateRequest, wire)


def test_too_many_fields_are_refused() -> None:
    read_message(pb.Chat, b"\x0a\x00" * MAX_FIELDS)
    with pytest.raises(InvalidRequest, match=f"more than {MAX_FIELDS} fields"):
        read_message(pb.Chat, b"\x0a\x00" * (MAX_FIELDS + 1))


def holds_unknown(message: Any) -> bool:
    """Returns whether protobuf kept an unknown field of the message, at any depth."""
    if len(UnknownFieldSet(message)):
        return True
    for kind, value in message.ListFields():
        if kind.message_type is None or kind.message_type.GetOptions().map_entry:
            continue
        if any(map(holds_unknown, [value] if isinstance(value, Message) else value)):
            return True
    return False


SEED = pb.GenerateRequest(
    chat={"messages": [{"role": "user", "content": "hi"}]},
    sampling={"logit_bias": {5: 1.0}, "seed": 2**63, "temperature": 0.5},
    stopping={"stop": ["a"], "stop_token_ids": [1, 300]},
    priority=-1,
).SerializeToString()


def mutated(random: Random) -> bytes:
    """Returns a request in which bytes are changed, removed, added or repeated."""
    raw = bytearray(SEED)
    for _ in range(random.randint(1, 6)):
        at = random.randrange(len(raw) + 1)
        match random.randrange(4):
            case 0:
                raw[at : at + 1] = random.randbytes(1)
            case 1:
                del raw[at : at + random.randint(1, 4)]
            case 2:
                raw[at:at] = random.randbytes(random.randint(1, 12))
            case _:
                raw += raw[at : at + 20]
    return bytes(raw)


LONG = "a" * (MAX_NAME_BYTES + 1)


@pytest.mark.parametrize(
    ("request_", "path"),
    [
        (pb.GenerateRequest(request_id=LONG), "request_id"),
        (pb.GenerateRequest(chat={"messages": [{"content": LONG}, {"role": LONG}]}), "chat.messages[1].role"),
        (pb.GenerateRequest(stopping={"stop": [LONG]}), "stopping.stop"),
        (pb.ReloadRequest(checkpoint=LONG), "checkpoint"),
    ],
)
def test_names_have_few_bytes(request_: Message, path: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{len(LONG)} bytes; it must have at most {MAX_NAME_BYTES}") as caught:
        read_message(type(request_), request_.SerializeToString())
    assert caught.value.field == path


@pytest.mark.parametrize(
    "request_",
    [
        pb.GenerateRequest(text=LONG, sampling={"json_schema": LONG}, request_id=LONG[:-1]),
        pb.GenerateRequest(chat={"messages": [{"content": LONG}]}, sampling={"regex": LONG}),
        pb.GenerateRequest(sampling={"grammar": LONG}),
        pb.ScoreRequest(text=LONG, continuation_text=LONG),
        pb.TokenizeRequest(text=LONG),
        oip.ModelInferRequest(parameters={"stop": oip.InferParameter(string_param=LONG)}),
    ],
)
def test_texts_may_be_long(request_: Message) -> None:
    assert read_message(type(request_), request_.SerializeToString()) == request_


def test_messages_that_only_name_something_are_short() -> None:
    most = pb.AbortRequest(request_id="a" * (SHORT_BYTES - 3)).SerializeToString()
    assert len(most) == SHORT_BYTES
    assert read_short_message(pb.AbortRequest, most).ByteSize() == SHORT_BYTES
    with pytest.raises(InvalidRequest, match=f"at most {SHORT_BYTES} bytes; this has {SHORT_BYTES + 1}"):
        read_short_message(pb.AbortRequest, most + b"a")


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.matrix)])
def test_mutated_messages_are_read_or_refused_and_unknown_fields_never_pass(count: int) -> None:
    random, verdicts = Random(count), Counter[str]()
    for _ in range(count):
        raw = mutated(random)
        try:
            message = read_message(pb.GenerateRequest, raw)
        except InvalidRequest as error:
            verdicts["damaged" if "damaged" in str(error) else "unknown"] += 1
        else:
            verdicts["read"] += 1
            assert not holds_unknown(message), raw.hex()
    assert min(verdicts[each] for each in ("damaged", "unknown", "read")) > count // 50, verdicts


def test_a_message_that_does_not_come_ends_its_call(channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MESSAGE_SECONDS", 0.2)
    over = threading.Event()
    with pytest.raises(grpc.RpcError) as caught:
        list(channel.stream_stream("/tk.v1.Generation/Generate")(iter(over.wait, True), timeout=20))
    over.set()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "within 0.2 s" in caught.value.details()
