"""The spans of a call, planned from its record: phases within the call, and no words of the caller."""

import json
from typing import Any

from tk.core.errors import Cancelled, Overloaded
from tk.infer.engine.request.events import Delta, Finished, FinishReason, Started, Timing, Usage
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.infer.serve.metrics.request_record import RequestRecord, RequestTerms, trace_of
from tk.infer.serve.metrics.spans import PlannedSpan, spans_of

BEGUN = 1_700_000_000 * 10**9


def record(**fields: Any) -> RequestRecord:
    made: dict[str, Any] = {"method": "Generate", "principal": "alice", "begun_ns": BEGUN}
    return RequestRecord(**made | fields)


def phases(spans: list[PlannedSpan]) -> dict[str, tuple[float, float]]:
    """Begins and ends in seconds since the call's begin."""
    return {span.name: ((span.begin_ns - BEGUN) / 1e9, (span.end_ns - BEGUN) / 1e9) for span in spans}


def completed() -> RequestRecord:
    params = SamplingParams(temperature=0.5, max_new_tokens=3, n=2, seed=7, stop=("secret",))
    made = record(terms=RequestTerms(params=params))
    made.admit("x")
    made.progress.admitted = 0.5
    made.see(Started("x", 7, 4, seed=7, step=40))
    made.see(Delta(0, "abc", (1, 2, 3)))
    for total, preemptions in ((3.0, 1), (4.0, 0)):
        timing = Timing(queue_seconds=1.0, first_token_seconds=2.0, total_seconds=total, preemptions=preemptions)
        made.see(Finished(0, FinishReason.LENGTH, Usage(7, 4, 3), timing))
    made.values["total_seconds"] = 5.0
    return made


def test_phases_have_the_times_of_the_engine() -> None:
    assert phases(spans_of(completed(), "tiny")) == {
        "text_completion tiny": (0.0, 5.0),
        "queue": (0.5, 1.5),
        "prefill": (1.5, 2.5),
        "decode": (2.5, 4.5),
    }


def test_the_call_has_the_attributes_of_the_conventions_and_no_text() -> None:
    call, *rest = spans_of(completed(), "tiny")
    assert call.attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "tk",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": 7,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "x",
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "rpc.system.name": "grpc",
        "rpc.method": "Generate",
        "rpc.response.status_code": "OK",
        "tk.principal": "alice",
        "tk.checkpoint_step": 40,
        "tk.preemptions": 1,
    }
    assert [dict(span.attributes) for span in rest] == [{}, {}, {}]


def test_a_request_that_does_not_complete_has_the_phases_that_it_reached() -> None:
    made = record(status="CANCELLED", error=Cancelled("gone"), values={"total_seconds": 4.0})
    made.progress.admitted = 1.0
    assert phases(spans_of(made, "m")) == {"text_completion m": (0, 4), "queue": (1, 4)}
    made.progress.started, made.progress.first_token = 2.0, 3.0
    assert list(phases(spans_of(made, "m")).values()) == [(0, 4), (1, 2), (2, 3), (3, 4)]
    assert spans_of(made, "m")[0].attributes["error.type"] == "CANCELLED"


def test_a_refused_request_has_no_phases() -> None:
    made = record(method="POST /v1/completions", status="RESOURCE_EXHAUSTED", error=Overloaded("full"))
    [call] = spans_of(made, "m")
    assert call.attributes["error.type"] == "RESOURCE_EXHAUSTED"
    assert (call.attributes["http.request.method"], call.attributes["http.route"]) == ("POST", "/v1/completions")
    assert not any(name.startswith(("rpc.", "gen_ai.usage", "gen_ai.response.id")) for name in call.attributes)


def test_prompts_that_are_logged_have_the_form_of_the_conventions() -> None:
    def shown(prompt: Any) -> Any:
        return json.loads(spans_of(record(values={"prompt": prompt}), "m")[0].attributes["gen_ai.input.messages"])

    parts = [{"type": "text", "content": "hi"}]
    assert shown("hi") == [{"role": "user", "parts": parts}]
    assert shown({"messages": [{"role": "system", "content": "hi"}]}) == [{"role": "system", "parts": parts}]
    assert shown({"ids": [5]}) == {"ids": [5]}


def test_a_trace_context_is_taken_from_headers_of_a_bounded_length() -> None:
    headers: list[tuple[str, str | bytes]] = [("traceparent", "00-a-b-01"), ("tracestate", "x" * 513), ("other", "y")]
    assert trace_of(headers) == {"traceparent": "00-a-b-01"}
    assert trace_of([("traceparent", b"00")]) == {}
