"""The parameters of a request: its options of sampling and stopping, under the names that tk.v1 has for them.

Some senders have no type for fractions or lists. So numbers may be texts, and lists and objects are texts of JSON.
"""

import json
import math
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, Final, TypeVar, get_args, get_type_hints

from ....core.errors import InvalidRequest
from ....proto.open_inference import open_inference_pb2 as oip
from ...engine.grammar.compiler import MAX_BYTES
from ...engine.grammar.grammar import Kind
from ...engine.request.sampling_params import MAX_LOGIT_BIAS, OPTIONS, SamplingParams

# Names that other servers have for the same options.
ALIASES: Final = MappingProxyType({"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"})
TIMEOUT: Final = "timeout"
ADAPTER: Final = "adapter"
# Clients set it to have a last message marked in a stream. Here all streams have one, so it changes nothing.
WANTS_FINAL: Final = "triton_enable_empty_final_response"
# The longest text of JSON for a list or an object: more than any that is accepted needs, and json is done at once.
MAX_JSON: Final = 64 << 10
# The longest time that the engine's clock is asked to hold, in microseconds: a year.
MAX_TIMEOUT: Final = 366 * 86_400 * 10**6
# Tensors of log-probabilities are not built.
_NO_PARAMETERS: Final = frozenset(("logprobs", "prompt_logprobs"))
_TYPES: Final = MappingProxyType(get_type_hints(SamplingParams))
_FLOAT32: Final = struct.Struct("f")
T = TypeVar("T")


def read_parameters(given: Mapping[str, oip.InferParameter]) -> tuple[SamplingParams, dict[str, str]]:
    """Reads the parameters of a request.

    Returns:
        The options; and for each field that was set, as errors name it, the name of its
        parameter.

    Raises:
        InvalidRequest: a parameter is unknown, has a wrong value, or excludes another one.
    """
    options: dict[str, Any] = {}
    names: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in sorted(given):
        if name in (TIMEOUT, ADAPTER, WANTS_FINAL):
            continue
        option = ALIASES.get(name, name)
        if option not in OPTIONS or option in _NO_PARAMETERS:
            raise unknown_parameter(f"parameters.{name}")
        if (other := taken.setdefault("constraint" if option in get_args(Kind) else option, name)) != name:
            raise wrong(f"parameters.{name}", f"set beside {other}", "unset there")
        options[option] = _option(option, name, _value(given[name]))
        names[option] = name
    return SamplingParams(**options), names


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
        raise wrong(f"parameters.{TIMEOUT}", _shown(value), f"0 (no limit) to {MAX_TIMEOUT} microseconds", value)
    return number / 1e6 if number else None


def read_adapter(given: Mapping[str, oip.InferParameter]) -> str:
    """Returns the name of the adapter that the caller wants; "" = none. Raises InvalidRequest if it is no text."""
    value = _value(given[ADAPTER]) if ADAPTER in given else ""
    if not isinstance(value, str):
        raise wrong(f"parameters.{ADAPTER}", _shown(value), "the name of a loaded adapter", value)
    return value


def unknown_parameter(field: str) -> InvalidRequest:
    """Returns the error of a parameter that this server does not know."""
    field = field[:200]
    return InvalidRequest(f"{field} is unknown to this server; leave it unset.", field=field)


def _option(option: str, name: str, given: Any) -> Any:
    """Returns the value of an option, which its parameter has in one of the types that senders have."""
    right, convert = _SEED if option == "seed" else _CONVERSIONS[_TYPES[option]]
    is_json = "JSON" in right
    longest = MAX_JSON if is_json else MAX_BYTES
    if isinstance(given, str) and len(given) > longest:
        raise wrong(f"parameters.{name}", f"a text of {len(given)} characters", f"one of at most {longest}")
    try:
        value: Any = convert(given)
    except (ValueError, OverflowError) as error:
        raise wrong(f"parameters.{name}", _shown(given), right, given) from error
    if is_json and len(value) > MAX_LOGIT_BIAS:
        raise wrong(f"parameters.{name}", f"{len(value)} entries", f"at most {MAX_LOGIT_BIAS}")
    return value


# The conversions take any value, and raise ValueError or OverflowError for those that are wrong.
def _as(kind: type[T], value: Any) -> T:
    if not isinstance(value, kind):
        raise ValueError
    return value


def _text(value: Any) -> str:
    return _as(str, value).encode().decode()  # fails on half a surrogate pair, which JSON can have


def _number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    with suppress(ValueError):
        return int(value) if isinstance(value, str) else value
    return float(value)


def _integer(value: Any, most: int = 2**32 - 1) -> int:
    number = _number(value)
    if number != number // 1 or not 0 <= number <= most:
        raise ValueError
    return int(number)


def _float(value: Any) -> float:
    """Returns the nearest number of 32 bits, as the options of tk.v1 have."""
    number: float = _FLOAT32.unpack(_FLOAT32.pack(float(_number(value))))[0]
    if not math.isfinite(number):
        raise ValueError
    return number


def _parsed(value: Any) -> Any:
    """Returns what a text of JSON holds; None for anything else."""
    with suppress(TypeError, ValueError, RecursionError):
        return json.loads(value)
    return None


def _texts(value: Any) -> tuple[str, ...]:
    """Returns the texts of a JSON list; any other text is the only one."""
    parsed = _parsed(value)
    return tuple(map(_text, parsed if isinstance(parsed, list) else [value]))


def _ids(value: Any) -> tuple[int, ...]:
    return tuple(map(_integer, _as(list, _parsed(value))))


def _biases(value: Any) -> dict[int, float]:
    return {_integer(key): _float(bias) for key, bias in _as(dict, _parsed(value)).items()}


_UINT32: Final = f"an integer from 0 to {2**32 - 1}", _integer
_SEED: Final = f"an integer from 0 to {2**64 - 1}", partial(_integer, most=2**64 - 1)
# What values must be, and their conversion, for each type of an option.
_CONVERSIONS: Final[Mapping[Any, tuple[str, Callable[[Any], Any]]]] = MappingProxyType(
    {
        bool: ("true or false", partial(_as, bool)),
        float: ("a finite number", _float),
        int: _UINT32,
        int | None: _UINT32,
        str | None: ("a text", _text),
        tuple[str, ...]: ("a text, or a JSON list of texts", _texts),
        tuple[int, ...]: ("a JSON list of token ids", _ids),
        Mapping[int, float]: ("a JSON object of token ids and numbers", _biases),
    }
)


def _value(parameter: oip.InferParameter) -> bool | int | float | str | None:
    value: bool | int | float | str | None = getattr(parameter, parameter.WhichOneof("parameter_choice") or "", None)
    return value


def _shown(value: Any) -> str:
    if value is None:
        return "without a value"
    shown = repr(value[:60] if isinstance(value, str) else value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def wrong(field: str, shown: str, right: str, given: object = None) -> InvalidRequest:
    """Returns the error of a field that has a wrong value."""
    return InvalidRequest(f"{field} is {shown}; it must be {right}.", field=field, given=given)
