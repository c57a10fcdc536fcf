"""What is sent while the store is away: it waits, and comes once and in order, or an error says
that it does not (HTL10, HTL11).
"""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions.server.delivery import pending_writes
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore
from tests.support.asking import SCHEMA
from tests.support.duplex import ELICITS
from tests.support.interposed import Interposed
from tests.support.raw import Json, RawClient, Reply, Sent, in_session, text_of, uris
from tests.support.replicas import cluster
from tests.support.virtual_time import cycles
from tests.support.world import Ctx, Toolbox, World, world

FAULTS = pytest.mark.parametrize("when", ["before", "after"])
"""The store fails before its effect, or its answer is lost."""


def adds_steps(box: Toolbox) -> None:
    """A tool that reports ``to`` steps, and waits at the gate after each of ``at``."""

    async def steps(ctx: Ctx, arguments: Json) -> str:
        for step in range(1, arguments["to"] + 1):
            await ctx.session.report_progress(step, message="x" * arguments.get("size", 0))
            if step in arguments["at"]:
                await box.gate(f"{arguments.get('name', '')}{step}").arrive()
        if arguments.get("fails"):
            raise ValueError("the tool failed")
        return "stepped"

    box.tools["steps"] = steps


def stepping(client: RawClient, *at: int, **arguments: object) -> Sent:
    return client.call("steps", meta={"progressToken": 1}, at=at, to=4, **arguments)


def steps_of(*replies: Reply) -> list[int]:
    messages = [message for reply in replies for message in reply.messages]
    return [m["params"]["progress"] for m in messages if m.get("method")]


async def through(w: World, *gates: int | str) -> None:
    """Let a tool through its gates, one after the other."""
    for gate in gates:
        await w.box.gate(str(gate)).started.wait()
        w.box.gate(str(gate)).go.set()
        await cycles()


def nothing_waits(w: World) -> bool:
    attachments: Any = w.inside.attachments
    return len(attachments._pending_writes) == 0


async def passes(seconds: float) -> None:
    """Time passes, virtually: the store is asked again."""
    await asyncio.sleep(seconds)


# --- the response of a call ------------------------------------------------------------------


def adds_giving_up(box: Toolbox) -> None:
    """A tool that asks, and does not wait for the answer."""

    async def gives_up(ctx: Ctx, arguments: Json) -> str:
        await ctx.session.report_progress(1)
        await box.gate("1").arrive()
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                await ctx.session.elicit_form("?", SCHEMA, related_request_id=ctx.request_id)
        return "gave up"

    box.tools["gives up"] = gives_up


@FAULTS
@pytest.mark.parametrize("listens", [True, False])
async def test_a_question_that_waits_is_not_put_once_it_is_withdrawn(
    listens: bool, when: str
) -> None:
    """ASK6: the withdrawal has its key, and replaces it in the log and before it is there."""
    interposed = Interposed()
    async with world(store=interposed.store) as w:
        adds_giving_up(w.box)
        client = await w.connected(capabilities=ELICITS)
        sent = client.call("gives up", meta={"progressToken": 1})
        await sent.reply.event(1)
        if not listens:
            await sent.reply.gone()
        interposed.fails("append", when)
        await through(w, 1)
        await passes(10)
        # The store is away, and a client that listens has the answer.
        assert sent.reply.ended
        interposed.mend()
        await passes(10)
        reply = sent.reply if listens else await client.get(sent.reply.events[0].id).done()
        methods = [message.get("method") for message in reply.messages]
        assert methods == ["notifications/progress", "notifications/cancelled", None]
        ids = [event.id for event in reply.events]
        assert ids == sorted(set(ids)), "and each has its place in the log"
        # Who comes back after any of them gets the rest.
        for place, event_id in enumerate(ids[-3:-1], 1):
            again = await client.get(event_id).done()
            assert again.messages == reply.messages[place:]


@FAULTS
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("first", range(4))
async def test_who_comes_back_after_an_outage_gets_all_that_was_sent(
    first: int, fails: bool, when: str
) -> None:
    """The call ends meanwhile, with a result or an error. Wherever the outage began."""
    interposed = Interposed()
    async with world(store=interposed.store) as w:
        adds_steps(w.box)
        client = await w.connected()
        sent = stepping(client, 1, fails=fails)
        await sent.reply.event(1)
        await sent.reply.gone()
        interposed.fails("append", when, first=first, times=3)
        await through(w, 1)
        await passes(30)

        again = await client.get(sent.reply.events[0].id).done()
        assert steps_of(again) == [1, 2, 3, 4]
        answer = again.answer_to(sent.id)
        assert answer is not None and ("error" in answer) is fails
        ids = [event.id for event in again.events]
        assert ids == sorted(set(ids)) and len(ids) == 6
        # And again, from a later one.
        rest = await client.get(ids[3]).done()
        assert steps_of(rest) == [4] and rest.messages[-1] == answer


