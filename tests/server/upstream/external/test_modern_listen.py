"""A client of the modern era that names no session listens: what its child says of changes.

The rules are those of `mcp_sessions/server/upstream/external/peer.py`.
"""

import asyncio
import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions import HTTPServer
from mcp_sessions.server.dispatch import listening
from mcp_sessions.server.upstream.external import slot, starts
from tests.server.upstream.external.test_upstream import user
from tests.support.children import child, child_world, is_alive, until
from tests.support.duplex import duplex_world
from tests.support.modern import SUBSCRIPTION_ID, ModernClient, Received, session_meta
from tests.support.modern_server import ModernServer, modern_url
from tests.support.raw import RawClient, text_of, uris
from tests.support.world import World, world

LISTS = "notifications/tools/list_changed"


async def update(client: ModernClient, *names: str) -> None:
    for name in names:
        await client.text("update", {"uri": f"test://{name}"})


async def subscribed(client: ModernClient) -> list[str]:
    return json.loads(await client.text("state"))["subscribed"]


async def notified(received: Received, count: int) -> list[str]:
    """Which resources changed, once there are as many events."""
    return uris(await received.has_events(count))


async def clients(w: World, *names: str) -> list[ModernClient]:
    return [ModernClient(await w.carrier_of(user(name))) for name in names]


@pytest.mark.parametrize("per", ["session", "principal"])
async def test_it_gets_changes_of_its_own_child_and_nobody_else_does(per: str) -> None:
    async with child_world(options={"per": per}) as w:
        ann, bob = await clients(w, "ann", "bob")
        of_ann = await ann.listening(None, "test://a", lists=("tools",))
        of_bob = await bob.listening(None, "test://a", "test://b")
        await update(ann, "a")
        await update(bob, "b")
        assert await notified(of_ann, 1) == ["test://a"]
        assert await notified(of_bob, 1) == ["test://b"]
        await ann.text("changed")
        event = (await of_ann.has_events(2))[1]
        assert event["method"] == LISTS
        assert event["params"]["_meta"][SUBSCRIPTION_ID] == of_ann.id


async def test_who_shares_a_child_with_all_gets_what_it_listens_for() -> None:
    async with child_world(options={"per": "shared"}) as w:
        ann, bob = await clients(w, "ann", "bob")
        of_ann = await ann.listening(None, "test://a")
        of_bob = await bob.listening(None, "test://b")
        await update(bob, "a", "b")
        assert await notified(of_ann, 1) == ["test://a"]
        assert await notified(of_bob, 1) == ["test://b"]
        assert await subscribed(ann) == ["test://a", "test://b"]


async def test_a_child_is_subscribed_as_long_as_anybody_listens() -> None:
    async with child_world() as w:
        client = ModernClient(w.carrier)
        one = await client.listening(None, "test://a", "test://b")
        other = await client.listening(None, "test://b")
        assert await subscribed(client) == ["test://a", "test://b"]
        one.leave()
        while await subscribed(client) != ["test://b"]:
            pass
        again = await client.listening(None, "test://a")
        await update(client, "a", "b")
        assert await notified(other, 1) == ["test://b"]
        assert await notified(again, 1) == ["test://a"]
        for received in (other, again):
            received.leave()
        while await subscribed(client):
            pass


@pytest.mark.parametrize("per", ["session", "principal", "shared"])
async def test_a_listen_of_a_session_has_its_child_report_its_resources_and_of_no_others(
    per: str,
) -> None:
    """Of the newest listen: the one before ended. And what a session subscribed is no other's."""
    async with child_world(options={"per": per}) as w:
        client = ModernClient(w.carrier)
        session, other = [(await client.start())["sessionId"] for _ in range(2)]

        async def at_child() -> list[str]:
            return json.loads(await client.text("state", session=session))["subscribed"]

        await client.listening(other, "test://b")
        await client.listening(session, "test://a", "test://b")
        assert await at_child() == ["test://a", "test://b"]
        received = await client.listening(session, "test://c")
        left = ["test://c"] if per == "session" else ["test://b", "test://c"]
        assert await at_child() == left
        await client.text("update", {"uri": "test://c"}, session=session)
        assert await notified(received, 1) == ["test://c"]
        await client.listening(session)
        assert await at_child() == ([] if per == "session" else ["test://b"])


