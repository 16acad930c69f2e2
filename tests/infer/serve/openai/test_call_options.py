"""Fields of both dialects: those that ask for nothing, for what is not built, and for a text of some form."""

from typing import Any

import pytest

from tk.core.errors import InvalidRequest
from tk.infer.engine.request.request import CacheOptions
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.infer.serve.http.json_body import Fields
from tk.infer.serve.openai.call_options import take_options
from tk.tests.infer.serve.fake_engine import FakeEngine
from tk.tests.infer.serve.http.http_server import HttpServerThread

PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "someone", "safety_identifier": "a hash", "prompt_cache_key": "a tenant"},
        {"metadata": {"run": "7"}, "store": False, "service_tier": "auto"},
        {"parallel_tool_calls": True, "tools": [], "tool_choice": "auto"},
        {"functions": [], "function_call": "none", "modalities": ["text"]},
        {"service_tier": "default", "verbosity": "medium", "reasoning_effort": "none"},
        {"suffix": "", "tools": None, "response_format": {"type": "text"}, "cache_salt": ""},
        {"top_k": -1},
        {"n": 2},
    ],
    ids=lambda fields: ",".join(fields),
)
def test_fields_that_ask_for_nothing_are_taken(fields: dict[str, Any]) -> None:
    left = Fields({**fields, "cache_salt": None})
    assert {name: value for name, value in take_options(left).items() if value} == ({"n": 2} if "n" in fields else {})
    left.refuse_rest()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"store": True}, "store"),
        ({"store": 0}, "store"),
        ({"metadata": "run"}, "metadata"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"suffix": "x"}, "suffix"),
        ({"prediction": {}}, "prediction"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": "all"}, "top_k"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object", "more": 1}}, "response_format.more"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": [5]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"], "regex": "b"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"json": {}}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_fields_that_ask_for_what_is_not_built_are_refused_by_name(
    server: HttpServerThread, engine: FakeEngine, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = server.ask(path, {**PATHS[path], **fields})
    assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert engine.requests == []


@pytest.mark.parametrize(
    ("form", "constraint"),
    [
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"choice": ["yes", "no."]}, {"regex": r"yes|no\."}),
        ({"json": {"type": "null"}}, {"json_schema": '{"type": "null"}'}),
        ({"json": '{"type":"null"}'}, {"json_schema": '{"type":"null"}'}),
        ({"grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({}, {}),
    ],
)
def test_the_form_of_a_text(form: dict[str, Any], constraint: dict[str, Any]) -> None:
    options = take_options(Fields({"structured_outputs": form}))
    assert SamplingParams(**options) == SamplingParams(**constraint)


def test_a_text_has_one_form() -> None:
    options = take_options(Fields({"structured_outputs": {"regex": "a", "grammar": 'start: "a"'}}))
    with pytest.raises(InvalidRequest, match="grammar is set beside regex"):
        SamplingParams(**options).validate(vocab_size=9)


def test_a_salt_keeps_prefixes_apart(server: HttpServerThread, engine: FakeEngine) -> None:
    assert server.ask("/v1/completions", {"prompt": "hi", "cache_salt": "of one tenant"}).status == 200
    assert engine.requests[0].cache == CacheOptions(salt="of one tenant")
