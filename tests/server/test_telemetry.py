"""OpenTelemetry: the SDK's spans say whose session, and what happens to sessions is counted."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions import metrics

ROOT = Path(__file__).parents[2]


@cache
def notified(*arguments: str) -> Any:
    """What the program in ``tests.support.telemetry_program`` printed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.telemetry_program", *arguments],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT}/transports"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    return json.loads(done.stdout)


def test_a_span_of_a_session_names_its_digest_and_no_span_names_an_id() -> None:
    """SEC2, and OpenTelemetry's ``gen_ai.conversation.id``."""
    seen = notified()
    by_session = {seen["session"]: list[str](), seen["transport"]: list[str]()}
    for name, attributes in seen["spans"]:
        known = attributes.get("mcp_sessions.session")
        assert attributes.get("gen_ai.conversation.id") == known
        if known in by_session:
            by_session[known].append(name)
    assert by_session[seen["session"]] == [*["tools/call tell"] * 5, "tools/call echo"]
    # A request without a session of ours belongs to its transport's.
    assert by_session[seen["transport"]] == ["notifications/initialized", "tools/call echo"]
    for session_id in seen["ids"]:
        assert session_id not in json.dumps([seen["spans"], seen["points"]])


def test_a_span_of_a_conversation_has_the_hosts_own_id() -> None:
    """By that the host's own spans are found. In a session that its client named it is the
    digest; and each line of the audit names the trace and the session of its span.
    """
    seen = notified("conversation")
    calls = [
        (attributes["mcp_sessions.session"], attributes["gen_ai.conversation.id"])
        for name, attributes in seen["spans"]
        if name == "tools/call echo"
    ]
    host, conversation, named = "the host's own id", seen["conversation"], seen["named"]
    assert calls == [(conversation, host), (conversation, host), (named, named)]
    traces = [
        trace
        for (name, _), trace in zip(seen["spans"], seen["traces"], strict=True)
        if name == "tools/call echo"
    ]
    assert traces[1] == "4bf92f3577b34da6a3ce929d0e0e4736" and len(set(traces)) == 3
    sessions = [session for session, _ in calls]
    assert seen["audit"] == [list(each) for each in zip(sessions, traces, strict=True)]


def test_what_happens_to_sessions_is_counted() -> None:
    points = {
        (name.removeprefix("mcp_sessions."), *sorted(attributes.values())): value
        for name, attributes, value in notified()["points"]
    }
    assert points == {
        ("sessions", "transport"): 2,
        ("sessions", "protocol"): 3,
        ("attaches", "http"): 5,
        ("replays", "http"): 1,
        ("refusals", "unknown_position"): 1,
        ("coalesced",): 1,
        ("detached", "taken_over"): 2,
        ("ended", "ended", "protocol"): 1,
        ("ended", "expired", "protocol"): 2,
        ("ended", "expired", "transport"): 2,
    }


def test_a_command_has_spans_as_a_server_in_python_has_them_and_its_processes_are_counted() -> None:
    seen = notified("command")
    calls = [
        (name, attributes.get("error.type"), attributes.get("mcp_sessions.session"))
        for name, attributes in seen["spans"]
        if name in ("tools/call echo", "tools/call", "unknown")
    ]
    # What the server was not seen to have may be an id: such a name is in no span.
    assert calls == [
        ("tools/call echo", None, seen["session"]),
        ("unknown", "-32601", seen["session"]),
        ("tools/call", "-31012", seen["session"]),
        ("tools/call echo", None, None),
    ]
    assert seen["traces"][-1] == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert seen["spans"][-1][1]["mcp.protocol.version"] == "2026-07-28"
    assert seen["id"] not in json.dumps([seen["spans"], seen["points"]])
    points = {
        (name.removeprefix("mcp_sessions."), *attributes.values()): value
        for name, attributes, value in seen["points"]
        if "children" in name
    }
    assert points == {
        ("children", "started"): 2,
        ("children_running",): 0,
        ("children_over", "died"): 1,
        ("children_over", "ended"): 1,
    }