async def test_a_session_gets_changes_of_its_resources_from_the_child_that_follows() -> None:
    async with child_world() as w:
        client = ModernClient(w.carrier)
        session = (await client.start())["sessionId"]
        await client.listening(session, "test://a")
        pid = int(await client.text("pid", session=session))
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not is_alive(pid), "the child is dead")
        await client.send("tools/call", {"name": "state"}, session=session).done()
        state = json.loads(await client.text("state", session=session))
        assert state["subscribed"] == ["test://a"]


async def test_a_listen_of_a_session_is_received_whatever_its_child_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its own events need no child."""
    async with child_world("dies", "key") as w:
        client = ModernClient(w.carrier)
        session = (await client.start())["sessionId"]
        received = await client.listening(session, "test://a", lists=("tools",))
        assert "a listen gets no resource updates for now" in caplog.text
        await w.layer.notify_tools_changed()
        assert (await received.has_events(1))[0]["method"] == LISTS


async def test_an_update_below_a_resource_reaches_who_subscribed_to_that() -> None:
    """Of several who share a process: which of them a server does not say."""
    async with child_world(options={"per": "principal"}) as w:
        client = ModernClient(w.carrier)
        above = await client.listening(None, "test://a")
        others = await client.listening(None, "test://ab", "test://b/")
        by_name = await client.listening(None, "test://a/1")
        await update(client, "a/2", "a/1", "b/3", "ab")
        assert await notified(above, 1) == ["test://a/2"]
        assert await notified(by_name, 1) == ["test://a/1"]
        assert await notified(others, 2) == ["test://b/3", "test://ab"]


async def test_who_listens_to_a_child_that_died_is_notified_when_there_is_another() -> None:
    async with child_world() as w:
        client = ModernClient(w.carrier)
        received = await client.listening(None, "test://a")
        pid = int(await client.text("pid"))
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not is_alive(pid), "the child is dead")
        # Nobody may have noticed yet; what asks then is not answered, and it is noticed.
        await client.send("tools/call", {"name": "state"}).done()
        assert await subscribed(client) == ["test://a"]
        assert await notified(received, 1) == ["test://a"], "it may have changed"
        await update(client, "a")
        assert await notified(received, 2) == ["test://a", "test://a"]


async def test_a_server_that_does_not_answer_holds_up_nobody_who_listens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (starts, slot):
        monkeypatch.setattr(module, "ANSWERING", 0.5)
    async with child_world() as w:
        client = ModernClient(w.carrier)
        one = await client.listening(None, "test://mute", "test://a")
        other = await client.listening(None, "test://mute")
        await update(client, "a", "mute")
        assert await notified(one, 2) == ["test://a", "test://mute"]
        assert await notified(other, 1) == ["test://mute"]
        fresh = await client.listening(None, "test://mute", "test://b")
        await update(client, "b")
        assert await notified(fresh, 1) == ["test://b"]
        many = await client.listening(None, *(f"test://mute{n}" for n in range(9)), "test://b")
        await update(client, "b")
        assert await notified(many, 1) == ["test://b"]
    said = [line.partition(": ")[2] for line in caplog.messages if "answer" in line]
    assert said == [
        "after its restart it does not answer resources/subscribe",
        # Of that resource it is asked once, whoever listens; and of many by one listen, too.
        "it does not answer resources/subscribe",
        "it does not answer resources/subscribe",
        "it does not answer subscriptions: some updates are missing",
    ]


async def test_a_url_of_the_modern_era_reports_it_too() -> None:
    async with modern_url(ModernServer()) as url, world(server=HTTPServer(url)) as w:
        client = ModernClient(w.carrier)
        received = await client.listening(None, "test://a")
        await update(client, "b", "a")
        assert await notified(received, 1) == ["test://a"]


async def test_what_is_no_listen_and_what_is_too_much_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The operator learns of the limit."""
    async with child_world(max_subscriptions=2) as w:
        client = ModernClient(w.carrier)
        many = await client.listen(None, *(f"test://{name}" for name in "abc")).error()
        assert (many["code"], many["data"]["limit"]) == (-31011, "max_subscriptions")
        assert "The limit max_subscriptions (2) is reached" in caplog.text
        wrong: dict[str, Any] = {"notifications": {"resourceSubscriptions": 7}}
        assert (await client.send("subscriptions/listen", wrong).error())["code"] == -32602
        assert (await client.send("subscriptions/listen", {}).error())["code"] == -32602
        received = await client.listening(None, "test://a", "test://b")
        await update(client, "b")
        assert await notified(received, 1) == ["test://b"]


