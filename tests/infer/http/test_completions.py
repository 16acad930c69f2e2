"""Completions over HTTP as the `openai` package and bare clients see them, whole and in events."""

from collections.abc import Iterator

import openai
import pytest

from tk.core.errors import WorkerDied
from tk.infer.requests.events import Delta, Done, Failed, TokenLogprob, TopLogprob
from tk.infer.requests.sampling_params import SamplingParams
from tk.tests.infer.http.http_server import HttpServerThread, post
from tk.tests.infer.server.fake_engine import WAIT_SECONDS, FakeEngine, delta, finished, started

LOGPROBS = (
    TokenLogprob(97, -0.5, 1, b"a", (TopLogprob(97, -0.5, b"a"), TopLogprob(98, -1.5, b"b"))),
    TokenLogprob(98, -1.25, 2, b"b", (TopLogprob(97, -0.5, b"a"),)),
)


@pytest.fixture
def client(server: HttpServerThread) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{server.http_port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", timeout=WAIT_SECONDS, max_retries=0) as client:
        yield client


def test_the_openai_package_completes(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.completions.create(model="fake", prompt="hi", n=2, extra_headers={"x-request-id": "mine"})
    assert answer.id == "cmpl-mine"
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [
        (0, "abc", "length"),
        (1, "abc", "length"),
    ]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 6, 10)
    assert engine.requests[0].prompt == (1, 104, 105)
    assert [model.id for model in client.models.list()] == ["fake"]


def test_the_openai_package_streams(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    chunks = list(client.completions.create(model="fake", prompt="hi", n=2, stream=True, stream_options=options))
    for index in (0, 1):
        own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.text for choice in own) == "abc"
        assert [choice.finish_reason for choice in own if choice.finish_reason] == ["length"]
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [6]
    assert chunks[-1].choices == []


def test_a_stream_ends_with_done(server: HttpServerThread) -> None:
    answer = server.ask("/v1/completions", {"model": "fake", "prompt": "hi", "stream": True})
    assert answer.events[-1] == "[DONE]"
    assert all("usage" not in event for event in answer.events[:-1])
    assert answer.headers["x-request-id"] == answer.events[0]["id"].removeprefix("cmpl-")
    assert answer.headers["cache-control"] == "no-cache"


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


def test_prompts_of_one_call_run_together(server: HttpServerThread, engine: FakeEngine) -> None:
    body = {"model": "fake", "prompt": ["a", "b"], "n": 2}
    whole = server.ask("/v1/completions", body, {"x-request-id": "mine"}).json
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"]["completion_tokens"] == 12
    assert [request.request_id for request in engine.requests] == ["mine-0", "mine-1"]

    body |= {"prompt": [[5], [6, 7]], "stream": True}
    events = server.ask("/v1/completions", body).events
    texts = dict.fromkeys(range(4), "")
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == dict.fromkeys(range(4), "abc")
    assert [request.prompt for request in engine.requests[2:]] == [(5,), (6, 7)]


def test_logprobs_of_completions(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request), Delta(0, "ab", (97, 98), LOGPROBS), finished(), Done()]
    logprobs = client.completions.create(model="fake", prompt="hi", logprobs=2).choices[0].logprobs
    assert (logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset) == (["a", "b"], [-0.5, -1.25], [0, 1])
    assert logprobs.top_logprobs == [{"a": -0.5, "b": -1.5}, {"a": -0.5}]
    [chunk, _] = client.completions.create(model="fake", prompt="hi", logprobs=2, stream=True)
    assert chunk.choices[0].logprobs == logprobs


def test_an_error_in_a_stream_is_its_last_event(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request), delta("ab"), Failed(WorkerDied("worker 0 is gone"))]
    stream = client.completions.create(model="fake", prompt="hi", stream=True)
    with pytest.raises(openai.APIError, match="worker 0 is gone"):
        list(stream)
    assert engine.aborted == []


def test_a_lost_connection_aborts_its_request(server: HttpServerThread, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request)]
    for body in (b'{"prompt":"hi","stream":true}', b'{"prompt":"hi"}'):
        connection = server.connect(post("/v1/completions", body))
        engine.wait_for(lambda e: e.num_live == 1)
        connection.close()
        engine.wait_for(lambda e: e.num_live == 0)
    assert len(engine.aborted) == 2


def test_a_refused_prompt_ends_those_before_it(server: HttpServerThread, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request)]
    assert server.ask("/v1/completions", {"prompt": ["a", "x" * 200]}).status == 400
    engine.wait_for(lambda e: e.num_live == 0)
    assert len(engine.aborted) == 1
