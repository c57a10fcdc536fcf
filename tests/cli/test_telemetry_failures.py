"""The log about a collector that takes nothing."""

import logging
from collections.abc import Generator

import pytest

from mcp_sessions.cli.telemetry import AGAIN, TelemetryFailures

EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Generator[Clock]:
    """Of the failures that are taken; afterwards OpenTelemetry logs as before."""
    clock, own = Clock(), logging.getLogger("opentelemetry")
    failures = TelemetryFailures(clock)
    failures.install("http://a.example/v1/metrics")
    failures.install("http://a.example/v1/traces")
    yield clock
    own.removeHandler(failures)
    own.propagate = True


class Lines(logging.Handler):
    """The records that reach the root logger. The handler of pytest is at others as well."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        assert record.exc_info is None
        self._lines.append(record.getMessage())

    def taken(self) -> list[str]:
        lines, self._lines = self._lines, []
        return lines


@pytest.fixture
def said() -> Generator[Lines]:
    lines = Lines()
    logging.root.addHandler(lines)
    yield lines
    logging.root.removeHandler(lines)


def refused() -> Exception:
    """As ``requests`` raises it: the true reason is some causes below, the text has the URL."""

    class MaxRetries(Exception):
        reason = OSError("text")

    below = ConnectionError("http://a.example/?key=secret")
    below.__context__ = ConnectionRefusedError(111, "Connection refused")
    inside = MaxRetries("http://a.example/?key=secret")
    inside.reason = below
    return OSError(inside)


def test_an_outage_is_one_line_and_another_one_much_later(clock: Clock, said: Lines) -> None:
    sdk, exporter = logging.getLogger("opentelemetry.sdk.trace.export"), logging.getLogger(EXPORTER)
    line = (
        "metrics or traces were not exported to http://a.example/v1/metrics and "
        "http://a.example/v1/traces: "
    )
    for _ in range(3):
        try:
            raise refused()
        except OSError:
            sdk.exception("Exception while exporting Span batch.")
    assert said.taken() == [f"{line}Connection refused"]
    clock.now = AGAIN - 1
    exporter.error("Failed to export batch code: %s, reason: %s", 401, "your key is secret")
    assert said.taken() == []
    clock.now = AGAIN
    exporter.error("Failed to export batch code: %s, reason: %s", 401, "your key is secret")
    assert said.taken() == [f"{line}status 401"]


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        (refused(), "Connection refused"),
        (TimeoutError(), "no answer in time"),
        (ValueError("secret"), "ValueError"),
        ("Service Unavailable", "Service Unavailable"),
        ("secret", "no answer in time"),
    ],
)
def test_a_try_that_is_followed_by_another_is_no_line_but_its_reason_is_kept(
    argument: object, reason: str, clock: Clock, said: Lines
) -> None:
    exporter = logging.getLogger(EXPORTER)
    exporter.warning("Transient error %s while exporting, retrying in %.2fs.", argument, 1.0)
    assert said.taken() == []
    exporter.error("Failed to export %s batch due to timeout, max retries or shutdown.", "spans")
    [line] = said.taken()
    assert line.endswith(f"/v1/traces: {reason}")


def test_what_else_is_logged_stays_but_for_headers(clock: Clock, said: Lines) -> None:
    logging.getLogger("opentelemetry.attributes").warning("Invalid type %s", "list")
    logging.getLogger("opentelemetry.util.re").warning("Header format invalid: %s", "key secret")
    assert said.taken() == ["Invalid type list", "OpenTelemetry: Header format invalid: ***"]


def test_nothing_is_logged_once_the_process_exits(
    said: Lines,
) -> None:
    failures = TelemetryFailures(Clock())
    failures.stop()
    failures.failed("late")
    failures.handle(logging.LogRecord(EXPORTER, logging.ERROR, "", 0, "late", (), None))
    assert said.taken() == []