async def test_a_resource_that_the_child_refuses_to_report_is_not_received_and_others_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with child_world() as w:
        client = ModernClient(w.carrier)
        with caplog.at_level(logging.WARNING):
            received = await client.listening(None, "test://a", "test://refused")
        assert "refuses resources/subscribe" in caplog.text
        await update(client, "a")
        assert await notified(received, 1) == ["test://a"]


async def test_a_child_that_does_not_start_is_the_answer() -> None:
    async with child_world("dies", "licence") as w:
        client = ModernClient(w.carrier)
        error = await client.listen(None, "test://a").error()
        assert error["data"] == {"reason": "not_started", "started": False}


@pytest.mark.parametrize("per", ["principal", "shared"])
@pytest.mark.parametrize("modern", [True, False])
async def test_what_nobody_wants_to_get_any_more_its_child_need_not_report(
    per: str, modern: bool
) -> None:
    """Sessions come and go, and one child serves them all."""
    async with child_world(options={"per": per}) as w:
        client, older = ModernClient(w.carrier), await w.connected()
        if modern:
            session = (await client.create())["sessionId"]
            await client.listening(session, "test://a")
        else:
            session = (await older.start())["sessionId"]
            await older.result("resources/subscribe", {"uri": "test://a"})
        assert await subscribed(client) == ["test://a"]
        await w.layer.sessions.end(session)
        left = ["test://a"]
        async with asyncio.timeout(10):
            while left:
                left = await subscribed(client)


async def test_who_listens_holds_up_nobody_on_its_connection_while_its_child_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one connection carries everything; it receives what that child tells once it is
    there.
    """
    monkeypatch.setattr(listening, "_NOTIFYING", 0.1)
    began = tmp_path / "began"
    async with duplex_world(server=child("slow", str(began))) as w:
        peer = await w.connected("websocket", modern=True)
        named = session_meta((await peer.start())["sessionId"])
        wanted = {"notifications": {"resourceSubscriptions": ["test://a"]}}
        await peer.send("subscriptions/listen", wanted, meta=named)
        async with asyncio.timeout(5):
            assert "result" in await peer.answer(await peer.send("session/start", {}))
        began.touch()
        state = ""
        async with asyncio.timeout(10):
            while "test://a" not in state:
                said = await peer.answer(await peer.call("state", meta=named))
                state = text_of(said["result"])


async def test_another_session_gets_its_own() -> None:
    """Of one principal's one child: neither takes the other's subscription away."""
    async with child_world(options={"per": "principal"}) as w:
        modern, older = ModernClient(w.carrier), RawClient(w.carrier)
        await older.initialize()
        stream = await older.get().started()
        await older.result("resources/subscribe", {"uri": "test://a"})
        received = await modern.listening(None, "test://a")
        received.leave()
        received = await modern.listening(None, "test://b")
        await update(modern, "a", "b")
        assert await notified(received, 1) == ["test://b"]
        assert uris(await stream.has(1)) == ["test://a"]
