"""Values go to the wire and come back; the .proto keeps the promises of tk.v1: its numbers, room for newer servers."""

from dataclasses import replace

import pytest

from tk.infer.client.wire import (
    adapter_from_wire,
    adapter_to_wire,
    cache_from_request,
    cache_to_request,
    completion_from_wire,
    completion_to_wire,
    event_from_wire,
    event_to_wire,
    field_from_wire,
    field_to_wire,
    model_info_from_wire,
    model_info_to_wire,
    params_from_request,
    params_to_request,
)
from tk.infer.engine.request.completion import Choice, Completion
from tk.infer.engine.request.events import (
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
from tk.infer.engine.request.request import CacheOptions
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.proto.v1 import generation_pb2 as pb
from tk.tests.infer.every_option import EVERY_OPTION

# Fixed for ever: fields in order, numbered from 1. Fields that are added later get numbers beyond these.
PROMISED = {
    "GenerateRequest": "request_id model text tokens chat no_special_tokens sampling stopping output cache priority "
    "adapter",
    "TokenIds": "ids",
    "Chat": "messages",
    "ChatMessage": "role content",
    "Sampling": "temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty logit_bias seed n "
    "json_schema regex grammar",
    "Stopping": "max_new_tokens min_new_tokens stop stop_token_ids ignore_eos",
    "OutputOptions": "logprobs prompt_logprobs keep_special_tokens include_stop",
    "CacheOptions": "bypass salt",
    "GenerateResponse": "started delta finished prompt_logprobs",
    "Started": "request_id prompt_tokens cached_tokens seed prompt_logprobs step adapter_sha256",
    "PromptLogprobs": "start logprobs",
    "Delta": "index text token_ids logprobs",
    "TokenLogprob": "token_id logprob rank token top",
    "TopLogprob": "token_id logprob token",
    "Finished": "index reason stop stop_token_id usage timing",
    "Usage": "prompt_tokens cached_tokens completion_tokens proposed_tokens accepted_tokens",
    "Timing": "queue_seconds first_token_seconds total_seconds preemptions",
    "GenerateResult": "request_id seed choices usage timing prompt_logprobs step adapter_sha256",
    "Choice": "index text token_ids logprobs reason stop stop_token_id",
    "ScoreRequest": "text tokens continuation_text continuation_tokens top adapter",
    "LoadAdapterRequest": "name checkpoint",
    "UnloadAdapterRequest": "name",
    "ListAdaptersResponse": "adapters",
    "Adapter": "name sha256 rank bytes step live_requests",
    "ScoreResponse": "logprobs total is_greedy prompt_tokens",
}

# Numbers that fp32 and fp64 hold exactly, no two of a message equal.
FIRST = TokenLogprob(5, None, 0, b"a")
SECOND = TokenLogprob(6, -0.5, 2, b"\xff", (TopLogprob(7, -0.25, b"b"), TopLogprob(6, -0.5, b"\xff")))
USAGE, TIMING = Usage(3, 1, 7, 6, 5), Timing(0.25, 0.5, 1.5, 4)
EVENTS = [
    Started("r", 3, 1, 2**64 - 1, (FIRST, SECOND), 2**40, "ab"),
    PromptLogprobs(256, (SECOND, FIRST)),
    Delta(2, "caf\u00e9", (5, 6), (SECOND,)),
    Finished(1, FinishReason.STOP_STRING, USAGE, TIMING, "end"),
    Finished(1, FinishReason.STOP_TOKEN, USAGE, TIMING, 0),
    *(Finished(0, reason, USAGE, TIMING) for reason in FinishReason),
]


@pytest.mark.parametrize("event", EVENTS)
def test_events_come_back_as_they_were(event: SentEvent) -> None:
    sent = event_to_wire(event).SerializeToString()
    assert event_from_wire(pb.GenerateResponse.FromString(sent)) == event


def test_completions_come_back_as_they_were() -> None:
    choices = (Choice(0, "x", (5,), FinishReason.STOP_TOKEN, (SECOND,), 0), Choice(1, "", (), FinishReason.EOS))
    completion = Completion("r", 9, choices, USAGE, TIMING, (FIRST, SECOND), step=2**40, adapter_sha256="ab")
    sent = completion_to_wire(completion).SerializeToString()
    assert completion_from_wire(pb.GenerateResult.FromString(sent)) == completion


def test_the_model_comes_back_as_it_was() -> None:
    info = ModelInfo(
        "m",
        "llama",
        7,
        "ab",
        "1.0",
        1,
        2,
        "fp32",
        "bf16",
        "int8",
        16,
        64,
        128,
        4,
        20,
        256,
        (0, 9),
        1024,
        "aten",
        max_adapters=3,
    )
    assert model_info_from_wire(pb.ModelInfo.FromString(model_info_to_wire(info).SerializeToString())) == info


def test_adapters_come_back_as_they_were() -> None:
    info = AdapterInfo("a", "ab", 16, 2**40, 2**41, 3)
    assert adapter_from_wire(pb.Adapter.FromString(adapter_to_wire(info).SerializeToString())) == info


def test_params_come_back_as_they_were() -> None:
    default = SamplingParams()
    constraints = {"json_schema": "{}", "regex": "a*", "grammar": ""}  # one at a time, and without some other options
    assert all(getattr(EVERY_OPTION, name) != getattr(default, name) for name in vars(default).keys() - constraints)
    constrained = [SamplingParams(**{name: text}) for name, text in constraints.items()]  # type: ignore[arg-type]
    for params in (EVERY_OPTION, replace(EVERY_OPTION, seed=0), default, *constrained):
        request = pb.GenerateRequest()
        params_to_request(params, request)
        assert params_from_request(pb.GenerateRequest.FromString(request.SerializeToString())) == params
    assert params_from_request(pb.GenerateRequest()) == default, "fields that are unset have the defaults"
    with pytest.raises(ValueError, match="out of range"):
        params_to_request(SamplingParams(seed=-1), pb.GenerateRequest())


def test_the_use_of_the_cache_comes_back_as_it_was() -> None:
    for cache in (CacheOptions(), CacheOptions(bypass=True), CacheOptions(salt="s"), CacheOptions(True, "s")):
        request = pb.GenerateRequest()
        cache_to_request(cache, request)
        assert cache_from_request(pb.GenerateRequest.FromString(request.SerializeToString())) == cache


def test_numbers_are_those_promised() -> None:
    for message, names in PROMISED.items():
        fields = pb.DESCRIPTOR.message_types_by_name[message].fields_by_name
        assert [fields[name].number for name in names.split()] == list(range(1, len(names.split()) + 1)), message
    reasons = {name.removeprefix("FINISH_REASON_"): number for name, number in pb.FinishReason.items()}
    assert reasons == {"UNSPECIFIED": 0, "EOS": 1, "STOP_TOKEN": 2, "STOP_STRING": 3, "LENGTH": 4}


def test_events_and_reasons_of_a_newer_server() -> None:
    newer = bytes([0x7A, 2, 8, 1])  # field 15, an event arm that we do not know
    assert event_from_wire(pb.GenerateResponse.FromString(newer)) is None
    result = pb.GenerateResult(choices=[pb.Choice(text="abc", reason=9)])  # type: ignore[arg-type]
    assert completion_from_wire(result).finish_reason is FinishReason.LENGTH


def test_fields_have_a_name_on_the_wire() -> None:
    names = {
        "top_p": "sampling.top_p",
        "stop": "stopping.stop",
        "logprobs": "output.logprobs",
        "messages[3]": "chat.messages[3]",
        "cache.salt": "cache.salt",
        "prompt": "prompt",
        "": "",
    }
    for field, name in names.items():
        assert field_to_wire(field) == name
        assert field_from_wire(name) == field
    assert field_from_wire("sampling.of_a_newer_server") == "sampling.of_a_newer_server"
