"""Limits of docs/wire.md as a client meets them: a value at a limit is served, one beyond refused with its field."""

from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tk.proto.v1 import generation_pb2 as pb
from tk.tests.infer.serve.fake_engine import INFO, WAIT_SECONDS, FakeEngine


@pytest.fixture
def engine(engine: FakeEngine) -> FakeEngine:
    engine.info = replace(INFO, vocab_size=1 << 16, max_model_len=1 << 16)
    return engine


def refusal(call: Any, request: Any) -> tuple[str, str]:
    """The code and the field of a call that is refused."""
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=WAIT_SECONDS)
    bad = error_details_pb2.BadRequest()
    rpc_status.from_call(caught.value).details[0].Unpack(bad)
    [violation] = bad.field_violations
    return caught.value.code().name, violation.field


def many(number: int) -> list[int]:
    return list(range(number))


LIMITS: list[tuple[str, Any, Any]] = [
    ("request_id", "x" * 128, "x" * 129),
    ("sampling.n", 16, 17),
    ("sampling.logit_bias", dict.fromkeys(many(1024), 1.0), dict.fromkeys(many(1025), 1.0)),
    ("stopping.stop", ["x"] * 16, ["x"] * 17),
    ("stopping.stop", ["é" * 128], ["é" * 128 + "x"]),
    ("stopping.stop", ["x"], [""]),
    ("stopping.stop_token_ids", many(64), many(65)),
    ("stopping.stop_token_ids", [65535], [65536]),
    ("stopping.max_new_tokens", 1, 0),
    ("output.logprobs", 20, 21),
    ("output.prompt_logprobs", 20, 21),
    ("cache.salt", "é" * 1024, "é" * 1025),
]


@pytest.mark.parametrize(("field", "most", "beyond"), LIMITS)
def test_a_field_at_its_limit_and_beyond(stub: Any, engine: FakeEngine, field: str, most: Any, beyond: Any) -> None:
    def request(value: Any) -> pb.GenerateRequest:
        part, _, name = field.rpartition(".")
        fields = {"stopping": {"max_new_tokens": 8}} | {part: {name: value}} if part else {name: value}
        if part == "stopping" and name != "max_new_tokens":
            fields["stopping"] = {"max_new_tokens": 8, name: value}
        return pb.GenerateRequest(text="hi", **fields)

    assert stub.GenerateOnce(request(most), timeout=WAIT_SECONDS).choices[0].text == "abc"
    assert refusal(stub.GenerateOnce, request(beyond)) == ("INVALID_ARGUMENT", field)
    assert len(engine.requests) == 1


def test_conversations_and_constraints(stub: Any, engine: FakeEngine) -> None:
    long = pb.GenerateRequest(chat={"messages": [{"role": "user"}] * 1025})
    assert refusal(stub.GenerateOnce, long) == ("INVALID_ARGUMENT", "chat.messages")
    for kind in ("json_schema", "regex", "grammar"):
        request = pb.GenerateRequest(text="hi", sampling={kind: "x" * (256 * 1024 + 1)})
        assert refusal(stub.GenerateOnce, request) == ("INVALID_ARGUMENT", f"sampling.{kind}")
    assert engine.requests == []


def test_more_ids_than_a_message_has_text_for(stub: Any) -> None:
    assert len(stub.Detokenize(pb.TokenIds(ids=[97] * 600_000), timeout=WAIT_SECONDS).text) == 600_000
    assert refusal(stub.Detokenize, pb.TokenIds(ids=[97] * 700_000)) == ("INVALID_ARGUMENT", "ids")
