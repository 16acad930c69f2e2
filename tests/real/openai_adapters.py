"""The `openai` package asks each model of a server: python openai_adapters.py http://HOST:PORT/v1 QUESTION

It runs in an environment without tk, and writes one JSON document: the answer of each model that the server lists.
"""

import json
import sys

import openai


def main(url: str, question: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
    messages = [{"role": "user", "content": question}]
    answers = {}
    for model in client.models.list():
        answer = client.chat.completions.create(model=model.id, messages=messages, temperature=0, max_tokens=24)
        answers[model.id] = answer.choices[0].message.content
    print(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
