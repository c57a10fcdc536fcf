"""``serve`` exports metrics and traces as the ``OTEL_`` variables say."""

import json
import logging
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

from mcp_sessions.cli import telemetry
from mcp_sessions.cli.telemetry import asked, described, exporting
from tests.support.children import CHILD
from tests.support.collector import WITHIN, Collector, collecting
from tests.support.redis_server import namespace, shared_redis
from tests.support.serving import INITIALIZE, initialize, read_lines, serving

APP = """
from mcp.server import MCPServer
mcp = MCPServer("notes")
"""
COMMAND = ("--", sys.executable, "-S", CHILD)
MADE = ("sessions", "transport")
OVER_STDIO = [sys.executable, "-m", "mcp_sessions.cli", "serve", "--stdio"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "app.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return tmp_path


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Generator[Collector]:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        yield collector


def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export many times a second."""
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")


def started(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """Its address, and its log until then."""
    said = ""
    while line := read_lines(process, 1):
        found = re.fullmatch(r"  at +(http://\S+)\n", line)
        if found is not None:
            return found[1], said
        said += line
    raise AssertionError(f"it does not serve: {said}")


def ended(process: "subprocess.Popen[str]", number: signal.Signals = signal.SIGTERM) -> str:
    process.send_signal(number)
    assert process.stderr is not None
    said = process.stderr.read()
    assert process.wait(WITHIN) == (130 if number == signal.SIGINT else -number), said
    return said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_was_counted_and_traced_arrives_also_if_the_server_is_stopped_at_once(
    here: Path, collector: Collector, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The intervals are the SDK's own: seconds, and a minute. The one serves Python, the other a
    file of commands.
    """
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "key=secret")
    servers = {"notes": {"command": COMMAND[1], "args": COMMAND[2:]}}
    (here / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    target = ("app.py",) if number == signal.SIGTERM else ("--config", "mcp.json")
    with serving(here, *target) as process:
        initialize(started(process)[0])
        said = ended(process, number)

    assert list(collector.points[MADE].values()) == [1]
    assert "initialize" in [name for name, _ in collector.spans]
    assert (collector.services, collector.keys) == ({"mcp-sessions"}, {"secret"})
    assert "Traceback" not in said and "secret" not in said


def test_a_client_at_a_pipe_is_counted(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    done = subprocess.run(
        [*OVER_STDIO, "app.py"],
        input=json.dumps(INITIALIZE) + "\n",
        capture_output=True,
        text=True,
        timeout=WITHIN,
        check=True,
    )
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == [1]
    assert "initialize" in [name for name, _ in collector.spans] and collector.services == {"mine"}
    assert f"traces are exported to {collector.url}/v1/traces" in done.stderr


@pytest.mark.redis
def test_each_worker_exports_what_is_its_own(
    here: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a variable gives all of them the same instance."""
    often(monkeypatch)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=pod-7")
    store = f"{shared_redis().url}?namespace={namespace()}"

    def both_said_so() -> bool:
        return len(collector.points.get(MADE, ())) == 2 and len(dict.fromkeys(spans())) == 2

    def spans() -> list[str]:
        return [instance for name, instance in collector.spans if name == "initialize"]

    with serving(
        here, "app.py", "--workers", "2", "--store", store, "--drain-delay", "0"
    ) as keeper:
        (url, first), sessions = started(keeper), 0
        # Which worker takes a connection is the system's to say.
        while keeper.poll() is None and not collector.wait_for(both_said_so, 0.05):
            initialize(url)
            sessions += 1
        keeper.terminate()
        assert keeper.stderr is not None
        said = keeper.stderr.read()
        assert keeper.wait(WITHIN) == 0
    assert sum(collector.points[MADE].values()) == sessions
    assert all(re.fullmatch(r"pod-7-\d+", each) for each in collector.points[MADE])
    # Once, and not for each.
    assert first.count("exported to") == 2 and "exported to" not in said


@pytest.mark.parametrize("answers", [False, True])
def test_a_collector_that_takes_nothing_holds_up_nobody_and_is_one_line(
    here: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """It refuses connections, or takes them and is silent for ever."""
    often(monkeypatch)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        if not answers:
            silent.close()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://a:secret@127.0.0.1:{port}/?b=c")
        with serving(here, "app.py") as process:
            assert initialize(started(process)[0])["serverInfo"]
            said = ended(process)

    reason = "no answer in time" if answers else "Connection refused"
    [line] = [each for each in said.splitlines() if "not exported" in each]
    assert line.endswith(f"127.0.0.1:{port}/v1/traces: {reason}")
    assert "WARNING mcp_sessions.cli.telemetry: metrics or traces were not" in line
    assert "Traceback" not in said and "secret" not in said and "b=c" not in said


def test_a_provider_of_the_target_stays(
    here: Path, collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    """So does one that ``opentelemetry-instrument`` set before."""
    (here / "app.py").write_text(
        "from opentelemetry import trace\n"
        "from opentelemetry.sdk.trace import TracerProvider\n"
        f"trace.set_tracer_provider(TracerProvider())\n{APP}"
    )
    with serving(here, "app.py") as process:
        initialize(started(process)[0])
        said = ended(process)
    assert list(collector.points[MADE].values()) == [1] and not collector.spans
    assert "Overriding" not in said

    check = [*OVER_STDIO, "--check", "app.py"]
    lines = subprocess.run(check, capture_output=True, text=True, timeout=WITHIN, check=True).stdout
    assert f"metrics     exported to {collector.url}/v1/metrics\n" in lines
    assert "traces      exported by a provider that is set already\n" in lines


@pytest.mark.parametrize("variable", ["OTEL_SERVICE_NAME", "OTEL_EXPORTER_OTLP_ENDPOINT"])
def test_nothing_is_imported_before_a_variable_asks_for_it(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name is no place to export to."""
    monkeypatch.setenv(variable, "http://127.0.0.1:1")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *OVER_STDIO[1:], *COMMAND],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WITHIN,
        check=True,
    )
    assert "mcp_sessions.cli.telemetry" in done.stderr
    assert ("opentelemetry.sdk" in done.stderr) is (variable != "OTEL_SERVICE_NAME")


def warnings_of(caplog: pytest.LogCaptureFixture, **options: bool) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING), exporting(**options):
        return [record.getMessage() for record in caplog.records]


