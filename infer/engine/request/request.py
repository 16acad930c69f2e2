"""A request: the same values whatever the protocol, for the command line, `LLM` and `Client` alike."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from ....core.argument_types import FLAG, TEXT, wrong_type
from ....core.errors import InvalidRequest
from ..grammar.grammar import Grammar
from .adapter_lease import AdapterLease
from .events import ModelInfo
from .prompts import (
    Encoder,
    GivenPrompt,
    GivenPrompts,
    as_params,
    as_prompt,
    as_prompts,
    check_length,
    checked_prompt,
    described,
    prompt_tokens,
)
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from ..grammar.compiler import Grammars

_MAX_TOP_K: Final = 2**31 - 1  # the plan's width; no vocabulary is larger


@dataclass(frozen=True)
class CacheOptions:
    """The use of the prefix cache by one request; no option changes an answer.

    Attributes:
        bypass: whether the request neither reads nor fills the cache.
        salt: only requests of the same salt share cached prefixes.

    Raises:
        InvalidRequest: a value has the wrong type.
    """

    bypass: bool = False
    salt: str = ""

    def __post_init__(self) -> None:
        if (wrong := wrong_type(self, {"bypass": FLAG, "salt": TEXT})) is not None:
            name, why = wrong
            raise InvalidRequest(f"cache.{name} is {why}", field=f"cache.{name}")


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        prompt: a text, token ids with special tokens, or a conversation; the engine takes a tuple of token ids.
        params: the sampling options, which the engine validates at submission.
        request_id: the request's name, unique among the live requests of its principal; "" = a server makes one.
        model: the name of the model that the caller wants; "" = any.
        adapter: the name of the adapter that the caller wants; "" = none.
        special_tokens: whether the tokenizer's special tokens are added to a text.
        priority: requests with higher values run first; above 0 it needs the role admin of a server.
        deadline: the value of time.monotonic() after which the caller no longer waits for the answer, or None.
        logprobs_from: the first place of the prompt that `params.prompt_logprobs` reports; the logits before it are
            not computed.
        cache: the use of the prefix cache.
        at_once: whether the whole answer is one message, whose size is bounded, where a server sends it.
        principal: the name of the caller; principals with waiting requests of one priority get equal shares of tokens.
            They share no cached prefixes, and each has request ids of its own.
        weight: the principal's weight, above 0: twice the weight, twice the share.
        grammar: the grammar of `params.constraint`; None = none, or `Engine.submit` builds it.
        lease: the hold on the adapter of that name, which `Engine.submit` takes and the request's end releases.
        version: a hold on the adapter that the name must have; None = the one that has it at submission.
        is_checked: whether the prompt comes from `checked_prompt`; else `Engine.submit` looks at every token id.
    """

    prompt: GivenPrompt
    params: SamplingParams
    request_id: str = ""
    model: str = ""
    special_tokens: bool = True
    priority: int = 0
    deadline: float | None = None
    logprobs_from: int = 0
    cache: CacheOptions = field(default_factory=CacheOptions)
    at_once: bool = False
    principal: str = ""
    weight: float = 1.0
    grammar: Grammar | None = None
    is_checked: bool = False
    adapter: str = ""
    lease: AdapterLease | None = None
    version: AdapterLease | None = None

    @property
    def key(self) -> tuple[str, str]:
        """The principal and the request id, which no other live request of an engine has."""
        return self.principal, self.request_id

    @property
    def adapter_digest(self) -> str:
        """The digest of the adapter that is held for the request; "" = none is."""
        return "" if self.lease is None else self.lease.digest

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt, if it is token ids.

        Raises:
            InvalidRequest: it is still a text or a conversation.
        """
        if not isinstance(self.prompt, tuple):
            raise InvalidRequest("The prompt is no tuple of token ids, which alone an engine computes.", field="prompt")
        return self.prompt


def as_request(
    prompt: GivenPrompt, params: SamplingParams | None, cache: CacheOptions | None, adapter: str = ""
) -> Request:
    """Returns a request with an id of its own.

    Args:
        prompt: a str, token ids or a Conversation.
        params: the sampling options; None = the defaults.
        cache: the use of the prefix cache; None = the defaults.
        adapter: the name of an adapter; "" = none.

    Raises:
        InvalidRequest: an argument has the wrong type.
    """
    if not isinstance(params, SamplingParams | None):
        raise InvalidRequest(f"params is {described(params)}; it must be a SamplingParams.")
    if not isinstance(cache, CacheOptions | None):
        raise InvalidRequest(f"cache is {described(cache)}; it must be a CacheOptions, or None.", field="cache")
    if not isinstance(adapter, str):
        raise InvalidRequest(f"adapter is {described(adapter)}; it must be a str.", field="adapter")
    options, use, name = params or SamplingParams(), cache or CacheOptions(), uuid.uuid4().hex
    return Request(as_prompt(prompt), options, name, cache=use, adapter=adapter)


def as_requests(
    prompts: GivenPrompts,
    params: SamplingParams | Sequence[SamplingParams] | None,
    cache: CacheOptions | None,
    adapter: str = "",
) -> list[Request]:
    """Returns a request for each prompt; the arguments are those of `LLM.generate`.

    Raises:
        InvalidRequest: see `as_request`; or there are not as many `params` as prompts.
    """
    given = as_prompts(prompts)
    pairs = zip(given, as_params(params, len(given)), strict=True)
    return [as_request(prompt, each, cache, adapter) for prompt, each in pairs]


def tokenized(request: Request, tokenizer: Encoder | None) -> Request:
    """Returns a request whose prompt is token ids; see `prompt_tokens`."""
    return replace(request, prompt=prompt_tokens(tokenizer, as_prompt(request.prompt), request.special_tokens))


def check_servable(request: Request, info: ModelInfo, has_tokenizer: bool) -> None:
    """Checks a request's options and tokens; the length comes before all work that grows with it.

    Args:
        info: the description of the model.
        has_tokenizer: whether the checkpoint has a tokenizer.

    Raises:
        InvalidRequest: a value cannot be served.
        PromptTooLong: the prompt leaves no room for a new token.
    """
    params, vocab_size = request.params, info.vocab_size
    params.validate(vocab_size)
    if params.top_k > _MAX_TOP_K:
        raise InvalidRequest(f"top_k is {params.top_k}; it must be at most {_MAX_TOP_K}.", "top_k")
    check_length(len(request.token_ids), info.max_model_len)
    if not request.is_checked:
        checked_prompt(request.token_ids, vocab_size)
    if params.stop and not has_tokenizer:
        raise InvalidRequest(
            "Stop strings need text, and the checkpoint has no tokenizer.json; use stop_token_ids.",
            field="stop",
        )


def with_grammar(request: Request, grammars: "Grammars") -> Request:
    """Returns a request with the grammar of its constraint, if it has one; not for an event loop (see `compile`).

    Raises:
        InvalidRequest: see `Grammars.compile`.
    """
    constraint = request.params.constraint
    if constraint is None or request.grammar is not None:
        return request
    keep = request.params.keep_special_tokens
    return replace(request, grammar=grammars.compile(constraint, request.principal, request.token_ids, keep))
