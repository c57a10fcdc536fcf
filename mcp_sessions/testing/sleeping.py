"""Check sessions that sleep, and those of conversations: they outlive their idle time."""

from __future__ import annotations

from mcp_sessions.core.log import Draft
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import Refusal
from mcp_sessions.ids import GET_STREAM, SessionId
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.stores.record_changes import SetStreamOpened
from mcp_sessions.testing.parts import (
    ALICE,
    BOB,
    IDLE,
    LIFETIME,
    MCP_MODES,
    NOW,
    POST_STREAM,
    MakeStore,
    ids_of,
    limit_of,
    new_session,
    opened,
    subscribers_of,
)


async def a_conversations_session_lives_as_long_as_it_may_be_idle(make: MakeStore) -> None:
    """With ``forget_after``, however a request or the work on one moved its deadline; and its
    lifetime ends that much later, however busy. The same holds for sessions that clients start.
    """
    forget = 3 * LIFETIME
    conversation, second = SessionId("conversation" + "x" * 31), SessionId("second" + "x" * 37)
    async with opened(make, forget_after=forget) as store:

        async def life_of(session_id: SessionId) -> tuple[float, float]:
            record = await store.load(session_id, now=NOW)
            assert record is not None
            return record.life.expires_at - NOW, record.life.ends_at - NOW

        async def expired(now: float, *held: SessionId) -> list[SessionId]:
            gone = await store.expire(now=now, held=held, limit=9)
            return [record.session_id for record in gone]

        started = [(await new_session(store, mode=mode)).id for mode in MCP_MODES]
        for each in (conversation, second):
            await store.create(Mode.CONVERSATION, ALICE, peer=None, now=NOW, session_id=each)
            assert await store.head(each) is None
        for each in (conversation, second, *started):
            assert await life_of(each) == (forget, LIFETIME + forget)
        assert await expired(NOW + forget - 0.1) == []
        for each in started:
            assert await store.end(each) is not None

        await store.touch([conversation], now=NOW + 1)
        assert (await life_of(conversation))[0] == forget + 1
        assert (
            await store.admit(conversation, ALICE, mode=Mode.CONVERSATION, now=NOW + 2) is not None
        )
        assert (await life_of(conversation))[0] == forget + 2
        assert await expired(NOW + forget + 1) == [second]
        assert await expired(NOW + forget + 10, conversation) == []
        assert (await life_of(conversation))[0] == LIFETIME + forget
        assert await expired(NOW + LIFETIME + forget - 1) == []
        late = NOW + LIFETIME + forget
        assert await store.admit(conversation, ALICE, mode=Mode.CONVERSATION, now=late) is None
        assert await expired(late, conversation) == [conversation]


async def a_principals_oldest_conversations_make_room(make: MakeStore) -> None:
    """Those that were not used for longest, and nobody else's; what has another mode, is running or
    was used lately stays.
    """
    forget = 500.0
    async with opened(make, forget_after=forget, idle_timeout=200.0) as store:

        async def conversation(name: str, principal: Principal = ALICE, at: float = 0) -> SessionId:
            named = SessionId(name * 43)
            record = await store.create(
                Mode.CONVERSATION, principal, peer=None, now=NOW + at, session_id=named
            )
            return record.session_id

        async def evicted(at: float, limit: int, *held: SessionId) -> list[SessionId]:
            gone = await store.evict_own(ALICE, now=NOW + at, unused_for=60, held=held, limit=limit)
            return [record.session_id for record in gone]

        others = [(await new_session(store, mode=mode)).id for mode in MCP_MODES]
        others += [await conversation("o", BOB), await conversation("n", ANONYMOUS)]
        oldest, used, held, second, third = [
            await conversation(name, at=at) for at, name in enumerate("abcde")
        ]
        await store.subscribe(third, "note://1")
        assert await store.admit(used, ALICE, mode=Mode.CONVERSATION, now=NOW + 90) is not None
        assert await evicted(59.9, 9) == []
        assert await evicted(100, 1, held) == [oldest]
        assert await evicted(100, 9, held) == [second, third]
        assert await evicted(100, 9, held) == []
        assert await subscribers_of(store, "note://1") == []
        assert await ids_of(store) == {*others, used, held}
        assert await evicted(155, 1) == [held]
        assert await evicted(155, 9) == [used]
        assert await store.evict_own(ALICE, now=NOW, unused_for=1, held=(), limit=9) == []


