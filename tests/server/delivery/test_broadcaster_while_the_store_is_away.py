"""A server-wide change that the store fails in the middle of: who learns of it, when, how often."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import pytest

from mcp_sessions.core.log import LoggedEvent
from mcp_sessions.core.messages import EXTENSION
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import EVENTS, GET_STREAM, Position, SessionId
from mcp_sessions.server.delivery import broadcaster
from mcp_sessions.stores.contract import CHANGES_AT_ONCE, SessionStore
from tests.support.raw import Json, in_session
from tests.support.replicas import Backplane, SharedStore, cluster
from tests.support.virtual_time import cycles
from tests.support.world import Ctx, World, world

URI = "a:1"


@dataclass
class Shared:
    world: World
    store: SharedStore

    async def subscribers(self, count: int) -> list[Json]:
        """The answers to ``session/start`` of so many sessions that are subscribed."""
        started: list[Json] = []
        for _ in range(count):
            client = self.world.client()
            started.append(await client.start())
            meta = in_session(started[-1]["sessionId"])
            await client.result("resources/subscribe", {"uri": URI, "_meta": meta})
        return started

    async def events_of(self, session_id: str, stream: Any = EVENTS) -> Sequence[LoggedEvent]:
        head = await self.store.head(SessionId(session_id), stream=stream)
        assert head is not None
        first = Position(head.log_epoch, 0).event_id()
        events, refusal = await self.store.read(
            SessionId(session_id), first, now=self.world.clock(), stream=stream
        )
        assert refusal is None
        return events

    def fails(self, which: Callable[[int, Sequence[SessionId]], str | None]) -> None:
        """Have ``append_change`` fail.

        Args:
            which: Of the number of the call and its sessions: ``before`` its effect, ``after``
                it, or None: it does not.
        """
        inner, calls = self.store.append_change, 0

        async def append_change(session_ids: Sequence[SessionId], *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            when = which(calls, session_ids)
            if when == "before":
                raise StoreUnavailable("away")
            notified = await inner(session_ids, *args, **kwargs)
            if when == "after":
                raise StoreUnavailable("away")
            return notified

        self.store.append_change = append_change


@asynccontextmanager
async def shared(**limits: Any) -> AsyncGenerator[Shared]:
    backplane = Backplane()
    store = backplane.store()
    async with world(store=cast("SessionStore", store), **limits) as w:
        try:
            yield Shared(w, store)
        finally:
            backplane.is_away = False
            store.bury()


async def notified(s: Shared, started: Json) -> None:
    """Wait until a session has the change; bounded."""
    async with asyncio.timeout(120):
        while not await s.events_of(started["sessionId"]):  # noqa: ASYNC110 - the store tells nobody
            await asyncio.sleep(0.1)


async def test_a_change_is_reported_when_the_store_is_back() -> None:
    """Who announced it learns that it is not stored, and nobody is told ``catchup: true`` over
    a hole: the event is there.
    """
    async with shared() as s:
        [started] = await s.subscribers(1)
        s.store.backplane.is_away = True
        with pytest.raises(StoreUnavailable, match="keeps the change"):
            await s.world.layer.notify_resource_updated(URI)
        await asyncio.sleep(60)
        s.store.backplane.is_away = False

        await notified(s, started)

        client = await s.world.connected()
        resumed = await client.resume(started["sessionId"], started["sessionEventId"])
        assert (resumed["catchup"], resumed["replayed"]) == (True, 1)
        await s.world.layer.notify_resource_updated(URI)


async def test_an_answer_does_not_wait_until_the_store_is_back() -> None:
    """Its handler ran: whoever asked receives what came of it."""
    async with shared() as s:
        [started] = await s.subscribers(1)

        async def touch(ctx: Ctx, arguments: Json) -> str:
            s.fails(lambda call, _: "before" if call < 5 else None)
            with pytest.raises(StoreUnavailable):
                await s.world.layer.notify_resource_updated(URI)
            return "touched"

        s.world.box.tools["touch"] = touch
        client = await s.world.connected()
        assert await client.text("touch") == "touched"
        assert not await s.events_of(started["sessionId"])
        await notified(s, started)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("coalesces", [True, False])
async def test_the_rest_of_an_audience_is_notified_and_nobody_twice(
    when: str, coalesces: bool
) -> None:
    """The store fails for some, before or after it stored their events."""
    limits: dict[str, Any] = {} if coalesces else {"coalescing": {}}
    async with shared(**limits) as s:
        started = await s.subscribers(3 * CHANGES_AT_ONCE)
        s.fails(lambda call, _: when if call in (2, 3, 5) else None)
        for announce in (
            lambda: s.world.layer.notify_resource_updated(URI),
            lambda: s.world.layer.notify_tools_changed(),
        ):
            with pytest.raises(StoreUnavailable):
                await announce()
            s.fails(lambda call, _: when if call in (2, 3) else None)
        await asyncio.sleep(60)

        for each in started:
            events = await s.events_of(each["sessionId"])
            assert [b"tools" in event.payload for event in events] == [False, True]
            assert [event.number for event in events] == [1, 2]


async def test_who_is_attached_gets_it_once() -> None:
    """Live, on a GET stream, though the store failed between what it stored and its answer."""
    async with shared(coalescing={}) as s:
        client = await s.world.connected()
        stream = await client.get().started()
        session = (await client.start())["sessionId"]
        await client.result("resources/subscribe", {"uri": URI, "_meta": in_session(session)})
        relay, failures = s.store.relay, [True, True]

        async def fails(*args: Any, **kwargs: Any) -> Any:
            if failures and failures.pop():
                raise StoreUnavailable("away")
            return await relay(*args, **kwargs)

        s.store.relay = fails
        s.fails(lambda call, _: "after" if call == 1 else None)
        with pytest.raises(StoreUnavailable):
            await s.world.layer.notify_resource_updated(URI)
        await asyncio.sleep(60)
        await s.world.layer.notify_prompts_changed()

        messages = await stream.has(2)
        assert [m["method"].split("/")[1] for m in messages] == ["resources", "prompts"]


async def test_a_session_that_the_store_fails_for_hinders_no_other() -> None:
    """Not those that are told in one step with it, and not the changes that come later."""
    async with shared() as s:
        started = await s.subscribers(CHANGES_AT_ONCE + 3)
        damaged = started[2]["sessionId"]
        s.fails(lambda _, session_ids: "before" if damaged in session_ids else None)
        with pytest.raises(StoreUnavailable):
            await s.world.layer.notify_resource_updated(URI)
        await asyncio.sleep(120)
        for each in started:
            has = [event.number for event in await s.events_of(each["sessionId"])]
            assert has == ([] if each["sessionId"] == damaged else [1])

        await s.world.client().result(
            "resources/unsubscribe", {"uri": URI, "_meta": in_session(damaged)}
        )
        await asyncio.sleep(60)
        await s.world.layer.notify_resource_updated(URI)


async def test_a_session_in_the_middle_of_something_keeps_nobody_waiting() -> None:
    """A session's turn is taken by a store call that takes long; it receives when that has
    ended.
    """
    async with shared() as s:
        started = await s.subscribers(3)
        attachments = s.world.inside.attachments
        async with attachments.session_lock(SessionId(started[0]["sessionId"])):
            notifying = asyncio.create_task(s.world.layer.notify_resource_updated(URI))
            for each in started[1:]:
                await notified(s, each)
            assert not notifying.done()
            assert not await s.events_of(started[0]["sessionId"])
        await notifying
        assert len(await s.events_of(started[0]["sessionId"])) == 1


async def test_other_replicas_bare_connections_get_it_once() -> None:
    """Its message to them is sent again, and those who have it know that."""
    async with cluster(2) as c:
        client = await c[1].connected()
        await client.result("resources/subscribe", {"uri": URI})
        stream = await c.at(0, client).get().started()
        c.backplane.is_away = True
        with pytest.raises(StoreUnavailable):
            await c[0].layer.notify_resource_updated(URI)
        c.backplane.is_away = False
        async with asyncio.timeout(60):
            messages = await stream.has(1)
        assert messages[0]["params"]["uri"] == URI
        await cycles(50)
        assert c.notified("change") == 1
        received = c[1].inside.broadcaster
        assert received.is_new("x.1")
        assert not received.is_new("x.1")


async def test_what_is_kept_is_bounded_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In number: changes of one key are one, and who announces one too many receives it."""
    monkeypatch.setattr(broadcaster, "EACH", 2)
    monkeypatch.setattr(broadcaster, "KEPT", 4)
    async with shared() as s:
        [started] = await s.subscribers(1)
        client = await s.world.connected(capabilities={"extensions": {EXTENSION: {}}})
        stream = await client.get().started()
        await client.start()
        s.store.backplane.is_away = True
        for number in (1, 2, 2, 2, 3, 3, 4, 4):
            with pytest.raises(StoreUnavailable, match="keeps the change"):
                await s.world.layer.notify_resource_updated(f"a:{number}")
        with pytest.raises(StoreUnavailable, match="too many"):
            await s.world.layer.notify_resource_updated("a:5")
        s.store.backplane.is_away = False
        await asyncio.sleep(60)

        # What it missed is not there: it is not notified that it has everything.
        resumed = await client.resume(started["sessionId"], started["sessionEventId"])
        assert resumed["catchup"] is False
        assert (await stream.has(1))[0]["params"]["reason"] == "evicted"
        await s.world.layer.notify_tools_changed()
        assert [event.number for event in await s.events_of(started["sessionId"])] == [1]
    assert "changes were lost" in caplog.text


async def test_a_server_that_stops_says_what_it_could_not_report(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It waits for no store that is away."""
    caplog.set_level(logging.ERROR)
    async with shared() as s:
        await s.subscribers(1)
        s.store.backplane.is_away = True
        with pytest.raises(StoreUnavailable):
            await s.world.layer.notify_resource_updated(URI)
    assert "changes were lost" in caplog.text
    assert GET_STREAM not in caplog.text
