"""The story of a session: what an operator reads of it, also after its end."""

import asyncio
import json
from typing import Any, cast

import pytest

from mcp_sessions.core.story import MOST, Told, read
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import SessionId, digest
from mcp_sessions.server.reporting.stories import Stories
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.record_changes import Tell
from tests.support.raw import RawClient, call_params, in_session
from tests.support.world import World, world


async def story_of(w: World, session: str) -> list[Told]:
    whole = await w.layer.store.whole(SessionId(session))
    assert whole is not None
    return read(whole.record.story)[1]


def facts(told: Told, *names: str) -> list[Any]:
    return [told.what, *(told.facts.get(name) for name in names)]


async def test_a_story_names_nothing_that_opens_a_session() -> None:
    """SEC2: over HTTP the connection of a session is named by an id, which is a credential."""
    async with world() as w:
        client = await w.connected()
        session = (await client.start())["sessionId"]
        stream = await client.get().started()
        other = await w.connected()
        await other.resume(session)
        await stream.gone()
        await w.inside.lifecycle.tell()
        assert client.session_id is not None and other.session_id is not None
        ids = session, client.session_id, other.session_id
        for each in ids:
            whole = await w.layer.store.whole(SessionId(each))
            assert whole is not None
            assert not [one for one in ids if one in whole.record.story]
            assert digest(each) not in whole.record.story
        (opened, closed) = await story_of(w, client.session_id)
        assert facts(opened, "transport", "why") == ["attached", "http", "opened"]
        assert facts(closed, "why") == ["detached", "closed"]


async def test_refusals_are_counted_and_written_once_a_minute() -> None:
    """A flood of them leaves the rest of the story there."""
    async with world(max_running_requests=1) as w:
        client = await w.connected()
        session = (await client.start())["sessionId"]
        await w.waits(client.call("wait", gate="g"))

        async def refused(times: int) -> None:
            for _ in range(times):
                error = await client.error("tools/call", call_params("echo", {"text": "x"}))
                assert "max_running_requests" in json.dumps(error)

        async def counts() -> list[int]:
            await w.inside.lifecycle.tell()
            assert client.session_id is not None
            told = await story_of(w, client.session_id) + await story_of(w, session)
            counted = [each for each in told if each.what == "refused"]
            for each in counted:
                assert facts(each, "why", "method")[1:] == ["max_running_requests", "tools/call"]
            return [each.facts["times"] for each in counted]

        await refused(3)
        assert await counts() == [3]
        await refused(40)
        w.clock.advance(59)
        assert await counts() == [3]
        w.clock.advance(1)
        assert await counts() == [3, 40]
        w.clock.advance(60)
        assert await counts() == [3, 40]
        w.box.gate("g").go.set()


async def test_a_call_that_runs_long_is_told_while_it_runs_and_after() -> None:
    async with world() as w:
        client = await w.connected()
        session = (await client.start())["sessionId"]
        call = await w.waits(client.call("wait", gate="g"))
        await w.inside.lifecycle.tell()
        w.clock.advance(29)
        await w.inside.lifecycle.tell()
        assert [each.what for each in await story_of(w, session)] == ["attached"]
        w.clock.advance(6)
        for _ in range(2):
            await w.inside.lifecycle.tell()
        assert (await story_of(w, session))[-1].text == "tools/call ran for 35s or longer"
        w.clock.advance(100)
        w.box.gate("g").go.set()
        await call.result()
        await w.inside.lifecycle.tell()
        assert [each.text for each in await story_of(w, session)][1:] == [
            "tools/call ran for 35s or longer",
            "tools/call ran for 2m15s or longer",
        ]


async def test_a_question_that_waits_is_told() -> None:
    async with world() as w:
        client = await w.connected(capabilities={"elicitation": {}})
        session = (await client.start())["sessionId"]
        call = client.call("ask_standalone", question="who?")
        async with asyncio.timeout(20):
            while not w.inside.questions.by_session:  # noqa: ASYNC110  (nothing tells of it)
                await asyncio.sleep(0)
        await w.inside.lifecycle.tell()
        w.clock.advance(31)
        await w.inside.lifecycle.tell()
        told = (await story_of(w, session))[-1]
        assert told.text == "elicitation/create waited for its client for 31s or longer"
        await w.layer.sessions.end(session)
        await call.error()


async def ends_by_client(w: World, client: RawClient, session: str) -> None:
    await client.end(session)


async def ends_by_time(w: World, client: RawClient, session: str) -> None:
    w.clock.advance(130)
    await w.expire()


@pytest.mark.parametrize("ends", [ends_by_client, ends_by_time])
async def test_the_story_is_kept_after_the_end(ends: Any) -> None:
    """With the client's name. What waited to be written is in it."""
    async with world(idle_timeout=100) as w:
        client = await w.connected()
        session = (await client.start())["sessionId"]
        stranger = await client.error("tools/call", call_params("echo", meta=in_session("x" * 43)))
        assert stranger["code"] == -32043
        await ends(w, client, session)
        await w.expire()
        ended = {end.session: end for end in await w.layer.sessions.ended()}
        end = ended[digest(session)]
        assert end.client == "raw 1"
        assert [each.what for each in read(end.story)[1]] == ["attached"]
        assert len(end.story) <= MOST


async def test_a_process_that_stops_writes_what_waits() -> None:
    async with world() as w:
        client = await w.connected()
        stream = await client.get().started()
        await stream.gone()
        assert client.session_id is not None
        await w.inside.lifecycle.settle()
        assert [each.what for each in await story_of(w, client.session_id)] == [
            "attached",
            "detached",
        ]


async def test_what_happened_while_the_store_was_away_is_told_later() -> None:
    """An outage is what an operator asks about."""
    told: list[tuple[SessionId, list[str]]] = []
    is_away = True

    class Store:
        async def change(self, session_id: SessionId, tell: Tell) -> None:
            if is_away:
                raise StoreUnavailable("away")
            told.append((session_id, [text for _, text in tell.entries]))

    first, second = SessionId("1"), SessionId("2")
    stories = Stories(cast("SessionStore", Store()), "r", lambda: 1_000.0)
    stories.count(first, "refused full tools/call")
    stories.note(second, "detached slow r")
    with pytest.raises(StoreUnavailable):
        await stories.write()
    stories.note(first, "detached closed r")
    is_away = False
    await stories.write()

    assert told == [
        (first, ["refused full tools/call 1", "detached closed r"]),
        (second, ["detached slow r"]),
    ]
