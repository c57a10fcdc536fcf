"""Each start and each end of a session is one line in the log and one record in the audit."""

import logging
from collections.abc import Awaitable, Callable

import pytest

from mcp_sessions.core.ends import EndReason
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import digest
from mcp_sessions.stores.memory import MemoryStore
from tests.support.audit import Lines
from tests.support.interposed import Interposed
from tests.support.raw import RawClient
from tests.support.world import World, world

LOGGER = "mcp_sessions.server.dispatch.history"
End = Callable[[World, RawClient, str], Awaitable[object]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    caplog.set_level(logging.INFO, "mcp_sessions.audit")
    caplog.set_level(logging.INFO, LOGGER)
    return Lines(caplog)


def notified(caplog: pytest.LogCaptureFixture, session_id: str) -> list[str]:
    """What the log says of a session, without its name."""
    named = f"session {digest(session_id)} "
    said = [each.getMessage() for each in caplog.records if each.name == LOGGER]
    return [each.removeprefix(named) for each in said if each.startswith(named)]


async def by_client(w: World, client: RawClient, session_id: str) -> None:
    await client.end(session_id)


async def by_operator(w: World, client: RawClient, session_id: str) -> None:
    assert await w.layer.sessions.end(session_id)


async def by_idling(w: World, client: RawClient, session_id: str) -> None:
    w.clock.advance(130)
    await w.expire()


async def by_age(w: World, client: RawClient, session_id: str) -> None:
    for _ in range(5):
        w.clock.advance(60)
        await client.result("ping", {"_meta": {}})
        await client.resume(session_id)
    w.clock.advance(60)
    await w.expire()


@pytest.mark.parametrize(
    ("ends", "reason", "said"),
    [
        (by_client, "client", "ended: its client ended it"),
        (by_operator, "operator", "ended: an operator ended it"),
        (by_idling, "idle", "ended: it expired after 2m10s without a request"),
        (by_age, "lifetime", "ended: it expired after 6m, its longest lifetime"),
    ],
)
async def test_a_start_and_an_end_are_one_line_and_one_record_each(
    ends: End, reason: str, said: str, lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(idle_timeout=100, max_lifetime=350) as w:
        client = await w.connected()
        session_id = (await client.start())["sessionId"]
        await ends(w, client, session_id)
        assert notified(caplog, session_id) == ["started (protocol)", said]
        name = digest(session_id)
        started, ended = [e for e in lines.sessions if e["mcp_sessions.session"] == name]
        assert started["event.name"] == "mcp_sessions.session.started"
        assert ended["event.name"] == "mcp_sessions.session.ended"
        assert ended["mcp_sessions.end.reason"] == reason
        [end] = [each for each in await w.layer.sessions.ended() if each.session == name]
        assert end.reason is EndReason(reason)


async def test_a_delete_ends_a_transport_session_for_its_client(
    lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    async with world() as w:
        client = await w.connected()
        assert client.session_id is not None
        await client.delete().done()
        said = ["started (transport)", "ended: its client ended it"]
        assert notified(caplog, client.session_id) == said


async def test_who_made_room_names_the_limit(
    lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(max_sessions=2, min_evictable_idle_time=60) as w:
        first = await w.connected()
        w.clock.advance(61)
        await w.connected()
        await w.connected()
        assert first.session_id is not None
        room = "ended: it made room for another (max_sessions) after 1m1s without a request"
        assert notified(caplog, first.session_id) == ["started (transport)", room]


async def emptied(store: MemoryStore) -> None:
    await store.close()
    store._made = None  # pyright: ignore[reportPrivateUsage]


async def test_a_store_that_is_away_learns_of_an_end_later(
    lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    steps = Interposed()
    async with world(store=steps.store) as w:
        client = await w.connected()
        session_id = (await client.start())["sessionId"]
        steps.fails("remember_ends", "before")
        await client.end(session_id)
        assert notified(caplog, session_id)[1:] == ["ended: its client ended it"]
        await w.expire()
        assert await w.layer.sessions.ended() == []
        steps.mend()
        await w.expire()
        [end] = await w.layer.sessions.ended()
        assert end.session == digest(session_id)
        await w.expire()
        assert len(await w.layer.sessions.ended()) == 1
        assert len(notified(caplog, session_id)) == 2


@pytest.mark.parametrize("fails", [False, True])
async def test_a_store_that_was_emptied_is_named_and_what_was_open_ends(
    lines: Lines, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    """Also if the store fails as it is found empty: it is looked at again."""
    steps = Interposed()
    async with world(store=steps.store) as w:
        client = await w.connected()
        stream = await client.get().started()
        await w.expire()
        await emptied(steps.memory)
        later = await w.connected()
        if fails:
            steps.fails("remember_ends", "before")
            with pytest.raises(StoreUnavailable):
                await w.expire()
            steps.mend()
        await w.expire()
        assert client.session_id is not None
        gone = ["ended: the store was emptied or replaced"]
        assert notified(caplog, client.session_id)[1:] == gone
        assert later.session_id is not None and len(notified(caplog, later.session_id)) == 1
        assert caplog.text.count("the sessions in it are gone") == 1
        await stream.done()
        await w.expire()
        assert caplog.text.count("the sessions in it are gone") == 1
