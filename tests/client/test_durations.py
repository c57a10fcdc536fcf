"""A client measures its requests and sessions, if a meter provider is set."""

from collections.abc import Mapping

import pytest

from mcp_sessions import metrics
from tests.support.resuming import connected

Measured = list[tuple[str, float, Mapping[str, str]]]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    found: Measured = []

    def lasted(histogram: str, seconds: float, attributes: Mapping[str, str]) -> None:
        if histogram.startswith("mcp.client."):
            found.append((histogram, seconds, attributes))

    monkeypatch.setattr(metrics, "look_for_provider", lambda: None)
    monkeypatch.setattr(metrics, "measures", True)
    monkeypatch.setattr(metrics, "lasted", lasted)
    return found


@pytest.mark.parametrize(("scheme", "protocol"), [("http", "http"), ("ws", "websocket")])
async def test_each_request_of_the_application_and_its_session_is_measured(
    measured: Measured, scheme: str, protocol: str
) -> None:
    async with connected("legacy", scheme) as it:
        await it.call("echo", text="x")
        await it.client.call_tool("no such tool", {})
    calls = [
        (seconds, said)
        for name, seconds, said in measured
        if name == "mcp.client.operation.duration" and said["mcp.method.name"] == "tools/call"
    ]
    network = {
        "network.transport": "tcp",
        "network.protocol.name": protocol,
        "mcp.protocol.version": "2025-11-25",
    }
    tool = {"mcp.method.name": "tools/call", "gen_ai.operation.name": "execute_tool"} | network
    assert [said for _, said in calls] == [
        tool | {"gen_ai.tool.name": "echo"},
        tool | {"gen_ai.tool.name": "no such tool", "error.type": "tool_error"},
    ]
    assert all(0 <= seconds < 60 for seconds, _ in calls)
    [(seconds, said)] = [
        (seconds, said) for name, seconds, said in measured if name == "mcp.client.session.duration"
    ]
    assert said == {"mcp.protocol.version": "2025-11-25"} and 0 < seconds < 60
