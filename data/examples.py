"""Fine-tuning examples and their loss masks: a prompt with its response, or a conversation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.errors import ConfigError
from ..text.chat_context import NO_CONTEXT, Context
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
        where: the file and row that the conversation was read from, for errors.
        context: tools, documents and variables for the chat template.
        unlearned: the indexes of the assistant's messages that are read and not learned.
    """

    messages: tuple[Mapping[str, Any], ...]
    where: str
    context: Context = NO_CONTEXT
    unlearned: frozenset[int] = frozenset()

    @property
    def text(self) -> str:
        """The contents of all messages, without special tokens."""
        contents = (message.get("content") for message in self.messages)
        return "\n".join(content for content in contents if isinstance(content, str))

    def why_unlearned(self) -> str:
        """Returns the reason why nothing of a conversation is learned, of which no token is."""
        said = [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]
        if not said:
            roles = ", ".join(dict.fromkeys(message["role"] for message in self.messages))
            return f'no message has the role "assistant" (roles: {roles})'
        if self.unlearned.issuperset(said):
            return "every message of the assistant has the weight 0"
        return "the chat template renders or marks nothing for the assistant's messages"


Example = PromptResponse | Chat
Document = str | Example


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
            rendered = self._tokenizer.chat_template.render(example.messages, example.context, example.unlearned)
        except ConfigError as error:
            raise ConfigError(f"{example.where}: {error}.") from error
        return self._tokenizer.encode_spans(rendered.text, rendered.spans)
