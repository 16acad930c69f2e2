"""The options of both completions, as the engine gets them."""

from tk.infer.engine.request.events import TokenLogprob, TopLogprob
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.tests.infer.serve.fake_engine import FakeEngine
from tk.tests.infer.serve.http.http_server import HttpServerThread

LOGPROBS = (
    TokenLogprob(97, -0.5, 1, b"a", (TopLogprob(97, -0.5, b"a"), TopLogprob(98, -1.5, b"b"))),
    TokenLogprob(98, -1.25, 2, b"b", (TopLogprob(97, -0.5, b"a"),)),
)


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
