"""The prompts of one call, all in the engine together."""

from tk.infer.engine.request.events import TokenLogprob, TopLogprob
from tk.tests.infer.serve.fake_engine import FakeEngine, started
from tk.tests.infer.serve.http.http_server import HttpServerThread

LOGPROBS = (
    TokenLogprob(97, -0.5, 1, b"a", (TopLogprob(97, -0.5, b"a"), TopLogprob(98, -1.5, b"b"))),
    TokenLogprob(98, -1.25, 2, b"b", (TopLogprob(97, -0.5, b"a"),)),
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


def test_a_refused_prompt_ends_those_before_it(server: HttpServerThread, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request)]
    assert server.ask("/v1/completions", {"prompt": ["a", "x" * 200]}).status == 400
    engine.wait_for(lambda e: e.num_live == 0)
    assert len(engine.aborted) == 1
