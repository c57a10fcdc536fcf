"""A session that moves to another store is the same there."""

from __future__ import annotations

from mcp_sessions.core.log import Draft
from mcp_sessions.core.request_keys import Begun, KeyUse
from mcp_sessions.core.states import Mode
from mcp_sessions.core.story import Entry
from mcp_sessions.ids import GET_STREAM, FencingEpoch, RequestKey, SessionId
from mcp_sessions.principal import Principal
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.record_changes import (
    SetCurrent,
    SetFilter,
    SetLogLevel,
    SetStreamOpened,
    SetWaitsFrom,
)
from mcp_sessions.stores.records import CurrentSession, Peer
from mcp_sessions.stores.whole_sessions import WholeSession, from_json, to_json
from mcp_sessions.testing.belongings_checks import ODD
from mcp_sessions.testing.parts import (
    ALICE,
    HERE,
    KEY,
    MESSAGE,
    NOW,
    POST_STREAM,
    RESULT,
    MakeStore,
    SessionOf,
    new_session,
    opened,
    subscribers_of,
)

SECOND, THIRD, FOURTH = (KeyUse(RequestKey(name), b"2", "process-1") for name in "234")


async def _of_a_client(store: SessionStore) -> SessionOf:
    """One that has something of everything."""
    peer = Peer("2025-11-25", {"clientInfo": {"name": ODD[0]}}, modern=True)
    scoped = Principal(ALICE.client_id, ALICE.issuer, ALICE.subject, frozenset({"a", "b"}), NOW)
    made = await store.create(Mode.PROTOCOL, scoped, peer=peer, now=NOW)
    session = SessionOf(store, made.session_id)
    entry = Entry(NOW, "attached websocket here started")
    assert await store.attach(session.id, HERE, now=NOW, entry=entry) is not None
    for number in range(5):
        await store.append(session.id, Draft(b'{"id":"', b'"}', name=f"n{number}"), now=NOW)
    for text in ("old", "new"):
        await store.append(session.id, Draft(text.encode(), key=ODD[1]), now=NOW + 1)
    await store.append(session.id, MESSAGE, now=NOW, stream=POST_STREAM)
    for use in (KEY, SECOND, THIRD, FOURTH):
        assert (await session.begin(use))[0] is Begun.FIRST
    await store.finish_request(session.id, THIRD.key, RESULT, now=NOW + 2)
    await store.finish_request(session.id, KEY.key, b'"result":{"a":1}', now=NOW + 3)
    await store.finish_request(session.id, SECOND.key, None, now=NOW + 4)
    await store.change_state(session.id, {"kept": [1, ODD[0]]}, ())
    await store.replace_data(session.id, {"notes": {"a": 2**70}}, expected_version=0)
    await store.change(
        session.id, SetFilter(frozenset({"file:///a", ODD[2]}), frozenset({"tools"}))
    )
    await store.change(session.id, SetLogLevel("debug"))
    head = await store.head(session.id)
    assert head is not None
    await store.change(session.id, SetWaitsFrom(head.event_id()))
    return session


async def _of_a_connection(store: SessionStore, carried: SessionOf) -> SessionOf:
    connection = await new_session(store, mode=Mode.TRANSPORT)
    await store.change(connection.id, SetCurrent(CurrentSession(carried.id, FencingEpoch(1))))
    await store.change(connection.id, SetStreamOpened())
    head = await store.head(carried.id)
    assert head is not None
    assert await store.carry(connection.id, carried.id, FencingEpoch(1), head)
    await store.append(carried.id, MESSAGE, now=NOW)
    (event,), _ = await store.read(carried.id, head.event_id(), now=NOW)
    await store.relay(connection.id, carried.id, FencingEpoch(1), event, now=NOW)
    await store.append(connection.id, MESSAGE, now=NOW, stream=GET_STREAM)
    return connection


