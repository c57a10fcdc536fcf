"""Lines that a peer can cause are bounded, and counted."""

import logging
from importlib import import_module

import pytest

from mcp_sessions.seldom import MOST, QUIET, Seldom


def line(text: str, at: float, *values: object) -> logging.LogRecord:
    record = logging.LogRecord("a", logging.WARNING, "", 0, text, values, None)
    record.created = at
    return record


def test_a_flood_is_ten_lines_a_minute_and_the_next_one_counts_the_rest() -> None:
    seldom = Seldom()
    passed = [seldom.filter(line("no such host: %s", 100.0, number)) for number in range(1_000)]
    assert sum(passed) == MOST == 10
    later = line("no such host: %s", 100.0 + QUIET, "b")
    assert seldom.filter(later)
    assert later.getMessage() == "no such host: b (990 more such lines were left out)"
    after = line("no such host: %s", 101.0 + QUIET, "c")
    assert seldom.filter(after) and after.getMessage() == "no such host: c"


def test_a_flood_of_one_kind_hides_no_other() -> None:
    seldom = Seldom()
    for _ in range(1_000):
        seldom.filter(line("one", 100.0))
    assert seldom.filter(line("another", 100.0))


def test_a_clock_that_was_set_back_hides_nothing_for_long() -> None:
    seldom = Seldom()
    for _ in range(1_000):
        seldom.filter(line("one", 10_000.0))
    assert seldom.filter(line("one", 100.0))


@pytest.mark.parametrize(
    "name",
    [
        "uvicorn.error",
        "mcp_sessions.server.upstream.rounds",
        "mcp_sessions.server.upstream.held_call",
        "mcp_sessions.server.upstream.sdk.authentication",
        "mcp_sessions.server.calls.detached",
        "mcp_sessions.server.requests.tasks",
        "mcp_sessions.server.requests.running_task",
        "mcp_sessions.server.requests.joining",
        "mcp_sessions.server.dispatch.stages.conversation_stage",
        "mcp_sessions.server.dispatch.stages.session_methods",
        "mcp_sessions.server.dispatch.conversation_sessions",
        "mcp_sessions.server.dispatch.router",
        "mcp_sessions.server.cluster.pending",
        "mcp_sessions.server.upstream.external.server_messages",
        "mcp_sessions.acp.link",
        "mcp_sessions_transports.outbox",
        "mcp_sessions_transports.duplex",
        "mcp_sessions_transports.credentials",
        "mcp_sessions_transports.stdio.stdio_server",
        "mcp_sessions_transports.http.channel",
        "mcp_sessions_transports.http.endpoint",
        "mcp_sessions_transports.http.io",
        "mcp_sessions_transports.http.handshake",
        "mcp_sessions_transports.origin",
        "mcp_sessions_transports.websocket.authorizer",
        "mcp_sessions_transports.websocket.websocket_server",
        "mcp.client.sse",
        "mcp.client.stdio",
        "mcp.server.request_state",
        "mcp_sessions.client.messages",
        "mcp_sessions_transports.stdio.stdio_client",
    ],
)
def test_what_is_said_of_a_wrong_message_is_bounded(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    for module in ("acp.servers", "client_transport", "serve.endpoint", "serve.uvicorn_server"):
        import_module(f"mcp_sessions.{module}")
    if name.startswith("mcp_sessions"):
        import_module(name)
    # A server that another test ran in this process may have made this one silent.
    caplog.set_level(logging.WARNING, logger=name)
    for number in range(100):
        logging.getLogger(name).warning("a test refused %d", number)
    assert len(caplog.messages) == MOST
