"""Conversations over a scripted engine: their tokens, their refusals, and the calls beside one that never ends."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tk.proto.v1 import generation_pb2 as pb
from tk.tests.infer.serve.fake_engine import INFO, WAIT_SECONDS, ByteTokenizer, FakeEngine
from tk.text.tokenizer_files import TextFiles

TEMPLATE = """{%- if messages[0].content == 'loop' %}
{%- for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{%- elif messages[0].role == 'assistant' %}{{ raise_exception('the user begins') }}{% endif -%}
{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"""


class ChatTokenizer(ByteTokenizer):
    """A byte tokenizer with a chat template."""

    files = TextFiles(Path("a folder"), {"chat_template.jinja": TEMPLATE.encode()})


@pytest.fixture
def engine(engine: FakeEngine) -> FakeEngine:
    engine.tokenizer = ChatTokenizer()
    return engine


def chat(*messages: tuple[str, str]) -> pb.GenerateRequest:
    return pb.GenerateRequest(chat={"messages": [{"role": role, "content": content} for role, content in messages]})


def test_a_conversation_is_rendered_and_no_special_token_is_added(stub: Any, engine: FakeEngine) -> None:
    stub.GenerateOnce(chat(("system", "é"), ("user", "hi")), timeout=WAIT_SECONDS)
    list(stub.Generate(chat(("user", "hi")), timeout=WAIT_SECONDS))
    assert [bytes(request.token_ids).decode() for request in engine.requests] == ["séuhi>", "uhi>"]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (chat(("assistant", "hi")), "the user begins"),
        (chat(("user", "x" * INFO.max_model_len)), f"more than {INFO.max_model_len} characters"),
        (chat(*[("user", "")] * 1025), "1 to 1024"),
    ],
)
def test_a_conversation_that_cannot_be_served_is_an_invalid_argument(
    stub: Any, engine: FakeEngine, request_: pb.GenerateRequest, words: str
) -> None:
    with pytest.raises(grpc.RpcError, match=words) as caught:
        stub.GenerateOnce(request_, timeout=WAIT_SECONDS)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    bad = error_details_pb2.BadRequest()
    rpc_status.from_call(caught.value).details[0].Unpack(bad)
    assert bad.field_violations[0].field == "chat.messages"
    assert engine.requests == []


def test_a_template_without_end_holds_up_no_other_call(stub: Any, engine: FakeEngine) -> None:
    endless = stub.GenerateOnce.future(chat(("user", "loop")), timeout=WAIT_SECONDS)
    assert stub.GenerateOnce(pb.GenerateRequest(text="hi"), timeout=WAIT_SECONDS).choices[0].text == "abc"
    assert stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=WAIT_SECONDS).name == "fake"
    assert not endless.done()
    with pytest.raises(grpc.RpcError, match="too long"):
        endless.result()
    assert stub.GenerateOnce(chat(("user", "hi")), timeout=WAIT_SECONDS).choices[0].text == "abc"
