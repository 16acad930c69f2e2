"""Completions over HTTP as the `openai` package and bare clients see them, whole and in events."""

from pathlib import Path

import openai
import pytest

from tk.core.errors import WorkerDied
from tk.infer.engine.request.events import Failed, TokenLogprob, TopLogprob
from tk.tests.infer.serve.fake_engine import FakeEngine, delta, started
from tk.tests.infer.serve.http.http_server import HttpServerThread, post
from tk.tests.text.families import TOO_MUCH, impatient
from tk.text.tokenizer import Tokenizer

LOGPROBS = (
    TokenLogprob(97, -0.5, 1, b"a", (TopLogprob(97, -0.5, b"a"), TopLogprob(98, -1.5, b"b"))),
    TokenLogprob(98, -1.25, 2, b"b", (TopLogprob(97, -0.5, b"a"),), text_offset=1),
)


def test_the_openai_package_completes(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.completions.create(model="fake", prompt="hi", n=2, extra_headers={"x-request-id": "mine"})
    assert (answer.id, answer.system_fingerprint) == ("cmpl-mine", "step-7")
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


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_text_that_makes_the_tokenizer_panic_is_a_bad_request(
    server: HttpServerThread, engine: FakeEngine, tmp_path: Path, path: str
) -> None:
    (impatient(tmp_path) / "chat_template.jinja").write_text("{{ messages[0].content }}")
    engine.tokenizer = Tokenizer.from_folder(tmp_path)
    for content, status in ((TOO_MUCH, 400), ("ab", 200)):
        body = {"messages": [{"role": "user", "content": content}]} if "chat" in path else {"prompt": content}
        answer = server.ask(path, {"model": "fake", **body})
        assert answer.status == status
        if status == 400:
            assert "retry-limit-in-match over" in answer.error["message"]
            assert answer.error["param"] == "prompt"


def test_a_stream_ends_with_done(server: HttpServerThread) -> None:
    answer = server.ask("/v1/completions", {"model": "fake", "prompt": "hi", "stream": True})
    assert answer.events[-1] == "[DONE]"
    assert all("usage" not in event for event in answer.events[:-1])
    assert answer.headers["x-request-id"] == answer.events[0]["id"].removeprefix("cmpl-")
    assert answer.headers["cache-control"] == "no-cache"


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


def test_a_refused_prompt_ends_those_before_it(server: HttpServerThread, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request)]
    assert server.ask("/v1/completions", {"prompt": ["a", "x" * 200]}).status == 400
    engine.wait_for(lambda e: e.num_live == 0)
    assert len(engine.aborted) == 1
