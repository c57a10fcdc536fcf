"""Admission and ownership: who may use a session, and which request runs."""

from __future__ import annotations

from dataclasses import replace

from mcp_sessions.core.request_keys import Begun, KeyUse
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import (
    RequestKey,
)
from mcp_sessions.principal import Principal
from mcp_sessions.stores.record_changes import SetCurrent
from mcp_sessions.stores.records import Admitted, CurrentSession, CurrentUse
from mcp_sessions.testing.parts import (
    ALICE,
    BOB,
    HERE,
    IDLE,
    KEY,
    MCP_MODES,
    NOW,
    RESULT,
    THERE,
    MakeStore,
    at_once,
    ids_of,
    new_session,
    opened,
)


async def a_strangers_request_is_refused_before_it_has_any_effect(make: MakeStore) -> None:
    """SES8, ERR2: foreign and unknown look the same, and not even a deadline moves."""
    async with opened(make) as store:
        session = await new_session(store)
        for stranger in (BOB, Principal(), Principal("other", ALICE.issuer, ALICE.subject)):
            for mode in MCP_MODES:
                assert await session.admit(KEY, principal=stranger, mode=mode, now=NOW + 9) is None
        assert await session.deadline() == NOW + IDLE
        assert await session.begin(KEY) == (Begun.FIRST, None)


async def a_refreshed_credential_of_the_same_identity_keeps_the_session(make: MakeStore) -> None:
    """SES8. The record keeps the scopes that the session was made with (SEC3)."""
    async with opened(make) as store:
        scopes = frozenset({"read"})
        session = await new_session(store, Principal("client", ALICE.issuer, ALICE.subject, scopes))
        admitted = await session.admit(principal=ALICE)
        assert admitted is not None and admitted.record.principal.scopes == scopes
        assert await ids_of(store, ALICE) == {session.id}


async def a_request_in_the_wrong_mode_changes_nothing(make: MakeStore) -> None:
    """A session never changes its mode (SES1); the record says which it is."""
    async with opened(make) as store:
        session = await new_session(store, mode=Mode.TRANSPORT)
        refused = await session.admit(KEY, mode=Mode.PROTOCOL, now=NOW + 9)
        assert refused is not None and refused.record.mode is Mode.TRANSPORT
        assert (refused.key, refused.outcome) == (None, None)
        assert await session.deadline() == NOW + IDLE
        admitted = await session.admit(KEY, mode=Mode.TRANSPORT)
        assert admitted is not None and admitted.key is Begun.FIRST


async def a_displaced_connection_is_notified_and_changes_nothing(make: MakeStore) -> None:
    """RES3: the store itself compares the fencing epoch, in the same step."""
    async with opened(make) as store:
        session, now = await new_session(store), NOW + 9
        old, new = await session.attach(HERE), await session.attach(THERE)
        late = await session.admit(KEY, fencing_epoch=old.fencing_epoch, now=now)
        assert late is not None and late.displaced and late.key is None
        assert await session.deadline() == NOW + IDLE
        admitted = await session.admit(KEY, fencing_epoch=new.fencing_epoch, now=now)
        assert admitted is not None and not admitted.displaced and admitted.key is Begun.FIRST
        assert await session.deadline() == now + IDLE


async def a_connections_current_session_is_admitted_to_in_the_same_step_or_not_at_all(
    make: MakeStore,
) -> None:
    """A store may leave it to its caller. What it does is whole, and only what the connection's
    own admission leads to (ASC2, SES8).
    """
    async with opened(make) as store:
        connection = await new_session(store, mode=Mode.TRANSPORT)
        session, other = await new_session(store), await new_session(store)
        old = await session.attach(HERE)

        async def admit(use: CurrentUse, *, principal: Principal = ALICE) -> Admitted | None:
            return await store.admit(
                connection.id, principal, mode=Mode.TRANSPORT, now=NOW + 9, current=use
            )

        use = CurrentUse(session.id, key=KEY)
        none = await admit(use)
        assert none is not None and none.current is None
        current = CurrentSession(session.id, old.fencing_epoch)
        await store.change(connection.id, SetCurrent(current))
        guessed = await admit(CurrentUse(other.id, key=KEY))
        assert guessed is not None and guessed.current is None
        assert await admit(use, principal=BOB) is None
        for untouched in session, other:
            assert await untouched.deadline() == NOW + IDLE
        both = await admit(use)
        assert both is not None and (both.key, both.record.client.current) == (None, current)
        within = both.current
        if within is not None:
            assert (within.key, within.record.session_id) == (Begun.FIRST, session.id)
            assert await session.deadline() == NOW + 9 + IDLE
            again = await admit(replace(use, key=replace(KEY, runner="process-2")))
            assert again is not None and again.current is not None
            assert (again.current.key, again.current.runner) == (Begun.RUNNING, KEY.runner)
            assert await store.finish_request(session.id, KEY.key, RESULT, now=NOW)
            answered = await admit(use)
            assert answered is not None and answered.current is not None
            assert answered.current.outcome == RESULT
        else:
            assert await session.begin(KEY) == (Begun.FIRST, None)
        assert await other.begin(KEY) == (Begun.FIRST, None)
        await session.attach(THERE)
        before = await session.deadline()
        late = await store.admit(
            connection.id,
            ALICE,
            mode=Mode.TRANSPORT,
            now=NOW + 20,
            current=CurrentUse(session.id, key=replace(KEY, key=RequestKey("late"))),
        )
        assert late is not None and late.current is None
        assert await session.deadline() == before
        unknown = await session.admit(replace(KEY, key=RequestKey("late")))
        assert unknown is not None and unknown.key is Begun.FIRST
        await store.end(session.id)
        gone = await admit(use)
        assert gone is not None and gone.current is None