def test_work_that_fails_where_nobody_awaits_it_is_counted() -> None:
    """What an operator is asked to alert on; with its kind, and without what it says."""
    seen = notified("failing")
    counted = {
        (name, attributes.get("work"), attributes.get("error")): value
        for name, attributes, value in seen["points"]
    }
    work = "the rounds over expired sessions"
    assert counted["mcp_sessions.background_failures", work, "KeyError"] == len(seen["raised"]) == 2
    assert not [value for value in seen["raised"] if value in json.dumps(seen["points"])]
    # It was begun anew.
    ended = [attributes for name, attributes, _ in seen["points"] if name == "mcp_sessions.ended"]
    assert {"mode": "protocol", "reason": "expired"} in ended


def test_without_a_provider_nothing_is_recorded() -> None:
    """No exporter, no cost: the server is not wrapped, and the counters are the API's own."""
    seen = notified("bare")
    assert (seen["spans"], seen["points"]) == ([], [])


LASTED, SESSION = "mcp.server.operation.duration", "mcp.server.session.duration"


def test_each_request_and_each_session_is_measured_in_the_names_of_the_convention() -> None:
    """OpenTelemetry's conventions for MCP. A session names no network: it may use several."""
    network = {"network.transport": "tcp", "network.protocol.name": "http"}
    version = {"mcp.protocol.version": "2025-11-25"}
    tool = {"mcp.method.name": "tools/call", "gen_ai.operation.name": "execute_tool"}
    expected: list[list[Any]] = [
        [LASTED, {"mcp.method.name": "initialize"} | network | version, 2],
        [LASTED, tool | {"gen_ai.tool.name": "echo"} | network | version, 2],
        [LASTED, {"mcp.method.name": "session/start"} | network | version, 3],
        [LASTED, tool | {"gen_ai.tool.name": "tell"} | network | version, 6],
        [LASTED, {"mcp.method.name": "session/resume"} | network | version, 2],
        [LASTED, {"mcp.method.name": "session/end"} | network | version, 1],
        [SESSION, version, 5],
    ]
    assert sorted(notified()["durations"], key=str) == sorted(expected, key=str)


def test_a_name_that_a_client_invents_is_no_value_of_an_attribute() -> None:
    """Each would be a time series, for ever."""
    seen = notified("invented")["durations"]
    assert "invented" not in json.dumps(seen)
    found = [
        (said["mcp.method.name"], said.get("gen_ai.tool.name"), said.get("error.type"), count)
        for _, said, count in seen
    ]
    assert sorted(found, key=str) == [
        ("initialize", None, None, 1),
        ("tools/call", None, "0", 3),
        ("unknown", None, "-32601", 3),
    ]


def test_the_gauges_say_what_is_there_when_an_exporter_asks() -> None:
    """A call has run for 40 seconds; a stream is open, and two sessions are in the store."""
    found = {
        (name.removeprefix("mcp_sessions."), *said.values()): value
        for name, said, value in notified("open")["gauges"]
    }
    assert {name: value for name, value in found.items() if value} == {
        ("attached", "http"): 1,
        ("streams", "http"): 1,
        ("open_calls",): 1,
        ("longest_call",): 40,
        ("store_sessions", "memory"): 2,
    }
    # What there is none of is 0, so that an alert has a value.
    assert found["slow_clients",] == found["waiting", "client"] == found["streams", "stdio"] == 0
    assert ("store_away", "memory") not in found


def test_an_attribute_has_a_bounded_number_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_values", dict[str, set[str]]())
    found = [metrics.bounded("gen_ai.tool.name", f"tool {number}") for number in range(150)]
    assert found[:100] == [f"tool {number}" for number in range(100)]
    assert set(found[100:]) == {"_OTHER"}
    assert metrics.bounded("gen_ai.tool.name", "tool 7") == "tool 7"
    assert metrics.bounded("error.type", "tool 120") == "tool 120"
