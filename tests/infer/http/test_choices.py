"""Log-probabilities in the dialect of completions."""

import openai

from tk.infer.requests.events import Delta, Done, TokenLogprob, TopLogprob
from tk.tests.infer.server.fake_engine import FakeEngine, finished, started

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
