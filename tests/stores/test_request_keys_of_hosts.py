"""The session of the request keys that a host sends outside of sessions, over each store."""

import pytest

from mcp_sessions.core.request_keys import Begun, KeyUse
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import RequestKey, SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.testing import MakeStore
from tests.stores.every_store import every_store

KEEPER = Principal(client_id="keeper")
HOME = SessionId("h" * 64)
NOW = 1_800_000_000.0
POLICY = SessionPolicy(
    idle_timeout=60, forget_after=120, request_key_lifetime=600, max_lifetime=120
)


async def begun(store: SessionStore, name: str, now: float) -> Begun | None:
    use = KeyUse(RequestKey(name), b"d" * 32, "runner", run=name)
    admitted = await store.admit(HOME, KEEPER, mode=Mode.KEYS, now=now, key=use)
    return admitted.key if admitted is not None else None


@pytest.mark.parametrize("make_store", every_store())
async def test_it_outlives_its_last_key_and_ends_then_alone(make_store: MakeStore) -> None:
    store = make_store()
    await store.open(POLICY)
    try:
        await store.create(Mode.KEYS, KEEPER, peer=None, now=NOW, session_id=HOME)
        for number in range(4):
            # Beyond idle time and lifetime of a session.
            now = NOW + number * 599
            assert await begun(store, f"k{number}", now) is Begun.FIRST
            await store.finish_request(HOME, RequestKey(f"k{number}"), b'"result":{}', now=now)
        now = NOW + 3 * 599 + 659
        assert await store.expire(now=now, held=(), limit=9) == []
        assert await store.evict_heavy(now=now, most=1, held=(), limit=9) == []
        [ended] = await store.expire(now=now + 62, held=(), limit=9)
        assert (ended.session_id, ended.mode) == (HOME, Mode.KEYS)
        assert await begun(store, "k3", now + 62) is None
    finally:
        await store.close()


@pytest.mark.parametrize("make_store", every_store())
async def test_it_makes_room_when_its_keys_are_forgotten(make_store: MakeStore) -> None:
    store = make_store()
    await store.open(POLICY)
    try:
        await store.create(Mode.KEYS, KEEPER, peer=None, now=NOW, session_id=HOME)
        for passed, ends in ((609, 0), (611, 1)):
            gone = await store.evict_own(KEEPER, now=NOW + passed, unused_for=10, held=(), limit=9)
            assert len(gone) == ends
    finally:
        await store.close()
