"""The messages of a client's requests: what they hold, and what is refused before it is sent."""

from typing import Any

import pytest

from tk.core.errors import InvalidRequest
from tk.infer.client.outgoing import detokenize_message, message_for, score_messages, tokenize_message
from tk.infer.engine.request.prompts import Conversation, GivenPrompt
from tk.infer.engine.request.request import CacheOptions, as_requests
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.proto.v1 import generation_pb2 as pb

HI = Conversation([{"role": "user", "content": "hi"}])


def test_a_request_has_what_differs_from_the_defaults() -> None:
    prompts: list[GivenPrompt] = ["a", [5, 6], HI]
    text, ids, chat = map(message_for, as_requests(prompts, SamplingParams(seed=3), CacheOptions(salt="s")))
    assert text.WhichOneof("prompt") == "text"
    assert list(ids.tokens.ids) == [5, 6]
    assert [(each.role, each.content) for each in chat.chat.messages] == [("user", "hi")]
    assert all((each.sampling.seed, each.cache.salt) == (3, "s") for each in (text, ids, chat))
    [empty] = map(message_for, as_requests([[]], None, None))
    assert empty.WhichOneof("prompt") == "tokens", "the server says what is wrong with it"
    assert not empty.HasField("cache")


def test_a_score_asks_for_the_most_probable_tokens() -> None:
    assert score_messages("a", "b") == [pb.ScoreRequest(text="a", continuation_text="b", top=1)]
    both: list[GivenPrompt] = ["b", [2, 3]]
    assert score_messages([1], both) == [
        pb.ScoreRequest(tokens={"ids": [1]}, continuation_text="b", top=1),
        pb.ScoreRequest(tokens={"ids": [1]}, continuation_tokens={"ids": [2, 3]}, top=1),
    ]
    assert score_messages("a", []) == []
    [empty] = score_messages("a", [[]])
    assert empty.WhichOneof("continuation") == "continuation_tokens"


@pytest.mark.parametrize(
    ("prompt", "continuation", "field"),
    [(HI, "a", "prompt"), ("a", HI, "continuation"), (b"a", "a", "prompt"), ([-1], "a", ""), ("\ud800", "a", "")],
)
def test_what_cannot_be_scored_is_not_sent(prompt: Any, continuation: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        score_messages(prompt, continuation)
    assert error.value.field == field


def test_tokens_and_texts() -> None:
    assert tokenize_message("a", special_tokens=False) == pb.TokenizeRequest(text="a", no_special_tokens=True)
    assert detokenize_message([1, 2]) == pb.TokenIds(ids=[1, 2])
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        detokenize_message([2**32])
