"""The `openai` package against a server's HTTP port: python openai_checks.py http://HOST:PORT/v1 MODEL QUESTION

It runs in an environment without tk, and writes one JSON document.
"""

import json
import sys

import openai

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def refusal(client: openai.OpenAI, model: str, temperature: float) -> tuple[str, int, object]:
    """Returns the class, status and parameter of the error that a request ends in."""
    try:
        client.completions.create(model=model, prompt="a", temperature=temperature)
    except openai.APIStatusError as error:
        return type(error).__name__, error.status_code, error.body
    raise SystemExit("nothing was refused")


def main(url: str, model: str, question: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
    messages = [{"role": "user", "content": question}]
    chat = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 40}
    answer = client.chat.completions.create(**chat)
    streamed = client.chat.completions.create(**chat, stream=True)
    texts = [chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices]
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    shaped = client.chat.completions.create(**chat, response_format=form)
    text = {"model": model, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
    completion = client.completions.create(**text)
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**text, stream=True) if chunk.choices]
    found = {
        "models": [each.id for each in client.models.list()],
        "answer": answer.choices[0].message.content,
        "reason": answer.choices[0].finish_reason,
        "prompt_tokens": answer.usage.prompt_tokens,
        "streamed": "".join(texts),
        "shaped": shaped.choices[0].message.content,
        "completion": completion.choices[0].text,
        "pieces": "".join(pieces),
        "bad_field": refusal(client, model, temperature=-1),
        "bad_model": refusal(client, "another", temperature=1),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
