"""WebSockets and pipes live in one process; what concerns them happens in any."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, cast

import pytest

from mcp_sessions.errors import StoreRefused, StoreUnavailable
from mcp_sessions.ids import SessionId
from mcp_sessions.server.cluster.shared_bus import SharedBus
from tests.support.children import until
from tests.support.duplex import (
    DECLARED,
    ELICITS,
    DuplexPeer,
    listening,
    pipe,
    websocket,
)
from tests.support.raw import (
    Json,
    at_most,
    call_params,
    event_ids,
    in_session,
    keyed,
    text_of,
    uris,
)
from tests.support.replicas import Cluster, cluster, events_are_lost, lost, numbers
from tests.support.virtual_time import cycles

pytestmark = pytest.mark.on_network

SOON = 2.0
"""Seconds; less than a round takes."""

SEEDS = range(3)
DETACHED = "notifications/sessions/detached"
CAPABILITIES: Json = {**DECLARED, **ELICITS}


class Sockets:
    """A cluster whose replicas can be reached on WebSockets, too."""

    def __init__(self, c: Cluster, ports: list[int], stack: AsyncExitStack) -> None:
        self.c = c
        self._ports = ports
        self._stack = stack

    async def connected(self, number: int, **options: Any) -> DuplexPeer:
        """A WebSocket to that replica, after its handshake."""
        url = f"ws://127.0.0.1:{self._ports[number]}/mcp"
        peer = await self._stack.enter_async_context(websocket(url, **options))
        await peer.initialize()
        return peer

    async def piped(self, number: int, **options: Any) -> DuplexPeer:
        peer = await self._stack.enter_async_context(pipe(self.c[number].layer, **options))
        await peer.initialize()
        return peer

    async def publish(self, number: int, session: str, n: int) -> None:
        publisher = self.c[number].inside.publisher
        await publisher.publish(cast(SessionId, session), "notifications/x", {"n": n})

    async def round(self, number: int) -> None:
        bus = self.c[number].inside.bus
        assert isinstance(bus, SharedBus)
        for _ in range(4):
            await bus.round()


@asynccontextmanager
async def sockets(count: int = 2, **options: Any) -> AsyncGenerator[Sockets]:
    async with cluster(count, **options) as c, AsyncExitStack() as stack:
        ports = [await stack.enter_async_context(listening(w.layer_app)) for w in c.worlds]
        yield Sockets(c, ports, stack)


@pytest.mark.parametrize("kind", ["websocket", "stdio"])
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_connection_gets_what_any_replica_stores(kind: str, seed: int) -> None:
    """ATT6, EVT7: its own process among them; once and in order."""
    async with sockets(3, seed=seed) as s:
        peer = await (s.connected(2) if kind == "websocket" else s.piped(2))
        session = (await peer.start())["sessionId"]

        async def produce(number: int) -> None:
            for n in range(20):
                await s.publish(number, session, 100 * number + n)

        await asyncio.gather(*(produce(number) for number in range(3)))
        events = await at_most(SOON, peer.has_events(60))

        ids = event_ids(events)
        assert ids == sorted(set(ids))
        for number in range(3):
            own = [n for n in numbers(events) if n // 100 == number]
            assert own == [*range(100 * number, 100 * number + 20)]


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_resume_under_load_is_whole(seed: int) -> None:
    """ATT6: "subscribe first, read history, merge", between two processes."""
    async with sockets(2, seed=seed) as s:
        started = await s.c[0].client().start()
        session = started["sessionId"]

        producing = asyncio.create_task(s.c[0].produce(session, 60))
        peer = await s.connected(1)
        resumed = await peer.resume(session, started["sessionEventId"])
        await producing
        events = await at_most(SOON, peer.has_events(60))

        assert resumed["catchup"]
        assert numbers(events) == [*range(60)]
        first = next(i for i, m in enumerate(peer.messages) if m in events)
        assert any("resumed" in (m.get("result") or {}) for m in peer.messages[:first])


@pytest.mark.parametrize("notified", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.in_process
async def test_a_takeover_at_another_replica_ends_it(seed: int, notified: bool) -> None:
    """RES3, TKO7: the displaced connection is notified, and receives nothing that was
    stored after.
    """
    async with sockets(3, seed=seed) as s:
        old = await s.connected(0, capabilities=CAPABILITIES)
        session = (await old.start())["sessionId"]
        if not notified:
            s.c.backplane.loses = lost("displaced")

        producing = asyncio.create_task(s.c[2].produce(session, 60))
        await old.has_events(3)
        new = await s.connected(1)
        resumed = await new.resume(session, event_ids(old.events)[-1])
        await producing
        await s.publish(0, session, 60)
        await new.until(lambda: numbers(new.events)[-1:] == [60], "the last event")
        await s.round(0)
        detached = await old.notified(DETACHED)

        assert detached["params"] == {"sessionId": session, "reason": "taken_over"}
        assert resumed["catchup"]
        assert all(id_ <= resumed["sessionEventId"] for id_ in event_ids(old.events))
        together = sorted({*numbers(old.events), *numbers(new.events)})
        assert together == [*range(61)]
        ids = event_ids(new.events)
        assert ids == sorted(set(ids))
        assert (await old.error("tools/list"))["code"] == -31010


@pytest.mark.parametrize("failed", [StoreUnavailable("away"), StoreRefused("another release")])
@pytest.mark.in_process
async def test_a_takeover_that_was_missed_is_told_though_the_store_fails_for_another_session(
    failed: StoreUnavailable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TKO7: the store comes back in the next round, or one session cannot be read at all."""
    async with sockets(2) as s:
        first, second = [await s.connected(0, capabilities=CAPABILITIES) for _ in range(2)]
        broken, session = [(await each.start())["sessionId"] for each in (first, second)]
        s.c.backplane.loses = lost("displaced")
        await (await s.connected(1)).resume(session)
        store, calls = s.c[0].inside.store, list[SessionId]()
        load = store.load

        async def fails(session_id: SessionId, **more: Any) -> Any:
            calls.append(session_id)
            if session_id == broken and (isinstance(failed, StoreRefused) or len(calls) == 1):
                raise failed
            return await load(session_id, **more)

        monkeypatch.setattr(store, "load", fails)
        bus = s.c[0].inside.bus
        assert isinstance(bus, SharedBus)
        bus.on_gap()
        for _ in range(2):
            with suppress(StoreUnavailable):
                await bus.round()
        assert (await at_most(SOON, second.notified(DETACHED)))["params"]["sessionId"] == session


