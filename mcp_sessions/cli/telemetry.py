"""Export metrics and traces of ``serve`` over OpenTelemetry, as the ``OTEL_`` variables say.

Rules, owned by ``tests/cli/test_telemetry.py``:

1. Nothing is imported without a variable that names an exporter or a collector.
2. A problem is one line of warning. The server serves all the same.
3. A provider that is set already, as by ``opentelemetry-instrument``, stays.
4. The exit waits at most :data:`LAST` seconds for the collector.
5. No line has a header, or the credentials or the query of a URL.

The providers and exporters read all other variables themselves. Nothing forks here: each worker is
a process of its own that makes its own providers. If a collector takes nothing, the log has one
line, where the SDK logs tracebacks.

Rules, owned by ``tests/cli/test_telemetry_failures.py``:

1. An outage is one line, and another one each :data:`AGAIN` seconds as long as it lasts.
2. The line has the reason, and nothing of a request: a URL or a header may hold a key.
3. Other records of OpenTelemetry go the way of all records.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from mcp_sessions.argument_types import did_you_mean
from mcp_sessions.cli.arguments import without_secrets
from mcp_sessions.errors import ConfigurationError

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

import math
import re
from http import HTTPStatus

logger = logging.getLogger(__name__)


AGAIN: Final = 600.0
"""Seconds between two lines about an outage."""

_PHRASES: Final = frozenset(status.phrase for status in HTTPStatus)
_EXPORT: Final = ("export", "_shared_internal")
"""Parts of the names of the loggers that report an export."""

_SILENT: Final = "no answer in time"
_CAUSES: Final = 20
"""Number of causes of an exception that are searched, at most."""


class TelemetryFailures(logging.Handler):
    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock
        self._endpoints: list[str] = []
        self._silent_until = -math.inf
        self._latest: str | None = None
        self._is_stopped = False

    def install(self, endpoint: str) -> None:
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(self)
        logger.propagate = False
        if endpoint not in self._endpoints:
            self._endpoints.append(endpoint)

    def stop(self) -> None:
        """Log nothing more: the process exits, and threads of the SDK may still try."""
        self._is_stopped = True

    def emit(self, record: logging.LogRecord) -> None:
        if self._is_stopped:
            return
        if any(part in record.name for part in _EXPORT):
            reason = _reason(record)
            if "retrying" in str(record.msg):
                self._latest = reason or self._latest
            else:
                self.failed(reason)
        elif record.name.startswith("opentelemetry.util"):
            # These records quote headers that OpenTelemetry cannot read.
            text = re.sub("%[a-z]", "***", str(record.msg))
            logger.log(record.levelno, "OpenTelemetry: %s", text)
        else:
            logging.root.handle(record)

    def failed(self, reason: str | None) -> None:
        """Log that an export failed.

        Args:
            reason: None: the reason of the latest try.
        """
        # It takes no lock: the handler of SIGTERM calls it, and must not wait for a thread that
        # logs.
        now = self._clock()
        if self._is_stopped or now < self._silent_until:
            return
        self._silent_until = now + AGAIN
        logger.warning(
            "metrics or traces were not exported to %s: %s",
            " and ".join(self._endpoints) or "anywhere",
            reason or self._latest or _SILENT,
        )


def _reason(record: logging.LogRecord) -> str | None:
    """Return why an export failed, without text of a request. None: the record does not say it."""
    arguments = record.args if isinstance(record.args, tuple) else ()
    errors = [each for each in arguments if isinstance(each, BaseException)]
    if record.exc_info and record.exc_info[1] is not None:
        errors.append(record.exc_info[1])
    for error in errors:
        return _reason_of(error)
    for each in arguments:
        if isinstance(each, int) and 400 <= each < 600:
            return f"status {each}"
        if each in _PHRASES:
            return str(each)
    return None


def _reason_of(error: BaseException) -> str:
    waiting, seen = [error], list[BaseException]()
    while waiting and len(seen) < _CAUSES:
        each = waiting.pop(0)
        seen.append(each)
        if isinstance(each, OSError) and each.errno is not None and each.strerror:
            return each.strerror
        if isinstance(each, TimeoutError):
            return _SILENT
        inside = (each.__cause__, each.__context__, getattr(each, "reason", None), *each.args)
        waiting += [one for one in inside if isinstance(one, BaseException) and one not in seen]
    return type(error).__name__


LAST: Final = 3.0
"""Seconds that the last metrics and spans have at the exit."""

PROMETHEUS: Final = "prometheus"
_PORT: Final = "OTEL_EXPORTER_PROMETHEUS_PORT"
_LAST_PORT: Final = 65_535

METRICS: Final = "metrics"
TRACES: Final = "traces"

_EXTRA: Final = "pip install 'mcp-sessions[otel]'"
_OF_PROTOCOL: Final = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


@dataclass(frozen=True, slots=True)
class Exported:
    name: str
    """``metrics`` or ``traces``."""

    exporters: Sequence[EntryPoint]

    where: str
    """Addresses, for a log."""


def asked(environment: Mapping[str, str]) -> dict[str, Sequence[str]]:
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return {}
    found: dict[str, Sequence[str]] = {}
    for name in (METRICS, TRACES):
        text = environment.get(f"OTEL_{name.upper()}_EXPORTER", "").strip()
        if not text and _of_otlp(environment, name, "ENDPOINT") is not None:
            text = "otlp"
        exporters = [each.strip() for each in text.split(",") if each.strip()]
        if exporters and "none" not in exporters:
            found[name] = exporters
    return found


def exported(
    environment: Mapping[str, str], name: str, exporters: Sequence[str], *, stdio: bool
) -> Exported:
    """Find the exporters of a signal.

    Args:
        exporters: Names of the exporters.
        stdio: Whether standard output is a client's.

    Raises:
        ConfigurationError: The signal cannot be exported.
    """
    if find_spec("opentelemetry.sdk") is None:
        raise ConfigurationError(f"the OpenTelemetry SDK is not installed: {_EXTRA}")
    if stdio and "console" in exporters:
        raise ConfigurationError(
            f"OTEL_{name.upper()}_EXPORTER=console: standard output is the client's"
        )
    entries = [_exporter(environment, name, each) for each in exporters]
    places = {"otlp": _endpoint, PROMETHEUS: _page}
    endpoints = [places[each](environment, name) if each in places else each for each in exporters]
    return Exported(name, entries, ", ".join(endpoints))


def described(environment: Mapping[str, str], *, stdio: bool) -> list[tuple[str, str, bool]]:
    """Describe each signal: its name, what a start does with it, and whether that is wrong."""
    wanted = asked(environment)
    lines: list[tuple[str, str, bool]] = []
    for name in (METRICS, TRACES):
        if _is_provided(name):
            lines.append((name, "exported by a provider that is set already", False))
        elif name not in wanted:
            lines.append((name, "not exported: no OTEL_ variable asks for it", False))
        else:
            try:
                one = exported(environment, name, wanted[name], stdio=stdio)
            except ConfigurationError as failed:
                lines.append((name, str(failed), True))
            else:
                lines.append((name, f"exported to {one.where}", False))
    return lines


@contextmanager
def exporting(
    *, stdio: bool = False, is_worker: bool = False, says: bool = True
) -> Generator[None]:
    """Export the signals that the variables ask for, until the block or the process ends.

    Args:
        stdio: Whether standard output is a client's.
        is_worker: Whether other processes have the same variables.
        says: Whether this process logs the lines that are the same for all of them.
    """
    ends: list[Callable[[], object]] = []
    lost: dict[str, list[str]] = {}
    failures = TelemetryFailures(time.monotonic)
    for name, exporters in asked(os.environ).items():
        if _is_provided(name):
            continue
        try:
            one = exported(os.environ, name, exporters, stdio=stdio)
            failures.install(one.where)
            ends.append(_PROVIDE[name](one.exporters, _resource(is_worker=is_worker)))
        except Exception as failed:
            # A variable may have any value, and an exporter any author. No failure of them may keep
            # the server from serving.
            if isinstance(failed, OSError) and PROMETHEUS in exporters:
                # Another process has the port, such as another worker.
                text = f"{_page(os.environ, name)}: {failed.strerror or failed}: set {_PORT}"
                lost.setdefault(text, []).append(name)
            elif not isinstance(failed, ConfigurationError):
                text = " ".join(str(failed).split())
                lost.setdefault(f"{type(failed).__name__}: {text}", []).append(name)
            elif says:
                lost.setdefault(str(failed), []).append(name)
        else:
            if says:
                logger.info("%s are exported to %s", name, one.where)
    for reason, names in lost.items():
        logger.warning("%s are not exported: %s", " and ".join(names), reason)
    if not ends:
        yield
        return
    end = partial(_end, ends, failures)
    with _before_sigterm_ends_it(end):
        try:
            yield
        finally:
            end()


def _end(ends: list[Callable[[], object]], failures: TelemetryFailures) -> None:
    """Export the remaining data, within :data:`LAST` seconds. A second call does nothing."""
    until = time.monotonic() + LAST
    threads: list[threading.Thread] = []
    while ends:
        # Some releases of the SDK take no time limit, so each runs in a thread.
        ending = partial(_end_one, ends.pop(), failures)
        threads.append(threading.Thread(target=ending, daemon=True, name="the last telemetry"))
        threads[-1].start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        failures.failed(None)
    failures.stop()


def _end_one(end: Callable[[], object], failures: TelemetryFailures) -> None:
    try:
        end()
    except Exception as failed:
        # It may come from any exporter, and the process exits.
        failures.failed(type(failed).__name__)


@contextmanager
def _before_sigterm_ends_it(end: Callable[[], None]) -> Generator[None]:
    """Call ``end`` before SIGTERM ends the process: uvicorn drains, and raises the signal again."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def ended(number: int, _frame: object) -> None:
        end()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    signal.signal(signal.SIGTERM, ended)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _is_provided(name: str) -> bool:
    """Whether a provider is set. The API's default provider does nothing, and does not count."""
    from opentelemetry import metrics, trace

    provider = metrics.get_meter_provider() if name == METRICS else trace.get_tracer_provider()
    module = type(provider).__module__
    return not module.startswith(("opentelemetry.metrics", "opentelemetry.trace"))


