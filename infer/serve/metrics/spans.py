"""The spans of a request: one for the call and one for each phase in the engine, planned from its record.

Names of attributes are those of OpenTelemetry's conventions for generative AI and for calls; our own begin with `tk.`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from .request_record import RequestRecord

# The statuses that are the server's fault; the others are the caller's, or wanted.
FAULTS: Final = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
_PHASES: Final = ("queue", "prefill", "decode")
_PARAMS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "temperature": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "seed": "seed",
        "max_new_tokens": "max_tokens",
        "n": "choice.count",
        "frequency_penalty": "frequency_penalty",
        "presence_penalty": "presence_penalty",
    }
)


@dataclass(frozen=True)
class PlannedSpan:
    """A span: its name, its begin and end in nanoseconds since 1970, and its attributes."""

    name: str
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Any] = field(default_factory=dict)


def spans_of(record: RequestRecord, model: str) -> list[PlannedSpan]:
    """Returns the span of a call that has ended, and then those of its phases, which lie within it.

    Args:
        record: the record of the call.
        model: the name of the served model.
    """
    end = record.values.get("total_seconds", 0.0)
    call = PlannedSpan(f"{record.operation} {model}", record.begun_ns, _at(record, end), _attributes(record, model))
    return [call, *(_phase(record, *phase) for phase in _phases(record, end))]


def _phases(record: RequestRecord, end: float) -> list[tuple[str, float, float]]:
    """Returns the phases by name, begin and end in seconds since the call's begin: queue, prefill, decode.

    The engine's own times are exact; a request that did not complete has none, so those count at which its events came.
    """
    begin = record.admitted
    if begin is None:
        return []
    if record.timings:
        scheduled: float | None = begin + min(each.queue_seconds for each in record.timings)
        first: float | None = begin + min(each.first_token_seconds for each in record.timings)
        last = begin + max(each.total_seconds for each in record.timings)
    else:
        scheduled, first, last = record.started, record.first_token, end
    edges = [edge for edge in (begin, scheduled, first) if edge is not None]
    stops = [*edges[1:], last]
    return [(name, min(start, end), min(stop, end)) for name, start, stop in zip(_PHASES, edges, stops, strict=False)]


def _phase(record: RequestRecord, name: str, begin: float, end: float) -> PlannedSpan:
    return PlannedSpan(name, _at(record, begin), _at(record, end))


def _at(record: RequestRecord, seconds: float) -> int:
    return record.begun_ns + round(seconds * 1e9)


def _attributes(record: RequestRecord, model: str) -> dict[str, Any]:
    values, params = record.values, record.params
    found: dict[str, Any] = {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": "tk",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": record.request_id or None,
        "gen_ai.response.finish_reasons": record.reasons or None,
        "gen_ai.usage.input_tokens": values.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": values.get("completion_tokens"),
        "gen_ai.usage.cache_read.input_tokens": values.get("cached_tokens"),
        "gen_ai.input.messages": _messages(values["prompt"]) if "prompt" in values else None,
        "tk.principal": record.principal or None,
        "tk.checkpoint_step": record.step,
        "tk.preemptions": sum(each.preemptions for each in record.timings) if record.timings else None,
        "error.type": None if record.status == "OK" else record.status,
    }
    if params is not None:
        found |= {f"gen_ai.request.{name}": getattr(params, key) for key, name in _PARAMS.items()}
    http_method, _, path = record.method.partition(" ")
    if path:
        found |= {"http.request.method": http_method, "http.route": path}
    else:
        found |= {
            "rpc.system.name": "grpc",
            "rpc.method": record.method,
            "rpc.response.status_code": record.status,
        }
    return {name: value for name, value in found.items() if value is not None}


def _messages(prompt: Any) -> str:
    """Returns a logged prompt as JSON: messages in the conventions' form, or the token ids as they are."""
    if isinstance(prompt, str):
        prompt = {"messages": [{"role": "user", "content": prompt}]}
    if isinstance(prompt, dict) and "messages" in prompt:
        prompt = [
            {"role": each.get("role", ""), "parts": [{"type": "text", "content": each.get("content", "")}]}
            for each in prompt["messages"]
        ]
    return json.dumps(prompt, ensure_ascii=False)
