"""The .proto keeps the promises of tk.v1: its numbers, generated code that follows it, room for newer servers."""

import re
from pathlib import Path

from tk.infer.events import FinishReason
from tk.infer.wire import completion_from_wire, event_from_wire
from tk.proto.v1 import generation_pb2 as pb

# Fixed for ever: fields in order, numbered from 1. Fields that are added later get numbers beyond these.
PROMISED = {
    "GenerateRequest": "request_id model text tokens chat no_special_tokens sampling stopping output cache priority",
    "TokenIds": "ids",
    "Chat": "messages",
    "ChatMessage": "role content",
    "Sampling": "temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty logit_bias seed n "
    "json_schema regex",
    "Stopping": "max_new_tokens min_new_tokens stop stop_token_ids ignore_eos",
    "OutputOptions": "logprobs prompt_logprobs keep_special_tokens include_stop",
    "CacheOptions": "bypass salt",
    "GenerateResponse": "started delta finished",
    "Started": "request_id prompt_tokens cached_tokens seed prompt_logprobs",
    "Delta": "index text token_ids logprobs",
    "TokenLogprob": "token_id logprob rank token top",
    "TopLogprob": "token_id logprob token",
    "Finished": "index reason stop stop_token_id usage timing",
    "Usage": "prompt_tokens cached_tokens completion_tokens",
    "Timing": "queue_seconds first_token_seconds total_seconds preemptions",
    "GenerateResult": "request_id seed choices usage timing prompt_logprobs",
    "Choice": "index text token_ids logprobs reason stop stop_token_id",
    "ScoreRequest": "text tokens continuation_text continuation_tokens top",
    "ScoreResponse": "logprobs total is_greedy prompt_tokens",
}


def test_numbers_are_those_promised() -> None:
    for message, names in PROMISED.items():
        fields = pb.DESCRIPTOR.message_types_by_name[message].fields_by_name
        assert [fields[name].number for name in names.split()] == list(range(1, len(names.split()) + 1)), message
    reasons = {name.removeprefix("FINISH_REASON_"): number for name, number in pb.FinishReason.items()}
    assert reasons == {"UNSPECIFIED": 0, "EOS": 1, "STOP_TOKEN": 2, "STOP_STRING": 3, "LENGTH": 4}


def test_generated_code_is_that_of_the_proto() -> None:
    source = Path(pb.__file__).with_name("generation.proto").read_text()
    written: dict[str, dict[str, int]] = {}
    message = ""
    for line in source.splitlines():
        if opened := re.match(r"message (\w+) \{", line):
            message = opened[1]
            written[message] = {}
        elif field := re.match(r" +(?:optional |repeated )?[\w<>, ]+ (\w+) = (\d+);", line):
            written.get(message, {})[field[1]] = int(field[2])
        elif line == "}":
            message = ""
    generated = {
        name: {field.name: field.number for field in descriptor.fields}
        for name, descriptor in pb.DESCRIPTOR.message_types_by_name.items()
    }
    assert written == generated


def test_every_field_and_call_is_documented() -> None:
    source = Path(pb.__file__).with_name("generation.proto").read_text().splitlines()
    declared = [number for number, line in enumerate(source) if re.search(r"= \d+;$|^ +rpc ", line)]
    assert len(declared) > 100
    assert [source[number] for number in declared if not source[number - 1].lstrip().startswith("//")] == []


def test_events_and_reasons_of_a_newer_server() -> None:
    newer = bytes([0x7A, 2, 8, 1])  # field 15, an event arm that we do not know
    assert event_from_wire(pb.GenerateResponse.FromString(newer)) is None
    result = pb.GenerateResult(choices=[pb.Choice(text="abc", reason=9)])  # type: ignore[arg-type]
    assert completion_from_wire(result).finish_reason is FinishReason.LENGTH
