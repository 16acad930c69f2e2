"""Refusal of request fields that this server does not know, wherever they are."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk.core.errors import InvalidRequest
from tk.infer.server.requests import refuse_unknown_fields
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
        (field(7, field(8, MAP_ENTRY + UNKNOWN)), 8, "sampling.logit_bias"),
        (field(11, b"not an integer"), 11, "priority"),
    ],
)
def test_unknown_fields_are_refused_by_number_at_any_depth(wire: bytes, number: int, path: str) -> None:
    request = pb.GenerateRequest.FromString(wire)
    with pytest.raises(InvalidRequest) as caught:
        refuse_unknown_fields(request)
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
    sent = pb.GenerateRequest.FromString(request_.SerializeToString())
    refuse_unknown_fields(sent)
    assert sent == request_


@pytest.mark.parametrize("kind", [pb.TokenizeRequest, pb.TokenIds, pb.GetModelInfoRequest])
def test_every_request_message_is_checked(kind: Any) -> None:
    with pytest.raises(InvalidRequest, match="number 77 "):
        refuse_unknown_fields(kind.FromString(UNKNOWN))
