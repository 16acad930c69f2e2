"""What the `openai` package asks: python openai_session.py HOST:PORT. It runs in an environment without tk."""

import sys
from contextlib import suppress
from typing import Any

import openai

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
GREEDY: dict[str, Any] = {"temperature": 0, "seed": 3, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
SEEDED: dict[str, Any] = {"seed": 7, "n": 2, "max_tokens": 8, "extra_body": {"ignore_eos": True, "min_p": 0.01}}
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "A city?"}]
WRONG_TEXTS: list[dict[str, Any]] = [
    *({"temperature": -1}, {"n": 99}, {"max_tokens": 10**6}, {"logprobs": 99}, {"seed": 1.5}, {"echo": True}),
    *(
        {"logit_bias": {"99999": 1}},
        {"logit_bias": {"a": 1}},
        {"top_k": -1},
        {"top_k": 2**40},
        {"top_p": 0},
        {"min_p": 2},
    ),
    *({"repetition_penalty": 0}, {"presence_penalty": "1"}, {"seed": -1}, {"max_tokens": 0}, {"min_tokens": 9999}),
    *({"stop": ["a"] * 17}, {"stop": "a" * 300}, {"stop_token_ids": [99999]}, {"stop_token_ids": "a"}, {"stream": 1}),
    *(
        {"prompt": []},
        {"prompt": ""},
        {"prompt": [[]]},
        {"prompt": ["a"] * 17},
        {"prompt": [99999]},
        {"prompt": "a" * 2000},
    ),
    *({"response_format": {"type": "json_object"}}, {"unknown": 1}, {"ignore_eos": 1}, {"n": 8, "prompt": ["a"] * 8}),
]
WRONG_CHATS: list[dict[str, Any]] = [
    *({"tools": []}, {"messages": []}, {"messages": [{"role": "user"}]}, {"stop": [""]}, {"min_p": "a"}),
    *({"top_logprobs": 21, "logprobs": True}, {"top_logprobs": 2}, {"max_completion_tokens": 0}, {"max_tokens": 10**6}),
    *({"response_format": {"type": "json_schema"}}, {"response_format": {"type": "xml"}}, {"messages": "a"}),
]


def main(target: str) -> None:
    client = openai.OpenAI(base_url=f"http://{target}/v1", api_key="none", max_retries=0, timeout=60)
    [model] = [each.id for each in client.models.list()]
    client.models.retrieve(model)
    chat: dict[str, Any] = {"model": model, "messages": MESSAGES}
    text: dict[str, Any] = {"model": model, "prompt": "def main("}

    def asked(call: Any, **options: Any) -> None:
        with suppress(openai.APIStatusError):  # it is in the record
            answer = call(**options)
            if options.get("stream"):
                list(answer)

    streams: list[dict[str, Any]] = [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}]
    for how in streams:
        asked(client.chat.completions.create, **chat, **GREEDY, **how)
        asked(client.chat.completions.create, **chat, **SEEDED, **how, logprobs=True, top_logprobs=3)
        asked(client.chat.completions.create, **chat, **how, seed=1, temperature=0.5, response_format=FORM)
        asked(client.completions.create, **text, **GREEDY, **how, logprobs=2)
        asked(client.completions.create, **text, **SEEDED, **how, stop=["a", "e"], logit_bias={"65": 2})
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "top_p": 0.9}
    asked(client.completions.create, model=model, prompt=[[65, 66], [67] * 40], seed=3, max_tokens=4, **penalties)
    asked(client.completions.create, model=model, prompt=[65, 66, 67], temperature=0, max_tokens=4)
    for wrong in WRONG_TEXTS:
        asked(client.completions.create, **text, extra_body={"seed": 1, "max_tokens": 4} | wrong)
    for wrong in WRONG_CHATS:
        asked(client.chat.completions.create, **chat, extra_body={"seed": 1, "max_tokens": 4} | wrong)
    asked(client.completions.create, model="another", prompt="a")
    asked(client.embeddings.create, model=model, input="a")


if __name__ == "__main__":
    main(sys.argv[1])