async def test_who_has_it_now_is_known_at_another_replica() -> None:
    """TKO12."""
    async with sockets(2) as s:
        old = await s.connected(0, capabilities=CAPABILITIES)
        session = (await old.start())["sessionId"]
        new = await s.connected(1)

        named = {"_meta": {"io.github.mcp-sessions/instance": "one-of-ours"}}
        await new.result("session/resume", {"sessionId": session, **named})
        detached = await old.notified(DETACHED)

        assert detached["params"] == {
            "sessionId": session,
            "reason": "taken_over",
            "instance": "one-of-ours",
        }


async def test_rivals_on_two_replicas_leave_one_owner() -> None:
    """RES3, SES8: on several processes; every loser is notified."""
    async with sockets(2) as s:
        session = (await s.c[0].client().start())["sessionId"]
        rivals = [await s.connected(number % 2, capabilities=CAPABILITIES) for number in range(6)]
        await asyncio.gather(*(rival.resume(session) for rival in rivals))
        await s.publish(0, session, 1)
        for number in range(2):
            await s.round(number)
        owners = [
            rival
            for rival in rivals
            if "result" in await rival.answer(await rival.send("tools/list"))
        ]

        assert len(owners) == 1
        await owners[0].has_events(1)
        assert [len(rival.events) for rival in rivals].count(0) == 5
        for rival in rivals:
            if rival is not owners[0]:
                assert (await rival.notified(DETACHED))["params"]["reason"] == "taken_over"


@pytest.mark.in_process
async def test_a_lost_last_event_is_seen_by_its_number() -> None:
    """ATT10."""
    async with sockets(2) as s:
        peer = await s.connected(1)
        session = (await peer.start())["sessionId"]
        s.c.backplane.loses = events_are_lost
        await s.publish(0, session, 1)
        s.c.backplane.loses = lost()
        await s.round(1)
        assert numbers(await at_most(SOON, peer.has_events(1))) == [1]


