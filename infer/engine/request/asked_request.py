"""A request as a caller asks for it, whatever the protocol: its prompt may still be text."""

from dataclasses import dataclass, field

from .events import CacheOptions
from .prompts import GivenPrompt
from .sampling_params import SamplingParams


@dataclass(frozen=True)
class AskedRequest:
    """A prompt to continue, in the caller's words.

    Attributes:
        prompt: a text, token ids, or a conversation.
        params: the sampling options.
        model: the name of the model that the caller wants; "" = any.
        request_id: the caller's name for the request; "" = the server makes one.
        special_tokens: whether the tokenizer's special tokens are added to a text.
        priority: the priority; above 0 it needs the role admin.
        deadline: the value of time.monotonic() after which the caller no longer waits, or None.
        cache: the use of the prefix cache.
        at_once: whether the whole answer is one message.
        logprobs_from: the first place of the prompt whose log-probability is reported, if any is.
    """

    prompt: GivenPrompt
    params: SamplingParams
    model: str = ""
    request_id: str = ""
    special_tokens: bool = True
    priority: int = 0
    deadline: float | None = None
    cache: CacheOptions = field(default_factory=CacheOptions)
    at_once: bool = False
    logprobs_from: int = 0
