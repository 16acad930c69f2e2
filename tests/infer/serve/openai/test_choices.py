"""Log-probabilities in both dialects."""

import openai

from tk.infer.engine.request.events import Delta, Done, TokenLogprob, TopLogprob
from tk.tests.infer.serve.fake_engine import FakeEngine, finished, started

LOGPROBS = (
    TokenLogprob(97, -0.5, 1, b"a", (TopLogprob(97, -0.5, b"a"), TopLogprob(98, -1.5, b"b"))),
    TokenLogprob(98, -1.25, 2, b"b", (TopLogprob(97, -0.5, b"a"),), text_offset=1),
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
