"""The log level that comes with a request, at a server that has to be notified before."""

import json
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions.server.upstream.external import child
from tests.support.children import child_world
from tests.support.modern import LOG_LEVEL, ModernClient, Received
from tests.support.raw import Json


def said(messages: list[Json]) -> list[str]:
    return [m["params"]["data"] for m in messages if m.get("method") == "notifications/message"]


async def log(client: ModernClient, level: str, least: str | None, **options: Any) -> list[str]:
    """What a request learns of a message of that level."""
    meta = {LOG_LEVEL: least} if least is not None else {}
    sent: Received = client.call("log", {"text": "x", "level": level}, meta=meta, **options)
    await sent.result()
    return said(sent.messages)


async def level_of(client: ModernClient, **options: Any) -> str:
    return str(json.loads(await client.text("state", **options))["level"])


async def test_the_server_is_notified_of_the_most_that_a_request_wants_to_get() -> None:
    async with child_world() as w:
        client = ModernClient(w.carrier)
        session = (await client.create())["sessionId"]
        assert await log(client, "error", None, session=session) == []
        assert await level_of(client, session=session) == "none"
        assert await log(client, "error", "error", session=session) == ["x"]
        # As much as a server says that was sent nothing.
        assert await level_of(client, session=session) == "info"
        assert await log(client, "debug", "debug", session=session) == ["x"]
        assert await level_of(client, session=session) == "debug"
        assert await log(client, "info", "error", session=session) == []
        assert await level_of(client, session=session) == "debug"
        assert await log(client, "info", "no level", session=session) == []


async def test_a_server_without_a_log_is_notified_of_no_level() -> None:
    async with child_world("no logging") as w:
        client = ModernClient(w.carrier)
        assert await client.text("echo", {"text": "x"}, meta={LOG_LEVEL: "debug"}) == "x"
        assert await level_of(client) == "none"


async def test_a_server_that_does_not_answer_is_notified_once_and_holds_up_one_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(child, "ANSWERING", 0.2)
    notes = tmp_path / "notes"
    options = {"env": {"CALLS": str(notes)}}
    async with child_world("mute about levels", options=options) as w:
        client = ModernClient(w.carrier)
        session = (await client.create())["sessionId"]
        for _ in range(3):
            assert await log(client, "info", "info", session=session) == ["x"]
    assert notes.read_text().split("\n").count("level") == 1
