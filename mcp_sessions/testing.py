"""The store contract as checks, for authors of stores.

Every store of this project passes them, and so must yours::

    from mcp_sessions.testing import check_session_store

    async def test_my_store() -> None:
        await check_session_store(lambda: MyStore(...))

A store that processes share has an exchange, and :func:`check_exchange` is for that.

They need no test framework and read no clock: time is passed in, so nothing waits for it.
They assert what :class:`~mcp_sessions.stores.base.SessionStore` promises and no more: where
it leaves a choice (what becomes of a session between its deadline and the next ``expire``)
they do not look.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import anyio
from anyio.lowlevel import checkpoint

from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.request_keys import Begun
from mcp_sessions.errors import LimitReached, Refusal
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    ConnectionId,
    FencingEpoch,
    LogEpoch,
    Position,
    RequestKey,
    SessionEventId,
    SessionId,
    StreamName,
    parse_position,
    parse_session_id,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.stores.base import (
    Admitted,
    Appended,
    Attached,
    Attachment,
    CurrentSession,
    Exchange,
    KeyUse,
    Mode,
    Peer,
    Relayed,
    SessionRecord,
    SessionStore,
)

T = TypeVar("T")

MakeStore = Callable[[], SessionStore]
"""A new store that is not open yet, is empty, and shares nothing with those made before."""

MakeTwoStores = Callable[[], tuple[SessionStore, SessionStore]]
"""Two stores that are not open yet, as two processes would make them: they share everything
with each other, and nothing with those made before. Both have an ``exchange``.
"""

Check = Callable[[MakeStore], Awaitable[None]]
"""One rule: returns if the store keeps it, raises ``AssertionError`` if not."""

NOW = 1_800_000_000.0
IDLE = 100.0
LIFETIME = 1_000.0

ALICE = Principal("client", "https://issuer.example", "alice")
BOB = Principal("client", "https://issuer.example", "bob")
HERE, THERE = ConnectionId("here"), ConnectionId("there")
POST_STREAM = StreamName("post")
MESSAGE = Draft(b"{}")
MCP_MODES = (Mode.PROTOCOL, Mode.TRANSPORT)
KEY = KeyUse(RequestKey("key"), b"digest", "process-1")
RESULT = b'"result":{}'
NO_STREAM: tuple[list[int], Refusal | None] = ([], Refusal.UNKNOWN_POSITION)
"""What a stream that is not there answers to every read."""


async def check_session_store(make: MakeStore) -> None:
    """Run every check of :data:`STORE_CHECKS`, each on a store that ``make`` makes for it.

    Raises:
        AssertionError: The contract is broken; the traceback names the check.
        TimeoutError: A check did not come to its end within a minute.
        RuntimeError: Python runs with ``-O``, which leaves out what the checks assert.
    """
    if not __debug__:
        raise RuntimeError("the checks assert nothing under python -O")
    for check in STORE_CHECKS:
        with anyio.fail_after(60):
            await check(make)


async def check_exchange(make_two: MakeTwoStores) -> None:
    """Run every check of :data:`EXCHANGE_CHECKS`, for stores that processes share.

    Raises:
        AssertionError: The contract of :class:`~mcp_sessions.stores.base.Exchange` is broken.
        TimeoutError: What had to be heard was not, within a minute.
        RuntimeError: Python runs with ``-O``, which leaves out what the checks assert.
    """
    if not __debug__:
        raise RuntimeError("the checks assert nothing under python -O")
    for check in EXCHANGE_CHECKS:
        with anyio.fail_after(60):
            await check(make_two)


# --- a session's life --------------------------------------------------------------------


async def a_new_session_is_remembered_as_it_was_made(make: MakeStore) -> None:
    """Nobody attached, nothing subscribed, an empty log, the earlier of two deadlines."""
    peer = Peer("2025-11-25", {"clientInfo": {"name": "checker"}})
    async with _opened(make) as store:
        for mode in MCP_MODES:
            made = await store.create(mode, ALICE, peer=peer, now=NOW)
            session = _Session(store, made.session_id)
            for record in (made, await session.record()):
                assert parse_session_id(record.session_id) == session.id
                assert (record.mode, record.principal, record.peer) == (mode, ALICE, peer)
                assert (record.created_at, record.expires_at) == (NOW, NOW + IDLE)
                assert record.ends_at == NOW + LIFETIME
                assert (record.fencing_epoch, record.attachment, record.current) == (0, None, None)
                assert not record.stream_opened and not record.subscriptions and not record.state
                assert (record.lists, record.waits_from) == (None, None)
            assert await session.position(0) == await session.head()
    async with _opened(make, idle_timeout=2 * LIFETIME) as store:
        made = await store.create(Mode.PROTOCOL, ALICE, peer=None, now=NOW)
        assert (made.peer, made.expires_at) == (None, NOW + LIFETIME)


async def a_callers_id_is_never_adopted(make: MakeStore) -> None:
    """Pitfall F5: an id that the store did not mint makes nothing and names no bucket."""
    async with _opened(make) as store:
        stranger = _Session(store, SessionId("a-caller-chose-this"))
        await stranger.check_gone()
        # Again: what the first calls may have made would be found by now.
        await stranger.check_gone()
        assert not await store.all_sessions()


async def open_sessions_are_limited_per_store_and_per_principal(make: MakeStore) -> None:
    """Pitfall D3: what is refused is not made, and what ended makes room."""
    stronger = Principal("client", ALICE.issuer, ALICE.subject, frozenset({"write"}))
    async with _opened(make, max_sessions=3, max_sessions_per_principal=2) as store:
        first, _ = await _new(store), await _new(store)
        assert await _limit_of(lambda: _new(store)) == "max_sessions_per_principal"
        assert await _limit_of(lambda: _new(store, stronger)) == "max_sessions_per_principal"
        await _new(store, BOB)
        assert await _limit_of(lambda: _new(store, BOB)) == "max_sessions"
        assert len(await store.all_sessions()) == 3
        await store.end(first.id)
        await _new(store)


async def a_session_expires_when_idle_and_a_request_moves_that(make: MakeStore) -> None:
    """Pitfalls D2, D3: the moment itself is too late; looking does not keep it alive."""
    async with _opened(make) as store:
        session, late = await _new(store), NOW + IDLE
        assert await store.load(session.id, now=late - 1) is not None
        assert await store.load(session.id, now=late) is None
        assert await session.admit(now=late) is None
        assert await session.admit(now=late, held=True) is not None
        assert await session.deadline(now=late) == late + IDLE
        await store.touch([session.id, SessionId("unknown")], now=late + 50)
        assert await session.deadline(now=late) == late + 50 + IDLE


async def a_session_expires_however_busy_when_its_lifetime_is_over(make: MakeStore) -> None:
    """Pitfall D3: neither requests nor work at hand nor a touch move the absolute end."""
    async with _opened(make) as store:
        session, over = await _new(store), NOW + LIFETIME
        for now in (NOW + 600, over - 1):
            assert await session.admit(now=now, held=True) is not None
            assert await session.deadline(now=now) <= over
            await store.touch([session.id], now=now)
            assert await session.deadline(now=now) <= over
        for _ in range(2):
            assert await store.load(session.id, now=over) is None
            assert await session.admit(now=over, held=True) is None
            assert await store.attach(session.id, HERE, now=over) is None
            await store.touch([session.id], now=over)


async def a_conversation_never_expires_and_forgets_nothing(make: MakeStore) -> None:
    """Its log has no bound, is read in pages, and no other mode sees it."""
    late = NOW + 100 * LIFETIME
    async with _opened(make, max_events=2, max_bytes=2, max_age=1) as store:
        session = await _new(store, mode=Mode.CONVERSATION)
        for number in range(5):
            await session.append(now=NOW + number)
        assert not await store.expire(now=late, held=(), limit=9)
        await store.touch([session.id], now=NOW)
        for mode in MCP_MODES:
            assert await store.admit(session.id, ALICE, mode=mode, now=NOW) is None
        admitted = await store.admit(session.id, ALICE, mode=Mode.CONVERSATION, now=NOW)
        assert admitted is not None
        assert (admitted.record.expires_at, admitted.record.ends_at) == (math.inf, math.inf)
        record = await store.load(session.id, now=late)
        assert record is not None and record.mode is Mode.CONVERSATION
        assert (await session.append(now=late)).event.number == 6
        pages: list[list[int]] = []
        after: str = await session.position(0)
        while not pages or pages[-1]:
            events, refusal = await store.read(session.id, after, now=late, limit=4)
            assert refusal is None
            pages.append([event.number for event in events])
            after = events[-1].event_id if events else after
        assert pages == [[1, 2, 3, 4], [5, 6], []]
        assert await store.end(session.id) is not None
        await session.check_gone()


async def an_append_after_the_lifetime_stores_nothing(make: MakeStore) -> None:
    """Pitfall D5, ``append``: "None if the session is unknown, ended or expired"."""
    async with _opened(make) as store:
        session = await _new(store)
        assert await store.append(session.id, MESSAGE, now=NOW + LIFETIME) is None
        assert await session.kept() == []


async def expire_ends_what_is_overdue_and_spares_what_is_at_work(make: MakeStore) -> None:
    """Pitfalls D2, D3, D5: each record is handed out once, then nothing brings it back."""
    async with _opened(make) as store:
        held, *idle = [await _new(store) for _ in range(4)]
        young = await _new(store, now=NOW + 50)
        await store.subscribe(idle[0].id, "note://1")
        assert not await store.expire(now=NOW + IDLE - 1, held=[], limit=9)
        first = await store.expire(now=NOW + IDLE, held=[held.id], limit=2)
        second = await store.expire(now=NOW + IDLE, held=[held.id], limit=9)
        assert (len(first), len(second)) == (2, 1)
        assert {record.session_id for record in (*first, *second)} == {each.id for each in idle}
        assert {"note://1"} in [set(record.subscriptions) for record in (*first, *second)]
        for session in idle:
            await session.check_gone()
        assert await _ids(store) == {held.id, young.id}
        assert await held.admit(now=NOW + IDLE, held=True) is not None
        gone = await store.expire(now=NOW + LIFETIME, held=[held.id], limit=9)
        assert held.id in {record.session_id for record in gone}


async def an_ended_session_leaves_no_trace_and_never_comes_back(make: MakeStore) -> None:
    """Pitfalls D4, D5, D7: every late call is refused, and ending again finds nothing."""
    async with _opened(make) as store:
        session, other = await _new(store), await _new(store)
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
        assert await _ids(store) == set(await store.subscribers("note://1")) == {other.id}
        assert await other.kept() == await other.kept(GET_STREAM) == [1]


# --- admission and ownership -------------------------------------------------------------


async def a_strangers_request_is_refused_before_it_has_any_effect(make: MakeStore) -> None:
    """Pitfalls B7, F4: foreign and unknown look the same, and not even a deadline moves."""
    async with _opened(make) as store:
        session = await _new(store)
        for stranger in (BOB, Principal(), Principal("other", ALICE.issuer, ALICE.subject)):
            for mode in MCP_MODES:
                assert await session.admit(KEY, principal=stranger, mode=mode, now=NOW + 9) is None
        assert await session.deadline() == NOW + IDLE
        assert await session.begin(KEY) == (Begun.FIRST, None)


async def a_refreshed_credential_of_the_same_identity_keeps_the_session(make: MakeStore) -> None:
    """Pitfall F2. The record keeps the scopes that the session was made with (F3)."""
    async with _opened(make) as store:
        scopes = frozenset({"read"})
        session = await _new(store, Principal("client", ALICE.issuer, ALICE.subject, scopes))
        admitted = await session.admit(principal=ALICE)
        assert admitted is not None and admitted.record.principal.scopes == scopes
        assert await _ids(store, ALICE) == {session.id}


async def a_request_in_the_wrong_mode_changes_nothing(make: MakeStore) -> None:
    """A session never changes its mode (document 002); the record says which it is."""
    async with _opened(make) as store:
        session = await _new(store, mode=Mode.TRANSPORT)
        refused = await session.admit(KEY, mode=Mode.PROTOCOL, now=NOW + 9)
        assert refused is not None and refused.record.mode is Mode.TRANSPORT
        assert (refused.key, refused.outcome) == (None, None)
        assert await session.deadline() == NOW + IDLE
        admitted = await session.admit(KEY, mode=Mode.TRANSPORT)
        assert admitted is not None and admitted.key is Begun.FIRST


async def a_displaced_connection_is_told_and_changes_nothing(make: MakeStore) -> None:
    """Pitfall B1: the store itself compares the fencing epoch, in the same step."""
    async with _opened(make) as store:
        session, now = await _new(store), NOW + 9
        old, new = await session.attach(HERE), await session.attach(THERE)
        late = await session.admit(KEY, fencing_epoch=old.fencing_epoch, now=now)
        assert late is not None and late.displaced and late.key is None
        assert await session.deadline() == NOW + IDLE
        admitted = await session.admit(KEY, fencing_epoch=new.fencing_epoch, now=now)
        assert admitted is not None and not admitted.displaced and admitted.key is Begun.FIRST
        assert await session.deadline() == now + IDLE


async def a_request_key_is_begun_once_and_its_answer_kept(make: MakeStore) -> None:
    """Pitfall C2. Each session has keys of its own."""
    async with _opened(make) as store:
        session, other = await _new(store), await _new(store)
        assert await session.begin(KEY) == (Begun.FIRST, None)
        again = await session.admit(KeyUse(KEY.key, KEY.digest, "process-2"))
        assert again is not None and (again.key, again.outcome) == (Begun.RUNNING, None)
        assert again.runner == KEY.runner
        assert await store.finish_request(session.id, KEY.key, RESULT, now=NOW)
        assert not await store.finish_request(session.id, KEY.key, b'"error":{}', now=NOW)
        assert await session.begin(KEY) == (Begun.ANSWERED, RESULT)
        assert await other.begin(KEY) == (Begun.FIRST, None)
        assert not await store.finish_request(other.id, KEY.key, None, now=NOW)
        assert await other.begin(KEY) == (Begun.DROPPED, None)
        assert not await store.finish_request(other.id, RequestKey("unknown"), RESULT, now=NOW)


async def a_key_with_other_content_is_given_no_answer(make: MakeStore) -> None:
    """``Admitted.outcome``: "the kept answer, if ``key`` is ``ANSWERED``"."""
    reused = KeyUse(KEY.key, b"other digest", KEY.runner)
    async with _opened(make) as store:
        session = await _new(store)
        await session.begin(KEY)
        assert await session.begin(reused) == (Begun.OTHER_CONTENT, None)
        await store.finish_request(session.id, KEY.key, RESULT, now=NOW)
        assert await session.begin(reused) == (Begun.OTHER_CONTENT, None)


async def a_kept_answer_is_not_for_fewer_scopes(make: MakeStore) -> None:
    """Pitfall F3: what a stronger credential began is answered to no weaker one."""
    both = frozenset({"read", "write"})
    strong = replace(KEY, scopes=both)
    async with _opened(make) as store:
        session = await _new(store)
        assert await session.begin(strong) == (Begun.FIRST, None)
        assert await session.begin(KEY) == (Begun.FEWER_SCOPES, None)
        assert await store.finish_request(session.id, KEY.key, RESULT, now=NOW)
        assert await session.begin(replace(KEY, scopes=frozenset({"read"}))) == (
            Begun.FEWER_SCOPES,
            None,
        )
        more = replace(KEY, scopes=both | {"admin"})
        assert await session.begin(more) == (Begun.ANSWERED, RESULT)


async def one_key_sent_many_times_at_once_is_begun_once(make: MakeStore) -> None:
    """Pitfalls B5, C2."""
    async with _opened(make) as store:
        session = await _new(store)
        begun: list[Begun | None] = []

        async def send(_: int) -> None:
            begun.append((await session.begin(KEY))[0])

        await _at_once(send)
        assert begun.count(Begun.FIRST) == 1
        assert begun.count(Begun.RUNNING) == len(begun) - 1


async def request_keys_are_bounded_in_bytes_and_time(make: MakeStore) -> None:
    """Pitfall C2: what is full refuses a new key; it never forgets a known one early."""
    async with _opened(make, request_key_bytes=2_000, request_key_lifetime=50) as store:
        session = await _new(store)
        uses = [KeyUse(RequestKey(f"key-{n}"), b"digest", "process-1") for n in range(200)]
        begun: list[Begun | None] = []
        for use in uses:
            begun.append((await session.begin(use))[0])
            await store.finish_request(session.id, use.key, RESULT, now=NOW)
        known = begun.count(Begun.FIRST)
        assert 0 < known < len(uses), "the bytes of a session's keys have no bound"
        assert begun == [Begun.FIRST] * known + [Begun.FULL] * (len(uses) - known)
        for use in uses[:known]:
            again, _ = await session.begin(use, now=NOW + 49)
            assert again in {Begun.ANSWERED, Begun.DROPPED}
        assert await session.begin(uses[-1], now=NOW + 51) == (Begun.FIRST, None)


# --- the log -----------------------------------------------------------------------------


async def events_get_their_ids_from_the_store_in_order_of_issue(make: MakeStore) -> None:
    """Pitfalls A10, A14: whole ids, fit for a header, whose byte order is their order."""
    async with _opened(make) as store:
        session = await _new(store)
        ids: list[str] = []
        for number in range(1, 12):
            event = (await session.append(Draft(b'{"id":"', b'"}'), now=NOW + number)).event
            assert (event.number, event.at) == (number, NOW + number)
            assert event.payload == b'{"id":"%s"}' % event.event_id.encode()
            assert event.event_id == await session.head() == await session.position(number)
            assert all("\x21" <= character <= "\x7e" for character in event.event_id)
            ids.append(event.event_id)
        assert ids == sorted(set(ids))


async def two_writers_neither_repeat_nor_skip_an_id(make: MakeStore) -> None:
    """Pitfall A10: 10,000 events."""
    async with _opened(make, max_events=20_000, max_bytes=10_000_000) as store:
        session = await _new(store)
        issued: list[list[int]] = [[], []]

        async def write(writer: int) -> None:
            for _ in range(5_000):
                issued[writer].append((await session.append()).event.number)
                await checkpoint()

        await _at_once(write, times=2)
        assert await session.kept() == sorted(issued[0] + issued[1]) == list(range(1, 10_001))
        assert all(numbers == sorted(numbers) for numbers in issued)


async def a_replay_is_whole_or_refused_with_its_reason(make: MakeStore) -> None:
    """Pitfalls A1 to A4, A9: a position is an epoch and a number; zero events is a success."""
    async with _opened(make, max_events=3) as store:
        session = await _new(store)
        assert await session.missed(0) == []
        for _ in range(5):
            await session.append()
        for seen, missed in ((2, [3, 4, 5]), (4, [5]), (5, [])):
            assert await session.missed(seen) == missed
        at_four = await session.position(4)
        older = Position(LogEpoch("0" * at_four.index("-")), 4).event_id()
        for position, reason in (
            (None, Refusal.NO_POSITION),
            ("", Refusal.UNKNOWN_POSITION),
            ("se_305", Refusal.UNKNOWN_POSITION),
            (f"{at_four}\n", Refusal.UNKNOWN_POSITION),
            (older, Refusal.LOG_REPLACED),
            (await session.position(6), Refusal.AHEAD),
            (await session.position(1), Refusal.EVICTED),
            (await session.position(0), Refusal.EVICTED),
        ):
            assert await session.read(position) == ([], reason)
            attached = await session.attach(HERE, position)
            assert (list(attached.replay), attached.refusal) == ([], reason)


async def the_window_is_bounded_in_events_bytes_and_age(make: MakeStore) -> None:
    """Pitfall A13. The newest event is kept, however large; what is too old is not."""
    async with _opened(make, max_events=4, max_bytes=100, max_age=50) as store:
        session = await _new(store)
        for _ in range(6):
            await session.append()
        assert await session.kept() == [3, 4, 5, 6]
        await session.append(Draft(b"x" * 99), now=NOW + 10)
        assert await session.kept() == [7]
        await session.append(Draft(b"x" * 500), now=NOW + 10)
        assert await session.kept() == [8]
        at_seven, head = await session.position(7), await session.head()
        assert await session.read(await session.position(6)) == ([], Refusal.EVICTED)
        assert await session.read(at_seven, now=NOW + 60) == ([8], None)
        attached = await session.attach(HERE, at_seven, now=NOW + 61)
        assert (list(attached.replay), attached.refusal) == ([], Refusal.EXPIRED)
        assert await session.read(at_seven, now=NOW + 61) == ([], Refusal.EXPIRED)
        assert await session.read(head, now=NOW + 61) == ([], None)


async def a_newer_event_replaces_the_older_one_of_its_key(make: MakeStore) -> None:
    """Pitfall A12: the survivor keeps its newer id, the replaced id stays a position."""
    async with _opened(make) as store:
        session = await _new(store)
        replaced = [
            (await session.append(Draft(b"{}", key=key))).replaced
            for key in ("a", None, "b", "a", None, "b")
        ]
        assert replaced == [False, False, False, True, False, True]
        for seen, missed in ((0, [2, 4, 5, 6]), (1, [2, 4, 5, 6]), (3, [4, 5, 6]), (4, [5, 6])):
            assert await session.missed(seen) == missed
        # Where several sessions share a connection's stream, each has keys of its own.
        for origin in (SessionId("one"), SessionId("two"), None, SessionId("one")):
            await session.append(Draft(b"{}", key="a", origin=origin), stream=GET_STREAM)
        assert await session.kept(GET_STREAM) == [2, 3, 4]


async def streams_and_sessions_never_cross(make: MakeStore) -> None:
    """Pitfall F6. A stream that is not there knows no position and has no head."""
    async with _opened(make) as store:
        session, other = await _new(store), await _new(store)
        assert await session.read(None, stream=POST_STREAM) == NO_STREAM
        assert await store.head(session.id, stream=POST_STREAM) is None
        opened = await store.open_stream(session.id, POST_STREAM)
        assert opened is not None and opened.number == 0
        for stream in (EVENTS, GET_STREAM, POST_STREAM):
            await session.append(stream=stream)
        again = await store.open_stream(session.id, POST_STREAM)
        assert again is not None and again.number == 1
        for stream in (EVENTS, GET_STREAM, POST_STREAM):
            assert await session.kept(stream) == [1]
        assert await other.kept() == []
        assert await other.read(opened.event_id(), stream=POST_STREAM) == NO_STREAM


async def a_stream_made_anew_refuses_the_positions_of_the_old_one(make: MakeStore) -> None:
    """Pitfalls A1, A11: a new log has a new epoch, whatever its numbers."""
    async with _opened(make) as store:
        session = await _new(store)
        await store.drop_stream(session.id, POST_STREAM)
        old = (await session.append(stream=POST_STREAM)).event.event_id
        await store.drop_stream(session.id, POST_STREAM)
        assert await store.head(session.id, stream=POST_STREAM) is None
        for _ in range(3):
            await session.append(stream=POST_STREAM)
        events, refusal = await session.read(old, stream=POST_STREAM)
        assert not events
        assert refusal in {Refusal.LOG_REPLACED, Refusal.UNKNOWN_POSITION}


async def one_sessions_events_can_be_taken_off_a_connections_stream(make: MakeStore) -> None:
    """They stand in their own log; what is left stays whole, and no position is lost."""
    one, two = SessionId("one"), SessionId("two")
    async with _opened(make) as store:
        session = await _new(store, mode=Mode.TRANSPORT)
        await store.drop_origin(session.id, one)
        for origin in (one, two, None, one):
            await session.append(Draft(b"{}", origin=origin), stream=GET_STREAM)
        await store.drop_origin(session.id, one)
        assert await session.kept(GET_STREAM) == [2, 3]
        at_four = await session.position(4, GET_STREAM)
        assert (await session.append(stream=GET_STREAM)).event.number == 5
        assert await session.read(at_four, stream=GET_STREAM) == ([5], None)


async def events_are_relayed_once_and_in_the_order_of_their_own_log(make: MakeStore) -> None:
    """Whoever stored them, and whoever relays them first (pitfall A5)."""
    async with _opened(make) as store:
        stream = await _new(store, mode=Mode.TRANSPORT)
        session = await _new(store)
        events = [(await session.append(Draft(b"{}", key=key))).event for key in "abcdb"]
        start = Position(LogEpoch(events[0].event_id.partition("-")[0]), 0)

        async def relay(number: int, epoch: int = 1, *, skips: bool = False) -> Relayed:
            event = events[number - 1]
            return await store.relay(
                stream.id, session.id, FencingEpoch(epoch), event, now=NOW, skips=skips
            )

        async def origins() -> list[tuple[int, str | None]]:
            after = await stream.position(0, GET_STREAM)
            kept, _ = await store.read(stream.id, after, now=NOW, stream=GET_STREAM)
            return [(event.number, event.origin) for event in kept]

        assert await relay(1) == Relayed()
        assert await store.carry(stream.id, session.id, FencingEpoch(1), start)
        assert (await stream.record()).carried == {session.id: 1}
        early = await relay(2)
        assert early == Relayed(missing_after=start)
        first = (await relay(1)).event
        assert first is not None
        assert (first.number, first.payload, first.origin) == (1, events[0].payload, session.id)
        assert await relay(1) == Relayed()
        assert (await relay(3)).missing_after == replace(start, number=1)
        # Event 2 was replaced by event 5 in its log.
        assert (await relay(3, skips=True)).event is not None
        assert await relay(2) == Relayed()
        assert (await relay(4)).event is not None
        assert await relay(5, 2) == Relayed()
        assert await origins() == [(1, session.id), (2, session.id), (3, session.id)]

        # A new attachment takes over, and what was meant for the old one comes late.
        assert await store.carry(stream.id, session.id, FencingEpoch(3), start)
        assert not await store.carry(stream.id, session.id, FencingEpoch(2), start)
        assert await origins() == []
        assert await relay(5, 1, skips=True) == Relayed()
        assert (await relay(5, 3, skips=True)).event is not None
        # Who displaced the old attachment takes away what it left, and no more.
        await store.drop_origin(stream.id, session.id, fencing_epoch=FencingEpoch(2))
        assert (await stream.record()).carried == {session.id: 3}
        assert await origins() == [(4, session.id)]
        # Told twice, it goes on as it was.
        assert await store.carry(stream.id, session.id, FencingEpoch(3), start)
        assert await origins() == [(4, session.id)]
        await store.drop_origin(stream.id, session.id, fencing_epoch=FencingEpoch(3))
        assert await relay(5, 3, skips=True) == Relayed()
        assert not (await stream.record()).carried
        assert await origins() == []
        assert not await store.carry(SessionId("unknown"), session.id, FencingEpoch(4), start)


# --- attachment --------------------------------------------------------------------------


async def the_newest_attachment_is_the_only_one(make: MakeStore) -> None:
    """Pitfalls B1, B4: each attach has a higher fencing epoch and names whom it displaced."""
    async with _opened(make) as store:
        session = await _new(store)
        assert (await session.append()).attachment is None
        before, newest = None, 0
        for connection in (HERE, HERE, THERE, None, HERE):
            attached = await session.attach(connection)
            assert attached.previous == before
            assert attached.fencing_epoch > newest
            newest = attached.fencing_epoch
            before = Attachment(connection, FencingEpoch(newest)) if connection else None
            assert (await session.append()).attachment == before
            record = await session.record()
            assert (record.attachment, record.fencing_epoch) == (before, newest)


async def an_attach_that_wants_a_free_session_displaces_nobody(make: MakeStore) -> None:
    """Rule 1: a request attaches its session only if it is attached nowhere."""
    async with _opened(make) as store:
        session = await _new(store)
        first = await store.attach(session.id, HERE, now=NOW, only_if_free=True)
        assert first is not None
        assert await store.attach(session.id, THERE, now=NOW, only_if_free=True) is None
        assert (await session.record()).attachment == Attachment(HERE, first.fencing_epoch)
        assert await store.detach(session.id, first.fencing_epoch)
        assert await store.attach(session.id, THERE, now=NOW, only_if_free=True) is not None


async def a_late_close_of_a_displaced_connection_changes_nothing(make: MakeStore) -> None:
    """Pitfall B3, also where the session came back to the same connection."""
    async with _opened(make) as store:
        session = await _new(store)
        first, second, third = [
            (await session.attach(connection)).fencing_epoch for connection in (HERE, THERE, HERE)
        ]
        for late in (first, second, FencingEpoch(0), FencingEpoch(third + 1)):
            assert not await store.detach(session.id, late)
            assert (await session.record()).attachment == Attachment(HERE, third)
        assert await store.detach(session.id, third)
        assert (await session.record()).attachment is None
        assert not await store.detach(session.id, third)
        assert (await session.attach(THERE)).fencing_epoch > third


async def many_attaches_at_once_leave_one_owner(make: MakeStore) -> None:
    """Pitfall B5: a chain of takeovers, none lost and none with two successors."""
    async with _opened(make) as store:
        session = await _new(store)
        owners: dict[int, ConnectionId] = {}
        displaced: dict[int, Attachment | None] = {}

        async def come(number: int) -> None:
            connection = ConnectionId(f"connection-{number}")
            attached = await session.attach(connection)
            owners[attached.fencing_epoch] = connection
            displaced[attached.fencing_epoch] = attached.previous

        await _at_once(come)
        assert len(owners) == 20
        before = None
        for epoch in sorted(owners):
            assert displaced[epoch] == before
            before = Attachment(owners[epoch], FencingEpoch(epoch))
        assert (await session.record()).attachment == before


async def what_is_stored_during_a_takeover_arrives_once_and_in_order(make: MakeStore) -> None:
    """Pitfalls A5, B2: each event is in the replay or after the head, never in both."""
    async with _opened(make) as store:
        session = await _new(store)
        stored: list[Appended] = []
        taken: list[tuple[int, Attached]] = []

        async def work(part: int) -> None:
            await (write, take_over)[part]()

        async def write() -> None:
            for _ in range(300):
                stored.append(await session.append())
                await checkpoint()

        async def take_over() -> None:
            for number in range(40):
                seen = stored[-1].event.number if stored else 0
                position = await session.position(seen)
                await checkpoint()
                taken.append((seen, await session.attach(ConnectionId(f"{number}"), position)))
                for _ in range(number % 5):
                    await checkpoint()

        await _at_once(work, times=2)
        heads = [_number(attached.head) for _, attached in taken]
        for (seen, attached), head, end in zip(taken, heads, [*heads[1:], 300], strict=True):
            live = [
                event.number
                for event, heard_by in ((each.event, each.attachment) for each in stored)
                if heard_by is not None and heard_by.fencing_epoch == attached.fencing_epoch
            ]
            assert attached.refusal is None
            assert _numbers(attached.replay) == list(range(seen + 1, head + 1))
            assert sorted(live) == list(range(head + 1, end + 1))


# --- what else a session has -------------------------------------------------------------


async def subscriptions_belong_to_the_session(make: MakeStore) -> None:
    """Those of both modes; once however often it asked; limited, with what is there kept."""
    async with _opened(make, max_subscriptions=2) as store:
        first, second = [await _new(store, mode=mode) for mode in MCP_MODES]
        for session in (first, second):
            for uri in ("note://1", "note://1", "note://2"):
                assert await store.subscribe(session.id, uri)
            over = await _limit_of(lambda of=session: store.subscribe(of.id, "note://3"))
            assert over == "max_subscriptions"
            assert await store.subscribe(session.id, "note://2"), "it has that one already"
            assert (await session.record()).subscriptions == {"note://1", "note://2"}
        assert sorted(await store.subscribers("note://1")) == sorted([first.id, second.id])
        assert not await store.subscribers("note://3")
        for _ in range(2):
            assert await store.unsubscribe(first.id, "note://1")
            assert list(await store.subscribers("note://1")) == [second.id]
        assert await store.subscribe(first.id, "note://3")


async def a_listen_filter_replaces_the_subscriptions(make: MakeStore) -> None:
    """protocol.md: it becomes the session's subscriptions and outlives the stream."""
    async with _opened(make, max_subscriptions=2) as store:
        session = await _new(store)
        await store.subscribe(session.id, "note://1")
        lists = frozenset({"tools"})
        for uris in (
            frozenset({"note://2", "note://3"}),
            frozenset({"note://3"}),
            frozenset[str](),
        ):
            assert await store.set_filter(session.id, uris, lists)
            record = await session.record()
            assert (record.subscriptions, record.lists) == (uris, lists)
            for uri in ("note://1", "note://2", "note://3"):
                assert (session.id in await store.subscribers(uri)) == (uri in uris)
        many = frozenset({"note://4", "note://5", "note://6"})
        over = await _limit_of(lambda: store.set_filter(session.id, many, frozenset()))
        assert over == "max_subscriptions"
        record = await session.record()
        assert (record.subscriptions, record.lists) == (frozenset(), lists)
        assert not await store.subscribers("note://4")


