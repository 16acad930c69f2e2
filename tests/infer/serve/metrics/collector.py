"""A collector of OTLP over gRPC on a socket of its own, which keeps the spans that it gets, or hangs."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

WAIT_SECONDS = 30.0


class Collector:
    """A real gRPC server; with `hangs` it answers no export before it is closed."""

    def __init__(self, hangs: bool = False) -> None:
        self._hangs = hangs
        self._released, self._changed = threading.Event(), threading.Condition()
        self.num_exports = 0
        self._spans: list[Any] = []
        self.resource: dict[str, str] = {}
        self._server = grpc.server(ThreadPoolExecutor(4))
        otlp_grpc.add_TraceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.url = f"http://127.0.0.1:{port}"
        self._server.start()

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self._changed:
            self.num_exports += 1
            for group in request.resource_spans:
                self.resource = {each.key: each.value.string_value for each in group.resource.attributes}
                self._spans += [span for scope in group.scope_spans for span in scope.spans]
            self._changed.notify_all()
        if self._hangs:
            self._released.wait(WAIT_SECONDS)
        return otlp.ExportTraceServiceResponse()

    def spans(self, count: int) -> list[Any]:
        """Waits until so many spans have come, and returns all."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._spans) >= count, WAIT_SECONDS), self._spans
            return list(self._spans)

    def wait_for_export(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_exports > 0, WAIT_SECONDS)

    def close(self) -> None:
        self._released.set()
        self._server.stop(0).wait(WAIT_SECONDS)


def attributes(span: Any) -> dict[str, Any]:
    """The attributes of a span as plain values."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
