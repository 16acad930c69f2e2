"""Score over a scripted engine: the request that the engine gets, the answer, and the refusals."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tk.infer.engine.request.events import (
    Delta,
    Done,
    Event,
    Finished,
    FinishReason,
    Started,
    Timing,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from tk.infer.engine.request.request import Request
from tk.infer.engine.request.score import score_request
from tk.proto.v1 import generation_pb2 as pb
from tk.tests.infer.serve.fake_engine import INFO, WAIT_SECONDS, ByteTokenizer, FakeEngine
from tk.tests.text.families import TOO_MUCH, impatient
from tk.text.tokenizer import Tokenizer


class Spanning(ByteTokenizer):
    """A byte tokenizer with one token for " os"."""

    def encode_pair(self, prompt: str, continuation: str) -> tuple[list[int], int]:
        assert prompt + continuation == "import os"
        return [*self.encode("import"), 200], 7


def place(token: int, greedy: int) -> TokenLogprob:
    top = TopLogprob(greedy, -0.25, bytes([greedy]))
    return TokenLogprob(token, -0.5, 1 + (token != greedy), bytes([token]), (top, TopLogprob(9, -2.0, b"9")))


def scored(request: Request) -> Sequence[Event]:
    """Each token has -0.5; the most probable one is always "c"."""
    tokens = (*request.token_ids[request.logprobs_from :], *request.params.logit_bias)
    places = [place(token, ord("c")) for token in tokens]
    started = Started(request.request_id, len(request.token_ids), 0, 1, tuple(places[:-1]))
    delta = Delta(0, "", (tokens[-1],), tuple(places[-1:]))
    return [
        started,
        delta,
        Finished(0, FinishReason.LENGTH, Usage(len(request.token_ids), 0, 1), Timing(0, 0, 0, 0)),
        Done(),
    ]


@pytest.fixture
def engine(engine: FakeEngine) -> FakeEngine:
    engine.script = scored
    return engine


def ids(*tokens: int) -> dict[str, list[int]]:
    return {"ids": list(tokens)}


@pytest.mark.parametrize(
    ("fields", "prompt", "continuation"),
    [
        ({"text": "ab", "continuation_text": "cc"}, (1, 97, 98), (99, 99)),
        ({"tokens": ids(7), "continuation_text": "cc"}, (7,), (99, 99)),
        ({"text": "a", "continuation_tokens": ids(99)}, (1, 97), (99,)),
        ({"tokens": ids(7, 8), "continuation_tokens": ids(98, 99)}, (7, 8), (98, 99)),
    ],
)
def test_the_engine_scores_what_is_asked(
    stub: Any, engine: FakeEngine, fields: dict[str, Any], prompt: tuple[int, ...], continuation: tuple[int, ...]
) -> None:
    answer = stub.Score(pb.ScoreRequest(**fields), timeout=WAIT_SECONDS)
    [seen] = engine.requests
    expected = score_request(prompt, continuation)
    assert (seen.prompt, seen.params, seen.logprobs_from) == (expected.prompt, expected.params, len(prompt))
    assert seen.deadline is not None
    assert [each.token_id for each in answer.logprobs] == list(continuation)
    assert not any(each.top for each in answer.logprobs)
    assert (answer.total, answer.prompt_tokens) == (-0.5 * len(continuation), len(prompt))
    assert answer.is_greedy == (set(continuation) == {99})


def test_alternatives_are_returned_when_asked(stub: Any, engine: FakeEngine) -> None:
    for top in (1, 2):
        request = pb.ScoreRequest(text="a", continuation_text="bc", top=top)
        answer = stub.Score(request, timeout=WAIT_SECONDS)
        assert [[each.token_id for each in place.top] for place in answer.logprobs] == [[99, 9][:top]] * 2
    assert [request.params.logprobs for request in engine.requests] == [1, 2]
    assert engine.num_live == 0


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"continuation_text": "a"}, "prompt"),
        ({"text": "a"}, "continuation"),
        ({"tokens": ids(), "continuation_text": "a"}, "prompt"),
        ({"text": "a", "continuation_tokens": ids()}, "continuation"),
        ({"tokens": ids(5, 256), "continuation_text": "a"}, "prompt"),
        ({"text": "a", "continuation_tokens": ids(256)}, "continuation"),
        ({"tokens": ids(*[5] * INFO.max_model_len), "continuation_text": "a"}, "prompt"),
        ({"tokens": ids(5), "continuation_tokens": ids(*[5] * (INFO.max_model_len + 1))}, "prompt"),
        ({"text": "x" * 129, "continuation_text": "a"}, "text"),
        ({"text": "a", "continuation_text": "x" * 129}, "continuation_text"),
        ({"text": "a", "continuation_text": "a", "top": 21}, "top"),
    ],
)
def test_what_cannot_be_scored_is_refused(stub: Any, engine: FakeEngine, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Score(pb.ScoreRequest(**fields), timeout=WAIT_SECONDS)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    bad = error_details_pb2.BadRequest()
    rpc_status.from_call(caught.value).details[0].Unpack(bad)
    assert bad.field_violations[0].field == field
    assert engine.requests == []


def test_a_text_that_makes_the_tokenizer_panic_is_an_invalid_argument(
    stub: Any, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.tokenizer = Tokenizer.from_folder(impatient(tmp_path))
    for call, request in (
        (stub.Score, pb.ScoreRequest(text="a", continuation_text=TOO_MUCH)),
        (stub.Score, pb.ScoreRequest(tokens=ids(7), continuation_text=TOO_MUCH)),
        (stub.Tokenize, pb.TokenizeRequest(text=TOO_MUCH)),
        (stub.GenerateOnce, pb.GenerateRequest(text=TOO_MUCH)),
    ):
        with pytest.raises(grpc.RpcError, match="retry-limit-in-match over") as caught:
            call(request, timeout=WAIT_SECONDS)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_token_that_spans_the_border_is_scored(stub: Any, engine: FakeEngine) -> None:
    engine.tokenizer = Spanning()
    answer = stub.Score(pb.ScoreRequest(text="import ", continuation_text="os"), timeout=WAIT_SECONDS)
    assert [each.token_id for each in answer.logprobs] == [200]
    assert answer.prompt_tokens == 7


def test_text_without_a_tokenizer_is_a_failed_precondition(stub: Any, engine: FakeEngine) -> None:
    engine.tokenizer = None
    assert stub.Score(pb.ScoreRequest(tokens=ids(7), continuation_tokens=ids(99)), timeout=WAIT_SECONDS).is_greedy
    with pytest.raises(grpc.RpcError) as caught:
        stub.Score(pb.ScoreRequest(tokens=ids(7), continuation_text="a"), timeout=WAIT_SECONDS)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
