"""No call over HTTP holds up the event loop: neither the largest body nor the longest answer."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tk.infer.engine.request.events import Delta, Done, Event, TokenLogprob, TopLogprob
from tk.infer.engine.request.request import Request
from tk.tests.infer.serve.fake_engine import INFO, FakeEngine, finished, started
from tk.tests.infer.serve.http.http_server import HttpServerThread
from tk.tests.infer.serve.probed_loop import ProbedLoop, most_seconds

ENTRY = TokenLogprob(5, -0.5, 1, b"a", tuple(TopLogprob(token, -1.5, b"%d" % token) for token in range(20)))
NUMBER = 10_240


def scored(request: Request) -> list[Event]:
    """An answer with 20 alternatives for each token, which the engine sends at once: the server joins them."""
    return [started(request), *[Delta(0, "a", (5,), (ENTRY,))] * NUMBER, finished(), Done()]


@pytest.fixture
def probed(engine: FakeEngine) -> Iterator[tuple[ProbedLoop, HttpServerThread]]:
    """A loop, and the server on it."""
    engine.info = replace(INFO, max_model_len=1 << 20)
    loop = ProbedLoop()
    server = HttpServerThread(engine, loop=loop, http_port=0)
    yield loop, server
    server.close()


def test_no_body_holds_up_the_loop(probed: tuple[ProbedLoop, HttpServerThread], engine: FakeEngine) -> None:
    loop, server = probed
    number = (1 << 19) - 50
    loop.longest = 0.0
    body = b'{"max_tokens":3,"prompt":[' + b",".join([b"5"] * number) + b"]}"
    assert server.ask("/v1/completions", body).status == 200
    assert len(engine.requests[0].token_ids) == number
    assert loop.longest < most_seconds() / 2  # a body has a quarter of the bytes of a message


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
def test_no_number_of_log_probabilities_holds_up_the_loop(
    probed: tuple[ProbedLoop, HttpServerThread], engine: FakeEngine, is_streamed: bool
) -> None:
    loop, server = probed
    engine.script = scored
    body = {"prompt": "a", "logprobs": 20, "max_tokens": NUMBER, "stream": is_streamed}
    loop.longest = 0.0
    answer = server.ask("/v1/completions", body)
    assert answer.status == 200, answer.body
    choices = [
        choice for event in (answer.events[:-1] if is_streamed else [answer.json]) for choice in event["choices"]
    ]
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices if choice["logprobs"]) == NUMBER
    assert loop.longest < most_seconds()
