"""Asks a server of OpenAI's dialect as langchain-openai and litellm do by default; prints what they got as JSON.

Usage: python dialect_checks.py URL MODEL QUESTION
"""

import importlib
import json
import sys
from typing import Any

PROMPTS = [f"The number after {number} is" for number in range(20)]  # langchain sends so many in one call


def langchain(url: str, model: str, question: str) -> dict[str, object]:
    """Returns the answers of langchain's chat model and of its text model."""
    package: Any = importlib.import_module("langchain_openai")  # of another environment
    chat = package.ChatOpenAI(model=model, base_url=url, api_key="none", temperature=0)
    text = package.OpenAI(model=model, base_url=url, api_key="none", temperature=0, max_tokens=4)
    whole = chat.invoke([("system", "You are brief."), ("user", question)])
    return {
        "whole": whole.content,
        "tokens": whole.usage_metadata["output_tokens"],
        "streamed": "".join(
            str(part.content) for part in chat.stream([("system", "You are brief."), ("user", question)])
        ),
        "named": chat.invoke([{"role": "user", "name": "ann", "content": question}]).content,
        "alone": [text.invoke(PROMPTS[3]), text.invoke(PROMPTS[17])],
        "batch": [found[0].text for found in text.generate(PROMPTS).generations],
    }


def through_litellm(url: str, model: str, question: str) -> dict[str, object]:
    """Returns litellm's answers, whole and streamed."""
    litellm: Any = importlib.import_module("litellm")
    messages = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": question}]
    asked = {"model": f"openai/{model}", "api_base": url, "api_key": "none", "messages": messages, "temperature": 0}
    parts = litellm.completion(**asked, stream=True)
    return {
        "whole": litellm.completion(**asked).choices[0].message.content,
        "streamed": "".join(part.choices[0].delta.content or "" for part in parts),
        "tagged": litellm.completion(**asked, metadata={"run": "7"}, user="ann", n=1).choices[0].message.content,
    }


def main() -> None:
    url, model, question = sys.argv[1:]
    found = {"langchain": langchain(url, model, question), "litellm": through_litellm(url, model, question)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