async def where_the_next_listen_stream_starts_is_remembered(make: MakeStore) -> None:
    """protocol.md: a replay waits for the next listen."""
    async with _opened(make) as store:
        session = await _new(store)
        for event_id in (await session.position(3), None):
            await store.set_waits_from(session.id, event_id)
            assert (await session.record()).waits_from == event_id
        position = await session.position(0)
        await store.set_waits_from(session.id, position)
        displaced = await session.attach(None)
        assert displaced.waits_from is None
        assert (await session.record()).waits_from == position

        async def listen(number: int) -> None:
            taken.append((await session.attach(ConnectionId(f"listen-{number}"))).waits_from)

        taken: list[SessionEventId | None] = []
        await _at_once(listen)
        # One of them replays, whichever was first.
        assert [start for start in taken if start is not None] == [position]
        assert (await session.record()).waits_from is None


async def state_is_changed_key_by_key(make: MakeStore) -> None:
    """protocol.md: what a request changed is applied to the newest state; none is lost."""
    async with _opened(make) as store:
        session = await _new(store)
        value: dict[str, Any] = {"list": [1], "gone": 1}
        changed = await store.change_state(session.id, value, ())
        assert changed is not None and changed.session_id == session.id
        value["list"].append(2)
        assert (await session.record()).state == {"list": [1], "gone": 1}
        versions: list[int] = []

        async def change(number: int) -> None:
            record = await store.change_state(session.id, {f"key-{number}": number}, ["gone"])
            assert record is not None
            versions.append(record.state_version)

        await _at_once(change)
        record = await session.record()
        assert record.state == {"list": [1], **{f"key-{number}": number for number in range(20)}}
        assert len(set(versions)) == 20 and record.state_version == max(versions)


