"""Traces of real requests at a real collector: contexts of callers, collectors that hang or are gone, no collector."""

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

pytest.importorskip("opentelemetry", reason="the extra otel is not installed")

from tk.core.errors import ConfigError
from tk.infer.engine.request.events import Done
from tk.infer.serve.metrics.request_record import RequestRecord
from tk.infer.serve.metrics.traces import RequestTraces, check_endpoint, chosen_endpoint
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import GenerationStub
from tk.tests.infer.serve.fake_engine import WAIT_SECONDS, FakeEngine, ServerThread, delta, finished, started
from tk.tests.infer.serve.http.http_server import HttpServerThread
from tk.tests.infer.serve.metrics.collector import Collector, attributes
from tk.tests.infer.serve.serving import Serving
from tk.tests.infer.serve.tiny_model import write_tiny_model

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{CALLER}-01"


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    engine.script = lambda request: [started(request), delta("abc"), finished(), Done()]
    yield engine
    engine.close()


def generate(server: ServerThread, *metadata: tuple[str, str], **fields: Any) -> None:
    with grpc.insecure_channel(server.target) as channel:
        request = pb.GenerateRequest(**{"text": "secret words"} | fields)
        list(GenerationStub(channel).Generate(request, timeout=WAIT_SECONDS, metadata=metadata))


def test_a_request_is_a_span_of_its_callers_trace(engine: FakeEngine, collector: Collector) -> None:
    server = ServerThread(engine, otlp_endpoint=collector.url)
    generate(server, ("traceparent", PARENT), ("tracestate", "vendor=1"), request_id="mine")
    spans = collector.spans(4)
    [call] = [span for span in spans if span.parent_span_id.hex() == CALLER]
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    assert call.trace_state == "vendor=1"
    assert (call.name, call.kind) == ("text_completion fake", 2)
    shown = attributes(call)
    assert shown["gen_ai.response.id"] == "mine"
    assert shown["gen_ai.usage.input_tokens"] == len("secret words") + 1
    phases = {span.name: span for span in spans if span.parent_span_id == call.span_id}
    assert set(phases) == {"queue", "prefill", "decode"}
    for span in phases.values():
        assert call.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= call.end_time_unix_nano
    assert collector.resource["service.name"] == "tk"
    assert not any("secret" in str(span) for span in spans)
    server.close()


def test_http_and_conversations_and_refusals_have_spans_too(engine: FakeEngine, collector: Collector) -> None:
    server = HttpServerThread(engine, http_port=0, otlp_endpoint=collector.url, log_prompts=True)
    body = {"prompt": "secret words", "max_tokens": 3}
    assert server.ask("/v1/completions", body, {"traceparent": PARENT}).status == 200
    assert server.ask("/v1/completions", {"prompt": []}, {"traceparent": "no context"}).status == 400
    calls = {span.trace_id.hex() == TRACE: span for span in collector.spans(5) if span.kind == 2}
    good, refused = attributes(calls[True]), attributes(calls[False])
    assert calls[True].parent_span_id.hex() == CALLER
    assert (good["http.request.method"], good["http.route"], good["gen_ai.request.max_tokens"]) == (
        "POST",
        "/v1/completions",
        3,
    )
    assert "secret words" in good["gen_ai.input.messages"], "the operator asked for prompts"
    assert refused["error.type"] == "INVALID_ARGUMENT"
    assert calls[False].parent_span_id == b""
    server.close()


def test_a_caller_that_does_not_sample_gets_no_spans(engine: FakeEngine, collector: Collector) -> None:
    server = ServerThread(engine, otlp_endpoint=collector.url)
    generate(server, ("traceparent", PARENT[:-1] + "0"))
    generate(server)
    server.close()  # it sends what waits
    assert TRACE not in {span.trace_id.hex() for span in collector.spans(4)}


