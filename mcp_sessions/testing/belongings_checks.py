"""Check the other parts of a session: subscriptions, state, data, story, and entries in lists."""

from __future__ import annotations

from typing import Any

from mcp_sessions.core.log import Draft
from mcp_sessions.core.request_keys import Begun, KeyUse
from mcp_sessions.core.states import Mode
from mcp_sessions.core.story import MOST, Entry, Told, read
from mcp_sessions.errors import Refusal
from mcp_sessions.ids import (
    ConnectionId,
    FencingEpoch,
    LogEpoch,
    Position,
    RequestKey,
    SessionEventId,
    SessionId,
    StreamName,
    parse_position,
)
from mcp_sessions.principal import Principal
from mcp_sessions.stores.contract import SessionStore, StateConflict
from mcp_sessions.stores.record_changes import (
    SetCurrent,
    SetFilter,
    SetLogLevel,
    SetStreamOpened,
    SetWaitsFrom,
    Tell,
)
from mcp_sessions.stores.records import Attachment, CurrentSession, Peer
from mcp_sessions.testing.parts import (
    ALICE,
    BOB,
    HERE,
    MCP_MODES,
    NOW,
    RESULT,
    THERE,
    MakeStore,
    SessionOf,
    at_once,
    ids_of,
    limit_of,
    new_session,
    opened,
    subscribers_of,
)


async def subscriptions_belong_to_the_session(make: MakeStore) -> None:
    """Those of both modes; once however often it asked; limited, with what is there kept."""
    async with opened(make, max_subscriptions=2) as store:
        first, second = [await new_session(store, mode=mode) for mode in MCP_MODES]
        for session in (first, second):
            for uri in ("note://1", "note://1", "note://2"):
                assert await store.subscribe(session.id, uri)
            refused = await limit_of(lambda of=session: store.subscribe(of.id, "note://3"))
            assert refused == "max_subscriptions"
            assert await store.subscribe(session.id, "note://2"), "it has that one already"
            assert (await session.record()).client.subscriptions == {"note://1", "note://2"}
        assert sorted(await subscribers_of(store, "note://1")) == sorted([first.id, second.id])
        assert not await subscribers_of(store, "note://3")
        for _ in range(2):
            assert await store.unsubscribe(first.id, "note://1")
            assert list(await subscribers_of(store, "note://1")) == [second.id]
        assert await store.subscribe(first.id, "note://3")


async def a_listen_filter_replaces_the_subscriptions(make: MakeStore) -> None:
    """HTM8: it becomes the session's subscriptions and outlives the stream."""
    async with opened(make, max_subscriptions=2) as store:
        session = await new_session(store)
        await store.subscribe(session.id, "note://1")
        lists = frozenset({"tools"})
        for uris in (
            frozenset({"note://2", "note://3"}),
            frozenset({"note://3"}),
            frozenset[str](),
        ):
            assert await store.change(session.id, SetFilter(uris, lists))
            record = await session.record()
            assert (record.client.subscriptions, record.client.lists) == (uris, lists)
            for uri in ("note://1", "note://2", "note://3"):
                assert (session.id in await subscribers_of(store, uri)) == (uri in uris)
        many = frozenset({"note://4", "note://5", "note://6"})
        refused = await limit_of(lambda: store.change(session.id, SetFilter(many, frozenset())))
        assert refused == "max_subscriptions"
        record = await session.record()
        assert (record.client.subscriptions, record.client.lists) == (frozenset(), lists)
        assert not await subscribers_of(store, "note://4")


