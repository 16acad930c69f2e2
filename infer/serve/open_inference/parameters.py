"""The parameters of a request: its options of sampling and stopping, under the names that tk.v1 has for them.

Some senders have no type for fractions or lists. So numbers may be texts, and lists and objects are texts of JSON.
"""

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import ParseDict, ParseError

from ....core.errors import InvalidRequest
from ....proto.open_inference import open_inference_pb2 as oip
from ....proto.v1 import generation_pb2 as pb
from ...engine.grammar.compiler import MAX_BYTES
from ...engine.request.sampling_params import MAX_LOGIT_BIAS

# Names that other servers have for the same options.
ALIASES: Final = MappingProxyType({"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"})
TIMEOUT: Final = "timeout"
# Clients set it to have a last message marked in a stream. Here all streams have one, so it changes nothing.
WANTS_FINAL: Final = "triton_enable_empty_final_response"
# The longest text of JSON for a list or an object: more than any that is accepted needs, and json is done at once.
MAX_JSON: Final = 64 << 10
# The longest time that the engine's clock is asked to hold, in microseconds: a year.
MAX_TIMEOUT: Final = 366 * 86_400 * 10**6
_RIGHT: Final = MappingProxyType(
    {
        FieldDescriptor.CPPTYPE_BOOL: "true or false",
        FieldDescriptor.CPPTYPE_FLOAT: "a finite number",
        FieldDescriptor.CPPTYPE_STRING: "a text",
        FieldDescriptor.CPPTYPE_UINT32: f"an integer from 0 to {2**32 - 1}",
        FieldDescriptor.CPPTYPE_UINT64: f"an integer from 0 to {2**64 - 1}",
    }
)


def _places() -> Iterator[tuple[str, tuple[str, FieldDescriptor]]]:
    """Yields the options by name, each with the part of a GenerateRequest that has it, and its field there."""
    parts = pb.GenerateRequest.DESCRIPTOR.fields_by_name
    for part in ("sampling", "stopping"):
        yield from ((field.name, (part, field)) for field in parts[part].message_type.fields)
    for name in ("include_stop", "keep_special_tokens"):
        yield name, ("output", parts["output"].message_type.fields_by_name[name])


_PLACES: Final[Mapping[str, tuple[str, FieldDescriptor]]] = MappingProxyType(dict(_places()))


def read_parameters(given: Mapping[str, oip.InferParameter], request: pb.GenerateRequest) -> dict[str, str]:
    """Writes parameters into a request.

    Returns:
        For each field that was set, as errors name it ("stopping.max_new_tokens"), the name of its parameter.

    Raises:
        InvalidRequest: a parameter is unknown, has a wrong value, or excludes another one.
    """
    names: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in sorted(given):
        if name in (TIMEOUT, WANTS_FINAL):
            continue
        if (place := _PLACES.get(ALIASES.get(name, name))) is None:
            raise unknown_parameter(f"parameters.{name}")
        part, field = place
        only_one = field.full_name if field.containing_oneof is None else field.containing_oneof.full_name
        if (other := taken.setdefault(only_one, name)) != name:
            raise _wrong(name, f"set beside {other}", "unset there")
        _set(getattr(request, part), field, name, given[name])
        names[f"{part}.{field.name}"] = name
    return names


def read_timeout(given: Mapping[str, oip.InferParameter]) -> float | None:
    """Returns the seconds that the caller waits for the answer, from the parameter in microseconds; None = no limit.

    Raises:
        InvalidRequest: it is no number of microseconds.
    """
    if TIMEOUT not in given:
        return None
    value = _value(given[TIMEOUT])
    number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 20 else value
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MAX_TIMEOUT:
        raise _wrong(TIMEOUT, _shown(value), f"0 (no limit) to {MAX_TIMEOUT} microseconds", value)
    return number / 1e6 if number else None


def unknown_parameter(field: str) -> InvalidRequest:
    """Returns the error of a parameter that this server does not know."""
    field = field[:200]
    return InvalidRequest(f"{field} is unknown to this server; leave it unset.", field=field)


def _set(part: Any, field: FieldDescriptor, name: str, parameter: oip.InferParameter) -> None:
    """Sets a field of a part of the request; JSON's rules for protobuf check type and range."""
    given = _value(parameter)
    value: Any = given
    right = _RIGHT.get(field.cpp_type, "of another type")
    if field.message_type is not None:
        value, right = _parsed(given, name), "a JSON object of token ids and numbers"
    elif field.is_repeated and field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        value, right = _texts(given, name), "a text, or a JSON list of texts"
    elif field.is_repeated:
        value, right = _parsed(given, name), "a JSON list of token ids"
    elif isinstance(given, str) and len(given) > MAX_BYTES:
        raise _wrong(name, f"a text of {len(given)} characters", f"one of at most {MAX_BYTES}")
    is_flag = field.cpp_type == FieldDescriptor.CPPTYPE_BOOL
    try:
        if value is None or isinstance(value, bool) != is_flag:
            raise ParseError("JSON's rules take true for 1, and null for unset")
        ParseDict({field.name: value}, part)
    except ParseError as error:
        raise _wrong(name, _shown(given), right, given) from error


def _value(parameter: oip.InferParameter) -> bool | int | float | str | None:
    arm = parameter.WhichOneof("parameter_choice")
    value: bool | int | float | str | None = getattr(parameter, arm) if arm else None
    return value


def _parsed(value: Any, name: str) -> list[Any] | dict[str, Any] | None:
    """Returns the list or object that a text of JSON holds; None for anything else."""
    if not isinstance(value, str):
        return None
    if len(value) > MAX_JSON:
        raise _wrong(name, f"a text of {len(value)} characters", f"one of at most {MAX_JSON}")
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return None
    if not isinstance(parsed, list | dict):
        return None
    if len(parsed) > MAX_LOGIT_BIAS:
        raise _wrong(name, f"{len(parsed)} entries", f"at most {MAX_LOGIT_BIAS}")
    return parsed


def _texts(value: Any, name: str) -> Any:
    """Returns the texts of a JSON list; any other text is the only one."""
    parsed = _parsed(value, name)
    if isinstance(value, str) and not isinstance(parsed, list):
        return [value]
    return parsed


def _shown(value: Any) -> str:
    if value is None:
        return "without a value"
    shown = repr(value[:60] if isinstance(value, str) else value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _wrong(name: str, shown: str, right: str, given: object = None) -> InvalidRequest:
    field = f"parameters.{name}"
    return InvalidRequest(f"{field} is {shown}; it must be {right}.", field=field, given=given)