def test_a_missing_sdk_is_one_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not one for each worker."""

    def no_spec(_: str) -> None: ...

    monkeypatch.setattr(telemetry, "find_spec", no_spec)
    assert warnings_of(caplog) == []
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    said = "the OpenTelemetry SDK is not installed: pip install 'mcp-sessions[otel]'"
    assert warnings_of(caplog) == [f"traces are not exported: {said}"]
    assert warnings_of(caplog, is_worker=True, says=False) == []
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    assert warnings_of(caplog) == [f"metrics and traces are not exported: {said}"]


def test_what_goes_wrong_in_one_worker_is_said_by_that_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a port that the first one has."""

    def taken(*_: object, **__: object) -> NoReturn:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(telemetry, "exported", taken)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "prometheus")
    [line] = warnings_of(caplog, is_worker=True, says=False)
    assert line == (
        "metrics are not exported: http://localhost:9464/metrics: Address already in use: "
        "set OTEL_EXPORTER_PROMETHEUS_PORT"
    )


ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a.example"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {}),
        ({"OTEL_SERVICE_NAME": "x", "OTEL_METRICS_EXPORTER": " "}, {}),
        (ENDPOINT, {"metrics": ["otlp"], "traces": ["otlp"]}),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a.example"}, {"traces": ["otlp"]}),
        ({**ENDPOINT, "OTEL_METRICS_EXPORTER": "none"}, {"traces": ["otlp"]}),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "TRUE"}, {}),
        ({"OTEL_METRICS_EXPORTER": "otlp, prometheus"}, {"metrics": ["otlp", "prometheus"]}),
    ],
)
def test_a_signal_is_exported_if_its_exporter_or_a_collector_is_named(
    environment: Mapping[str, str], expected: Any
) -> None:
    assert asked(environment) == expected


@pytest.mark.parametrize(
    ("environment", "stdio", "said", "is_wrong"),
    [
        ({}, False, "not exported: no OTEL_ variable asks for it", False),
        ({**ENDPOINT}, True, "exported to http://a.example/v1/metrics", False),
        ({"OTEL_METRICS_EXPORTER": "otlp"}, False, "to http://localhost:4318/v1/metrics", False),
        (
            {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "https://u:p@a.example/x?key=1"},
            False,
            "exported to https://a.example/x",
            False,
        ),
        ({"OTEL_METRICS_EXPORTER": "console"}, False, "exported to console", False),
        ({"OTEL_METRICS_EXPORTER": "console"}, True, "standard output is the client's", True),
        ({"OTEL_METRICS_EXPORTER": "none-such"}, False, "no exporter 'none-such'", True),
        ({"OTEL_METRICS_EXPORTER": "promethues"}, False, "did you mean prometheus?", True),
        (
            {"OTEL_METRICS_EXPORTER": "prometheus"},
            False,
            "exported to http://localhost:9464/metrics",
            False,
        ),
        (
            {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_PORT": "http"},
            False,
            "OTEL_EXPORTER_PROMETHEUS_PORT: must be a port, not 'http'",
            True,
        ),
        (
            {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_PORT": "99999"},
            False,
            "OTEL_EXPORTER_PROMETHEUS_PORT: must be a port, not '99999'",
            True,
        ),
        (
            {**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            False,
            "pip install opentelemetry-exporter-otlp-proto-grpc",
            True,
        ),
        (
            {**ENDPOINT, "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/json"},
            False,
            "must be one of http/protobuf, grpc, not 'http/json'",
            True,
        ),
    ],
)
def test_a_check_says_where_to_and_what_is_wrong(
    environment: Mapping[str, str], stdio: bool, said: str, is_wrong: bool
) -> None:
    name, text, wrong = described(environment, stdio=stdio)[0]
    assert (name, wrong) == ("metrics", is_wrong)
    assert text.endswith(said) or said in text


def test_a_variable_with_a_wrong_value_is_a_warning_and_the_server_serves(
    here: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is a header that cannot be read, without the header."""
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "-1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "secret")
    with serving(here, "app.py") as process:
        url, first = started(process)
        initialize(url)
        ended(process)
    assert "WARNING mcp_sessions.cli.telemetry: metrics are not exported: ValueError: " in first
    assert "WARNING mcp_sessions.cli.telemetry: OpenTelemetry: Header" in first
    assert "secret" not in first and collector.spans
