"""What the layer gives a wrapped server it gives every kind of it: the same story over each.

A server in Python, one that is a command (`tests.support.child_server`), one that is a command
and speaks the era of 2026-07-28 only (`tests.support.modern_child`), and one that is a URL, whose
tools are alike. The promises are those of the README and of `spec/`.
"""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions import SessionSecurity
from tests.support import apps
from tests.support.children import child, modern_child
from tests.support.duplex import DECLARED, ELICITS, DuplexWorld, duplex_world
from tests.support.modern import SUBSCRIPTION_ID, ModernClient, session_meta
from tests.support.raw import event_ids, in_session, keyed, text_of, uris
from tests.support.urls import stock_server
from tests.support.world import Ctx, Toolbox

pytestmark = pytest.mark.filterwarnings(apps.DEPRECATED)

SERVERS = ("python", "command", "modern command", "url")


@pytest.fixture
def anyio_backend() -> str:
    """Asyncio's own loop: other processes know no other time."""
    return "asyncio"


@asynccontextmanager
async def served(kind: str, **options: Any) -> AsyncGenerator[DuplexWorld]:
    """A server of that kind behind the layer, on every transport."""
    if kind.endswith("command"):
        server = modern_child() if kind.startswith("modern") else child()
        async with duplex_world(server=server, **options) as w:
            yield w
        return
    if kind == "url":
        async with stock_server() as server, duplex_world(server=server, **options) as w:
            yield w
        return
    box, count = Toolbox(), 0

    async def counted(ctx: Ctx, arguments: dict[str, Any]) -> str:
        nonlocal count
        count += 1
        return str(count)

    box.tools["count"] = counted
    async with duplex_world(box=box, **options) as w:
        yield w


@pytest.mark.parametrize("kind", SERVERS)
async def test_what_was_missed_comes_on_another_connection_once_coalesced_and_in_order(
    kind: str,
) -> None:
    async with served(kind) as w:
        client = await w.inner.connected()
        started = await client.start()
        session = started["sessionId"]
        for name in "ab":
            await client.result("resources/subscribe", {"uri": f"test://{name}"})
        await client.delete().done()
        other = await w.inner.connected()
        by_name = ModernClient(w.inner.carrier)
        for name in "abaab":
            sent = {"uri": f"test://{name}"}
            await by_name.text("update", sent, meta=session_meta(session))
        stream = await other.get().started()
        resumed = await other.resume(session, started["sessionEventId"])
        assert (resumed["catchup"], resumed["replayed"]) == (True, 2)
        missed = await stream.has(2)
        assert uris(missed) == ["test://a", "test://b"]
        assert event_ids(missed) == sorted(event_ids(missed))


@pytest.mark.parametrize("transport", ["websocket", "stdio"])
@pytest.mark.parametrize("kind", SERVERS)
async def test_a_session_continues_over_another_transport(kind: str, transport: str) -> None:
    async with served(kind) as w:
        client = await w.inner.connected()
        started = await client.start()
        assert await client.text("count") == "1"
        peer = await w.connected(transport, capabilities=DECLARED)
        await peer.resume(started["sessionId"], started["sessionEventId"])
        assert await peer.text("count") == "2", "it is the same session, in the same server"
        await peer.result("resources/subscribe", {"uri": "test://a"})
        await peer.text("update", uri="test://a")
        assert uris(await peer.has_events(1)) == ["test://a"]
        assert (await client.error("tools/list"))["code"] == -31010, "it was taken over"


@pytest.mark.parametrize("kind", SERVERS)
async def test_a_keyed_call_runs_once_and_whoever_sends_it_again_joins(kind: str) -> None:
    """The question that its handler asks comes to the newest sending; one answer is for both."""
    async with served(kind) as w:
        first = await w.inner.connected(capabilities={"elicitation": {}})
        session = (await first.start())["sessionId"]
        meta = keyed("k", session)
        running = first.call("ask", question="how many?", meta=meta)
        await running.reply.has(1)
        second = await w.inner.connected(capabilities={"elicitation": {}})
        joined = second.call("ask", question="how many?", meta=meta)
        (question,) = await joined.reply.has(1)
        await second.respond(question, {"action": "accept", "content": {"answer": "two"}})
        results = [text_of(await sent.result()) for sent in (running, joined)]
        assert results[0] == results[1] and "two" in results[0]
        again = first.call("ask", question="how many?", meta=meta)
        assert text_of(await again.result()) == results[0]


