"""The traces of a server: its requests' spans, exported by OTLP over gRPC from a thread of their own.

The spans of a request are made when it has ended. They wait in a bounded queue for the exporter's thread, so that a
collector that hangs or is gone costs spans and nothing else.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from ....core.errors import ConfigError
from ....core.extras import install_line
from .observer import Observer
from .request_record import RequestRecord
from .spans import FAULTS, spans_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOL_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
# Seconds at the server's end for the spans that still wait.
LAST_SECONDS: Final = 0.3
_LOG: Final = logging.getLogger(__name__)


def chosen_endpoint(option: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns the address to which spans go, of the option or of the standard variables; None = spans are not wanted.

    Variables may be set for all programs of a machine, so where they cannot be followed the log says so, and there are
    no spans.

    Raises:
        ConfigError: the option cannot be followed; see `check_endpoint`.
    """
    if option is not None:
        check_endpoint(option, environment)
        return option
    endpoint = next((environment[name] for name in ENDPOINT_VARIABLES if environment.get(name)), None)
    is_off = environment.get("OTEL_TRACES_EXPORTER", "") == "none"
    if endpoint is None or is_off or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        check_endpoint(endpoint, environment)
    except ConfigError as error:
        _LOG.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, but there will be no spans: %s", error)
        return None
    return endpoint


def check_endpoint(endpoint: str, environment: Mapping[str, str] = os.environ) -> None:
    """Checks that spans can be sent to an address.

    Raises:
        ConfigError: it is no address of a collector's gRPC port, or OpenTelemetry is not installed.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
        raise ConfigError(
            f"--otlp-endpoint is {endpoint!r}; write http://HOST:4317, or https:// with TLS: the collector's port of "
            "gRPC, without a path."
        )
    protocol = next((environment[name] for name in _PROTOCOL_VARIABLES if environment.get(name)), "grpc")
    if protocol != "grpc":
        raise ConfigError(f"The environment asks for OTLP over {protocol!r}; tk sends it over gRPC only.")
    found = None
    with suppress(ModuleNotFoundError):  # of a package around it
        found = find_spec("opentelemetry.exporter.otlp.proto.grpc")
    if found is None:
        raise ConfigError(f"--otlp-endpoint needs OpenTelemetry's SDK and exporter: {install_line('otel')}.")


class RequestTraces(Observer):
    """Makes the spans of requests and exports them. Sampling, limits and batches follow the standard OTEL_ variables.

    Args:
        endpoint: the address of a collector.
        model: returns the name of the served model.
    """

    def __init__(self, endpoint: str, model: Callable[[], str]) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model = model
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._provider = _provider(self._exporter)
        self._tracer = self._provider.get_tracer("tk")
        self._trace, self._propagator = trace, TraceContextTextMapPropagator()
        _LOG.info("spans to %s", endpoint)

    def end(self, record: RequestRecord) -> None:
        call, *phases = spans_of(record, self._model())
        trace = self._trace
        parent = self._propagator.extract(record.terms.trace)
        span = self._tracer.start_span(
            call.name, parent, trace.SpanKind.SERVER, call.attributes, start_time=call.begin_ns
        )
        if not span.is_recording():
            return
        if record.status in FAULTS:
            span.set_status(trace.StatusCode.ERROR)
        within = trace.set_span_in_context(span)
        for phase in phases:
            self._tracer.start_span(phase.name, within, start_time=phase.begin_ns).end(phase.end_ns)
        span.end(call.end_ns)

    def close(self) -> None:
        """Sends the spans that wait, for a moment at most; those of a collector that hangs are dropped."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(LAST_SECONDS)
        if closing.is_alive():  # an exporter that tries again would do so for half a minute
            self._exporter.shutdown()


def _provider(exporter: "SpanExporter") -> "TracerProvider":
    """Returns the source of spans, with the exporter on a thread of its own."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "tk"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
