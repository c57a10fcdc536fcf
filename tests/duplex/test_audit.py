"""The audit on a pipe and on a WebSocket."""

import logging

import pytest

from tests.support.audit import Lines
from tests.support.duplex import duplex_world
from tests.support.modern import envelope
from tests.support.raw import Json


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    caplog.set_level(logging.INFO, "mcp_sessions.audit")
    return Lines(caplog)


@pytest.mark.parametrize("kind", ["websocket", "pipe"])
async def test_each_transport_is_named_in_both_eras(lines: Lines, kind: str) -> None:
    expected = {"websocket": ("tcp", "websocket"), "pipe": ("pipe", None)}[kind]

    def where(line: Json) -> tuple[str, str | None]:
        return line["network.transport"], line.get("network.protocol.name")

    async with duplex_world() as w:
        old = await w.connected(kind)
        await old.text("echo", text="x")
    async with duplex_world() as w:
        new = await (w.websocket if kind == "websocket" else w.pipe)(modern=True)
        await new.text("echo", meta=envelope(), text="x")
    assert [where(each) for each in lines.all] == [expected] * 3
    eras = [each["mcp_sessions.era"] for each in lines.all]
    assert eras == ["handshake", "handshake", "modern"]
