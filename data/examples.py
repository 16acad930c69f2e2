"""What a line of JSON holds: a text, a prompt with its response, or a conversation; and how the latter two are learned.

{"text": "..."}                                                  all of it is learned
{"prompt": "...", "response": "..."}                             the response and the end of text are
{"messages": [{"role": "user", "content": "..."}, ...]}          what the assistant says is, ends of turns included
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.errors import ConfigError
from ..text.chat_template import ChatTemplate
from ..text.tokenizer import Tokenizer


@dataclass(frozen=True)
class PromptResponse:
    """What is asked, and what should be answered."""

    prompt: str
    response: str

    @property
    def text(self) -> str:
        """All of it, without special tokens."""
        return self.prompt + self.response


@dataclass(frozen=True)
class Chat:
    """A conversation: messages as the chat template takes them, each with at least a `role`; `where` it was read."""

    messages: tuple[Mapping[str, Any], ...]
    where: str

    @property
    def text(self) -> str:
        """All that is said, without special tokens."""
        contents = (message.get("content") for message in self.messages)
        return "\n".join(content for content in contents if isinstance(content, str))


Example = PromptResponse | Chat
Document = str | Example


def parse_line(line: bytes, where: str) -> Document:
    """What one line of JSON holds; ConfigError, which begins with `where`, if it is none of the three."""
    try:
        data = json.loads(line)
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: a text is not valid Unicode: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not a line of JSON: {error}.") from error
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
    """Examples to tokens, and which of them are learned."""

    def __init__(self, tokenizer: Tokenizer, start: list[int], eos_token_id: int) -> None:
        """`start`: the tokens before every text."""
        self._tokenizer = tokenizer
        self._start, self._eos = start, eos_token_id
        self._template: ChatTemplate | None = None

    def encode(self, example: Example) -> tuple[list[int], list[bool]]:
        """Token ids, and for each whether the loss counts it.

        Raises:
            ConfigError: the chat template does not take these messages.
            CheckpointError: there is no chat template.
        """
        return self._chat(example) if isinstance(example, Chat) else self._prompt_response(example)

    def _prompt_response(self, example: PromptResponse) -> tuple[list[int], list[bool]]:
        """Prompt as a request's would be encoded; tokens never join it and the response, which no server could do."""
        prompt = self._tokenizer.encode(example.prompt, special_tokens=False)
        both = self._tokenizer.encode(example.text, special_tokens=False)
        if both[: len(prompt)] != prompt:
            both = prompt + self._tokenizer.encode(example.response, special_tokens=False)
        num_read = len(self._start) + len(prompt)
        ids = [*self._start, *both, self._eos]
        return ids, [False] * num_read + [True] * (len(ids) - num_read)

    def _chat(self, example: Chat) -> tuple[list[int], list[bool]]:
        if self._template is None:
            self._template = ChatTemplate.from_folder(self._tokenizer.folder, self._tokenizer.special_tokens)
        try:
            rendered = self._template.render(example.messages)
        except ConfigError as error:
            raise ConfigError(f"{example.where}: {error}.") from error
        return self._tokenizer.encode_spans(rendered.text, rendered.spans)
