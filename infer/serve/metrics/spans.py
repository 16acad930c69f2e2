"""The spans of a request: one for the call and one for each phase in the engine, planned from its record.

Names of attributes are those of OpenTelemetry's conventions for generative AI and for calls; our own begin with `tk.`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from .request_record import RequestProgress, RequestRecord

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

    def at(seconds: float) -> int:
        return record.begun_ns + round(seconds * 1e9)

    end = record.values.get("total_seconds", 0.0)
    call = PlannedSpan(f"{record.terms.operation} {model}", record.begun_ns, at(end), _attributes(record, model))
    phases = _phases(record.progress, end)
    return [call, *(PlannedSpan(name, at(min(begin, end)), at(min(stop, end))) for name, begin, stop in phases)]


def _phases(progress: RequestProgress, end: float) -> Iterator[tuple[str, float, float]]:
    """Returns the phases by name, begin and end in seconds since the call's begin: queue, prefill, decode.

    The engine's own times are exact; a request that did not complete has none, so those count at which its events came.
    """
    begin, scheduled, first = progress.admitted, progress.started, progress.first_token
    if begin is not None and progress.samples:
        timings = [sample.timing for sample in progress.samples]
        scheduled = begin + min(each.queue_seconds for each in timings)
        first = begin + min(each.first_token_seconds for each in timings)
        end = begin + max(each.total_seconds for each in timings)
    edges = [] if begin is None else [edge for edge in (begin, scheduled, first) if edge is not None]
    return zip(_PHASES, edges, [*edges[1:], end], strict=False)


def _attributes(record: RequestRecord, model: str) -> dict[str, Any]:
    values, params, progress = record.values, record.terms.params, record.progress
    found: dict[str, Any] = {
        "gen_ai.operation.name": record.terms.operation,
        "gen_ai.provider.name": "tk",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": record.request_id or None,
        "gen_ai.response.finish_reasons": progress.reasons or None,
        "gen_ai.usage.input_tokens": values.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": values.get("completion_tokens"),
        "gen_ai.usage.cache_read.input_tokens": values.get("cached_tokens"),
        "gen_ai.input.messages": _messages(values["prompt"]) if "prompt" in values else None,
        "tk.principal": record.principal or None,
        "tk.checkpoint_step": progress.step,
        "tk.adapter": progress.adapter or None,
        "tk.adapter_sha256": progress.adapter_sha256 or None,
        "tk.preemptions": progress.preemptions if progress.samples else None,
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