async def subscriptions_are_bounded_in_bytes(make: MakeStore) -> None:
    """Each of them, and all together; what is refused leaves what is there as it was."""
    async with opened(make, max_uri_bytes=20, max_subscription_bytes=50) as store:
        session = await new_session(store)

        async def check(*uris: str) -> None:
            assert (await session.record()).client.subscriptions == set(uris)
            assert [list(await subscribers_of(store, uri)) for uri in uris] == [[session.id]] * len(
                uris
            )

        # In bytes: an umlaut has two.
        long, first, second, third = "n" * 21, "ä" * 10, "b" * 20, "c" * 11
        assert await limit_of(lambda: store.subscribe(session.id, long)) == "max_uri_bytes"
        assert not await subscribers_of(store, long)
        for _ in range(2):
            assert await store.subscribe(session.id, first)
            assert await store.subscribe(session.id, second)
        full = await limit_of(lambda: store.subscribe(session.id, third))
        assert full == "max_subscription_bytes" and not await subscribers_of(store, third)
        await check(first, second)
        for _ in range(2):
            assert await store.unsubscribe(session.id, second)
        assert await store.subscribe(session.id, third)
        await check(first, third)
        for uris, limit in (
            ({long}, "max_uri_bytes"),
            ({first, second, third}, "max_subscription_bytes"),
        ):
            wanted = frozenset(uris)
            reached = await limit_of(
                lambda to=wanted: store.change(session.id, SetFilter(to, frozenset()))
            )
            assert reached == limit
            await check(first, third)
        assert await store.change(session.id, SetFilter(frozenset({second, third}), frozenset()))
        assert await limit_of(lambda: store.subscribe(session.id, first)) == full
        assert await store.subscribe(session.id, "d" * 19)
        await check(second, third, "d" * 19)


async def data_is_bounded_in_bytes(make: MakeStore) -> None:
    """As JSON. A value that is too large is not stored, and the old value stays."""
    async with opened(make, max_data_bytes=100) as store:
        session = await new_session(store)
        value = {"n": "x" * 92}
        assert await store.replace_data(session.id, value, expected_version=0)
        there = await store.load_data(session.id)
        assert there is not None

        async def replace(version: int) -> None:
            larger = {"n": "x" * 93}
            assert not await store.replace_data(session.id, larger, expected_version=version)

        assert await limit_of(lambda: replace(there.version)) == "max_data_bytes"
        await replace(there.version + 1)
        again = await store.load_data(session.id)
        assert again is not None and (again, again.value) == (there, value)


async def state_is_bounded_in_bytes_whoever_changes_it(make: MakeStore) -> None:
    """Requests that each see little of it may come to much together."""
    async with opened(make, max_state_bytes=100) as store:
        session = await new_session(store)
        for key in "ab":
            assert await store.change_state(session.id, {key: "x" * 46}, ())
        before = await session.record()

        async def change(changed: dict[str, Any], *removed: str) -> None:
            await store.change_state(session.id, changed, removed)

        assert await limit_of(lambda: change({"c": "x" * 46})) == "max_state_bytes"
        assert await limit_of(lambda: change({"a": "x" * 50})) == "max_state_bytes"
        record = await session.record()
        assert record.state == before.state
        await change({"c": "x" * 46}, "a")
        await change({"c": "y"})
        assert (await session.record()).state.values == {"b": "x" * 46, "c": "y"}


async def where_the_next_listen_stream_starts_is_remembered(make: MakeStore) -> None:
    """HTM6: a replay waits for the next listen."""
    async with opened(make) as store:
        session = await new_session(store)
        for event_id in (await session.position(3), None):
            assert await store.change(session.id, SetWaitsFrom(event_id))
            assert (await session.record()).client.waits_from == event_id
        position = await session.position(0)
        assert await store.change(session.id, SetWaitsFrom(position))
        displaced = await session.attach(None)
        assert displaced.waits_from is None
        assert (await session.record()).client.waits_from == position

        async def listen(number: int) -> None:
            taken.append((await session.attach(ConnectionId(f"listen-{number}"))).waits_from)

        taken: list[SessionEventId | None] = []
        await at_once(listen)
        # One of them replays, whichever was first.
        assert [start for start in taken if start is not None] == [position]
        assert (await session.record()).client.waits_from is None