@FAULTS
async def test_who_comes_back_during_the_outage_is_refused_and_misses_nothing(when: str) -> None:
    interposed = Interposed()
    async with world(store=interposed.store) as w:
        adds_steps(w.box)
        client = await w.connected()
        sent = stepping(client, 1)
        await sent.reply.event(1)
        await sent.reply.gone()
        interposed.fails("append", when)
        await through(w, 1)
        assert (await client.get(sent.reply.events[1].id).done()).status == 503
        interposed.mend()

        # At once, however late the store is asked again.
        again = await client.get(sent.reply.events[1].id).done()
        assert steps_of(again) == [2, 3, 4]
        assert again.answer_to(sent.id) is not None


@FAULTS
@pytest.mark.parametrize("ends", [False, True])
async def test_who_listens_through_an_outage_gets_all_once_and_in_order(
    ends: bool, when: str
) -> None:
    """Messages wait for the store, and the answer does not. Each has the id that it gets there."""
    interposed = Interposed()
    async with world(store=interposed.store) as w:
        adds_steps(w.box)
        client = await w.connected()
        sent = stepping(client, 1, 3)
        await sent.reply.event(1)
        interposed.fails("append", when)
        await through(w, 1)
        if ends:
            await through(w, 3)
            assert text_of(await sent.result()) == "stepped"
            assert (await client.get(sent.reply.events[1].id).done()).status == 503
        else:
            await passes(5)
            assert steps_of(sent.reply) == [1]
        interposed.mend()
        if not ends:
            await passes(10)
            assert steps_of(sent.reply) == [1, 2, 3]
            await through(w, 3)
        await sent.reply.done()
        assert steps_of(sent.reply) == [1, 2, 3, 4]
        ids = [event.id for event in sent.reply.events]
        assert ids == sorted(set(ids)) and len(ids) == 6
        for seen in range(1, 6):
            rest = await client.get(ids[seen]).done()
            assert [event.id for event in rest.events[1:]] == ids[seen + 1 :]