async def what_sleeps_makes_room_first(make: MakeStore) -> None:
    """Sleepers of any owner go first, whatever they hold; for one principal only his own."""
    async with opened(make, forget_after=500.0) as store:

        async def evicted(at: float, *held: SessionId) -> list[SessionId]:
            gone = await store.evict(now=NOW + at, unused_for=60, held=held, limit=1, opened=False)
            return [record.session_id for record in gone]

        async def evicted_own(principal: Principal, at: float) -> list[SessionId]:
            gone = await store.evict_own(principal, now=NOW + at, unused_for=60, held=(), limit=9)
            return [record.session_id for record in gone]

        older, his, unowned, used = [
            await new_session(store, principal, mode=Mode.TRANSPORT, now=NOW + at)
            for at, principal in enumerate((ALICE, BOB, ANONYMOUS, ALICE))
        ]
        await store.subscribe(older.id, "note://1")
        await store.change(older.id, SetStreamOpened())
        await used.admit(mode=Mode.TRANSPORT, now=NOW + 90)
        started, young = [await new_session(store, now=NOW + at) for at in (4, 90)]
        assert await evicted_own(ALICE, IDLE - 0.1) == []
        assert await evicted(IDLE, unowned.id) == [older.id]
        assert await evicted(IDLE) == [unowned.id]
        assert await evicted_own(ALICE, IDLE + 9) == [started.id]
        assert await evicted_own(BOB, IDLE + 9) == [his.id]
        assert await evicted(IDLE + 89.9) == []
        assert await ids_of(store) == {used.id, young.id}
        assert set(await evicted_own(ALICE, IDLE + 90)) == {used.id, young.id}


async def what_sleeps_is_bounded_in_bytes(make: MakeStore) -> None:
    """The least recently used go, whoever's they are and of whatever mode. Sessions that are awake
    or run a request stay. Events that come later count as well.

    The bounds leave room for a store that keeps data in a form that is longer by a third.
    """
    heavy, event = {"text": "x" * 60_000}, Draft(b"y" * 60_000)
    named = SessionId("named" + "x" * 38)
    async with opened(make, forget_after=500.0) as store:

        async def evicted(
            at: float, most: int, *held: SessionId, limit: int = 9
        ) -> list[SessionId]:
            gone = await store.evict_heavy(now=NOW + at, most=most, held=held, limit=limit)
            return [record.session_id for record in gone]

        owners = ((ALICE, Mode.PROTOCOL), (BOB, Mode.TRANSPORT), (ALICE, Mode.TRANSPORT))
        made = [
            (await new_session(store, principal, mode=mode, now=NOW + at)).id
            for at, (principal, mode) in enumerate(owners)
        ]
        await store.create(Mode.CONVERSATION, BOB, peer=None, now=NOW + 3, session_id=named)
        made += [named, (await new_session(store, now=NOW + 4)).id]
        for each in made:
            assert await store.replace_data(each, heavy, expected_version=0)
        first, second, third, conversation, last = made
        assert await evicted(IDLE - 0.1, 1) == []
        assert await evicted(IDLE + 1.5, 170_000) == []
        assert await store.admit(first, ALICE, mode=Mode.PROTOCOL, now=NOW + 50) is not None
        await store.sleep(now=NOW + IDLE + 9)
        assert await evicted(IDLE + 9, 340_000) == []
        assert await evicted(IDLE + 9, 170_000, second) == [third]
        assert await evicted(IDLE + 9, 170_000) == [second]
        assert await evicted(IDLE + 9, 1, limit=1) == [conversation]
        assert await ids_of(store) == {first, last}
        subscribed = await new_session(store, now=NOW + 5)
        for _ in range(3):
            await subscribed.append(event, now=NOW + IDLE + 9)
        assert await evicted(IDLE + 9, 340_000) == []
        assert await evicted(IDLE + 9, 220_000) == [last]
        assert await evicted(IDLE + 9, 100_000) == [subscribed.id]
        await subscribed.check_gone()