async def the_level_of_its_log_is_remembered(make: MakeStore) -> None:
    """The newest; what else is known of the session stays."""
    async with opened(make) as store:
        session, other = await new_session(store), await new_session(store)
        await store.subscribe(session.id, "note://1")
        for level in ("error", "info"):
            assert await store.change(session.id, SetLogLevel(level))
            record = await session.record()
            assert (record.client.log_level, record.client.subscriptions) == (level, {"note://1"})
        admitted = await store.admit(session.id, ALICE, mode=Mode.PROTOCOL, now=NOW)
        assert admitted is not None and admitted.record.client.log_level == "info"
        assert (await other.record()).client.log_level is None


async def state_is_changed_key_by_key(make: MakeStore) -> None:
    """STT12: what a request changed is applied to the newest state; none is lost."""
    async with opened(make) as store:
        session = await new_session(store)
        value: dict[str, Any] = {"list": [1], "gone": 1}
        changed = await store.change_state(session.id, value, ())
        assert changed is not None and changed.session_id == session.id
        value["list"].append(2)
        assert (await session.record()).state.values == {"list": [1], "gone": 1}
        versions: list[int] = []

        async def change(number: int) -> None:
            record = await store.change_state(session.id, {f"key-{number}": number}, ["gone"])
            assert record is not None
            versions.append(record.state.version)

        await at_once(change)
        record = await session.record()
        keys = {f"key-{number}": number for number in range(20)}
        assert record.state.values == {"list": [1], **keys}
        assert len(set(versions)) == 20 and record.state.version == max(versions)


async def state_is_changed_only_as_the_caller_saw_it(make: MakeStore) -> None:
    """A change for one state is not applied to another. The caller gets the other state."""
    async with opened(make) as store:
        session = await new_session(store)
        stored, refused = list[int](), list[StateConflict]()

        async def change(number: int) -> None:
            try:
                await store.change_state(session.id, {"n": number}, (), expected_version=0)
                stored.append(number)
            except StateConflict as conflict:
                refused.append(conflict)

        await at_once(change)
        record = await session.record()
        assert [record.state.values] == [{"n": number} for number in stored]
        assert {conflict.newest.state.version for conflict in refused} == {record.state.version}
        assert all(conflict.newest.state.values == record.state.values for conflict in refused)
        version = record.state.version
        changed = await store.change_state(session.id, {"m": 1}, ("n",), expected_version=version)
        assert changed is not None and changed.state.values == {"m": 1}


async def data_is_replaced_only_by_who_saw_its_newest_version(make: MakeStore) -> None:
    """``session.data``: of many edits at once one is stored; a reader has its own copy."""
    async with opened(make) as store:
        session = await new_session(store)
        empty = await store.load_data(session.id)
        assert empty is not None and empty.value == {}
        value: dict[str, Any] = {"list": [1]}
        assert await store.replace_data(session.id, value, expected_version=empty.version)
        value["list"].append(2)
        read = await store.load_data(session.id)
        assert read is not None and read.version != empty.version
        read.value["list"].append(3)
        again = await store.load_data(session.id)
        assert again is not None and again.value == {"list": [1]}
        version, kept = read.version, list[int]()

        async def edit(number: int) -> None:
            changed = {"number": number}
            if await store.replace_data(session.id, changed, expected_version=version):
                kept.append(number)

        await at_once(edit)
        last = await store.load_data(session.id)
        assert last is not None and [last.value["number"]] == kept
        assert not await store.replace_data(session.id, {}, expected_version=version)


async def a_connections_own_state_is_kept_with_its_session(make: MakeStore) -> None:
    """Transport-mode: its current session, and whether its GET stream was ever open."""
    async with opened(make) as store:
        session, target = await new_session(store, mode=Mode.TRANSPORT), await new_session(store)
        for current in (CurrentSession(target.id, FencingEpoch(3)), None):
            assert await store.change(session.id, SetCurrent(current))
            assert (await session.record()).client.current == current
        assert not (await session.record()).client.stream_opened
        for is_first in (True, False, False):
            assert await store.change(session.id, SetStreamOpened()) is is_first
            assert (await session.record()).client.stream_opened


ODD = ("\ud800", "a\udfffb", "\x00", "a\x00b", "ä \n'\"")
"""Texts that JSON can say: a peer may send them wherever it sends one."""


