"""On one connection: the answer first, then what was missed, then what comes; each once."""

import asyncio
from typing import Any

import pytest

from tests.support import apps
from tests.support.duplex import WITHIN, DuplexWorld, duplex_world
from tests.support.interposed import Interposed
from tests.support.raw import at_most, event_ids, in_session, uris
from tests.support.world import Gate

pytestmark = pytest.mark.filterwarnings(apps.DEPRECATED)

KINDS = ("websocket", "stdio")


def transport_of(world: DuplexWorld) -> Any:
    """The newest connection, as the server has it."""
    return world.inside.connections.all()[-1].transport


@pytest.mark.parametrize("kind", KINDS)
async def test_the_answer_to_resume_comes_before_the_first_replayed_event(kind: str) -> None:
    """The result is written before the first replayed event; live after (RES6)."""
    async with duplex_world() as world:
        first = await world.connected(kind)
        started = await first.start()
        session_id = started["sessionId"]
        await first.leave()
        missed = [f"note://{number}" for number in range(5)]
        await world.publish(session_id, *missed)
        second = await world.connected(kind)
        before = len(second.messages)
        answer = await second.resume(session_id, started["sessionEventId"])
        await world.publish(session_id, "note://live")
        await second.has_events(6)
        assert "result" in second.messages[before]
        assert (answer["catchup"], answer["replayed"]) == (True, 5)
        assert uris(second.events) == [*missed, "note://live"]
        assert answer["sessionEventId"] == second.events[4]["params"]["sessionEventId"]
        # Resuming where it is already attached: nothing is said twice, nobody displaced.
        again = await second.resume(session_id, second.events[3]["params"]["sessionEventId"])
        assert again["replayed"] == 2
        await second.has_events(8)
        assert uris(second.events[6:]) == ["note://4", "note://live"]


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_appended_while_a_resume_is_answered_comes_once_and_in_order(
    kind: str,
) -> None:
    """ATT6, EVT10: between the store's step and ours, and while events are held."""
    steps, attached = Interposed(), Gate()
    async with duplex_world(store=steps.store) as world:
        first = await world.connected(kind)
        started = await first.start()
        session_id = started["sessionId"]
        await first.leave()
        await world.publish(session_id, "note://a", "note://b")
        second = await world.connected(kind)
        steps.after["attach"] = attached.arrive
        resuming = asyncio.create_task(second.resume(session_id, started["sessionEventId"]))
        await at_most(WITHIN, attached.started.wait())
        publishing = asyncio.create_task(world.publish(session_id, "note://c", "note://d"))
        await asyncio.sleep(0)
        attached.go.set()
        answer = await at_most(WITHIN, resuming)
        await at_most(WITHIN, publishing)
        await world.publish(session_id, "note://e")
        await second.has_events(5)
        assert answer["replayed"] == 2
        assert uris(second.events) == [f"note://{name}" for name in "abcde"]
        ids = event_ids(second.events)
        assert ids == sorted(set(ids))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_resume_that_failed_holds_no_events_back(kind: str) -> None:
    """The store was away while a session was resumed: the events of every other session on
    the connection were held for an answer that never came, for ever.
    """
    steps = Interposed()
    async with duplex_world(store=steps.store) as world:
        peer = await world.connected(kind)
        session_id = (await peer.start())["sessionId"]
        steps.fails("attach", "before")
        assert (await peer.error("session/resume", {"sessionId": session_id}))["code"] == -31012
        steps.mend()
        await world.publish(session_id, "note://a")
        assert uris(await peer.has_events(1)) == ["note://a"]
        assert not transport_of(world).channels


@pytest.mark.parametrize("kind", KINDS)
async def test_a_full_buffer_leaves_the_rest_in_the_log_and_catches_up(kind: str) -> None:
    """Bounded memory: what does not fit waits in the log (ATT7)."""
    async with duplex_world(send_buffer=4_000) as world:
        peer = await world.connected(kind)
        session_id = (await peer.start())["sessionId"]
        outbox = transport_of(world).outbox
        release = outbox.hold()
        flood = [f"note://{number}" for number in range(200)]
        await world.publish(session_id, *flood)
        waiting = sum(len(chunk) for chunk, _ in outbox._buffer)
        assert waiting < 4_000 + 1_000
        release()
        await peer.has_events(200)
        await world.publish(session_id, "note://live")
        await peer.has_events(201)
        assert uris(peer.events) == [*flood, "note://live"]
        assert not outbox.was_slow


@pytest.mark.parametrize("kind", KINDS)
async def test_a_replay_larger_than_the_buffer_is_whole_and_in_order(kind: str) -> None:
    """RPL4: whole or refused, whatever the buffer holds; coalesced events leave gaps."""
    async with duplex_world(send_buffer=4_000) as world:
        first = await world.connected(kind)
        started = await first.start()
        session_id = started["sessionId"]
        await first.leave()
        # Each resource twice: the second half replaces the first, the ids are not dense.
        every = [f"note://{number % 150}" for number in range(300)]
        await world.publish(session_id, *every)
        second = await world.connected(kind)
        answer = await second.resume(session_id, started["sessionEventId"])
        await world.publish(session_id, "note://live")
        assert (answer["catchup"], answer["replayed"]) == (True, 150)
        await second.has_events(151)
        assert uris(second.events) == [*every[150:], "note://live"]