@pytest.mark.parametrize("kind", SERVERS)
async def test_a_client_on_a_pipe_or_a_websocket_is_asked_there(kind: str) -> None:
    async with served(kind) as w:
        for transport in ("websocket", "stdio"):
            peer = await w.connected(transport, capabilities={**DECLARED, **ELICITS})
            request = await peer.call("ask", question="how many?")
            question = await peer.question()
            await peer.respond(question, {"action": "accept", "content": {"answer": "two"}})
            assert "two" in text_of((await peer.answer(request))["result"])


@pytest.mark.parametrize("kind", SERVERS)
async def test_a_session_that_was_ended_has_ended(kind: str) -> None:
    async with served(kind) as w:
        client = await w.inner.connected()
        session = (await client.start())["sessionId"]
        assert await client.text("count") == "1"
        await client.end(session)
        gone = await client.call("count", meta=in_session(session)).error()
        assert gone["code"] == -32043
        await client.result("tools/list")


@pytest.mark.parametrize("kind", SERVERS)
async def test_state_goes_along_with_its_client(kind: str) -> None:
    """``sessions/create`` with nothing stored; what was sealed for one server is no other's."""
    async with served(kind, store=None, security=SessionSecurity(["k" * 32])) as w:
        client = ModernClient(w.inner.carrier)
        created = await client.create()
        meta = session_meta(created["sessionId"], state=created["state"])
        assert (await client.call("count", meta=meta).result())["resultType"] == "complete"
        forged = session_meta(created["sessionId"], state=created["state"][:-4] + "AAAA")
        assert "error" in await client.call("count", meta=forged).answer()


@pytest.mark.parametrize("kind", SERVERS)
async def test_after_a_restart_a_session_continues_and_no_keyed_call_runs_again(
    kind: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "store": f"sqlite:///{tmp_path}/sessions.db",
        "security": SessionSecurity(["k" * 32]),
    }
    async with served(kind, **options) as w:
        client = await w.inner.connected()
        started = await client.start()
        session = started["sessionId"]
        assert await client.text("count", meta=keyed("k", session)) == "1"
        await client.result("resources/subscribe", {"uri": "test://a"})
        await client.text("update", uri="test://a")
    async with served(kind, **options) as w:
        client = await w.inner.connected()
        stream = await client.get().started()
        await client.resume(session, started["sessionEventId"])
        assert uris(await stream.has(1)) == ["test://a"]
        assert await client.text("count", meta=keyed("k", session)) == "1"
        assert json.loads(await client.text("count")) == 1, "another process, which ran nothing"


@pytest.mark.parametrize("kind", [kind for kind in SERVERS if kind != "python"])
async def test_a_modern_client_is_asked_in_a_result_and_brings_the_answer_with_its_request(
    kind: str,
) -> None:
    """Whatever era the server speaks, in a session and outside; a handler in Python cannot be
    stopped, and asks by what it returns.
    """
    async with served(kind) as w:
        client = ModernClient(w.inner.carrier, capabilities={"elicitation": {}})
        for session in ((await client.create())["sessionId"], None):
            params = {"name": "ask", "arguments": {"question": "how many?"}}
            asked = await client.send("tools/call", params, session=session).result()
            assert asked["resultType"] == "input_required"
            ((name, question),) = asked["inputRequests"].items()
            assert question["method"] == "elicitation/create"
            assert question["params"]["message"] == "how many?"
            answers = {name: {"action": "accept", "content": {"answer": "two"}}}
            params |= {"inputResponses": answers, "requestState": asked["requestState"]}
            result = await client.send("tools/call", params, session=session).result()
            assert result["resultType"] == "complete" and "two" in text_of(result)


@pytest.mark.parametrize("kind", [kind for kind in SERVERS if kind.endswith("command")])
async def test_who_names_no_session_gets_changes_of_the_resources_that_it_listens_for(
    kind: str,
) -> None:
    """And of no others, whoever else listens; after the acknowledgement, under the listen's id."""
    async with served(kind) as w:
        client = ModernClient(w.inner.carrier)
        one = await client.listening(None, "test://a", "test://b")
        other = await client.listening(None, "test://b")
        for name in "abc":
            await client.text("update", {"uri": f"test://{name}"})
        assert uris((await one.has(3))[1:]) == ["test://a", "test://b"]
        notified = (await other.has(2))[1:]
        assert uris(notified) == ["test://b"]
        assert notified[0]["params"]["_meta"][SUBSCRIPTION_ID] == other.id
        other.leave()
        await client.text("update", {"uri": "test://b"})
        assert uris((await one.has(4))[3:]) == ["test://b"], "one of two left: the other listens on"