@pytest.mark.parametrize("fate", ["hangs", "is gone"])
def test_a_collector_that_does_not_answer_costs_spans_only(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    """More requests than the queue holds; each is answered, and the server ends, while no span is taken."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    collector = Collector(hangs=True)
    if fate == "is gone":
        collector.close()
    server = ServerThread(engine, otlp_endpoint=collector.url)
    with grpc.insecure_channel(server.target) as channel:
        stub = GenerationStub(channel)
        for _ in range(100):  # an export takes as long as the collector hangs, longer than a call may
            stub.GenerateOnce(pb.GenerateRequest(text="hi"), timeout=WAIT_SECONDS)
    if fate == "hangs":
        collector.wait_for_export()
    server.close()  # which waits for WAIT_SECONDS at most
    collector.close()


PROGRAM = """
import sys, grpc
from tk.infer.serve.openai.http_port import http_port_of
from tk.tests.infer.serve.fake_engine import FakeEngine, ServerThread
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import GenerationStub
engine = FakeEngine()
server = ServerThread(engine, *sys.argv[2:], **({"otlp_endpoint": sys.argv[1]} if sys.argv[1] else {}))
with grpc.insecure_channel(server.target) as channel:
    GenerationStub(channel).GenerateOnce(pb.GenerateRequest(text="hi"), timeout=20)
server.close()
engine.close()
print(any(name.startswith("opentelemetry") for name in sys.modules))
"""


def test_nothing_is_imported_without_the_option_and_a_hanging_collector_keeps_no_process() -> None:
    collector = Collector(hangs=True)
    for endpoint in ("", collector.url):
        command = [sys.executable, "-c", PROGRAM, endpoint]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
        assert (done.returncode, done.stdout) == (0, f"{bool(endpoint)}\n"), done.stderr
    collector.close()


def test_the_option_comes_before_the_variables() -> None:
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://all:4317"}
    assert chosen_endpoint(None, {}) is None
    assert chosen_endpoint(None, variables) == "http://all:4317"
    assert chosen_endpoint("http://own:4317", variables) == "http://own:4317"
    assert chosen_endpoint(None, variables | {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://one"}) == "https://one"
    for off in ({"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_SDK_DISABLED": "true"}):
        assert chosen_endpoint(None, variables | off) is None


@pytest.mark.parametrize("wrong", ["collector:4317", "ftp://collector", "http://", "http://collector:4318/v1/traces"])
def test_an_address_that_is_no_collectors_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint"):
        check_endpoint(wrong, {})


def test_variables_that_cannot_be_followed_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    over_http = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    with pytest.raises(ConfigError, match="over gRPC only"):
        check_endpoint("http://collector:4317", over_http)
    with caplog.at_level(logging.WARNING):
        assert chosen_endpoint(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"} | over_http) is None
    assert "there will be no spans" in caplog.text


WITHOUT = """
import sys
sys.modules["opentelemetry"] = None  # as where it is not installed
from tk.cli.main import main
sys.exit(main(["serve", "nowhere", *sys.argv[1:]]))
"""


def test_a_missing_package_is_named() -> None:
    command = [sys.executable, "-c", WITHOUT, "--port", "0", "--otlp-endpoint", "http://collector:4317"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --otlp-endpoint needs OpenTelemetry")
    assert "pip install 'opentelemetry-sdk>=" in done.stderr


def ask_for_ever(stub: Any) -> None:
    """Ends with the first refusal."""
    while True:
        stub.GenerateOnce(pb.GenerateRequest(text="a", stopping={"max_new_tokens": 1}), timeout=WAIT_SECONDS)


@pytest.mark.matrix
def test_a_second_signal_ends_a_server_whose_collector_hangs_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    collector = Collector(hangs=True)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    serving = Serving(str(write_tiny_model(tmp_path / "tiny")), "--kv-blocks", "128").wait_ready()
    long = pb.GenerateRequest(text="a", stopping={"max_new_tokens": 500, "ignore_eos": True}, sampling={"n": 8})
    try:
        with grpc.insecure_channel(serving.target) as channel:
            stub = GenerationStub(channel)
            stub.GenerateOnce(pb.GenerateRequest(text="a", stopping={"max_new_tokens": 3}), timeout=WAIT_SECONDS)
            assert [span.name for span in collector.spans(4)] == ["queue", "prefill", "decode", "text_completion tiny"]
            streams = [stub.Generate(long, timeout=WAIT_SECONDS) for _ in range(16)]
            for stream in streams:
                next(stream)
            serving.process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.RpcError):  # it drains
                ask_for_ever(stub)
            begun = time.monotonic()
            code, _, _ = serving.end(signal.SIGTERM)
        assert code == 130
        assert time.monotonic() - begun < 25  # some 0.5 s if the machine has time; the exporter tries for half a minute
    finally:
        serving.close()
        collector.close()


def test_ending_a_request_takes_little_of_the_event_loop(collector: Collector) -> None:
    traces = RequestTraces(collector.url, lambda: "m")
    records = [RequestRecord("Generate", values={"total_seconds": 0.0}) for _ in range(200)]
    for record in records:
        record.admit("x")
    begun = time.thread_time()
    for record in records:
        traces.end(record)
    assert (time.thread_time() - begun) / len(records) < 0.005
    traces.close()
