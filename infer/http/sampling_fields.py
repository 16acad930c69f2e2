"""The options that both of OpenAI's completions share, as those of a GenerateRequest."""

import json
from typing import Final

from ...proto.v1 import generation_pb2 as pb
from .fields import Fields

# min_p and repetition_penalty, and below top_k, min_tokens, stop_token_ids and ignore_eos, are not OpenAI's: other
# servers have them under these names too.
_NUMBERS: Final = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "min_p",
    "repetition_penalty",
)
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


def read_options(fields: Fields, request: pb.GenerateRequest) -> None:
    """Takes the options that are not the prompt's; unset ones stay unset.

    Raises:
        InvalidRequest: an option has the wrong type, or one that cannot be represented.
    """
    request.model = fields.text("model") or ""
    _read_sampling(fields, request.sampling)
    if (most := _length(fields)) is not None:
        request.stopping.max_new_tokens = most
    request.stopping.stop.extend(fields.texts("stop"))
    request.stopping.stop_token_ids.extend(fields.integers("stop_token_ids"))
    request.stopping.min_new_tokens = fields.integer("min_tokens") or 0
    request.stopping.ignore_eos = fields.flag("ignore_eos")
    fields.text("user")  # a name for the operator's own records: it changes nothing


def _read_sampling(fields: Fields, sampling: pb.Sampling) -> None:
    for name in _NUMBERS:
        if (number := fields.number(name)) is not None:
            setattr(sampling, name, number)
    if (top_k := fields.integer("top_k")) is not None:
        sampling.top_k = top_k
    if (seed := fields.integer("seed", 2**64 - 1)) is not None:
        sampling.seed = seed
    if (samples := fields.integer("n")) is not None:
        sampling.n = samples
    sampling.logit_bias.update(fields.numbers_by_id("logit_bias"))
    if (schema := _schema(fields.object("response_format"))) is not None:
        sampling.json_schema = schema


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