async def data_is_replaced_only_by_who_saw_its_newest_version(make: MakeStore) -> None:
    """``session.data``: of many edits at once one is stored; a reader has its own copy."""
    async with _opened(make) as store:
        session = await _new(store)
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

        await _at_once(edit)
        last = await store.load_data(session.id)
        assert last is not None and [last.value["number"]] == kept
        assert not await store.replace_data(session.id, {}, expected_version=version)


async def a_connections_own_state_is_kept_with_its_session(make: MakeStore) -> None:
    """Transport-mode: its current session, and whether its GET stream was ever open."""
    async with _opened(make) as store:
        session, target = await _new(store, mode=Mode.TRANSPORT), await _new(store)
        for current in (CurrentSession(target.id, FencingEpoch(3)), None):
            await store.set_current(session.id, current)
            assert (await session.record()).current == current
        assert not (await session.record()).stream_opened
        for is_first in (True, False, False):
            assert await store.mark_stream_opened(session.id) is is_first
            assert (await session.record()).stream_opened


async def sessions_can_be_listed_by_their_owner(make: MakeStore) -> None:
    """Every live one, or every one of a principal."""
    async with _opened(make) as store:
        first, second, theirs = await _new(store), await _new(store), await _new(store, BOB)
        assert await _ids(store) == {first.id, second.id, theirs.id}
        assert await _ids(store, ALICE) == {first.id, second.id}
        assert await _ids(store, Principal()) == set()


