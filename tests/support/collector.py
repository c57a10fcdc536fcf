"""A collector of OpenTelemetry, as far as a test needs one: OTLP over HTTP."""

import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

WITHIN = 40.0
"""Seconds in which something arrives."""


@dataclass
class Collector:
    port: int
    points: dict[tuple[str, ...], dict[str, int]] = field(
        default_factory=dict[tuple[str, ...], dict[str, int]]
    )
    """Name and attributes of a counter → ``service.instance.id`` → its value."""

    spans: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Of each span: its name, and the ``service.instance.id`` of its process."""

    services: set[str] = field(default_factory=set[str])
    keys: set[str | None] = field(default_factory=set[str | None])
    """What the requests said in the header ``key``."""

    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_for(self, condition: Callable[[], bool], within: float = WITHIN) -> bool:
        """Whether it holds within so many seconds."""
        with self.changed:
            return self.changed.wait_for(condition, within)

    def take(self, path: str, body: bytes, key: str | None) -> None:
        with self.changed:
            self.keys.add(key)
            if path == "/v1/metrics":
                self._take_metrics(ExportMetricsServiceRequest.FromString(body))
            elif path == "/v1/traces":
                self._take_traces(ExportTraceServiceRequest.FromString(body))
            else:
                raise AssertionError(f"nothing is sent to {path}")
            self.changed.notify_all()

    def _take_metrics(self, request: ExportMetricsServiceRequest) -> None:
        for resource in request.resource_metrics:
            instance = self._take_resource(resource.resource)
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.sum.data_points:
                        values = sorted(each.value.string_value for each in point.attributes)
                        name = metric.name.removeprefix("mcp_sessions.")
                        self.points.setdefault((name, *values), {})[instance] = point.as_int

    def _take_traces(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            instance = self._take_resource(resource.resource)
            for scope in resource.scope_spans:
                self.spans += [(span.name, instance) for span in scope.spans]

    def _take_resource(self, resource: Resource) -> str:
        said: Mapping[str, str] = {
            each.key: each.value.string_value for each in resource.attributes
        }
        self.services.add(said["service.name"])
        return said["service.instance.id"]


@contextmanager
def collecting() -> Generator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.take(self.path, body, self.headers.get("key"))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