@pytest.mark.in_process
async def test_what_was_missed_while_cut_off_is_read() -> None:
    """ATT10: on a gap every stream is read again."""
    async with sockets(2) as s:
        peer = await s.connected(1)
        session = (await peer.start())["sessionId"]
        s.c.stores[1].exchange.cut_off()
        for n in range(3):
            await s.publish(0, session, n)
        s.c.stores[1].exchange.mend()
        assert numbers(await at_most(SOON, peer.has_events(3))) == [0, 1, 2]


async def test_a_question_goes_to_the_connection_wherever_it_is() -> None:
    """ASK2: a handler on A asks a session whose WebSocket is on B; the answer comes back."""
    async with sockets(2) as s:
        peer = await s.connected(1, capabilities=CAPABILITIES)
        session = (await peer.start())["sessionId"]
        asked = s.c[0].client().call("ask_standalone", question="?", meta=in_session(session))
        question = await peer.question()
        await peer.respond(question, {"action": "accept", "content": {"answer": "yes"}})

        assert text_of(await at_most(SOON, asked.result())) == "accept: yes"


async def test_a_client_at_another_replica_that_cannot_be_asked_is_not() -> None:
    """The handler gets an error at once: what the client declared is known where it is."""
    async with sockets(2) as s:
        peer = await s.connected(1)
        session = (await peer.start())["sessionId"]
        asked = s.c[0].client().call("ask_standalone", question="?", meta=in_session(session))
        answer = await at_most(SOON, asked.answer())

        assert answer["error"]["code"] == -32600
        assert not peer.asked


async def test_an_open_question_moves_with_its_session() -> None:
    """ASK2: from the WebSocket on B to the one on C; asked by A."""
    async with sockets(3) as s:
        old = await s.connected(1, capabilities=CAPABILITIES)
        session = (await old.start())["sessionId"]
        asked = s.c[0].client().call("ask_standalone", question="?", meta=in_session(session))
        question = await old.question()
        new = await s.connected(2, capabilities=CAPABILITIES)
        await new.resume(session)

        assert await new.question() == question
        await new.respond(question, {"action": "decline"})
        assert text_of(await at_most(SOON, asked.result())) == "decline: None"


async def test_a_replica_that_stops_withdraws_its_questions_at_others() -> None:
    """ASK6."""
    async with sockets(2) as s:
        peer = await s.connected(1, capabilities=CAPABILITIES)
        session = (await peer.start())["sessionId"]
        asked = s.c[0].client().call("ask_standalone", question="?", meta=in_session(session))
        await peer.question()
        await s.c[0].inside.draining.stop()

        assert "error" in await asked.answer()
        await peer.notified("notifications/cancelled")


@pytest.mark.in_process
async def test_a_replica_stops_after_others_have_its_withdrawals() -> None:
    """ASK6. The store takes its time to say where the client is."""
    async with sockets(2) as s:
        peer = await s.connected(1, capabilities=CAPABILITIES)
        session = (await peer.start())["sessionId"]
        asked = s.c[0].client().call("ask_standalone", question="?", meta=in_session(session))
        await peer.question()
        store: Any = s.c.stores[0]
        load = store.load

        async def slow(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0.5)
            return await load(*args, **kwargs)

        store.load = slow
        await s.c[0].inside.draining.stop()

        assert "error" in await asked.answer()
        await peer.notified("notifications/cancelled")


@pytest.mark.in_process
async def test_a_question_that_is_withdrawn_while_it_is_sent_again_is_not() -> None:
    """ASK6. The store is slow for the one, and not for the other."""
    async with sockets(3) as s:
        old = await s.connected(1, capabilities=CAPABILITIES)
        session = (await old.start())["sessionId"]
        client = await s.c[0].connected()
        asked = client.call("ask_standalone", question="?", meta=in_session(session))
        await old.question()
        store: Any = s.c.stores[0]
        load, loads, released = store.load, list[str](), asyncio.Event()

        async def slow_once(*args: Any, **kwargs: Any) -> Any:
            loads.append("load")
            is_first, found = len(loads) == 1, await load(*args, **kwargs)
            if is_first:
                await released.wait()
            return found

        store.load = slow_once
        new = await s.connected(2, capabilities=CAPABILITIES)
        await new.resume(session)
        await until(lambda: loads, "it is sent again")
        await client.notify("notifications/cancelled", {"requestId": asked.id})
        await new.notified("notifications/cancelled")
        released.set()
        await cycles(50)
        await s.publish(0, session, 1)
        await new.has_events(1)
        assert not new.asked