@FAULTS
async def test_a_stream_ends_with_an_error_if_there_is_no_room_for_its_messages(
    when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who has most loses first. Each of its readers gets ``-31012``, and no other stream's does."""
    monkeypatch.setattr(pending_writes, "MOST", 20_000)
    interposed = Interposed()
    async with world(store=interposed.store) as w:
        adds_steps(w.box)
        large, small = await w.connected(), await w.connected()
        listens = stepping(large, 1, size=4_000, name="large")
        cut = stepping(large, 1, size=4_000, name="cut")
        other = stepping(small, 1, size=1_000, name="small")
        for sent in (listens, cut, other):
            await sent.reply.event(1)
        await cut.reply.gone()
        await other.reply.gone()
        interposed.fails("append", when)
        await through(w, "small1", "large1", "cut1")
        errors = [await listens.error()]
        interposed.mend()
        await passes(30)

        again = await large.get(cut.reply.events[1].id).done()
        late = await large.get(listens.reply.events[1].id).done()
        assert (await small.get(other.reply.events[1].id).done()).answer_to(other.id) is not None
        errors.append(late.messages[-1]["error"])
        assert {error["code"] for error in errors} == {-31012}
        answer = again.answer_to(cut.id) or {}
        assert answer.get("error", {}).get("code") == -31012 or steps_of(again) == [2, 3, 4]
        assert steps_of(late) in ([], [2]), "nothing comes after a gap"
        assert nothing_waits(w)
    assert "loses" in caplog.text


async def test_a_session_that_ends_meanwhile_leaves_nothing_that_waits() -> None:
    interposed = Interposed()
    async with world(store=interposed.store) as w:
        adds_steps(w.box)
        client = await w.connected()
        sent = stepping(client, 1)
        await sent.reply.event(1)
        await sent.reply.gone()
        interposed.fails("append", "before")
        await through(w, 1)
        await client.delete().done()
        interposed.mend()
        await passes(30)
        assert nothing_waits(w)
        assert (await client.get(sent.reply.events[1].id).done()).status == 404


async def test_a_server_that_stops_while_messages_wait_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next process answers for it: what was kept, and that the rest is unknown."""
    interposed = Interposed(SQLiteStore(tmp_path / "sessions.db"))
    async with world(store=interposed.store) as w:
        adds_steps(w.box)
        client = await w.connected()
        sent = stepping(client, 1)
        await sent.reply.event(1)
        await sent.reply.gone()
        interposed.fails("append", "before", first=1)
        await through(w, 1)
    assert "writes were lost" in caplog.text
    interposed.mend()
    async with world(store=SQLiteStore(tmp_path / "sessions.db")) as w:
        client.carrier = w.carrier
        again = await client.get(sent.reply.events[0].id).done()
        assert steps_of(again) == [1, 2]
        assert again.messages[-1]["error"]["code"] == -31012


@pytest.mark.parametrize("at", [0, 1])
async def test_any_replica_has_what_was_sent_during_an_outage(at: int) -> None:
    """As soon as the replica that ran the call has stored it."""
    async with cluster() as replicas:
        w = replicas[0]
        adds_steps(w.box)
        client = await w.connected()
        sent = stepping(client, 1, 3)
        await sent.reply.event(1)
        if not at:
            await sent.reply.gone()
        replicas.backplane.is_away = True
        await through(w, 1, 3)
        if at:
            await sent.result()
        replicas.backplane.is_away = False
        there, last = replicas.at(1, client), sent.reply.events[-1 - at].id
        reply = await there.get(last).done()
        while reply.status == 503:
            await passes(1)
            reply = await there.get(last).done()
        assert steps_of(sent.reply, reply) == [1, 2, 3, 4]
        assert reply.answer_to(sent.id) is not None


# --- questions and events --------------------------------------------------------------------


ASKS = ("ask", "ask_standalone")


@FAULTS
@pytest.mark.parametrize("method", ["append", "load"])
@pytest.mark.parametrize("tool", ASKS)
@pytest.mark.parametrize("in_a_session", [False, True])
async def test_a_question_is_asked_when_the_store_is_back(
    in_a_session: bool, tool: str, method: str, when: str
) -> None:
    """Once, whether the client listens on the response or on its GET stream."""
    interposed = Interposed()
    async with world(store=interposed.store) as w:

        async def asks(ctx: Ctx, arguments: Json) -> str:
            await ctx.session.report_progress(1)
            await w.box.gate("g").arrive()
            return await w.box.tools[tool](ctx, {"question": "which?"})

        w.box.tools["asks"] = asks
        client = await w.connected(capabilities={"elicitation": {}})
        if in_a_session:
            await client.start()
        stream = await client.get().started()
        sent = client.call("asks", meta={"progressToken": 1})
        await sent.reply.event(1)
        interposed.fails(method, when)
        await through(w, "g")
        await passes(5)
        interposed.mend()
        await passes(10)

        questions = [
            message
            for message in [*stream.messages, *sent.reply.messages]
            if message.get("method") == "elicitation/create"
        ]
        assert len(questions) == 1
        await client.respond(questions[0], {"action": "accept", "content": {"answer": "this"}})
        assert text_of(await sent.result()) == "accept: this"


@FAULTS
@pytest.mark.parametrize("method", ["append", "relay"])
@pytest.mark.parametrize("listens", [True, False])
async def test_a_handlers_events_come_once_and_in_order(
    listens: bool, method: str, when: str
) -> None:
    """EVT10: they wait for the store, and the call is answered."""
    interposed = Interposed()
    async with world(store=interposed.store) as w:
        client = await w.connected()
        session = (await client.start())["sessionId"]
        stream = await client.get().started()
        position = (await client.resume(session))["sessionEventId"]
        if not listens:
            await stream.gone()
        await emits(client, "1")
        interposed.fails(method, when)
        for number in "2345":
            await emits(client, number)
        interposed.mend()
        await emits(client, "6")
        await passes(10)
        if listens:
            assert uris(stream.messages) == list("123456")
        again = await w.connected()
        caught_up = await again.resume(session, position)
        assert caught_up["catchup"] and caught_up["replayed"] == 6
        assert uris(await (await again.get().started()).has(6)) == list("123456")


async def emits(client: RawClient, uri: str) -> None:
    assert await client.text("update", uri=uri) == "updated"


async def test_events_that_find_no_room_make_their_client_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUP8: its position is refused. Another session keeps all of its own."""
    monkeypatch.setattr(pending_writes, "MOST", 20_000)
    interposed = Interposed()
    async with world(store=interposed.store) as w:
        client, other = await w.connected(), await w.connected()
        sessions = [(await each.start())["sessionId"] for each in (client, other)]
        positions = [
            (await each.resume(session))["sessionEventId"]
            for each, session in zip((client, other), sessions, strict=True)
        ]
        interposed.fails("append", "before")
        await emits(other, "1")
        for number in range(30):
            await emits(client, f"{number}")
        interposed.mend()
        await passes(30)

        again = await w.connected()
        caught_up = await again.resume(sessions[1], positions[1])
        assert caught_up["catchup"] and caught_up["replayed"] == 1
        caught_up = await again.resume(sessions[0], positions[0])
        assert not caught_up["catchup"] and caught_up["reason"] == "log_replaced"


async def test_an_event_goes_to_who_has_the_session_when_the_store_is_back() -> None:
    interposed = Interposed()
    async with world(store=interposed.store) as w:
        first, second = await w.connected(), await w.connected()
        session = (await first.start())["sessionId"]
        old = await first.get().started()
        position = (await first.resume(session))["sessionEventId"]
        interposed.fails("append", "after")
        await first.text("update", uri="1", meta=in_session(session))
        # Its answer was lost: it is in the log, and the replay brings it.
        assert (await second.resume(session, position))["replayed"] == 1
        new = await second.get().started()
        interposed.mend()
        await passes(10)
        assert (uris(old.messages), uris(new.messages)) == ([], ["1"])