STORE_CHECKS: Sequence[Check] = (
    a_new_session_is_remembered_as_it_was_made,
    a_callers_id_is_never_adopted,
    open_sessions_are_limited_per_store_and_per_principal,
    a_session_expires_when_idle_and_a_request_moves_that,
    a_session_expires_however_busy_when_its_lifetime_is_over,
    a_conversation_never_expires_and_forgets_nothing,
    an_append_after_the_lifetime_stores_nothing,
    expire_ends_what_is_overdue_and_spares_what_is_at_work,
    an_ended_session_leaves_no_trace_and_never_comes_back,
    a_strangers_request_is_refused_before_it_has_any_effect,
    a_refreshed_credential_of_the_same_identity_keeps_the_session,
    a_request_in_the_wrong_mode_changes_nothing,
    a_displaced_connection_is_told_and_changes_nothing,
    a_request_key_is_begun_once_and_its_answer_kept,
    a_key_with_other_content_is_given_no_answer,
    a_kept_answer_is_not_for_fewer_scopes,
    one_key_sent_many_times_at_once_is_begun_once,
    request_keys_are_bounded_in_bytes_and_time,
    events_get_their_ids_from_the_store_in_order_of_issue,
    two_writers_neither_repeat_nor_skip_an_id,
    a_replay_is_whole_or_refused_with_its_reason,
    the_window_is_bounded_in_events_bytes_and_age,
    a_newer_event_replaces_the_older_one_of_its_key,
    streams_and_sessions_never_cross,
    a_stream_made_anew_refuses_the_positions_of_the_old_one,
    one_sessions_events_can_be_taken_off_a_connections_stream,
    events_are_relayed_once_and_in_the_order_of_their_own_log,
    the_newest_attachment_is_the_only_one,
    an_attach_that_wants_a_free_session_displaces_nobody,
    a_late_close_of_a_displaced_connection_changes_nothing,
    many_attaches_at_once_leave_one_owner,
    what_is_stored_during_a_takeover_arrives_once_and_in_order,
    subscriptions_belong_to_the_session,
    a_listen_filter_replaces_the_subscriptions,
    where_the_next_listen_stream_starts_is_remembered,
    state_is_changed_key_by_key,
    data_is_replaced_only_by_who_saw_its_newest_version,
    a_connections_own_state_is_kept_with_its_session,
    sessions_can_be_listed_by_their_owner,
)
"""The rules, by name. Run them one by one to see which of them a store breaks."""


