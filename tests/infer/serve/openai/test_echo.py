"""`echo`: prompts before answers, their tokens' places, whole and streamed, with and without log-probabilities."""

from collections.abc import Sequence
from typing import Any

import openai
import pytest

from tk.infer.engine.request.events import Delta, Done, Event, PromptLogprobs, TokenLogprob, TopLogprob
from tk.infer.engine.request.request import Request
from tk.infer.serve.openai.echo import Echo
from tk.tests.infer.serve.fake_engine import FakeEngine, finished, started
from tk.tests.infer.serve.http.http_server import HttpServerThread

NEW = (TokenLogprob(97, -0.5, 1, b"a"), TokenLogprob(98, -1.0, 1, b"b", text_offset=1))


def entry(token: int, logprob: float | None) -> TokenLogprob:
    tops = () if logprob is None else (TopLogprob(token, logprob, bytes([token])),)
    return TokenLogprob(token, logprob, 1, bytes([token]), tops)


def scored(request: Request) -> Sequence[Event]:
    """All tokens of the prompt, the first alone in its event, and "ab" from each sample."""
    first, *rest = [entry(token, -float(place) if place else None) for place, token in enumerate(request.token_ids)]
    if request.params.prompt_logprobs is None:
        begin: list[Event] = [started(request)]
    else:
        named = started(request)
        begin = [type(named)(**{**vars(named), "prompt_logprobs": (first,)}), PromptLogprobs(1, tuple(rest))]
    new = NEW if request.params.logprobs is not None else ()
    said = [Delta(index, "ab", (97, 98), new) for index in range(request.params.n)]
    return [*begin, *said, *(finished(index, tokens=2) for index in range(request.params.n)), Done()]


def streamed(client: openai.OpenAI, **fields: Any) -> dict[int, dict[str, Any]]:
    """Returns what the chunks of a stream make, by choice."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in client.completions.create(model="fake", stream=True, **fields):
        for choice in chunk.choices:
            made = choices.setdefault(choice.index, {"text": "", "logprobs": None, "finish_reason": None})
            made["text"] += choice.text
            made["finish_reason"] = choice.finish_reason or made["finish_reason"]
            if choice.logprobs is not None:
                made["logprobs"] = made["logprobs"] or {name: [] for name in choice.logprobs.model_dump()}
                for name, values in choice.logprobs.model_dump().items():
                    made["logprobs"][name] += values
    return choices


@pytest.mark.parametrize("prompt", ["hi", [1, 104, 105]], ids=["text", "ids"])
@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"logprobs": 1, "max_tokens": 0}, {"n": 2}], ids=str)
def test_a_choice_begins_with_its_prompt(
    client: openai.OpenAI, engine: FakeEngine, prompt: str | list[int], fields: dict[str, Any]
) -> None:
    engine.script = scored
    answer = client.completions.create(model="fake", prompt=prompt, echo=True, **fields)
    is_all = "max_tokens" in fields
    for choice in answer.choices:
        assert choice.text == ("hi" if is_all else "hiab")
        if "logprobs" in fields:
            logprobs = choice.logprobs
            assert logprobs.token_logprobs == [None, -1.0, -2.0, -0.5, -1.0][: 3 if is_all else 5]
            assert logprobs.tokens == ["\x01", "h", "i", "a", "b"][: 3 if is_all else 5]
            assert logprobs.text_offset == [0, 0, 1, 2, 3][: 3 if is_all else 5]
            assert logprobs.top_logprobs[:3] == [None, {"h": -1.0}, {"i": -2.0}]
        else:
            assert choice.logprobs is None
    assert len(answer.choices) == fields.get("n", 1)
    assert answer.usage.completion_tokens == (0 if is_all else 2 * len(answer.choices))
    whole = {choice.index: choice.model_dump() for choice in answer.choices}
    for index, choice in streamed(client, prompt=prompt, echo=True, **fields).items():
        assert choice == {name: whole[index][name] for name in choice}


def test_several_prompts_have_their_own_echo(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = scored
    fields: dict[str, Any] = {"prompt": ["hi", "you"], "echo": True, "n": 2, "logprobs": 0}
    answer = client.completions.create(model="fake", **fields)
    assert [choice.text for choice in answer.choices] == ["hiab", "hiab", "youab", "youab"]
    assert [choice.logprobs.text_offset[-1] for choice in answer.choices] == [3, 3, 4, 4]
    assert [streamed(client, **fields)[index]["text"] for index in range(4)] == ["hiab", "hiab", "youab", "youab"]


def test_an_echo_without_a_tokenizer_has_no_text(server: HttpServerThread, engine: FakeEngine) -> None:
    engine.tokenizer, engine.script = None, scored
    answer = server.ask("/v1/completions", {"prompt": [104], "echo": True, "logprobs": 0})
    assert answer.json["choices"][0]["text"] == "ab"


@pytest.mark.parametrize(
    ("text", "tokens", "places"),
    [
        ("a\u2603b", [b"a", b"\xe2\x98", b"\x83", b"b"], [0, 1, 1, 2]),
        ("Hello you", [b"<s>", b" Hello", b" you"], [0, 0, 5]),  # a space that the tokenizer has put before the text
        ("ab", [b"a", b"\xff", b"b"], [0, 1, 1]),  # bytes that are no text swallow what is behind them, and no more
    ],
)
def test_places_of_tokens(text: str, tokens: list[bytes], places: list[int]) -> None:
    entries = Echo(text, False).entries([TokenLogprob(0, -1.0, 1, token) for token in tokens])
    assert [each.text_offset for each in entries] == places
