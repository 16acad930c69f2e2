"""`Client` against a real server over a scripted engine: results, retries, errors, and the modules that it imports."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tk.core.errors import Cancelled, DeadlinePassed, InvalidRequest, Overloaded, TkError, WorkerDied
from tk.infer.client import connection
from tk.infer.client.client import Client
from tk.infer.client.connection import RemoteError, Unavailable
from tk.infer.engine.request.events import (
    Delta,
    Done,
    Event,
    FinishReason,
    PromptLogprobs,
    Started,
    TokenLogprob,
    TopLogprob,
)
from tk.infer.engine.request.request import CacheOptions, Request
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.tests.infer.serve.fake_engine import INFO, FakeEngine, ServerThread, delta, finished, started


@pytest.fixture
def client(server: ServerThread) -> Iterator[Client]:
    with Client(server.target, timeout=20) as client:
        yield client


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(connection, "LONGEST_PAUSE_SECONDS", 0.02)


def echo(request: Request) -> list[Event]:
    """Says its prompt back, without the first token."""
    return [started(request), delta(bytes(request.token_ids[1:]).decode()), finished(), Done()]


def test_one_completion_per_prompt_in_order(client: Client, engine: FakeEngine) -> None:
    engine.script = echo
    prompts = [f"prompt {number}" for number in range(100)]
    assert [completion.text for completion in client.generate(prompts)] == prompts


@pytest.mark.parametrize(
    ("prompts", "seen"),
    [
        ("hi", [(1, 104, 105)]),
        ([5, 6], [(5, 6)]),
        (np.array([5, 6]), [(5, 6)]),
        (["hi", [5, 6]], [(1, 104, 105), (5, 6)]),
        ([], []),
    ],
)
def test_prompts_are_one_or_many_text_or_ids(
    client: Client, engine: FakeEngine, prompts: Any, seen: list[tuple[int, ...]]
) -> None:
    completions = client.generate(prompts)
    assert [completion.text for completion in completions] == ["abc"] * len(seen)
    assert sorted(request.token_ids for request in engine.requests) == sorted(seen)


def test_params_are_one_for_all_or_one_each(client: Client, engine: FakeEngine) -> None:
    each = [SamplingParams(seed=seed, n=2, logit_bias={seed: 0.5}, stop=("x",), top_k=seed) for seed in (1, 2)]
    client.generate([[1], [2]], each)
    assert {request.token_ids[0]: request.params for request in engine.requests} == {1: each[0], 2: each[1]}
    with pytest.raises(InvalidRequest, match="2 SamplingParams for 1 prompts"):
        client.generate("hi", each)


def test_the_use_of_the_cache_reaches_the_engine(client: Client, engine: FakeEngine) -> None:
    chosen = CacheOptions(salt="s")
    client.generate(["a", "b"], cache=chosen)
    list(client.stream("c", cache=chosen))
    client.generate("d")
    assert [request.cache for request in engine.requests] == [chosen, chosen, chosen, CacheOptions()]


def test_a_completion_has_all_that_the_server_knows(client: Client, engine: FakeEngine) -> None:
    logprob = TokenLogprob(97, -0.5, 1, b"a", (TopLogprob(98, -1.5, b"\xff"),))

    def script(request: Request) -> list[Event]:
        deltas = [Delta(index, "a", (97,), (logprob,)) for index in range(request.params.n)]
        ends = [
            replace(finished(0, FinishReason.STOP_STRING, 1), matched="x"),
            replace(finished(1, FinishReason.EOS, 1), matched=0),
        ]
        return [started(request), *deltas, *ends, Done()]

    engine.script = script
    [completion] = client.generate("hi", SamplingParams(n=2, seed=3, logprobs=1))
    assert (completion.text, completion.token_ids, completion.seed) == ("a", (97,), 3)
    assert (completion.finish_reason, completion.matched) == (FinishReason.STOP_STRING, "x")
    assert (completion.choices[1].finish_reason, completion.choices[1].matched) == (FinishReason.EOS, 0)
    assert completion.logprobs == (logprob,)
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (4, 2)
    assert completion.timing.total_seconds == 0.3


def test_stream_gives_deltas_as_they_come(client: Client, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request), delta("ab")]
    deltas = client.stream("hi")
    assert next(deltas).text == "ab"
    engine.emit(engine.requests[0].request_id, delta("c"), finished(), Done())
    assert [one.text for one in deltas] == ["c"]


def test_all_events_with_the_scores_of_a_long_prompt(client: Client, engine: FakeEngine) -> None:
    first, second = (TokenLogprob(token, -0.5, 1, b"a") for token in (97, 98))
    scores: list[Event] = [
        Started("r", 300, 0, 3, (first,) * 256, step=12),
        PromptLogprobs(256, (second,) * 44),
        delta("ab"),
        finished(),
    ]
    engine.script = lambda request: [*scores, Done()]
    assert list(client.events("hi")) == scores
    [completion] = client.generate("hi")
    assert completion.prompt_logprobs == (first,) * 256 + (second,) * 44
    assert completion.step == 12


def test_leaving_a_stream_early_ends_the_request(client: Client, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request), delta("ab")]
    deltas = client.stream("hi")
    next(deltas)
    deltas.close()  # type: ignore[attr-defined]  # a generator, as for loops know
    engine.wait_for(lambda e: e.num_live == 0)
    assert len(engine.aborted) == 1


@pytest.mark.parametrize("call", ["generate", "stream"])
@pytest.mark.parametrize("refusal", [WorkerDied("gone"), Overloaded("full", 0.001)])
def test_retries_while_no_event_has_come(client: Client, engine: FakeEngine, call: str, refusal: TkError) -> None:
    engine.refusal = refusal
    attempts: list[Request] = []

    def recovering(request: Request, on_event: Any) -> None:
        attempts.append(request)
        if len(attempts) == 3:
            engine.refusal = None
        FakeEngine.submit(engine, request, on_event)

    engine.submit = recovering  # type: ignore[method-assign]
    result = client.generate("hi")[0].text if call == "generate" else "".join(d.text for d in client.stream("hi"))
    assert (result, len(attempts)) == ("abc", 3)


def test_retries_are_bounded(server: ServerThread, engine: FakeEngine) -> None:
    engine.refusal = Overloaded("full", 0.001)
    with Client(server.target, max_attempts=3) as client, pytest.raises(Overloaded, match="full") as caught:
        client.generate("hi")
    assert caught.value.retry_after == pytest.approx(0.001)
    assert len(engine.requests) == 3


def test_no_retry_after_an_event(client: Client, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request), delta("ab")]
    deltas = client.stream("hi")
    next(deltas)
    engine.die()
    with pytest.raises(Unavailable):
        next(deltas)
    assert len(engine.requests) == 1


def test_errors_come_back_as_they_were_raised(client: Client, engine: FakeEngine) -> None:
    engine.refusal = InvalidRequest("top_p is 7", field="top_p")
    with pytest.raises(InvalidRequest, match=r": top_p is 7") as invalid:
        client.generate("hi")
    assert invalid.value.field == "top_p", "the name of Python's field, not of the wire's"
    engine.refusal = Cancelled("enough")
    with pytest.raises(Cancelled, match="enough"):
        list(client.stream("hi"))
    engine.refusal = DeadlinePassed("too late")
    with pytest.raises(DeadlinePassed, match="too late"):
        list(client.stream("hi"))
    engine.refusal, engine.tokenizer = None, None
    with pytest.raises(RemoteError, match="FAILED_PRECONDITION") as remote:
        client.tokenize("hi")
    assert remote.value.status == "FAILED_PRECONDITION"
    assert len(engine.requests) == 3, "none of these is worth another attempt"


def test_no_server_is_unavailable(engine: FakeEngine) -> None:
    server = ServerThread(engine)
    server.close()
    with Client(server.target, max_attempts=2) as client, pytest.raises(Unavailable, match=server.target):
        client.model_info()


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ([-1], SamplingParams()),
        ([2**40], SamplingParams()),
        ("\ud800", SamplingParams()),
        (b"bytes", SamplingParams()),
        ([1, "a"], SamplingParams()),
        ("hi", SamplingParams(top_k=-1)),
        ("hi", SamplingParams(n=17)),
        ("hi", SamplingParams(top_k=2**40)),
    ],
)
def test_a_request_that_no_server_would_take_is_not_sent(
    client: Client, engine: FakeEngine, prompt: Any, params: SamplingParams
) -> None:
    with pytest.raises(InvalidRequest):
        client.generate(prompt, params)
    assert engine.requests == []


def test_model_info_and_tokenizer(client: Client) -> None:
    assert client.model_info() == INFO
    assert client.tokenize("hé") == [1, 104, 195, 169]
    assert client.tokenize("h", special_tokens=False) == [104]
    assert client.detokenize([104, 195, 169]) == "hé"


def test_close_is_idempotent(server: ServerThread) -> None:
    client = Client(server.target)
    assert client.model_info().name == "fake"
    client.close()
    client.close()


def test_importing_the_client_loads_no_torch() -> None:
    code = "import sys, tk.infer.client.client; print('torch' in sys.modules, 'tokenizers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]
