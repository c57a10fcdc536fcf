"""A store keeps the story of a session: what happened to it, bounded, in the steps themselves."""

from __future__ import annotations

from mcp_sessions.core.log import Draft
from mcp_sessions.core.story import MOST, Entry, Told, read
from mcp_sessions.ids import FencingEpoch, parse_position
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.record_changes import Tell
from mcp_sessions.testing.parts import (
    HERE,
    NOW,
    THERE,
    MakeStore,
    SessionOf,
    new_session,
    opened,
)


async def _story_of(session: SessionOf) -> str:
    whole = await session.store.whole(session.id)
    assert whole is not None
    return whole.record.story


async def _lives(store: SessionStore) -> SessionOf:
    """A session that was attached, missed events, and was resumed and taken over."""
    session = await new_session(store)
    entry = Entry(NOW, "attached websocket here started")
    first = await store.attach(session.id, HERE, now=NOW, entry=entry)
    assert first is not None
    for key in ("a", "a", "b"):
        await session.append(Draft(b"{}", key=key))
    entry = Entry(NOW + 1.4, "detached closed here")
    assert await store.detach(session.id, first.fencing_epoch, entry)
    # It comes too late, and nothing happens (TKO9).
    assert not await store.detach(session.id, first.fencing_epoch, entry)
    entry = Entry(NOW + 2, "attached http there resumed")
    position = parse_position(await session.position(1))
    assert await store.attach(session.id, HERE, now=NOW + 2, position=position, entry=entry)
    entry = Entry(NOW + 3, "attached stdio there resumed")
    assert await store.attach(session.id, THERE, now=NOW + 3, entry=entry)
    assert await store.attach(session.id, HERE, now=NOW, only_if_free=True, entry=entry) is None
    assert await store.change(session.id, Tell([Entry(NOW + 4, "long tools/call 30")]))
    return session


LINES = (
    "1800000000 attached websocket here started free - 0 0 0 no_position",
    "1800000001 detached closed here",
    "1800000002 attached http there resumed free 1 3 2 0 -",
    "1800000003 attached stdio there resumed over - 3 0 0 no_position",
    "1800000004 long tools/call 30",
)


async def a_story_tells_what_happened(make: MakeStore) -> None:
    """Who was attached, from where it was resumed, what was replayed: written by each step."""
    async with opened(make) as store:
        session = await _lives(store)
        assert (await _story_of(session)).splitlines() == list(LINES)


async def a_story_is_with_the_record_of_a_session_that_ends(make: MakeStore) -> None:
    """So whoever notes the end keeps the story."""
    async with opened(make) as store:
        ended, over = await _lives(store), await _lives(store)
        untold = await new_session(store)
        record = await store.end(ended.id)
        assert record is not None and record.story.splitlines() == list(LINES)
        expired = await store.expire(now=NOW + 10_000, held=(), limit=10)
        stories = {each.session_id: each.story.splitlines() for each in expired}
        assert stories == {over.id: list(LINES), untold.id: []}


async def old_entries_of_a_story_fold_away(make: MakeStore) -> None:
    """It has a bound in bytes. The newest entries are there, and the number of the others."""
    async with opened(make) as store:
        session = await new_session(store)
        count, folded, entries = 100, 0, list[Told]()
        for number in range(count):
            entry = Entry(NOW + number, "attached websocket here resumed")
            attached = await store.attach(session.id, HERE, now=NOW, entry=entry)
            assert attached is not None
            story = await _story_of(session)
            assert len(story.encode()) <= MOST
            folded, entries = read(story)
            assert folded + len(entries) == number + 1
            assert [entry.at for entry in entries] == [
                NOW + each for each in range(folded, number + 1)
            ]
        assert folded > 0 and len(entries) > 10
        many = [Entry(NOW, f"detached closed here-{number}") for number in range(count)]
        assert await store.change(session.id, Tell(many))
        story = await _story_of(session)
        assert len(story.encode()) <= MOST
        assert story.splitlines()[-1] == f"1800000000 detached closed here-{count - 1}"


async def a_session_that_is_gone_has_no_story(make: MakeStore) -> None:
    """SES18: a late entry never brings it back."""
    async with opened(make) as store:
        session = await _lives(store)
        await store.end(session.id)
        entry = Entry(NOW, "attached websocket here started")
        assert not await store.change(session.id, Tell([entry]))
        assert await store.attach(session.id, HERE, now=NOW, entry=entry) is None
        assert not await store.detach(session.id, FencingEpoch(1), entry)
        assert await store.whole(session.id) is None
