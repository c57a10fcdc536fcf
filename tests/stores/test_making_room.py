"""To make room, a store looks at some sessions. Those that may not go hide none that may."""

from collections.abc import Sequence

import pytest

from mcp_sessions.core.states import Mode
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.stores.records import SessionRecord
from mcp_sessions.stores.sql import steps
from mcp_sessions.testing import MakeStore
from tests.stores.every_store import every_store
from tests.stores.opening import NOW, new, opened

IDLE = 100.0
OWNER = Principal("gateway")


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "CANDIDATES", 2)


def ids_of(records: Sequence[SessionRecord]) -> list[str]:
    return [record.session_id for record in records]


@pytest.mark.parametrize("make", every_store())
async def test_sessions_of_other_modes_hide_none_that_sleeps(make: MakeStore) -> None:
    """SES20."""
    policy = SessionPolicy(idle_timeout=IDLE, forget_after=5 * IDLE, max_lifetime=100 * IDLE)
    async with opened(make(), policy) as store:
        for _ in range(9):
            await new(store, Mode.CONVERSATION, OWNER)
        sleeps = await store.create(Mode.PROTOCOL, OWNER, peer=None, now=NOW + 1)
        gone = await store.evict(now=NOW + 2 * IDLE, unused_for=60, held=(), limit=1, opened=False)
        assert ids_of(gone) == [sleeps.session_id]


@pytest.mark.parametrize("make", every_store())
async def test_sessions_of_a_connection_hide_none_of_the_owners_conversations(
    make: MakeStore,
) -> None:
    """SES20. Without ``forget_after`` none sleeps, and a named session goes for nobody."""
    async with opened(make(), SessionPolicy(idle_timeout=IDLE, max_lifetime=100 * IDLE)) as store:
        for _ in range(9):
            await new(store, Mode.PROTOCOL, OWNER)
        talk = await store.create(Mode.CONVERSATION, OWNER, peer=None, now=NOW + 1)
        gone = await store.evict_own(OWNER, now=NOW + 50, unused_for=10, held=(), limit=1)
        assert ids_of(gone) == [talk.session_id]


@pytest.mark.parametrize("make", every_store())
async def test_sessions_that_are_used_for_long_hide_none_that_nobody_has(make: MakeStore) -> None:
    """SES20. Those in use are named by the caller, more of them than are looked at."""
    async with opened(make(), SessionPolicy(idle_timeout=IDLE, max_lifetime=100 * IDLE)) as store:
        held = [await new(store, Mode.TRANSPORT) for _ in range(9)]
        other = await new(store, Mode.TRANSPORT)
        gone = await store.evict(now=NOW + 70, unused_for=60, held=held, limit=1, opened=True)
        assert ids_of(gone) == [other]