async def a_session_at_the_end_of_its_lifetime_does_not_sleep(make: MakeStore) -> None:
    """Nobody knows when it was used, so its bytes do not count, and it makes room for none."""
    heavy, late = {"text": "x" * 60_000}, NOW + LIFETIME
    async with opened(make, forget_after=500.0) as store:
        ending, asleep = [(await new_session(store, now=at)).id for at in (NOW, late - 1)]
        for each in (ending, asleep):
            assert await store.replace_data(each, heavy, expected_version=0)
        await store.touch([ending], now=late)
        ends: list[list[SessionId]] = []
        for most in (90_000, 30_000, 0):
            gone = await store.evict_heavy(now=late + IDLE, most=most, held=(), limit=9)
            ends.append([record.session_id for record in gone])
        assert ends == [[], [asleep], []]
        assert await ids_of(store) == {ending}


async def a_session_that_sleeps_loses_its_past_alone(make: MakeStore) -> None:
    """It lives on, and what waits for it then waits."""
    forget = 3 * LIFETIME
    async with opened(make, forget_after=forget) as store:
        connection, started = [await new_session(store, mode=mode) for mode in reversed(MCP_MODES)]
        await started.append()
        for stream in (GET_STREAM, GET_STREAM, POST_STREAM):
            await connection.append(stream=stream)
        await store.subscribe(connection.id, "note://1")
        await store.change_state(connection.id, {"n": 1}, ())

        async def replayed(after: int) -> tuple[list[int], Refusal | None]:
            position = await connection.position(after, GET_STREAM)
            return await connection.read(position, stream=GET_STREAM)

        await store.sleep(now=NOW + IDLE - 0.1)
        assert await replayed(0) == ([1, 2], None)
        assert await connection.kept(POST_STREAM) == [1]
        assert await started.kept() == [1]
        await store.sleep(now=NOW + IDLE)
        assert await replayed(1) == ([], Refusal.EVICTED)
        assert await replayed(2) == ([], None)
        assert await store.head(connection.id, stream=POST_STREAM) is None
        assert await started.read(await started.position(0)) == ([], Refusal.EVICTED)
        assert await started.read(await started.position(1)) == ([], None)
        await started.append(now=NOW + IDLE + 1)
        assert await started.read(await started.position(1)) == ([2], None)
        assert await subscribers_of(store, "note://1") == [connection.id]
        record = await connection.record(now=NOW + forget - 0.1)
        assert (record.state.values, record.life.ends_at) == ({"n": 1}, NOW + LIFETIME + forget)

        await connection.append(stream=GET_STREAM, now=NOW + IDLE + 1)
        await store.sleep(now=NOW + IDLE + 2)
        assert await replayed(2) == ([3], None)
        woken = NOW + 2 * IDLE
        assert await connection.admit(mode=Mode.TRANSPORT, now=woken) is not None
        await store.sleep(now=woken + IDLE - 0.1)
        assert await replayed(2) == ([3], None)
        await store.sleep(now=woken + IDLE)
        assert await replayed(2) == ([], Refusal.EVICTED)
        assert await ids_of(store) == {connection.id, started.id}
        gone = await store.expire(now=woken + forget, held=(), limit=9)
        assert {record.session_id for record in gone} == {connection.id, started.id}


async def one_principals_names_do_not_fill_the_store(make: MakeStore) -> None:
    """A tenth of ``max_sessions`` is his, where the operator says nothing; others come in."""
    async with opened(make, max_sessions=30) as store:

        async def named(name: str, principal: Principal = ALICE) -> None:
            named = SessionId(name * 43)
            await store.create(Mode.CONVERSATION, principal, peer=None, now=NOW, session_id=named)

        for name in "abc":
            await named(name)
        assert await limit_of(lambda: named("d")) == "max_sessions_per_principal"
        await named("a")
        await named("e", BOB)
        for _ in range(26):
            await new_session(store)
        assert await limit_of(lambda: new_session(store)) == "max_sessions"