# --- processes that share a store ----------------------------------------------------------


async def a_message_reaches_one_process_or_all_the_others(make_two: MakeTwoStores) -> None:
    """Whole, whatever its bytes; who sends to all is not among them."""
    async with _two_processes(make_two) as (here, there):
        every_byte = bytes(range(256)) + b"\r\n"
        await here.exchange.send(every_byte, to=there.name)
        await there.messages.until(1)
        await here.exchange.send(b"all")
        await there.messages.until(2)
        await here.exchange.send(b"myself", to=here.name)
        await there.exchange.send(b"")
        await here.messages.until(1)
        await here.exchange.send(b"nobody", to="nobody")
        assert there.messages.heard == [every_byte, b"all"]
        # Whether a process hears what it sends to itself is left open.
        assert [message for message in here.messages.heard if message != b"myself"] == [b""]


async def what_is_appended_to_a_watched_stream_is_heard(make_two: MakeTwoStores) -> None:
    """By whoever appends, in any process that watches, in order and as it was stored."""
    async with _two_processes(make_two) as (here, there):
        session = await _new(here.store)
        for process in (here, there):
            await process.exchange.watch(session.id, EVENTS)
            await process.exchange.watch(session.id, EVENTS)
        stored: list[Appended] = []
        for number in range(10):
            if number % 3 == 1:
                connection = ConnectionId(f"connection {number}") if number % 2 else None
                await session.attach(connection)
            store = (here if number % 2 else there).store
            origin = SessionId("another") if number % 3 else None
            draft = Draft(b'{"id":"', b'"}', f"key {number % 4}" if number % 5 else None, origin)
            appended = await store.append(session.id, draft, now=NOW + number / 3)
            assert appended is not None
            stored.append(appended)
        for process in (here, there):
            await process.events.until(10)
            assert process.events.heard == [
                (session.id, EVENTS, each.event, each.attachment) for each in stored
            ]
            assert len({each.attachment for each in stored}) > 2


