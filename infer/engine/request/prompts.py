"""The arguments of `generate`: one prompt or many, each text, ids or chat; one SamplingParams or one per prompt."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Integral
from operator import index
from typing import Any, Final, Protocol

from ....core.errors import InvalidRequest, PromptTooLong
from ....text.chat_context import NEW_TURN, RESERVED, PromptForm
from .sampling_params import SamplingParams

MAX_CHAT_MESSAGES: Final = 1024


@dataclass(frozen=True)
class Conversation:
    """A prompt of messages, which the model's chat template lays out up to the start of the assistant's next turn.

    Attributes:
        messages: the messages, oldest first, each with "role" and "content".
        continues: whether the answer continues the last message, which is the assistant's.
        variables: variables of the chat template, by name; JSON can hold their values.

    Raises:
        InvalidRequest: there are none or too many, or one has other keys, or values that are no text; the last one
            that shall be continued is not the assistant's; a variable has the name of one that every template has.
    """

    messages: Sequence[Mapping[str, str]]
    continues: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_num_messages(len(self.messages))
        for number, message in enumerate(self.messages):
            if set(message) != {"role", "content"} or not all(isinstance(value, str) for value in message.values()):
                raise InvalidRequest(
                    f'Message {number} is {described(message)}; it must be {{"role": TEXT, "content": TEXT}}.',
                    field=f"messages[{number}]",
                )
        if self.continues and self.messages[-1]["role"] != "assistant":
            raise InvalidRequest(
                f"The last message is of role {self.messages[-1]['role'][:40]!r}; only one of the assistant's can be "
                "continued.",
                field="messages",
            )
        if taken := sorted(RESERVED & self.variables.keys()):
            raise InvalidRequest(f"{taken[0]} is a variable that the request itself sets.", field="variables")

    @property
    def form(self) -> PromptForm:
        """The form of the prompt."""
        return PromptForm(self.continues, self.variables)


Prompt = str | tuple[int, ...] | Conversation
GivenPrompt = str | Sequence[int] | Conversation
GivenPrompts = GivenPrompt | Sequence[GivenPrompt]


class Encoder(Protocol):
    """The part of a tokenizer that prompts need."""

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text, with the tokenizer's special tokens unless `special_tokens` is False."""

    def encode_pair(self, prompt: str, continuation: str) -> tuple[list[int], int]:
        """Returns the token ids of two texts as one, and how many of them are wholly in the prompt."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], form: PromptForm = NEW_TURN) -> list[int]:
        """Returns the token ids of a conversation."""


def as_prompt(prompt: GivenPrompt) -> Prompt:
    """Converts one prompt to a str, a tuple of ints or a Conversation.

    Raises:
        InvalidRequest: the prompt is none of text, a sequence of token ids and a Conversation.
    """
    if isinstance(prompt, str | Conversation):
        return prompt
    if _is_sequence(prompt) and bool not in set(map(type, prompt)):  # True would be the token 1
        with suppress(TypeError):
            return tuple(map(index, prompt))
    raise InvalidRequest(
        f"A prompt is {described(prompt)}; it must be a str, a list of token ids or a Conversation.", field="prompt"
    )


def as_prompts(prompts: GivenPrompts) -> list[Prompt]:
    """Returns the prompts of a call: a bare str, Conversation or flat list of ids is one, an empty list is none."""
    if is_one_prompt(prompts):
        return [as_prompt(prompts)]  # type: ignore[arg-type]  # a flat list, as its first element shows
    if not _is_sequence(prompts):
        raise InvalidRequest(
            f"prompts is {described(prompts)}; it must be a str, a list of token ids, a Conversation, or a list of "
            "these.",
            field="prompt",
        )
    return [as_prompt(prompt) for prompt in prompts]  # type: ignore[arg-type, union-attr]


def is_one_prompt(prompts: GivenPrompts) -> bool:
    """Returns whether the prompts of a call are one: a bare str, a Conversation or a flat list of ids."""
    if isinstance(prompts, str | Conversation):
        return True
    return _is_sequence(prompts) and len(prompts) > 0 and isinstance(prompts[0], Integral)


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    """Returns one SamplingParams per prompt, from one for all (None = the defaults) or one for each."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not _is_sequence(params) or not all(isinstance(one, SamplingParams) for one in params):
        raise InvalidRequest(f"params is {described(params)}; it must be one SamplingParams, or a list of these.")
    if len(params) != num_prompts:
        raise InvalidRequest(f"{len(params)} SamplingParams for {num_prompts} prompts; pass one, or one per prompt.")
    return list(params)


def check_num_messages(number: int) -> None:
    """Raises InvalidRequest if a conversation has no messages, or too many."""
    if not 1 <= number <= MAX_CHAT_MESSAGES:
        raise InvalidRequest(
            f"messages has {number} messages; it must have 1 to {MAX_CHAT_MESSAGES}.", field="messages"
        )


def check_length(num_tokens: int, max_model_len: int) -> None:
    """Checks that a prompt of so many tokens leaves room for a new one.

    Raises:
        InvalidRequest: the prompt is empty.
        PromptTooLong: the prompt is as long as the longest sequence, or longer.
    """
    if not num_tokens:
        raise InvalidRequest("The prompt has no tokens; it must have at least one.", field="prompt")
    if num_tokens >= max_model_len:
        raise PromptTooLong(
            f"The prompt has {num_tokens} tokens, and sequences have at most max_model_len = {max_model_len}, new "
            f"tokens included. Shorten it to at most {max_model_len - 1}.",
            field="prompt",
        )


def checked_prompt(ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """Returns the token ids of a prompt; a million takes a twentieth of a second, too long for an event loop.

    Raises:
        InvalidRequest: one is not in the vocabulary.
    """
    prompt = tuple(ids)
    if prompt and not (min(prompt) >= 0 and max(prompt) < vocab_size):
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise InvalidRequest(f"Token id {wrong} is not one of the vocabulary's, 0 to {vocab_size - 1}.", field="prompt")
    return prompt


def prompt_tokens(tokenizer: Encoder | None, prompt: Prompt, special_tokens: bool = True) -> tuple[int, ...]:
    """Returns the tokens of a prompt.

    Args:
        tokenizer: the tokenizer of the model, if it has one.
        prompt: text, token ids or a conversation.
        special_tokens: whether the tokenizer's special tokens are added to a text.

    Raises:
        InvalidRequest: there is text and no tokenizer.
        CheckpointError: there is a conversation and no chat template.
        ConfigError: the chat template refuses a conversation.
    """
    if isinstance(prompt, tuple):
        return prompt
    if tokenizer is None:
        raise InvalidRequest(
            "The checkpoint has no tokenizer.json, so text cannot be used: copy that file into its folder, or give "
            "token ids.",
            field="prompt",
        )
    if isinstance(prompt, Conversation):
        return tuple(tokenizer.encode_chat(prompt.messages, prompt.form))
    return tuple(tokenizer.encode(prompt, special_tokens=special_tokens))


def described(value: Any) -> str:
    """Returns a value and its type, for an error."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _is_sequence(value: Any) -> bool:
    """Returns whether a value is a list, tuple, range or array, but neither bytes nor a mapping."""
    return hasattr(value, "__getitem__") and hasattr(value, "__len__") and not isinstance(value, (bytes, dict))
