"""Attachment: one connection receives a session, the newest."""

from __future__ import annotations

from collections.abc import Sequence

from anyio.lowlevel import checkpoint

from mcp_sessions.ids import (
    ConnectionId,
    FencingEpoch,
)
from mcp_sessions.stores.records import Appended, Attached, Attachment
from mcp_sessions.testing.parts import (
    HERE,
    NOW,
    THERE,
    Check,
    MakeStore,
    at_once,
    new_session,
    number_of,
    numbers_of,
    opened,
)


async def the_newest_attachment_is_the_only_one(make: MakeStore) -> None:
    """ATT1, HTL8: each attach has a higher fencing epoch and names whom it displaced."""
    async with opened(make) as store:
        session = await new_session(store)
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
    async with opened(make) as store:
        session = await new_session(store)
        first = await store.attach(session.id, HERE, now=NOW, only_if_free=True)
        assert first is not None
        assert await store.attach(session.id, THERE, now=NOW, only_if_free=True) is None
        assert (await session.record()).attachment == Attachment(HERE, first.fencing_epoch)
        assert await store.detach(session.id, first.fencing_epoch)
        assert await store.attach(session.id, THERE, now=NOW, only_if_free=True) is not None


async def a_late_close_of_a_displaced_connection_changes_nothing(make: MakeStore) -> None:
    """TKO9, also where the session came back to the same connection."""
    async with opened(make) as store:
        session = await new_session(store)
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
    """TKO8: a chain of takeovers, none lost and none with two successors."""
    async with opened(make) as store:
        session = await new_session(store)
        owners: dict[int, ConnectionId] = {}
        displaced: dict[int, Attachment | None] = {}

        async def come(number: int) -> None:
            connection = ConnectionId(f"connection-{number}")
            attached = await session.attach(connection)
            owners[attached.fencing_epoch] = connection
            displaced[attached.fencing_epoch] = attached.previous

        await at_once(come)
        assert len(owners) == 20
        before = None
        for epoch in sorted(owners):
            assert displaced[epoch] == before
            before = Attachment(owners[epoch], FencingEpoch(epoch))
        assert (await session.record()).attachment == before


async def what_is_stored_during_a_takeover_arrives_once_and_in_order(make: MakeStore) -> None:
    """ATT6, ATT5: each event is in the replay or after the head, never in both."""
    async with opened(make) as store:
        session = await new_session(store)
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

        await at_once(work, times=2)
        heads = [number_of(attached.head) for _, attached in taken]
        for (seen, attached), head, end in zip(taken, heads, [*heads[1:], 300], strict=True):
            live = [
                event.number
                for event, receiver in ((each.event, each.attachment) for each in stored)
                if receiver is not None and receiver.fencing_epoch == attached.fencing_epoch
            ]
            assert attached.refusal is None
            assert numbers_of(attached.replay) == list(range(seen + 1, head + 1))
            assert sorted(live) == list(range(head + 1, end + 1))


CHECKS: Sequence[Check] = (
    the_newest_attachment_is_the_only_one,
    an_attach_that_wants_a_free_session_displaces_nobody,
    a_late_close_of_a_displaced_connection_changes_nothing,
    many_attaches_at_once_leave_one_owner,
    what_is_stored_during_a_takeover_arrives_once_and_in_order,
)
