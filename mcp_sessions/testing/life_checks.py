"""A session's life: made, used, expired, ended; and how it ended, as a store remembers it."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from mcp_sessions.core.ends import MOST_ENDS, REMEMBERED_FOR, EndReason, SessionEnd
from mcp_sessions.core.log import PAGE_BYTES, Draft
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import (
    GET_STREAM,
    FencingEpoch,
    LogEpoch,
    Position,
    SessionId,
    digest,
    parse_session_id,
)
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.stores.record_changes import SetCurrent, SetStreamOpened
from mcp_sessions.stores.records import CurrentSession, Peer, SessionClient
from mcp_sessions.testing.parts import (
    ALICE,
    BOB,
    HERE,
    IDLE,
    KEY,
    LIFETIME,
    MCP_MODES,
    MESSAGE,
    NOW,
    MakeStore,
    SessionOf,
    ids_of,
    limit_of,
    new_session,
    opened,
    subscribers_of,
)


async def a_new_session_is_remembered_as_it_was_made(make: MakeStore) -> None:
    """Nobody attached, nothing subscribed, an empty log, the earlier of two deadlines."""
    peer = Peer("2025-11-25", {"clientInfo": {"name": "checker"}})
    async with opened(make) as store:
        for mode in MCP_MODES:
            made = await store.create(mode, ALICE, peer=peer, now=NOW)
            session = SessionOf(store, made.session_id)
            for record in (made, await session.record()):
                assert parse_session_id(record.session_id) == session.id
                assert (record.mode, record.principal) == (mode, ALICE)
                assert (record.life.created_at, record.life.expires_at) == (NOW, NOW + IDLE)
                assert record.life.ends_at == NOW + LIFETIME
                assert (record.fencing_epoch, record.attachment, record.state) == (0, None, ({}, 0))
                assert record.client == SessionClient(peer)
            assert await session.position(0) == await session.head()
    async with opened(make, idle_timeout=2 * LIFETIME) as store:
        made = await store.create(Mode.PROTOCOL, ALICE, peer=None, now=NOW)
        assert (made.client.peer, made.life.expires_at) == (None, NOW + LIFETIME)


async def what_a_client_says_of_itself_is_bounded(make: MakeStore) -> None:
    """It is kept as long as its session: more than that is refused, and nothing is made."""
    async with opened(make, max_client_bytes=1_000) as store:
        for mode in MCP_MODES:
            for size in (988, 989, 100_000):
                peer = Peer("2025-11-25", {"large": "x" * size})

                async def create(of: Mode = mode, by: Peer = peer) -> None:
                    await store.create(of, ALICE, peer=by, now=NOW)

                if size == 988:
                    await create()
                else:
                    assert await limit_of(create) == "max_client_bytes"
        records = await store.all_sessions()
        assert [record.client.peer for record in records] == [
            Peer("2025-11-25", {"large": "x" * 988}) for _ in MCP_MODES
        ]


async def every_session_is_in_a_page(make: MakeStore) -> None:
    """Also if others start and end between two pages. A store may give a session twice."""
    async with opened(make) as store:
        made = {(await new_session(store)).id for _ in range(7)}
        passing = await new_session(store)
        found, after, pages = set[SessionId](), None, 0
        while True:
            page = await store.some_sessions(after, 3)
            found |= {record.session_id for record in page.records}
            pages, after = pages + 1, page.following
            if after is None:
                break
            assert pages < 50
            await store.end(passing.id)
            passing = await new_session(store)
        assert made <= found
        assert (await store.some_sessions(None, 100)).following is None


async def a_callers_id_is_never_adopted(make: MakeStore) -> None:
    """SES4: an id that the store did not mint makes nothing and names no bucket."""
    async with opened(make) as store:
        stranger = SessionOf(store, SessionId("a-caller-chose-this"))
        await stranger.check_gone()
        # Again: what the first calls may have made would be found by now.
        await stranger.check_gone()
        assert not await store.all_sessions()


async def a_session_that_the_server_names_is_made_by_who_comes_first(make: MakeStore) -> None:
    """A later caller gets the same session, as it is. After its expiry it is made again."""
    named = SessionId("derived-from-a-name-" + "x" * 24)
    async with opened(make, max_sessions=2, max_sessions_per_principal=2) as store:
        made = await asyncio.gather(
            *(
                store.create(Mode.CONVERSATION, ALICE, peer=None, now=NOW, session_id=named)
                for _ in range(5)
            )
        )
        assert {record.session_id for record in made} == {named}
        assert [record.session_id for record in await store.all_sessions()] == [named]
        assert await store.replace_data(named, {"n": 1}, expected_version=0)
        other = await new_session(store)
        for _ in range(3):
            # No slot is taken twice, and none is needed for a session that exists.
            again = await store.create(
                Mode.CONVERSATION, ALICE, peer=None, now=NOW + 1, session_id=named
            )
            assert (again.life.created_at, again.mode) == (NOW, Mode.CONVERSATION)
        kept = await store.load_data(named)
        assert kept is not None and kept.value == {"n": 1}
        for mode in (*MCP_MODES, Mode.AGENT):
            assert await store.admit(named, ALICE, mode=mode, now=NOW) is None
        assert await store.admit(named, BOB, mode=Mode.CONVERSATION, now=NOW) is None
        assert await store.admit(named, ALICE, mode=Mode.CONVERSATION, now=NOW) is not None

        late = NOW + IDLE
        await store.end(other.id)
        anew = await store.create(Mode.CONVERSATION, ALICE, peer=None, now=late, session_id=named)
        empty = await store.load_data(named)
        assert anew.life.created_at == late and empty is not None and empty.value == {}
        await new_session(store)
        assert await limit_of(lambda: new_session(store)) == "max_sessions"
        assert await store.end(named) is not None
        assert await store.load(named, now=late) is None
        await new_session(store)


async def open_sessions_are_limited_per_store_and_per_principal(make: MakeStore) -> None:
    """SES15: what is refused is not made, and what ended makes room."""
    stronger = Principal("client", ALICE.issuer, ALICE.subject, frozenset({"write"}))
    async with opened(make, max_sessions=3, max_sessions_per_principal=2) as store:
        first, _ = await new_session(store), await new_session(store)
        assert await limit_of(lambda: new_session(store)) == "max_sessions_per_principal"
        assert await limit_of(lambda: new_session(store, stronger)) == "max_sessions_per_principal"
        await new_session(store, BOB)
        assert await limit_of(lambda: new_session(store, BOB)) == "max_sessions"
        assert len(await store.all_sessions()) == 3
        await store.end(first.id)
        await new_session(store)


async def a_session_expires_when_idle_and_a_request_moves_that(make: MakeStore) -> None:
    """SES14, SES15: the moment itself is too late; looking does not keep it alive."""
    async with opened(make) as store:
        session, late = await new_session(store), NOW + IDLE
        assert await store.load(session.id, now=late - 1) is not None
        assert await store.load(session.id, now=late) is None
        assert await session.admit(now=late) is None
        assert await session.admit(now=late, held=True) is not None
        assert await session.deadline(now=late) == late + IDLE
        await store.touch([session.id, SessionId("unknown")], now=late + 50)
        assert await session.deadline(now=late) == late + 50 + IDLE


async def a_session_expires_however_busy_when_its_lifetime_has_passed(make: MakeStore) -> None:
    """SES15: neither requests nor work at hand nor a touch move the absolute end."""
    async with opened(make) as store:
        session, end = await new_session(store), NOW + LIFETIME
        for now in (NOW + 600, end - 1):
            assert await session.admit(now=now, held=True) is not None
            assert await session.deadline(now=now) <= end
            await store.touch([session.id], now=now)
            assert await session.deadline(now=now) <= end
        for _ in range(2):
            assert await store.load(session.id, now=end) is None
            assert await session.admit(now=end, held=True) is None
            assert await store.attach(session.id, HERE, now=end) is None
            await store.touch([session.id], now=end)


async def an_agents_session_never_expires_and_forgets_nothing(make: MakeStore) -> None:
    """Its log has no bound, is read in pages, and no other mode sees it."""
    late = NOW + 100 * LIFETIME
    async with opened(make, max_events=2, max_bytes=2, max_age=1) as store:
        session = await new_session(store, mode=Mode.AGENT)
        for number in range(5):
            await session.append(now=NOW + number)
        assert not await store.expire(now=late, held=(), limit=9)
        await store.touch([session.id], now=NOW)
        for mode in MCP_MODES:
            assert await store.admit(session.id, ALICE, mode=mode, now=NOW) is None
        admitted = await store.admit(session.id, ALICE, mode=Mode.AGENT, now=NOW)
        assert admitted is not None
        life = admitted.record.life
        assert (life.expires_at, life.ends_at) == (math.inf, math.inf)
        record = await store.load(session.id, now=late)
        assert record is not None and record.mode is Mode.AGENT
        assert (await session.append(now=late)).event.number == 6
        pages: list[list[int]] = []
        after: str = await session.position(0)
        while not pages or pages[-1]:
            events, refusal = await store.read(session.id, after, now=late, limit=4)
            assert refusal is None
            pages.append([event.number for event in events])
            after = events[-1].event_id if events else after
        assert pages == [[1, 2, 3, 4], [5, 6], []]
        # Large events come in smaller pages: a reader holds one at a time.
        large = Draft(b"x" * (PAGE_BYTES // 2))
        for _ in range(3):
            assert await store.append(session.id, large, now=late) is not None
        events, _ = await store.read(session.id, after, now=late, limit=4)
        assert [event.number for event in events] == [7, 8]
        events, _ = await store.read(session.id, events[-1].event_id, now=late, limit=4)
        assert [event.number for event in events] == [9]
        assert await store.end(session.id) is not None
        await session.check_gone()


async def an_append_after_the_lifetime_stores_nothing(make: MakeStore) -> None:
    """SES18, ``append``: "None if the session is unknown, ended or expired"."""
    async with opened(make) as store:
        session = await new_session(store)
        assert await store.append(session.id, MESSAGE, now=NOW + LIFETIME) is None
        assert await session.kept() == []


async def expire_ends_what_is_overdue_and_spares_what_is_running(make: MakeStore) -> None:
    """SES14, SES15, SES18: each record is handed out once, then nothing brings it back."""
    async with opened(make) as store:
        held, *idle = [await new_session(store) for _ in range(4)]
        young = await new_session(store, now=NOW + 50)
        await store.subscribe(idle[0].id, "note://1")
        assert not await store.expire(now=NOW + IDLE - 1, held=[], limit=9)
        first = await store.expire(now=NOW + IDLE, held=[held.id], limit=2)
        second = await store.expire(now=NOW + IDLE, held=[held.id], limit=9)
        assert (len(first), len(second)) == (2, 1)
        assert {record.session_id for record in (*first, *second)} == {each.id for each in idle}
        assert {"note://1"} in [set(record.client.subscriptions) for record in (*first, *second)]
        for session in idle:
            await session.check_gone()
        assert await ids_of(store) == {held.id, young.id}
        assert await held.admit(now=NOW + IDLE, held=True) is not None
        gone = await store.expire(now=NOW + LIFETIME, held=[held.id], limit=9)
        assert held.id in {record.session_id for record in gone}


async def evict_ends_what_is_unowned_and_holds_nothing(make: MakeStore) -> None:
    """SES20: those first that were used only when they were made, then the others; of both those
    that were not used for longest. A session stays if it has an owner, is of another mode, or holds
    something.
    """
    async with opened(make, idle_timeout=500.0) as store:

        async def made(principal: Principal = ANONYMOUS, mode: Mode = Mode.TRANSPORT) -> SessionOf:
            return await new_session(store, principal, mode=mode)

        async def used(session: SessionOf, at: float) -> None:
            await session.admit(principal=ANONYMOUS, mode=Mode.TRANSPORT, now=NOW + at)

        async def evicted(
            at: float, limit: int, *held: SessionOf, opened: bool = True
        ) -> list[Any]:
            gone = await store.evict(
                now=NOW + at,
                unused_for=60,
                held=[each.id for each in held],
                limit=limit,
                opened=opened,
            )
            return [record.session_id for record in gone]

        others = [await made(ALICE), await made(mode=Mode.PROTOCOL)]
        subscribed, current, carrying = [await made() for _ in range(3)]
        await store.subscribe(subscribed.id, "note://1")
        in_use = CurrentSession(others[1].id, FencingEpoch(1))
        await store.change(current.id, SetCurrent(in_use))
        position = Position(LogEpoch("e" * 22), 0)
        assert await store.carry(carrying.id, others[1].id, FencingEpoch(1), position)
        kept = {each.id for each in (*others, subscribed, current, carrying)}
        long_used, longer_used, held, late, opened_once, early = [await made() for _ in range(6)]
        await store.change(opened_once.id, SetStreamOpened())
        for session, at in ((late, 50), (opened_once, 40), (longer_used, 90), (long_used, 80)):
            await used(session, at)
        assert await evicted(59.9, 9) == []

        assert await evicted(155, 1, held) == [early.id]
        assert await evicted(155, 2, held, opened=False) == [late.id, long_used.id]
        assert await evicted(155, 9, held) == [opened_once.id, longer_used.id]
        await early.check_gone()
        assert await ids_of(store) == kept | {held.id}
        assert await evicted(155, 9) == [held.id]


async def an_ended_session_leaves_no_trace_and_never_comes_back(make: MakeStore) -> None:
    """END2, SES18, END1: every late call is refused, and ending again finds nothing."""
    async with opened(make) as store:
        session, other = await new_session(store), await new_session(store)
        for each in (session, other):
            await store.subscribe(each.id, "note://1")
            await store.replace_data(each.id, {"n": 1}, expected_version=0)
            await each.append()
            await each.append(stream=GET_STREAM)
            await each.admit(KEY)
        await session.attach(HERE)
        record = await store.end(session.id)
        assert record is not None and record.session_id == session.id
        assert record.attachment is not None and record.attachment.connection_id == HERE
        await session.check_gone()
        assert await ids_of(store) == set(await subscribers_of(store, "note://1")) == {other.id}
        assert await other.kept() == await other.kept(GET_STREAM) == [1]


def _end(number: int, *, at: float = NOW) -> SessionEnd:
    return SessionEnd(digest(f"session {number}"), EndReason.CLIENT, at)


async def how_a_session_ended_is_remembered_once(make: MakeStore) -> None:
    """Every member of it, in order; a call that comes twice changes nothing."""
    whole = SessionEnd(
        "0123456789ab", EndReason.LIMIT, NOW, Mode.CONVERSATION, 9.5, 1.25, "max_sessions"
    )
    async with opened(make) as store:
        assert list(await store.ends(now=NOW)) == []
        assert list(await store.remember_ends([whole, _end(1)], now=NOW)) == [whole, _end(1)]
        later = _end(2, at=NOW + 1)
        assert list(await store.remember_ends([whole, later], now=NOW + 1)) == [later]
        assert set(await store.ends(now=NOW + 1)) == {whole, _end(1), later}
        assert (await store.ends(now=NOW + 1))[-1] == later
        assert list(await store.ended_outside(now=NOW + 1)) == []


async def ends_are_bounded_in_number_and_time(make: MakeStore) -> None:
    """The newest ``MOST_ENDS``, each for ``REMEMBERED_FOR`` seconds."""
    async with opened(make) as store:
        for first in range(0, MOST_ENDS + 500, 500):
            some = [_end(number, at=NOW + number / 1_000) for number in range(first, first + 500)]
            assert len(await store.remember_ends(some, now=NOW)) == 500
        kept = await store.ends(now=NOW)
        assert len(kept) == MOST_ENDS
        assert kept[0].at == NOW + 0.5
        assert list(await store.ends(now=NOW + 60 + REMEMBERED_FOR)) == []


async def an_end_outside_the_servers_is_handed_out_once(make: MakeStore) -> None:
    """Only one caller gets it, to write it to the log."""
    async with opened(make) as store:
        await store.remember_ends([_end(1)], now=NOW, outside=True)
        await store.remember_ends([_end(2)], now=NOW)
        found = await store.ended_outside(now=NOW)
        assert [(each.end, each.record) for each in found] == [(_end(1), None)]
        assert list(await store.ended_outside(now=NOW)) == []
        assert set(await store.ends(now=NOW)) == {_end(1), _end(2)}


async def a_store_says_when_it_was_made(make: MakeStore) -> None:
    """Once, and the same for ever; who only looks makes nothing."""
    async with opened(make) as store:
        assert await store.made(now=None) is None
        first = await store.made(now=NOW)
        assert first is not None and first.is_new and first.at == NOW
        again, looked = await store.made(now=NOW + 9), await store.made(now=None)
        assert again == looked and again is not None
        assert (again.name, again.at, again.is_new) == (first.name, NOW, False)


async def the_answer_of_create_says_whether_the_session_is_new(make: MakeStore) -> None:
    """So that its start is written down once, whoever comes first."""
    named = SessionId("named" + "x" * 38)
    async with opened(make) as store:
        for expected in (True, False):
            record = await store.create(
                Mode.CONVERSATION, ALICE, peer=None, now=NOW, session_id=named
            )
            assert record.is_new is expected
        assert (await store.create(Mode.PROTOCOL, ALICE, peer=None, now=NOW)).is_new
