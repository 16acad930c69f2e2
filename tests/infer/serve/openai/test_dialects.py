"""Bodies as requests, with every option; fields that are refused, by name; and log-probabilities in both dialects."""

from typing import Any

import openai
import pytest

from tk.infer.engine.request.events import Delta, Done, TokenLogprob, TopLogprob
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.tests.infer.serve.fake_engine import FakeEngine, finished, started
from tk.tests.infer.serve.http.http_server import HttpServerThread

LOGPROBS = (
    TokenLogprob(97, -0.5, 1, b"a", (TopLogprob(97, -0.5, b"a"), TopLogprob(98, -1.5, b"b"))),
    TokenLogprob(98, -1.25, 2, b"b", (TopLogprob(97, -0.5, b"a"),), text_offset=1),
)
CHAT = {"messages": [{"role": "user", "content": "hi"}], "prompt": None}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
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
        ({"n": 16, "prompt": ["a"] * 9}, "n"),
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
        ({"echo": "yes"}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"colour": "red"}, "colour"),
        ({"model": 5}, "model"),
        (CHAT | {"messages": None}, "messages"),
        (CHAT | {"messages": [5]}, "messages"),
        (CHAT | {"messages": [{"content": "hi"}]}, "messages[0].role"),
        (CHAT | {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT | {"messages": [{"role": "user", "content": "hi", "name": 5}]}, "messages[0].name"),
        (CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (CHAT | {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls"),
        (CHAT | {"echo": True}, "echo"),
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


def test_every_option_reaches_the_engine(server: HttpServerThread, engine: FakeEngine) -> None:
    body = {
        "model": "fake",
        "prompt": [104, 105],
        "temperature": 0.5,
        "top_p": 0.25,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"4": -2, "0": 1.0},
        "seed": 2**64 - 1,
        "n": 2,
        "max_tokens": 11,
        "stop": ["x", "yz"],
        "logprobs": 0,
        "top_k": 3,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "stop_token_ids": [4, 0],
        "ignore_eos": True,
        "user": "someone",
        "suffix": None,
    }
    assert server.ask("/v1/completions", body).status == 200
    [seen] = engine.requests
    assert seen.prompt == (104, 105)
    assert seen.params == SamplingParams(
        temperature=0.5,
        top_p=0.25,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={4: -2.0, 0: 1.0},
        seed=2**64 - 1,
        n=2,
        max_new_tokens=11,
        stop=("x", "yz"),
        logprobs=0,
        top_k=3,
        min_p=0.125,
        repetition_penalty=1.5,
        min_new_tokens=2,
        stop_token_ids=(4, 0),
        ignore_eos=True,
    )


def test_logprobs_of_completions(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request), Delta(0, "ab", (97, 98), LOGPROBS), finished(), Done()]
    logprobs = client.completions.create(model="fake", prompt="hi", logprobs=2).choices[0].logprobs
    assert (logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset) == (["a", "b"], [-0.5, -1.25], [0, 1])
    assert logprobs.top_logprobs == [{"a": -0.5, "b": -1.5}, {"a": -0.5}]
    [chunk, _] = client.completions.create(model="fake", prompt="hi", logprobs=2, stream=True)
    assert chunk.choices[0].logprobs == logprobs


def test_a_token_of_no_whole_characters_is_named_by_its_bytes_and_no_two_have_one_name(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    tokens = [b"\xf0\x9f", b"\xf0", b"\x9f", b"", b"", b"\xc3\xa9", b"A", b"A", b"A", b"bytes:\\xf0"]
    top = tuple(TopLogprob(number, -float(number), token) for number, token in enumerate(tokens))
    entries = (TokenLogprob(2, -2.0, 3, b"\x9f", top), TokenLogprob(99, -20.0, 50, b"A", top))
    engine.script = lambda request: [started(request), Delta(0, "\ufffdA", (2, 99), entries), finished(), Done()]
    logprobs = client.completions.create(model="fake", prompt="hi", logprobs=10).choices[0].logprobs
    assert logprobs.tokens == [r"bytes:\x9f", "token_id:99"]
    names = [r"bytes:\xf0\x9f", r"bytes:\xf0", r"bytes:\x9f", "", "bytes:", "\u00e9", "A", r"bytes:\x41", "token_id:8"]
    names += [r"bytes:\x62\x79\x74\x65\x73\x3a\x5c\x78\x66\x30"]  # whose text is the name of another one
    assert logprobs.top_logprobs == [{name: each.logprob for name, each in zip(names, top, strict=True)}] * 2
    [chunk, _] = client.completions.create(model="fake", prompt="hi", logprobs=10, stream=True)
    assert chunk.choices[0].logprobs == logprobs
