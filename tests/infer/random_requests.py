"""Random requests, for tests of what answers must not depend on."""

import json
import random
from typing import Any

from tk.infer import SamplingParams
from tk.infer.engine.request.completion import Completion
from tk.tests.infer.random_schemas import random_schema

_VOCAB = 260
_LENGTHS = (1, 3, 15, 16, 17, 31, 33, 64, 100, 255, 257, 300)
_OPTIONS: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("top_k", (1, 5, 100)),
    ("top_p", (0.3, 0.9)),
    ("min_p", (0.05, 0.3)),
    ("repetition_penalty", (0.8, 1.3)),
    ("presence_penalty", (-0.5, 0.7)),
    ("frequency_penalty", (-0.2, 0.6)),
    ("logprobs", (0, 1, 5)),
    ("prompt_logprobs", (0, 2)),
    ("stop", (("e",), ("th", "in", "x"))),
    ("stop_token_ids", (tuple(range(100, 120)),)),
    ("logit_bias", ({263: 5.0}, {7: 3.0, 9: -100.0})),
    ("include_stop", (True,)),
)
_REGEXES = ("[a-z]*", "(yes|no|maybe) [0-9]{3,9}", "[ -~]{5,40}")


def random_prompts(chance: random.Random, count: int) -> list[list[int]]:
    """Returns prompts of 1 to 301 tokens. Many begin alike, and some repeat themselves."""
    shared = [chance.randrange(_VOCAB) for _ in range(max(_LENGTHS))]
    found = []
    for _ in range(count):
        length = chance.choice(_LENGTHS)
        prompt = shared[:length] if chance.random() < 0.6 else [chance.randrange(_VOCAB) for _ in range(length)]
        if chance.random() < 0.3:
            prompt = (prompt[: chance.randint(1, 6)] * length)[:length]
        found.append([*prompt, chance.randrange(_VOCAB)] if chance.random() < 0.5 else prompt)
    return found


def random_params(chance: random.Random) -> SamplingParams:
    """Returns options with a seed, of which each is at its default more often than not."""
    options: dict[str, Any] = {
        "seed": chance.randrange(2**64),
        "max_new_tokens": chance.choice((1, 2, 9, 30, 70)),
        "temperature": chance.choice((0.0, 0.0, 0.5, 1.0, 1.7)),
        "n": chance.choice((1, 1, 1, 2, 5)),
    }
    options |= {name: chance.choice(values) for name, values in _OPTIONS if chance.random() < 0.2}
    kind = chance.random()
    if kind < 0.12:
        options["json_schema"] = json.dumps(random_schema(chance.randrange(10**6), depth=2))
    elif kind < 0.2:
        options["regex"] = chance.choice(_REGEXES)
    else:
        options["ignore_eos"] = chance.random() < 0.5
        options["min_new_tokens"] = min(options["max_new_tokens"], chance.choice((0, 0, 0, 1, 8)))
    return SamplingParams(**options)


def said(completion: Completion) -> tuple[object, ...]:
    """Returns what no answer may change: tokens, texts, log-probabilities, ends and their number."""
    return completion.choices, completion.prompt_logprobs, completion.usage.completion_tokens
