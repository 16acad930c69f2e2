"""The options that both of OpenAI's completions share, as those of SamplingParams."""

import json
from typing import Any, Final

from ....core.argument_types import NUMBER
from ...engine.request.sampling_params import OPTIONS
from .fields import Fields

# Numbers have SamplingParams' names. Some of them, and below top_k, min_tokens, stop_token_ids and ignore_eos, are not
# OpenAI's: other servers have them under these names too.
_NUMBERS: Final = tuple(name for name, each in OPTIONS.items() if each.kind is NUMBER)
NOT_BUILT: Final = frozenset(
    (
        "audio",
        "best_of",
        "echo",
        "function_call",
        "functions",
        "metadata",
        "modalities",
        "moderation",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "suffix",
        "tool_choice",
        "tools",
        "verbosity",
        "web_search_options",
    )
)


def read_options(fields: Fields) -> dict[str, Any]:
    """Takes the options that are not the prompt's; returns those that are set, as arguments of SamplingParams.

    Raises:
        InvalidRequest: an option has the wrong type, or one that cannot be represented.
    """
    found: dict[str, Any] = {name: fields.number(name) for name in _NUMBERS}
    found |= {"top_k": fields.integer("top_k"), "seed": fields.integer("seed", 2**64 - 1), "n": fields.integer("n")}
    found["json_schema"] = _schema(fields.object("response_format"))
    found["max_new_tokens"] = _length(fields)
    found["min_new_tokens"] = fields.integer("min_tokens")
    found["logit_bias"] = fields.numbers_by_id("logit_bias")
    found["stop"], found["stop_token_ids"] = tuple(fields.texts("stop")), tuple(fields.integers("stop_token_ids"))
    found["ignore_eos"] = fields.flag("ignore_eos")
    fields.text("user")  # a name for the operator's own records: it changes nothing
    return {name: value for name, value in found.items() if value is not None}


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
    kind = form.text("type")
    if kind == "json_schema":
        schema = _named_schema(form)
    elif kind == "json_object":
        schema = '{"type":"object"}'
    elif kind == "text":
        schema = None
    else:
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