async def _whole(store: SessionStore, session_id: SessionId) -> WholeSession:
    whole = await store.whole(session_id)
    assert whole is not None
    return whole


async def a_session_is_the_same_in_another_store(make: MakeStore) -> None:
    """Its logs, keys, data, state and all that its record has, also by way of JSON."""
    async with opened(make) as store, opened(make) as other:
        client = await _of_a_client(store)
        connection = await _of_a_connection(store, client)
        agent = await new_session(store, mode=Mode.AGENT)
        await store.append(agent.id, MESSAGE, now=NOW)
        unused = await new_session(store, mode=Mode.CONVERSATION)
        ids = {client.id, connection.id, agent.id, unused.id}
        assert set(await store.session_ids()) == ids
        for session_id in ids:
            whole = await _whole(store, session_id)
            assert to_json(from_json(to_json(whole))) == to_json(whole)
            assert await other.add_whole(whole)
            assert to_json(await _whole(other, session_id)) == to_json(whole)
        assert set(await other.session_ids()) == ids
        assert len(await other.all_sessions()) == len(ids)


async def a_session_goes_on_in_another_store(make: MakeStore) -> None:
    """What its client does next is done as where it was."""
    async with opened(make) as store, opened(make) as other:
        session = await _of_a_client(store)
        connection = await _of_a_connection(store, session)
        for each in (session, connection):
            assert await other.add_whole(await _whole(store, each.id))
        there, carries = SessionOf(other, session.id), SessionOf(other, connection.id)

        before, after = await store.head(session.id), await other.head(session.id)
        assert after is not None and before == after
        appended = await other.append(session.id, Draft(b"newest", key=ODD[1]), now=NOW + 5)
        assert appended is not None and appended.replaced
        assert appended.event.number == after.number + 1
        assert appended.attachment is not None
        assert appended.attachment.connection_id == HERE
        again = Draft(b'{"id":"', b'"}', name="n4", since=NOW)
        known = await other.append(session.id, again, now=NOW + 6)
        assert known is not None and known.event.number == 5
        relayed = await other.relay(
            connection.id, session.id, FencingEpoch(1), appended.event, now=NOW + 7
        )
        assert relayed.event is not None
        assert (await carries.record()).client.current is not None

        assert await there.begin(KEY, now=NOW + 5) == (Begun.ANSWERED, b'"result":{"a":1}')
        assert (await there.begin(SECOND, now=NOW + 5))[0] is Begun.DROPPED
        assert (await there.begin(FOURTH, now=NOW + 5))[0] is Begun.RUNNING
        assert await other.finish_request(session.id, FOURTH.key, RESULT, now=NOW + 5)
        assert list(await subscribers_of(other, ODD[2])) == [session.id]
        assert await other.unsubscribe(session.id, ODD[2])
        data = await other.load_data(session.id)
        assert data is not None
        assert await other.replace_data(session.id, {}, expected_version=data.version)
        changed = await other.change_state(session.id, {"more": 1}, ())
        assert changed is not None and changed.state.values["more"] == 1
        attached = await there.attach(HERE, now=NOW + 6)
        assert attached.fencing_epoch == (await session.record()).fencing_epoch + 1
        assert await other.end(session.id) is not None
        assert await other.whole(session.id) is None
        assert list(await subscribers_of(other, "file:///a")) == []


async def a_session_that_is_there_stays_as_it_is(make: MakeStore) -> None:
    """Whoever adds it again changes nothing."""
    async with opened(make) as store, opened(make) as other:
        session = await _of_a_client(store)
        whole = await _whole(store, session.id)
        assert await other.add_whole(whole)
        await other.append(session.id, MESSAGE, now=NOW + 5)
        newer = await _whole(other, session.id)

        assert not await other.add_whole(whole)
        assert to_json(await _whole(other, session.id)) == to_json(newer)
        assert await other.whole(SessionId("nobody-has-this-id")) is None