async def what_nobody_watches_is_not_heard(make_two: MakeTwoStores) -> None:
    """Streams and sessions never cross here either (pitfall F6), and an unwatch ends it."""
    async with _two_processes(make_two) as (here, there):
        watched, other = await _new(here.store), await _new(here.store)
        await there.exchange.watch(watched.id, EVENTS)
        await there.exchange.watch(watched.id, POST_STREAM)
        await there.exchange.watch(other.id, GET_STREAM)
        await there.exchange.unwatch(watched.id, POST_STREAM)
        await there.exchange.unwatch(watched.id, POST_STREAM)
        await here.store.append(other.id, MESSAGE, now=NOW)
        for stream in (POST_STREAM, GET_STREAM, EVENTS):
            await here.store.append(watched.id, MESSAGE, now=NOW, stream=stream)
        await here.store.append(other.id, MESSAGE, now=NOW, stream=GET_STREAM)
        await there.events.until(2)
        # In which order those of two streams are heard is left open.
        places = {(session_id, stream) for session_id, stream, _, _ in there.events.heard}
        assert places == {(watched.id, EVENTS), (other.id, GET_STREAM)}
        assert not here.events.heard
        await there.exchange.watch(watched.id, POST_STREAM)
        await here.store.append(watched.id, MESSAGE, now=NOW, stream=POST_STREAM)
        await there.events.until(3)
        assert there.events.heard[2][1] == POST_STREAM


