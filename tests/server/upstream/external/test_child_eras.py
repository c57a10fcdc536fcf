"""A server that speaks the era of 2026-07-28 only, as a URL and as a command, for clients of both.

The server is the SDK's own; see `tests.support.modern_server`.
"""

import json
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions import HTTPServer, StdioServer
from mcp_sessions.server.upstream.external.modern_messages import with_inputs
from mcp_sessions.server.upstream.port import UpstreamError
from tests.support import apps, modern_server
from tests.support.children import until
from tests.support.modern import ModernClient
from tests.support.modern_server import ModernServer, modern_url
from tests.support.raw import text_of
from tests.support.world import World, world

pytestmark = pytest.mark.filterwarnings(apps.DEPRECATED)

MOSTLY_A_URL = ("url", pytest.param("command", marks=pytest.mark.full))
"""A command imports the SDK each time. By default it is the server of one test."""

UPDATED = "notifications/resources/updated"
COMMAND = str(Path(modern_server.__file__))


@asynccontextmanager
async def modern_world(kind: str, modern: ModernServer | None = None) -> AsyncGenerator[World]:
    if kind == "command":
        async with world(server=StdioServer(sys.executable, COMMAND)) as w:
            yield w
        return
    async with modern_url(modern or ModernServer()) as url, world(server=HTTPServer(url)) as w:
        yield w


@pytest.mark.parametrize("kind", MOSTLY_A_URL)
async def test_a_client_of_the_era_before_gets_what_the_server_has(kind: str) -> None:
    async with modern_world(kind) as w:
        client = w.client()
        result = await client.initialize()
        assert result["serverInfo"] == {"name": "modern", "version": "3"}
        assert (result["instructions"], result["protocolVersion"]) == ("ask me", "2025-11-25")
        assert "tools" in result["capabilities"]
        assert await client.text("echo") == "echo"
        listed = await client.result("tools/list")
        assert [tool["name"] for tool in listed["tools"]] == ["ask"] and "resultType" not in listed
        read = await client.result("resources/read", {"uri": "note://é"})
        assert read["contents"][0]["text"] == "read"


@pytest.mark.parametrize("kind", ["url", "command"])
async def test_what_it_asks_is_asked_of_a_client_and_goes_with_the_request_again(kind: str) -> None:
    async with modern_world(kind) as w:
        client = await w.connected(capabilities={"elicitation": {}})
        sent = client.call("ask")
        (question,) = await sent.reply.has(1)
        assert question["params"]["message"] == "how many?"
        await client.respond(question, {"action": "accept", "content": {"answer": "two"}})
        assert json.loads(text_of(await sent.result())) == ["kept", {"q": {"answer": "two"}}]


@pytest.mark.parametrize("kind", MOSTLY_A_URL)
async def test_what_a_client_refuses_or_the_server_asks_for_ever_is_an_error(kind: str) -> None:
    async with modern_world(kind) as w:
        client = await w.connected(capabilities={"elicitation": {}})
        sent = client.call("ask")
        (question,) = await sent.reply.has(1)
        error = {"code": -1, "message": "no"}
        await client.post({"jsonrpc": "2.0", "id": question["id"], "error": error}).done()
        assert (await sent.error())["message"] == "no"
        assert "without end" in (await client.call("again").error())["message"]


@pytest.mark.parametrize(("rounds", "asks"), [(10, 10), (11, 10)])
async def test_a_request_may_need_input_ten_times(rounds: int, asks: int) -> None:
    """The eleventh time its client is not asked any more."""
    asked: list[Any] = []

    async def send(params: dict[str, Any]) -> dict[str, Any]:
        if len(asked) == rounds:
            return {"resultType": "complete", "rounds": rounds}
        return {"resultType": "input_required", "inputRequests": {"q": {"method": "roots/list"}}}

    async def ask(method: str, params: Mapping[str, Any] | None) -> dict[str, Any]:
        asked.append(method)
        return {}

    if rounds == asks:
        assert await with_inputs({}, send, ask) == {"rounds": rounds}
    else:
        with pytest.raises(UpstreamError) as refused:
            await with_inputs({}, send, ask)
        assert "without end" in refused.value.error["message"]
    assert len(asked) == asks


async def test_what_is_answered_at_a_url_has_a_name_in_the_era_before() -> None:
    """There it is required, and in that of the server it is not."""
    asked: list[Any] = []
    params = {"mode": "url", "message": "sign in", "url": "https://example.com/"}
    question = {"method": "elicitation/create", "params": params}

    async def send(params: dict[str, Any]) -> dict[str, Any]:
        if asked:
            return {}
        return {"resultType": "input_required", "inputRequests": {"q": question}}

    async def ask(method: str, params: Mapping[str, Any] | None) -> dict[str, Any]:
        asked.append(params)
        return {"action": "accept"}

    await with_inputs({}, send, ask)
    name = asked[0].pop("elicitationId")
    assert isinstance(name, str) and name
    assert asked == [params]


@pytest.mark.parametrize("kind", MOSTLY_A_URL)
async def test_a_client_of_its_own_era_gets_the_question_as_its_result(kind: str) -> None:
    async with modern_world(kind) as w:
        client = ModernClient(w.carrier)
        assert await client.text("echo") == "echo"
        result = await client.call("ask").result()
        assert (result["resultType"], result["requestState"]) == ("input_required", "kept")


@pytest.mark.parametrize("kind", MOSTLY_A_URL)
async def test_changes_are_received_for_what_is_subscribed_and_what_is_not_asked_for_is_not(
    kind: str,
) -> None:
    modern = ModernServer()
    async with modern_world(kind, modern) as w:
        client = await w.connected()
        stream = await client.get().started()
        await client.start()
        for uri in ("test://a", "test://b"):
            await client.result("resources/subscribe", {"uri": uri})
        await client.text("update", uri="test://a")
        await client.text("update", uri="test://b")
        notified = [m["params"]["uri"] for m in await stream.has(2) if m["method"] == UPDATED]
        assert notified == ["test://a", "test://b"]
        assert "subscriptionId" not in json.dumps(stream.messages), "that is the layer's own"
        await until(lambda: modern.open <= 2, "one stream for each of its sessions there")


@pytest.mark.parametrize("kind", MOSTLY_A_URL)
async def test_progress_and_a_log_come_with_their_request(kind: str) -> None:
    async with modern_world(kind) as w:
        client = await w.connected()
        sent = client.call("progress", meta={"progressToken": "mine"})
        await sent.result()
        (report,) = [m["params"] for m in sent.reply.messages if "method" in m]
        assert report == {"progressToken": "mine", "progress": 1, "total": 2, "message": "half"}
        await client.result("logging/setLevel", {"level": "info"})
        sent = client.call("log")
        await sent.result()
        assert sent.reply.messages[0]["params"]["data"] == "hello"


async def test_where_a_url_allows_no_second_listen_the_first_one_ends_before_it() -> None:
    """It kept the older stream, and nobody got changes of later subscriptions."""
    modern = ModernServer(listens=1)
    async with modern_world("url", modern) as w:
        client = await w.connected()
        stream = await client.get().started()
        await client.start()

        def notified() -> list[str]:
            return [m["params"]["uri"] for m in stream.messages if m["method"] == UPDATED]

        # Its session listens by now.
        await client.result("resources/subscribe", {"uri": "test://a"})
        await until(
            lambda: notified() == ["test://a"], "of what changed between the two nobody knows"
        )
        await client.text("update", uri="test://a")
        await until(lambda: notified() == ["test://a", "test://a"], "it listens for that")
        assert modern.open <= 1
