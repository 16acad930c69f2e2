"""Fields that are wrong, unknown or not built: each is refused by its name, with 400, before the engine sees it."""

from typing import Any

import pytest

from tk.tests.infer.serve.fake_engine import FakeEngine
from tk.tests.infer.serve.http.http_server import HttpServerThread

CHAT = {"messages": [{"role": "user", "content": "hi"}], "prompt": None}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "x" * 200}, "prompt"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": 16, "prompt": ["a", "b", "c"]}, "n"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**70}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"256": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "x"}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"every": 1}}, "stream_options.every"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"tools": []}, "tools"),
        ({"functions": []}, "functions"),
        ({"colour": "red"}, "colour"),
        ({"model": 5}, "model"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object", "more": 1}}, "response_format.more"),
        (CHAT | {"messages": None}, "messages"),
        (CHAT | {"messages": [5]}, "messages"),
        (CHAT | {"messages": [{"content": "hi"}]}, "messages[0].role"),
        (CHAT | {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT | {"messages": [{"role": "user", "content": "hi", "name": "x"}]}, "messages[0].name"),
        (CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (CHAT | {"tools": []}, "tools"),
        (CHAT | {"tool_choice": "auto"}, "tool_choice"),
        (CHAT | {"top_logprobs": 3}, "top_logprobs"),
        (CHAT | {"logprobs": 3}, "logprobs"),
    ],
)
def test_a_wrong_field_is_refused_by_name(
    server: HttpServerThread, engine: FakeEngine, fields: dict[str, Any], param: str
) -> None:
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    answer = server.ask(path, {"prompt": "hi", **fields})
    assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert engine.requests == []


def test_fields_that_ask_for_nothing_new_are_taken(server: HttpServerThread) -> None:
    body = {"prompt": "hi", "echo": False, "best_of": 2, "n": 2, "tools": None, "response_format": {"type": "text"}}
    assert server.ask("/v1/completions", body).status == 200