async def a_stream_that_is_watched_again_is_heard_again(make_two: MakeTwoStores) -> None:
    """However fast: what an unwatch that is under way undoes is the watch before it."""
    async with _two_processes(make_two) as (here, there):
        session = await _new(here.store)
        for number in range(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(there.exchange.watch, session.id, EVENTS)
                for _ in range(number % 4):
                    await checkpoint()
                tasks.start_soon(there.exchange.unwatch, session.id, EVENTS)
                for _ in range(number % 3):
                    await checkpoint()
                await there.exchange.watch(session.id, EVENTS)
                await there.exchange.watch(session.id, EVENTS)
            await there.exchange.watch(session.id, EVENTS)
            seen = len(there.events.heard)
            await session.append()
            await there.events.until(seen + 1)


async def a_relayed_event_is_heard_as_an_append_is(make_two: MakeTwoStores) -> None:
    """Its number is that of the stream it was relayed to (pitfall E5)."""
    async with _two_processes(make_two) as (here, there):
        stream = await _new(here.store, mode=Mode.TRANSPORT)
        session = await _new(here.store)
        await there.exchange.watch(stream.id, GET_STREAM)
        start = await session.position(0)
        after = parse_position(start)
        assert after is not None
        assert await here.store.carry(stream.id, session.id, FencingEpoch(1), after)
        event = (await session.append(Draft(b"{}", key="a"))).event
        relayed = await here.store.relay(stream.id, session.id, FencingEpoch(1), event, now=NOW)
        await there.events.until(1)
        assert there.events.heard == [(stream.id, GET_STREAM, relayed.event, None)]


async def a_process_is_alive_until_it_leaves(make_two: MakeTwoStores) -> None:
    """Pitfall B9. Who never joined is not alive."""
    async with _two_processes(make_two) as (here, there):
        for process in (here, there):
            assert await here.exchange.is_alive(process.name)
        assert not await here.exchange.is_alive("nobody")
        await there.exchange.leave()
        assert not await here.exchange.is_alive(there.name)
        assert await here.exchange.is_alive(here.name)


EXCHANGE_CHECKS: Sequence[Callable[[MakeTwoStores], Awaitable[None]]] = (
    a_message_reaches_one_process_or_all_the_others,
    what_is_appended_to_a_watched_stream_is_heard,
    what_nobody_watches_is_not_heard,
    a_stream_that_is_watched_again_is_heard_again,
    a_relayed_event_is_heard_as_an_append_is,
    a_process_is_alive_until_it_leaves,
)
"""The rules of an exchange, by name."""


# --- what the checks are written in ------------------------------------------------------


@dataclass(frozen=True)
class _Session:
    """A session in a store, and the store's methods without what no check varies."""

    store: SessionStore
    id: SessionId

    async def record(self, *, now: float = NOW) -> SessionRecord:
        record = await self.store.load(self.id, now=now)
        assert record is not None
        return record

    async def deadline(self, *, now: float = NOW) -> float:
        return (await self.record(now=now)).expires_at

    async def admit(
        self,
        key: KeyUse | None = None,
        *,
        principal: Principal = ALICE,
        mode: Mode = Mode.PROTOCOL,
        now: float = NOW,
        held: bool = False,
        fencing_epoch: FencingEpoch | None = None,
    ) -> Admitted | None:
        return await self.store.admit(
            self.id,
            principal,
            mode=mode,
            now=now,
            held=held,
            fencing_epoch=fencing_epoch,
            key=key,
        )

    async def begin(self, key: KeyUse, *, now: float = NOW) -> tuple[Begun | None, bytes | None]:
        admitted = await self.admit(key, now=now)
        assert admitted is not None
        return admitted.key, admitted.outcome

    async def attach(
        self, connection_id: ConnectionId | None, position: str | None = None, *, now: float = NOW
    ) -> Attached:
        attached = await self.store.attach(self.id, connection_id, now=now, position=position)
        assert attached is not None
        return attached

    async def append(
        self, draft: Draft = MESSAGE, *, stream: StreamName = EVENTS, now: float = NOW
    ) -> Appended:
        appended = await self.store.append(self.id, draft, now=now, stream=stream)
        assert appended is not None
        return appended

    async def head(self, stream: StreamName = EVENTS) -> SessionEventId:
        head = await self.store.head(self.id, stream=stream)
        assert head is not None
        return head.event_id()

    async def position(self, number: int, stream: StreamName = EVENTS) -> SessionEventId:
        head = await self.store.head(self.id, stream=stream)
        assert head is not None
        return Position(head.log_epoch, number).event_id()

    async def read(
        self, position: str | None, *, stream: StreamName = EVENTS, now: float = NOW
    ) -> tuple[list[int], Refusal | None]:
        events, refusal = await self.store.read(self.id, position, now=now, stream=stream)
        return _numbers(events), refusal

    async def missed(self, seen: int) -> list[int]:
        """The numbers after a position that is valid."""
        numbers, refusal = await self.read(await self.position(seen))
        assert refusal is None
        return numbers

    async def kept(self, stream: StreamName = EVENTS) -> list[int]:
        """What the oldest valid position replays: all that is there."""
        for number in range(_number(await self.head(stream)) + 1):
            position = await self.position(number, stream)
            numbers, refusal = await self.read(position, stream=stream)
            if refusal is None:
                return numbers
        raise AssertionError("the head is always a valid position")

    async def check_gone(self) -> None:
        """No call finds the session, and none brings it back."""
        store = self.store
        await store.touch([self.id], now=NOW)
        assert await store.load(self.id, now=NOW) is None
        for mode in Mode:
            assert await self.admit(KEY, mode=mode, held=True) is None
        for stream in (EVENTS, GET_STREAM):
            assert await store.append(self.id, MESSAGE, now=NOW, stream=stream) is None
            assert await store.open_stream(self.id, stream) is None
            assert await store.head(self.id, stream=stream) is None
            assert await self.read(None, stream=stream) == NO_STREAM
            await store.drop_origin(self.id, self.id, stream=stream)
        await store.drop_stream(self.id, GET_STREAM)
        assert await store.attach(self.id, HERE, now=NOW) is None
        assert not await store.detach(self.id, FencingEpoch(1))
        await store.set_current(self.id, CurrentSession(self.id, FencingEpoch(1)))
        assert not await store.mark_stream_opened(self.id)
        assert not await store.subscribe(self.id, "note://1")
        assert not await store.unsubscribe(self.id, "note://1")
        assert not await store.set_filter(self.id, frozenset({"note://1"}), frozenset())
        assert self.id not in await store.subscribers("note://1")
        await store.set_waits_from(self.id, None)
        assert await store.change_state(self.id, {"n": 1}, ()) is None
        assert not await store.finish_request(self.id, KEY.key, RESULT, now=NOW)
        assert await store.load_data(self.id) is None
        assert not await store.replace_data(self.id, {}, expected_version=0)
        assert self.id not in await _ids(store)
        assert await store.end(self.id) is None


@asynccontextmanager
async def _opened(make: MakeStore, **limits: Any) -> AsyncGenerator[SessionStore, None]:
    durations: dict[str, Any] = {"idle_timeout": IDLE, "max_lifetime": LIFETIME}
    store = make()
    await store.open(SessionPolicy(**(durations | limits)))
    try:
        yield store
    finally:
        await store.close()


async def _new(
    store: SessionStore,
    principal: Principal = ALICE,
    *,
    mode: Mode = Mode.PROTOCOL,
    now: float = NOW,
) -> _Session:
    return _Session(store, (await store.create(mode, principal, peer=None, now=now)).session_id)


async def _ids(store: SessionStore, principal: Principal | None = None) -> set[SessionId]:
    return {record.session_id for record in await store.all_sessions(principal)}


async def _limit_of(call: Callable[[], Awaitable[Any]]) -> str:
    try:
        await call()
    except LimitReached as reached:
        return reached.limit
    raise AssertionError("a limit was exceeded")


async def _at_once(call: Callable[[int], Coroutine[Any, Any, None]], *, times: int = 20) -> None:
    async def start(number: int) -> None:
        await checkpoint()
        await call(number)

    async with anyio.create_task_group() as tasks:
        for number in range(times):
            tasks.start_soon(start, number)


def _numbers(events: Sequence[LoggedEvent]) -> list[int]:
    return [event.number for event in events]


def _number(event_id: str) -> int:
    position = parse_position(event_id)
    assert position is not None
    return position.number


class _Heard(Generic[T]):
    """What came in so far."""

    def __init__(self) -> None:
        self.heard: list[T] = []
        self._grew = anyio.Event()

    def add(self, item: T) -> None:
        self.heard.append(item)
        self._grew.set()

    async def until(self, count: int) -> None:
        """Wait until there are ``count``."""
        with anyio.fail_after(20):
            while len(self.heard) < count:
                self._grew = anyio.Event()
                await self._grew.wait()


@dataclass
class _Process:
    """A store as one of several processes has it, and what that process heard."""

    name: str
    store: SessionStore
    exchange: Exchange
    messages: _Heard[bytes]
    events: _Heard[tuple[SessionId, StreamName, LoggedEvent, Attachment | None]]
    gaps: int = 0

    def on_message(self, message: bytes) -> None:
        self.messages.add(message)

    def on_event(
        self,
        session_id: SessionId,
        stream: StreamName,
        event: LoggedEvent,
        attachment: Attachment | None,
    ) -> None:
        self.events.add((session_id, stream, event, attachment))

    def on_gap(self) -> None:
        self.gaps += 1


@asynccontextmanager
async def _two_processes(
    make_two: MakeTwoStores,
) -> AsyncGenerator[tuple[_Process, _Process], None]:
    async with AsyncExitStack() as opened:
        processes: list[_Process] = []
        for name, store in zip(("process-1", "process-2"), make_two(), strict=True):
            await store.open(SessionPolicy(idle_timeout=IDLE, max_lifetime=LIFETIME))
            opened.push_async_callback(store.close)
            assert store.exchange is not None
            process = _Process(name, store, store.exchange, _Heard(), _Heard())
            await store.exchange.join(name, process)
            processes.append(process)
        yield processes[0], processes[1]
        assert not processes[0].gaps and not processes[1].gaps, "nothing was lost"
