"""How sessions ended, as a store remembers it, and when the store was made."""

from __future__ import annotations

from collections.abc import Sequence

from mcp_sessions.core.ends import MOST_ENDS, REMEMBERED_FOR, EndReason, SessionEnd
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import SessionId, digest
from mcp_sessions.testing.parts import ALICE, NOW, Check, MakeStore, opened


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


CHECKS: Sequence[Check] = (
    how_a_session_ended_is_remembered_once,
    ends_are_bounded_in_number_and_time,
    an_end_outside_the_servers_is_handed_out_once,
    a_store_says_when_it_was_made,
    the_answer_of_create_says_whether_the_session_is_new,
)
