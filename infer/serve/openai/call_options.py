"""The fields that both dialects share: sampling, what the text must be, and those that ask for nothing."""

import json
import re
from typing import Any, Final

from ....core.argument_types import NUMBER
from ...engine.request.request import CacheOptions
from ...engine.request.sampling_params import OPTIONS
from ..http.json_body import Fields

# OpenAI's fields that this server knows and does not implement.
NOT_BUILT: Final = frozenset(
    (
        *("audio", "best_of", "echo", "function_call", "functions", "modalities", "moderation", "prediction"),
        *("prompt_cache_retention", "reasoning_effort", "service_tier", "store", "suffix", "tool_choice", "tools"),
        *("verbosity", "web_search_options"),
    )
)
# Numbers have SamplingParams' names. Some of them, and below top_k, min_tokens, stop_token_ids and ignore_eos, are not
# OpenAI's: other servers have them under these names too.
_NUMBERS: Final = tuple(name for name, each in OPTIONS.items() if each.kind is NUMBER)
# Clients send these by default, with values that ask for what happens anyway; another value is refused by name.
_IDLE: Final[dict[str, tuple[Any, ...]]] = {
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
}


def take_options(fields: Fields) -> dict[str, Any]:
    """Takes the options of an answer; returns those that are set, as arguments of SamplingParams."""
    found: dict[str, Any] = {
        **{name: fields.number(name) for name in _NUMBERS},
        "top_k": _top_k(fields),
        "seed": fields.integer("seed", 2**64 - 1),
        "n": fields.integer("n"),
        "json_schema": _schema(fields.object("response_format")),
        "max_new_tokens": _length(fields),
        "min_new_tokens": fields.integer("min_tokens"),
        "logit_bias": fields.numbers_by_id("logit_bias"),
        "stop": tuple(fields.texts("stop")),
        "stop_token_ids": tuple(fields.integers("stop_token_ids")),
        "ignore_eos": fields.flag("ignore_eos"),
    }
    for name, value in _structure(fields.object("structured_outputs")).items():
        if value is not None and found.get(name) is not None:
            raise fields.wrong("structured_outputs", name, "unset beside response_format")
        found[name] = value
    take_idle(fields)
    return {name: value for name, value in found.items() if value is not None}


def take_cache_options(fields: Fields) -> CacheOptions:
    """Takes the salt: only calls that have the same one share cached prefixes."""
    return CacheOptions(salt=fields.text("cache_salt") or "")


def take_idle(fields: Fields) -> None:
    """Takes the fields that change nothing: names for the operator's records, and values that ask for nothing.

    Raises:
        InvalidRequest: one asks for what is not built.
    """
    for name in ("prompt_cache_key", "safety_identifier", "user"):
        fields.text(name)
    fields.object("metadata")
    fields.flag("parallel_tool_calls")  # there are no tools to call
    for name, values in _IDLE.items():
        fields.only(name, *values)


def _top_k(fields: Fields) -> int | None:
    """Takes the number of most probable tokens to keep; -1 means all, as 0 does."""
    value = fields.anything("top_k")
    return 0 if value == -1 else Fields({"top_k": value}).integer("top_k")


def _length(fields: Fields) -> int | None:
    """Takes the number of new tokens, which has an old name and a new one."""
    old, new = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise fields.wrong("max_completion_tokens", new, f"{old}, as max_tokens is; set one of them")
    return new if old is None else old


def _schema(form: Fields | None) -> str | None:
    """Returns the JSON Schema of a response format; None for plain text."""
    if form is None:
        return None
    kind, schema = form.text("type"), None
    if kind == "json_schema":
        schema = _named_schema(form)
    elif kind == "json_object":
        schema = '{"type":"object"}'
    elif kind != "text":
        raise form.wrong("type", kind, "text, json_object or json_schema")
    form.refuse_rest()
    return schema


def _named_schema(form: Fields) -> str:
    named = form.object("json_schema")
    if named is None:
        raise form.wrong("json_schema", None, "an object with a name and a schema")
    for name in ("name", "description"):
        named.text(name)
    named.flag("strict")  # the text is always what the schema accepts
    schema = named.anything("schema")
    if not isinstance(schema, dict):
        raise named.wrong("schema", schema, "a JSON Schema, as an object")
    named.refuse_rest()
    return json.dumps(schema)


def _structure(form: Fields | None) -> dict[str, str | None]:
    """Returns the constraint of `structured_outputs`, a field of other servers."""
    if form is None:
        return {}
    schema, choices = form.anything("json"), form.texts("choice")
    if schema is not None and not isinstance(schema, str | dict):
        raise form.wrong("json", schema, "a JSON Schema, as an object or a string")
    found = {
        "json_schema": json.dumps(schema) if isinstance(schema, dict) else schema,
        "regex": form.text("regex"),
        "grammar": form.text("grammar"),
    }
    if choices and found["regex"] is not None:
        raise form.wrong("choice", choices, "unset beside regex")
    if choices:
        found["regex"] = "|".join(map(re.escape, choices))
    form.refuse_rest()
    return found