def _resource(*, is_worker: bool) -> Resource:
    from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource

    found = Resource.create()
    own: dict[str, Any] = {}
    if str(found.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        own[SERVICE_NAME] = "mcp-sessions"
    instance = found.attributes.get(SERVICE_INSTANCE_ID)
    if instance is None:
        own[SERVICE_INSTANCE_ID] = str(uuid4())
    elif is_worker:
        # The variable may set it, to the same value for all workers.
        own[SERVICE_INSTANCE_ID] = f"{instance}-{os.getpid()}"
    return found.merge(Resource(own))


def _provide_metrics(exporters: Sequence[EntryPoint], resource: Resource) -> Callable[[], object]:
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader

    made = [each.load()() for each in exporters]
    # Such as Prometheus's, which a collector reads.
    readers = [
        each if isinstance(each, MetricReader) else PeriodicExportingMetricReader(each)
        for each in made
    ]
    provider = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
    metrics.set_meter_provider(provider)
    return provider.shutdown


def _provide_traces(exporters: Sequence[EntryPoint], resource: Resource) -> Callable[[], object]:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for each in exporters:
        provider.add_span_processor(BatchSpanProcessor(each.load()()))
    trace.set_tracer_provider(provider)
    return provider.shutdown


_PROVIDE: Final = {METRICS: _provide_metrics, TRACES: _provide_traces}


def _page(environment: Mapping[str, str], name: str) -> str:
    """Where Prometheus fetches."""
    host = environment.get("OTEL_EXPORTER_PROMETHEUS_HOST", "").strip() or "localhost"
    port = environment.get(_PORT, "").strip() or "9464"
    if not port.isdecimal() or int(port) > _LAST_PORT:
        raise ConfigurationError(f"{_PORT}: must be a port, not {port!r}")
    return f"http://{host}:{port}/{name}"


def _of_otlp(environment: Mapping[str, str], name: str, what: str) -> str | None:
    for variable in (f"OTEL_EXPORTER_OTLP_{name.upper()}_{what}", f"OTEL_EXPORTER_OTLP_{what}"):
        if text := environment.get(variable, "").strip():
            return text
    return None


def _protocol(environment: Mapping[str, str], name: str) -> str:
    return _of_otlp(environment, name, "PROTOCOL") or "http/protobuf"


def _exporter(environment: Mapping[str, str], name: str, exporter: str) -> EntryPoint:
    key, advice = exporter, "install the package that has it"
    if exporter == "otlp":
        protocol = _protocol(environment, name)
        if protocol not in _OF_PROTOCOL:
            raise ConfigurationError(
                f"OTEL_EXPORTER_OTLP_PROTOCOL: must be one of {', '.join(_OF_PROTOCOL)}, "
                f"not {protocol!r}"
            )
        key, advice = _OF_PROTOCOL[protocol], _EXTRA
        if protocol == "grpc":
            advice = "pip install opentelemetry-exporter-otlp-proto-grpc"
    elif exporter == PROMETHEUS:
        advice = "pip install opentelemetry-exporter-prometheus"
    else:
        near = did_you_mean(exporter, ("otlp", "console", "none", PROMETHEUS))
        advice = near.removeprefix("; ") or advice
    for entry in entry_points(group=f"opentelemetry_{name}_exporter", name=key):
        return entry
    raise ConfigurationError(f"there is no exporter {key!r} for {name}: {advice}")


def _endpoint(environment: Mapping[str, str], name: str) -> str:
    is_grpc = _protocol(environment, name) == "grpc"
    url = environment.get(f"OTEL_EXPORTER_OTLP_{name.upper()}_ENDPOINT", "").strip()
    if not url:
        default = "http://localhost:4317" if is_grpc else "http://localhost:4318"
        url = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip() or default
        url = url if is_grpc else f"{url.partition('?')[0].rstrip('/')}/v1/{name}"
    return without_secrets(url)
