"""Lines of JSON and their loss masks: a text, a prompt with its response, or a conversation.

{"text": "..."}                                                  every token is learned
{"prompt": "...", "response": "..."}                             the response and the end of text are learned
{"messages": [{"role": "user", "content": "..."}, ...]}          the assistant's turns are learned, their ends included
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.errors import ConfigError
from ..text.tokenizer import Tokenizer


@dataclass(frozen=True)
class PromptResponse:
    """A fine-tuning example: a prompt and the response to learn."""

    prompt: str
    response: str

    @property
    def text(self) -> str:
        """Prompt and response, without special tokens."""
        return self.prompt + self.response


@dataclass(frozen=True)
class Chat:
    """A conversation to fine-tune on.

    Attributes:
        messages: the messages as the chat template takes them, each with at least a `role`.
        where: the file and line that the conversation was read from, for errors.
    """

    messages: tuple[Mapping[str, Any], ...]
    where: str

    @property
    def text(self) -> str:
        """The contents of all messages, without special tokens."""
        contents = (message.get("content") for message in self.messages)
        return "\n".join(content for content in contents if isinstance(content, str))


Example = PromptResponse | Chat
Document = str | Example


def parse_line(line: bytes, where: str) -> Document:
    """Parses one line of JSON.

    Args:
        line: the line.
        where: the file and line number, with which errors begin.

    Raises:
        ConfigError: the line is no JSON, or holds no text, prompt and response, or conversation.
    """
    try:
        data = json.loads(line)
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: the line has text that is not valid Unicode: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: the line is not valid JSON: {error}.") from error
    if isinstance(data, dict):
        prompt, response, text = data.get("prompt"), data.get("response"), data.get("text")
        if isinstance(prompt, str) and isinstance(response, str):
            return PromptResponse(prompt, response)
        if "messages" in data:
            return Chat(_messages(data["messages"], where), where)
        if isinstance(text, str):
            return text
    raise ConfigError(
        f'{where}: each line must be an object with a string "text", as in {{"text": "Once ..."}}, with strings '
        '"prompt" and "response", or with "messages".'
    )


def _messages(found: object, where: str) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(found, list) or not found:
        raise ConfigError(f'{where}: "messages" must be a list of at least one message.')
    for number, message in enumerate(found, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f'{where}: message {number} must be an object with a string "role".')
    return tuple(found)


class ExampleEncoder:
    """Encodes examples as tokens with a loss mask.

    Args:
        tokenizer: the tokenizer, in a folder that also has the chat template.
        start: the tokens that precede every text.
        eos_token_id: the token that ends a response.
    """

    def __init__(self, tokenizer: Tokenizer, start: list[int], eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self._start, self._eos = start, eos_token_id

    def encode(self, example: Example) -> tuple[list[int], list[bool]]:
        """Returns the token ids of an example, and for each whether the loss counts it.

        Raises:
            ConfigError: the chat template refuses these messages.
            CheckpointError: the tokenizer's folder has no chat template.
        """
        return self._chat(example) if isinstance(example, Chat) else self._prompt_response(example)

    def _prompt_response(self, example: PromptResponse) -> tuple[list[int], list[bool]]:
        """Encodes the prompt as a server encodes it: no token spans the end of the prompt and the response."""
        prompt = self._tokenizer.encode(example.prompt, special_tokens=False)
        both = self._tokenizer.encode(example.text, special_tokens=False)
        if both[: len(prompt)] != prompt:
            both = prompt + self._tokenizer.encode(example.response, special_tokens=False)
        num_read = len(self._start) + len(prompt)
        ids = [*self._start, *both, self._eos]
        return ids, [False] * num_read + [True] * (len(ids) - num_read)

    def _chat(self, example: Chat) -> tuple[list[int], list[bool]]:
        try:
            rendered = self._tokenizer.chat_template.render(example.messages)
        except ConfigError as error:
            raise ConfigError(f"{example.where}: {error}.") from error
        return self._tokenizer.encode_spans(rendered.text, rendered.spans)