@pytest.mark.in_process
async def test_a_session_ended_at_another_replica_has_ended_here() -> None:
    """SES18, END1: requests of it fail, nothing of it follows; also when the word of it is lost."""
    async with sockets(2) as s:
        for loses in (lost(), lost("ended")):
            peer = await s.connected(1)
            session = (await peer.start())["sessionId"]
            waits = await peer.call("wait", gate="g")
            await s.c[1].box.gate("g").started.wait()
            s.c.backplane.loses = loses
            await s.c[0].client().end(session)
            await s.round(1)

            error = (await peer.answer(waits))["error"]
            assert (error["code"], error["data"]["started"]) == (-32043, True)
            assert (await peer.error("tools/list"))["code"] == -32043
            s.c[1].box.gate("g").started.clear()
            assert not s.c.stores[1].exchange.watched


@pytest.mark.in_process
async def test_a_change_reaches_the_bare_connections_of_every_replica() -> None:
    """Once; and a session that is attached there has its own."""
    async with sockets(2) as s:
        bare = [await s.connected(number) for number in range(2)]
        attached = await s.connected(1)
        await attached.start()
        for peer in bare:
            await peer.result("resources/subscribe", {"uri": "a:1"})
        await s.c[0].layer.notify_resource_updated("a:1")
        await s.c[1].layer.notify_tools_changed()
        for peer in (*bare, attached):
            await peer.notified("notifications/tools/list_changed")
        await s.round(1)

        for peer in bare:
            methods = sorted(m["method"] for m in peer.notifications)
            assert methods == [
                "notifications/resources/updated",
                "notifications/tools/list_changed",
            ]
        assert [m["method"] for m in attached.notifications] == ["notifications/tools/list_changed"]
        assert "sessionEventId" in attached.notifications[0]["params"]


async def test_a_keyed_request_moves_with_its_client() -> None:
    """REQ4, KEY3: begun on A's WebSocket, sent again on B's: progress, then the one answer, while
    the connection serves what else is asked.
    """
    async with sockets(2) as s:
        old = await s.connected(0)
        session = (await old.start())["sessionId"]
        meta = keyed("k", progressToken="t")
        await old.send("tools/call", call_params("progress", {"steps": 2, "gate": "g"}), meta=meta)
        await s.c[0].box.gate("g").started.wait()
        await old.leave()
        new = await s.connected(1)
        await new.resume(session)
        again = await new.send(
            "tools/call", call_params("progress", {"steps": 2, "gate": "g"}), meta=meta
        )
        assert await new.text("echo", text="meanwhile") == "meanwhile"
        await asyncio.sleep(0.1)
        s.c[0].box.gate("g").go.set()

        answer = await at_most(SOON, new.answer(again))
        assert text_of(answer["result"]) == "reported"
        reports = [m for m in new.notifications if m["method"] == "notifications/progress"]
        assert [m["params"]["progress"] for m in reports] == [1, 2], "KEY21: also what was before"


@pytest.mark.in_process
async def test_a_session_of_a_dead_replica_is_free() -> None:
    """ATT9, KEY11: "A session marker without a live owner is recovered": a rule-1 request attaches
    it as if it were attached nowhere, as soon as the death is noticed.
    """
    async with sockets(2) as s:
        old = await s.connected(0)
        session = (await old.start())["sessionId"]
        peer = await s.connected(1)
        await peer.text("echo", text="x", meta=in_session(session))
        await s.publish(1, session, 1)
        s.c.kill(0)
        died = s.c.stores[0].exchange
        assert died.died_at is not None
        died.died_at -= 60
        await asyncio.sleep(1.1)
        await peer.text("echo", text="x", meta=in_session(session))
        await s.publish(1, session, 2)

        assert numbers(await at_most(SOON, peer.has_events(1))) == [2]


async def test_one_pipe_and_one_replica_of_http() -> None:
    """What a handler on HTTP changes is received on the pipe of another process."""
    async with sockets(2) as s:
        peer = await s.piped(0)
        session = (await peer.start())["sessionId"]
        await s.c[1].client().text("update", uri="a:1", meta=in_session(session))
        assert uris(await at_most(SOON, peer.has_events(1))) == ["a:1"]