async def every_text_is_a_text(make: MakeStore) -> None:
    """Half a surrogate pair and a NUL, too: they are found, or not there, as any other."""
    async with opened(make) as store:
        for odd in ODD:
            await SessionOf(store, SessionId(odd)).check_gone()
            scopes = frozenset({odd})
            principal, peer = Principal(odd, odd, odd, scopes), Peer(odd, {odd: [odd]})
            made = await store.create(Mode.TRANSPORT, principal, peer=peer, now=NOW)
            session = SessionOf(store, made.session_id)
            assert await session.admit(mode=Mode.TRANSPORT) is None
            use = KeyUse(RequestKey(odd), b"digest", "process-1", scopes)
            for begun in (Begun.FIRST, Begun.ANSWERED):
                admitted = await session.admit(use, principal=principal, mode=Mode.TRANSPORT)
                assert admitted is not None and admitted.key is begun
                assert (admitted.record.principal, admitted.record.client.peer) == (principal, peer)
                assert admitted.record.principal.scopes == scopes
                await store.finish_request(session.id, use.key, RESULT, now=NOW)
            assert await store.subscribe(session.id, odd)
            assert list(await subscribers_of(store, odd)) == [session.id]
            assert await store.unsubscribe(session.id, odd)
            assert await store.change(session.id, SetFilter(scopes, scopes))
            assert await store.change_state(session.id, {odd: {odd: odd}, "gone": 1}, ())
            assert await store.change_state(session.id, {}, ["gone", odd + odd])
            assert await store.replace_data(session.id, {odd: [odd]}, expected_version=0)
            data = await store.load_data(session.id)
            assert data is not None and data.value == {odd: [odd]}
            assert await store.change(
                session.id, SetCurrent(CurrentSession(SessionId(odd), FencingEpoch(1)))
            )
            assert await store.change(session.id, SetWaitsFrom(SessionEventId(odd)))
            for is_new in (True, False):
                appended = await session.append(
                    Draft(b"{}", key=odd, origin=SessionId(odd)), stream=StreamName(odd)
                )
                assert appended.replaced is not is_new
                assert appended.event.key == (odd, odd)
            events, _ = await store.read(
                session.id,
                await session.position(0, StreamName(odd)),
                now=NOW,
                stream=StreamName(odd),
            )
            assert [(event.key, event.origin) for event in events] == [((odd, odd), odd)]
            await store.drop_stream(session.id, StreamName(odd))
            assert await store.head(session.id, stream=StreamName(odd)) is None
            start = Position(LogEpoch("1".zfill(19)), 0)
            assert await store.carry(session.id, SessionId(odd), FencingEpoch(1), start)
            assert await session.read(odd) == ([], Refusal.UNKNOWN_POSITION)
            record = await session.record()
            assert (record.client.subscriptions, record.client.lists) == (scopes, scopes)
            assert record.state.values == {odd: {odd: odd}}
            assert record.client.current == CurrentSession(SessionId(odd), FencingEpoch(1))
            assert record.client.waits_from == odd and record.client.carried == {odd: 1}
            attached = await session.attach(ConnectionId(odd), odd)
            assert (attached.refusal, attached.waits_from) == (Refusal.UNKNOWN_POSITION, odd)
            assert (await session.attach(None)).previous == Attachment(
                ConnectionId(odd), attached.fencing_epoch
            )
            assert await ids_of(store, principal) == {session.id}
            ended = await store.end(session.id)
            assert ended is not None and ended.principal == principal
            await session.check_gone()


async def sessions_can_be_listed_by_their_owner(make: MakeStore) -> None:
    """Every live one, or every one of a principal."""
    async with opened(make) as store:
        first, second, theirs = (
            await new_session(store),
            await new_session(store),
            await new_session(store, BOB),
        )
        assert await ids_of(store) == {first.id, second.id, theirs.id}
        assert await ids_of(store, ALICE) == {first.id, second.id}
        assert await ids_of(store, Principal()) == set()


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