async def a_request_key_is_begun_once_and_its_answer_kept(make: MakeStore) -> None:
    """KEY3. Each session has keys of its own."""
    async with opened(make) as store:
        session, other = await new_session(store), await new_session(store)
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


async def a_key_of_a_run_that_never_began_is_begun_anew(make: MakeStore) -> None:
    """``KeyUse.instead_of``: by whoever names the run that has it, once; an answer that was kept
    is not forgotten for it (KEY3).
    """
    first = replace(KEY, run="run-1", scopes=frozenset({"read"}))
    second = KeyUse(KEY.key, KEY.digest, "process-2", first.scopes, "run-2", instead_of="run-1")
    third = replace(second, runner="process-3", run="run-3")
    async with opened(make) as store:
        session = await new_session(store)
        await session.admit(first)
        again = await session.admit(replace(first, run="run-4"))
        assert again is not None and (again.key, again.run) == (Begun.RUNNING, "run-1")
        assert (await session.begin(replace(second, scopes=frozenset())))[0] is Begun.FEWER_SCOPES
        reused = replace(second, digest=b"other digest")
        assert (await session.begin(reused))[0] is Begun.OTHER_CONTENT
        assert await session.begin(replace(second, instead_of="")) == (Begun.RUNNING, None)
        assert await session.begin(second) == (Begun.FIRST, None)
        late = await session.admit(third)
        assert late is not None and late.key is Begun.RUNNING
        assert (late.runner, late.run) == ("process-2", "run-2")
        assert await store.finish_request(session.id, KEY.key, RESULT, now=NOW)
        again = replace(third, instead_of="run-2")
        assert await session.begin(again) == (Begun.ANSWERED, RESULT)


async def a_keyed_request_goes_with_its_attachment(make: MakeStore) -> None:
    """RES3: also where earlier requests of the same session had keys."""
    async with opened(make) as store:
        session = await new_session(store)
        for number in range(3):
            use = replace(KEY, key=RequestKey(f"key-{number}"))
            epoch = (await session.attach(HERE)).fencing_epoch
            admitted = await session.admit(use, fencing_epoch=epoch)
            assert admitted is not None and not admitted.displaced
            assert admitted.key is Begun.FIRST
            assert await store.finish_request(session.id, use.key, RESULT, now=NOW)


async def a_session_that_ends_meanwhile_admits_nothing(make: MakeStore) -> None:
    """A request that is too late is refused, and leaves nothing behind (END2)."""
    async with opened(make) as store:
        session = await new_session(store)
        assert await session.begin(KEY) == (Begun.FIRST, None)

        async def come(number: int) -> None:
            if number == 10:
                await store.end(session.id)
            await session.admit(replace(KEY, key=RequestKey(f"key-{number}")))

        await at_once(come)
        for key in (KEY.key, *(RequestKey(f"key-{number}") for number in range(20))):
            assert await session.admit(replace(KEY, key=key)) is None
            assert not await store.finish_request(session.id, key, RESULT, now=NOW)


async def a_key_with_other_content_is_given_no_answer(make: MakeStore) -> None:
    """``Admitted.outcome``: "the kept answer, if ``key`` is ``ANSWERED``"."""
    reused = KeyUse(KEY.key, b"other digest", KEY.runner)
    async with opened(make) as store:
        session = await new_session(store)
        await session.begin(KEY)
        assert await session.begin(reused) == (Begun.OTHER_CONTENT, None)
        await store.finish_request(session.id, KEY.key, RESULT, now=NOW)
        assert await session.begin(reused) == (Begun.OTHER_CONTENT, None)


async def a_kept_answer_is_not_for_fewer_scopes(make: MakeStore) -> None:
    """SEC3: what a stronger credential began is answered to no weaker one."""
    both = frozenset({"read", "write"})
    strong = replace(KEY, scopes=both)
    async with opened(make) as store:
        session = await new_session(store)
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
    """RES3, KEY3."""
    async with opened(make) as store:
        session = await new_session(store)
        begun: list[Begun | None] = []

        async def send(_: int) -> None:
            begun.append((await session.begin(KEY))[0])

        await at_once(send)
        assert begun.count(Begun.FIRST) == 1
        assert begun.count(Begun.RUNNING) == len(begun) - 1


async def request_keys_are_bounded_in_bytes_and_time(make: MakeStore) -> None:
    """KEY3: what is full refuses a new key; it never forgets a known one early."""
    async with opened(make, request_key_bytes=2_000, request_key_lifetime=50) as store:
        session = await new_session(store)
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


async def a_key_that_was_forgotten_is_a_new_one(make: MakeStore) -> None:
    """KEY12: also in the step that forgets it."""
    other = replace(KEY, digest=b"other digest")
    async with opened(make, request_key_lifetime=50) as store:
        session = await new_session(store)
        await session.begin(KEY)
        await store.finish_request(session.id, KEY.key, b"first", now=NOW)
        assert await session.begin(other, now=NOW + 51) == (Begun.FIRST, None)
        assert await session.begin(other, now=NOW + 102) == (Begun.RUNNING, None)
        assert await store.finish_request(session.id, KEY.key, RESULT, now=NOW + 103)
        assert await session.begin(other, now=NOW + 103) == (Begun.ANSWERED, RESULT)
