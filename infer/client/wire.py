"""The conversion of the engine's values to messages of tk.v1 and back.

Both directions of a conversion are next to each other, so that the server and the client cannot diverge. This module
checks nothing: see serve/call/checks.py and SamplingParams.validate.
"""

from collections.abc import Iterable
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, Final

from ...proto.v1 import generation_pb2 as pb
from ..engine.request.completion import Choice, Completion
from ..engine.request.events import (
    AdapterInfo,
    Delta,
    Finished,
    FinishReason,
    ModelInfo,
    PromptLogprobs,
    SentEvent,
    Started,
    Timing,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from ..engine.request.request import CacheOptions
from ..engine.request.sampling_params import OPTIONS, SamplingParams
from ..engine.request.score import Score, score_of, score_of_places, score_places

# The options that a message has as one value, and those of them that may be absent.
_LISTS: Final = ("logit_bias", "stop", "stop_token_ids")
_VALUES: Final = tuple((each.part, name) for name, each in OPTIONS.items() if name not in _LISTS)
_PARTS: Final = pb.GenerateRequest.DESCRIPTOR.fields_by_name
_OPTIONAL: Final = frozenset(
    name for part, name in _VALUES if _PARTS[part].message_type.fields_by_name[name].has_presence
)
_REASON_NUMBERS: Final = MappingProxyType(
    {reason: pb.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason}
)
# An unknown reason of a newer server becomes LENGTH, which implies the least.
_REASONS: Final = MappingProxyType({number: reason for reason, number in _REASON_NUMBERS.items()})


def field_to_wire(field: str) -> str:
    """Returns the name on the wire of a field that an InvalidRequest names: "top_p" is "sampling.top_p"."""
    if field in OPTIONS:
        return f"{OPTIONS[field].part}.{field}"
    return f"chat.{field}" if field.startswith(("messages", "variables")) else field


def field_from_wire(field: str) -> str:
    """Returns the field of a name on the wire; see `field_to_wire`."""
    part, _, name = field.partition(".")
    return name if part == "chat" or (name in OPTIONS and OPTIONS[name].part == part) else field


def params_from_request(request: pb.GenerateRequest) -> SamplingParams:
    """Returns the sampling options of a request; optional fields that are unset keep the defaults of SamplingParams."""
    given: dict[str, Any] = {}
    for part, name in _VALUES:
        message = getattr(request, part)
        if name not in _OPTIONAL or message.HasField(name):
            given[name] = getattr(message, name)
    return SamplingParams(
        **given,
        logit_bias=dict(request.sampling.logit_bias),
        stop=tuple(request.stopping.stop),
        stop_token_ids=tuple(request.stopping.stop_token_ids),
    )


def params_to_request(params: SamplingParams, request: pb.GenerateRequest) -> None:
    """Writes `params` into a request; fields that are None stay unset.

    Raises:
        ValueError: the wire's types cannot hold a number.
    """
    for part, name in _VALUES:
        value = getattr(params, name)
        if value is not None:
            setattr(getattr(request, part), name, value)
    request.sampling.logit_bias.update(params.logit_bias)
    request.stopping.stop.extend(params.stop)
    request.stopping.stop_token_ids.extend(params.stop_token_ids)


def cache_from_request(request: pb.GenerateRequest) -> CacheOptions:
    """Returns the use of the prefix cache that a request asks for."""
    return CacheOptions(request.cache.bypass, request.cache.salt)


def cache_to_request(cache: CacheOptions, request: pb.GenerateRequest) -> None:
    """Writes the use of the prefix cache into a request; the default stays unset."""
    if cache != CacheOptions():
        request.cache.CopyFrom(pb.CacheOptions(bypass=cache.bypass, salt=cache.salt))


def event_to_wire(event: SentEvent) -> pb.GenerateResponse:
    """Converts one event of a stream to its message."""
    match event:
        case Started():
            values = vars(event) | {"prompt_logprobs": _logprobs_to_wire(event.prompt_logprobs)}
            return pb.GenerateResponse(started=pb.Started(**values))
        case PromptLogprobs():
            scores = pb.PromptLogprobs(start=event.start, logprobs=_logprobs_to_wire(event.logprobs))
            return pb.GenerateResponse(prompt_logprobs=scores)
        case Delta():
            logprobs = _logprobs_to_wire(event.logprobs)
            delta = pb.Delta(index=event.index, text=event.text, token_ids=event.token_ids, logprobs=logprobs)
            return pb.GenerateResponse(delta=delta)
        case Finished():
            finished = pb.Finished(
                index=event.index,
                reason=_REASON_NUMBERS[event.reason],
                usage=pb.Usage(**vars(event.usage)),
                timing=pb.Timing(**vars(event.timing)),
                **_matched_to_wire(event.matched),
            )
            return pb.GenerateResponse(finished=finished)


def event_from_wire(response: pb.GenerateResponse) -> SentEvent | None:
    """Converts a response to its event, or to None for an unknown kind of event, which the client ignores."""
    match response.WhichOneof("event"):
        case "started":
            started = response.started
            return Started(
                request_id=started.request_id,
                prompt_tokens=started.prompt_tokens,
                cached_tokens=started.cached_tokens,
                seed=started.seed,
                prompt_logprobs=_logprobs_from_wire(started.prompt_logprobs),
                step=started.step,
                adapter_sha256=started.adapter_sha256,
            )
        case "prompt_logprobs":
            scores = response.prompt_logprobs
            return PromptLogprobs(scores.start, _logprobs_from_wire(scores.logprobs))
        case "delta":
            delta = response.delta
            logprobs = _logprobs_from_wire(delta.logprobs)
            return Delta(index=delta.index, text=delta.text, token_ids=tuple(delta.token_ids), logprobs=logprobs)
        case "finished":
            finished = response.finished
            return Finished(
                index=finished.index,
                reason=_REASONS.get(finished.reason, FinishReason.LENGTH),
                usage=Usage(**_values_of(Usage, finished.usage)),
                timing=Timing(**_values_of(Timing, finished.timing)),
                matched=_matched_from_wire(finished),
            )
    return None


def completion_to_wire(completion: Completion) -> pb.GenerateResult:
    """Converts a completed request to its message."""
    choices = [
        pb.Choice(
            index=choice.index,
            text=choice.text,
            token_ids=choice.token_ids,
            logprobs=_logprobs_to_wire(choice.logprobs),
            reason=_REASON_NUMBERS[choice.finish_reason],
            **_matched_to_wire(choice.matched),
        )
        for choice in completion.choices
    ]
    return pb.GenerateResult(
        request_id=completion.request_id,
        seed=completion.seed,
        choices=choices,
        usage=pb.Usage(**vars(completion.usage)),
        timing=pb.Timing(**vars(completion.timing)),
        prompt_logprobs=_logprobs_to_wire(completion.prompt_logprobs),
        step=completion.step,
        adapter_sha256=completion.adapter_sha256,
    )


def completion_from_wire(result: pb.GenerateResult) -> Completion:
    """Converts the message of a completed request back."""
    choices = [
        Choice(
            index=choice.index,
            text=choice.text,
            token_ids=tuple(choice.token_ids),
            finish_reason=_REASONS.get(choice.reason, FinishReason.LENGTH),
            logprobs=_logprobs_from_wire(choice.logprobs),
            matched=_matched_from_wire(choice),
        )
        for choice in result.choices
    ]
    return Completion(
        request_id=result.request_id,
        seed=result.seed,
        choices=tuple(choices),
        usage=Usage(**_values_of(Usage, result.usage)),
        timing=Timing(**_values_of(Timing, result.timing)),
        prompt_logprobs=_logprobs_from_wire(result.prompt_logprobs),
        step=result.step,
        adapter_sha256=result.adapter_sha256,
    )


def score_to_wire(completion: Completion, top: int) -> pb.ScoreResponse:
    """Converts the completion of `score_request` to the message of a score.

    Args:
        completion: the completed request.
        top: the number of alternatives of each token to keep.
    """
    score, places = score_of(completion), score_places(completion)
    kept = (replace(place, top=place.top[:top]) for place in places)
    return pb.ScoreResponse(
        logprobs=_logprobs_to_wire(kept),
        total=score.total,
        is_greedy=score.is_greedy,
        prompt_tokens=score.prompt_tokens,
    )


def score_from_wire(message: pb.ScoreResponse) -> Score:
    """Converts the message of a score, which has an alternative for each token at least, to the score."""
    return score_of_places(_logprobs_from_wire(message.logprobs), message.prompt_tokens)


def model_info_to_wire(info: ModelInfo) -> pb.ModelInfo:
    """Converts the description of the model to its message, which has the dataclass's field names."""
    return pb.ModelInfo(**vars(info))


def model_info_from_wire(message: pb.ModelInfo) -> ModelInfo:
    """Converts the message about the model back."""
    lists = {"eos_token_ids": tuple(message.eos_token_ids), "aliases": tuple(message.aliases)}
    return ModelInfo(**_values_of(ModelInfo, message) | lists)


def adapter_to_wire(info: AdapterInfo) -> pb.Adapter:
    """Converts the description of an adapter to its message, which has the dataclass's field names."""
    return pb.Adapter(**vars(info))


def adapter_from_wire(message: pb.Adapter) -> AdapterInfo:
    """Converts the message about an adapter back."""
    return AdapterInfo(**_values_of(AdapterInfo, message))


def _logprobs_to_wire(logprobs: Iterable[TokenLogprob]) -> list[pb.TokenLogprob]:
    return [
        pb.TokenLogprob(
            token_id=entry.token_id,
            logprob=entry.logprob,
            rank=entry.rank,
            token=entry.token,
            top=[pb.TopLogprob(token_id=top.token_id, logprob=top.logprob, token=top.token) for top in entry.top],
            text_offset=entry.text_offset,
        )
        for entry in logprobs
    ]


def _logprobs_from_wire(logprobs: Iterable[pb.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            token_id=entry.token_id,
            logprob=entry.logprob if entry.HasField("logprob") else None,
            rank=entry.rank,
            token=entry.token,
            top=tuple(TopLogprob(top.token_id, top.logprob, top.token) for top in entry.top),
            text_offset=entry.text_offset,
        )
        for entry in logprobs
    )


def _matched_to_wire(matched: str | int | None) -> dict[str, Any]:
    return {"stop" if isinstance(matched, str) else "stop_token_id": matched}  # None leaves the field unset


def _matched_from_wire(message: pb.Finished | pb.Choice) -> str | int | None:
    arm = message.WhichOneof("matched")
    return getattr(message, arm) if arm else None


def _values_of(kind: type, message: Any) -> dict[str, Any]:
    """Returns the values of a message's fields that a dataclass has too, by their common names."""
    return {field.name: getattr(message, field.name) for field in fields(kind)}
