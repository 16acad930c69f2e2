"""The names that a log may have: those of the wire and of OpenAI's dialect, none that a caller made up."""

import re
from collections.abc import Iterable
from functools import cache
from typing import Final

from google.protobuf.descriptor import Descriptor

from ...proto.open_inference import open_inference_pb2 as oip
from ...proto.v1 import generation_pb2 as pb

# The names in OpenAI's dialect that the wire does not have.
_OPENAI: Final = (
    *("include_usage", "json_schema", "logprobs", "max_completion_tokens", "max_tokens", "messages", "min_tokens"),
    *("name", "prompt", "response_format", "schema", "stream", "stream_options", "strict", "top_logprobs", "type"),
    *("best_of", "echo", "functions", "suffix", "tool_choice", "tools"),
)
_INDEX: Final = re.compile(r"\[\d{1,6}\]")


def known_name(name: str) -> str:
    """Returns the name of a call, or the path of a field, if all of it is known; "" otherwise."""
    words = _INDEX.sub("", name[:200]).split(".")
    return name[:200] if set(words) <= _known_names() else ""


@cache
def _known_names() -> frozenset[str]:
    names = {*_OPENAI, "ServerReflectionInfo"}
    for file in (pb.DESCRIPTOR, oip.DESCRIPTOR):
        names |= set(_names_of(file.message_types_by_name.values()))
        for service in file.services_by_name.values():
            names |= {method.name for method in service.methods}
    return frozenset(names)


def _names_of(messages: Iterable[Descriptor]) -> Iterable[str]:
    for message in messages:
        yield from (field.name for field in message.fields)
        yield from (oneof.name for oneof in message.oneofs)
        yield from _names_of(message.nested_types)