@pytest.mark.parametrize("kind", KINDS)
async def test_events_come_once_and_in_order_under_a_flood(kind: str) -> None:
    """Several writers, several sessions on one connection, a small buffer, calls between."""
    async with duplex_world(send_buffer=8_000, max_events=10_000) as world:
        peer = await world.connected(kind)
        sessions = [(await peer.start())["sessionId"] for _ in range(3)]

        async def write(session_id: str, writer: int) -> None:
            for number in range(100):
                await world.publish(session_id, f"note://{writer}/{number}", wait=number % 7 == 0)

        writers = [write(session_id, n) for session_id in sessions for n in range(3)]
        gathered = asyncio.gather(*writers)
        for number in range(20):
            assert await peer.text("echo", text=f"{number}") == f"{number}"
        await at_most(WITHIN, gathered)
        await peer.has_events(900)
        assert await peer.text("echo", text="end") == "end"
        assert len(peer.events) == 900
        for session_id in sessions:
            meta = in_session(session_id)
            own = [m for m in peer.events if m["params"]["_meta"] == meta]
            ids = event_ids(own)
            assert len(own) == 300
            assert ids == sorted(set(ids))
            for writer in range(3):
                prefix = f"note://{writer}/"
                assert [u for u in uris(own) if u.startswith(prefix)] == [
                    f"{prefix}{number}" for number in range(100)
                ]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_session_taken_while_its_log_is_read_sends_nothing_more_here(kind: str) -> None:
    """RES3: the connection was behind and read on in the log; the session was taken
    over meanwhile; what had been read went to the displaced connection all the same.
    """
    steps, reading = Interposed(), Gate()
    steps.after["read"] = reading.arrive
    async with duplex_world(store=steps.store, send_buffer=500) as world:
        old = await world.connected(kind)
        started = await old.start()
        session_id = started["sessionId"]
        release = transport_of(world).outbox.hold()
        flood = [f"note://{number}" for number in range(20)]
        await world.publish(session_id, *flood)
        release()
        await at_most(WITHIN, reading.started.wait())
        seen = len(old.events)
        new = await world.connected(kind)
        taking = asyncio.create_task(new.resume(session_id, started["sessionEventId"]))
        await new.until(lambda: new.messages and len(new.messages) > 1)
        reading.go.set()
        await taking
        await new.has_events(20)
        assert uris(new.events) == flood
        assert (await old.error("tools/list"))["code"] == -31010
        assert len(old.events) <= max(seen, 3)


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_of_a_session_follows_the_answer_to_its_end(kind: str) -> None:
    """The answer is written last and nothing of the session after it."""
    async with duplex_world() as world:
        peer = await world.connected(kind)
        session_id = (await peer.start())["sessionId"]
        gate = world.inner.box.gate("g")
        running = await peer.call("wait", gate="g")
        await at_most(WITHIN, gate.started.wait())
        await world.publish(session_id, "note://a")
        ended = await peer.send("session/end", {"sessionId": session_id})
        assert "result" in await peer.answer(ended)
        assert peer.messages[-1]["id"] == ended
        assert (await peer.answer(running))["error"]["code"] == -32043
        await world.publish(session_id, "note://b")
        # Ended by this connection: what follows belongs to no session.
        assert await peer.text("session_id") == "none"
        assert (await peer.error("session/end", {"sessionId": session_id}))["code"] == -32043
        assert "note://b" not in uris(peer.events)


@pytest.mark.parametrize("kind", KINDS)
async def test_who_takes_no_answers_may_not_continue_asking(kind: str) -> None:
    """Never buffered without bound: a client that asked and did not read grew the buffer by
    one answer per request, for all of ``slow_timeout``.
    """
    async with duplex_world(send_buffer=10_000, slow_timeout=0.2) as world:
        peer = await world.connected(kind)
        transport = transport_of(world)
        transport.outbox.hold()
        request = "i" * 1_000
        # Small enough for the buffer of any pipe; each answer is as large.
        for number in range(15):
            await peer.send("nope", request_id=f"{number}{request}")
        async with asyncio.timeout(WITHIN):
            while not transport.outbox.full:  # noqa: ASYNC110
                await asyncio.sleep(0)
        waiting = sum(len(chunk) for chunk, _ in transport.outbox._buffer)
        for number in range(15, 50):
            await peer.send("nope", request_id=f"{number}{request}")
        await at_most(WITHIN, transport.outbox.until_cut())
        assert transport.outbox.was_slow
        grown = sum(len(chunk) for chunk, _ in transport.outbox._buffer) - waiting
        assert grown < 10 * len(request)
