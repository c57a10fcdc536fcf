"""Who loses a session is notified, and nothing is left half attached, when the store fails while
another connection takes it over (TKO2).
"""

import asyncio

import pytest

from mcp_sessions.ids import SessionId
from mcp_sessions.stores.memory import MemoryStore
from tests.support.failing_calls import fails
from tests.support.in_memory import MemorySocket
from tests.support.raw import EXTENSION, Json, Reply, uris
from tests.support.world import World, world

DETACHED = "notifications/sessions/detached"
DECLARED: Json = {"extensions": {EXTENSION: {}}}


async def connected(w: World) -> MemorySocket:
    peer = MemorySocket(w.layer_app, capabilities=DECLARED)
    await peer.open()
    await peer.initialize()
    return peer


def notified(messages: list[Json]) -> list[str]:
    """Why a session was detached, each time."""
    return [m["params"]["reason"] for m in messages if m.get("method") == DETACHED]


async def later() -> None:
    """The store is back, and what it was due is done."""
    await asyncio.sleep(15)


@pytest.mark.parametrize("retries", [True, False], ids=["asked again", "given up"])
async def test_the_old_owner_is_notified_when_the_reply_to_the_attach_is_lost(
    retries: bool,
) -> None:
    store = MemoryStore()
    async with world(store=store) as w:
        old, new = await connected(w), await connected(w)
        session = (await old.start())["sessionId"]
        assert fails(store, "attach", after=True) == []
        assert (await new.error("session/resume", {"sessionId": session}))["code"] == -31012
        if retries:
            await new.resume(session)
        await later()

        assert notified(old.messages) == ["taken_over"]
        assert notified(new.messages) == []
        await new.leave()
        await old.leave()


async def test_who_keeps_the_session_gets_nothing() -> None:
    """The attach failed before its effect."""
    store = MemoryStore()
    async with world(store=store) as w:
        old, new = await connected(w), await connected(w)
        session = (await old.start())["sessionId"]
        fails(store, "attach", after=False)
        await new.error("session/resume", {"sessionId": session})
        await later()

        assert notified(old.messages) == []
        assert await old.text("update", uri="a:1") == "updated"
        await old.has_events(1)
        await new.leave()
        await old.leave()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after its effect"])
async def test_the_old_owner_is_notified_when_the_new_one_cannot_begin(after: bool) -> None:
    """The new one's GET stream does not carry it yet: what it asked fails, and is asked again."""
    store = MemoryStore()
    async with world(store=store) as w:
        old, new = await connected(w), await w.connected()
        stream = await new.get().started()
        session = (await old.start())["sessionId"]
        fails(store, "carry", after=after)
        reply = await new.send("session/resume", {"sessionId": session}).reply.done()
        assert reply.status == 503
        await later()
        assert notified(old.messages) == ["taken_over"]

        await new.resume(session)
        await new.text("update", uri="a:1")
        assert uris(await stream.has(1)) == ["a:1"]
        await old.leave()


async def test_an_old_owner_on_http_is_notified_when_the_store_is_back() -> None:
    """What tells it is stored first, for whoever opens its GET stream."""
    store = MemoryStore()
    async with world(store=store) as w:
        old, new = await w.connected(capabilities=DECLARED), await connected(w)
        session = (await old.start())["sessionId"]
        stream: Reply = await old.get().started()
        fails(store, "append", after=False)
        assert (await new.resume(session))["catchup"] is False
        await later()
        assert notified(stream.messages) == ["taken_over"]
        await new.leave()


async def test_what_a_deleted_transport_session_had_half_attached_is_free_again() -> None:
    store = MemoryStore()
    async with world(store=store) as w:
        client = await w.connected()
        fails(store, "attach", after=True)
        assert (await client.send("session/start", {}).reply.done()).status == 503
        await client.delete().done()
        await later()
        (orphan,) = await store.all_sessions()
        record = await store.load(SessionId(orphan.session_id), now=w.clock())
        assert record is not None and record.attachment is None


async def test_an_entry_whose_reply_was_lost_reaches_the_open_stream_all_the_same() -> None:
    """Nothing follows it that would show the gap."""
    store = MemoryStore()
    async with world(store=store) as w:
        client = await w.connected()
        await client.start()
        await client.result("resources/subscribe", {"uri": "note:1"})
        stream = await client.get().started()
        fails(store, "relay", after=True)
        await w.layer.notify_resource_updated("note:1")
        assert uris(await stream.has(1)) == ["note:1"]
