"""Tasks on a pipe and on a WebSocket: one wire has the listen and all else (SEP-2663)."""

from typing import Any

import pytest

from mcp_sessions.policy import TaskPolicy
from tests.support.duplex import DuplexPeer, duplex_world
from tests.support.modern import ACKNOWLEDGED, SUBSCRIPTION_ID
from tests.support.raw import SESSION, Json, call_params

CAPABILITIES: Json = {"extensions": {"io.modelcontextprotocol/tasks": {}}, "elicitation": {}}
CHANGED = "notifications/tasks"


def told(client: DuplexPeer, status: str) -> Any:
    def look() -> Json | None:
        said = [m["params"] for m in client.notifications if m["method"] == CHANGED]
        return next((each for each in said if each["status"] == status), None)

    return client.until(look, f"a task that is {status}")


@pytest.mark.parametrize("in_session", [False, True])
@pytest.mark.parametrize("kind", ["websocket", "stdio"])
async def test_a_listen_reports_a_task(kind: str, in_session: bool) -> None:
    async with duplex_world(tasks=TaskPolicy(always={"wait"})) as w:
        client = await w.connected(kind, modern=True, capabilities=CAPABILITIES)
        meta: Json = {}
        if in_session:
            meta = {SESSION: {"sessionId": (await client.start())["sessionId"]}}
        call = call_params("wait", {"gate": "g"})
        task = await client.result("tools/call", call, meta=meta)
        wanted: Json = {"notifications": {"taskIds": [task["taskId"], "x" * 43]}}
        listen = await client.send("subscriptions/listen", wanted, meta=meta)
        agreed = (await client.notified(ACKNOWLEDGED))["params"]
        assert agreed["notifications"] == {"taskIds": [task["taskId"]]}
        w.inner.box.gate("g").go.set()
        ended = await told(client, "completed")
        assert ended["taskId"] == task["taskId"]
        assert ended["result"]["content"][0]["text"] == "through g"
        assert ended["_meta"][SUBSCRIPTION_ID] == listen


@pytest.mark.parametrize("kind", ["websocket", "stdio"])
async def test_a_session_is_told_without_a_listen(kind: str) -> None:
    async with duplex_world(tasks=TaskPolicy(always={"wait"})) as w:
        client = await w.connected(kind, modern=True, capabilities=CAPABILITIES)
        meta = {SESSION: {"sessionId": (await client.start())["sessionId"]}}
        await client.result("tools/call", call_params("wait", {"gate": "g"}), meta=meta)
        w.inner.box.gate("g").go.set()
        assert (await told(client, "completed"))["result"]["content"][0]["text"] == "through g"
