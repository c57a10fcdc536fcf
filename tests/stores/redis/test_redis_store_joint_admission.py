"""A request that is admitted to its connection and the connection's current session by one
script.
"""

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager

import pytest

from mcp_sessions.core.request_keys import Begun
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import Refusal
from mcp_sessions.ids import Position, SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.record_changes import SetCurrent
from mcp_sessions.stores.records import Admitted, CurrentSession, CurrentUse
from mcp_sessions.stores.redis.redis_store import RedisStore
from mcp_sessions.testing.parts import HERE, KEY, MESSAGE, RESULT
from tests.support.redis_server import RedisServer, redis_server

pytestmark = pytest.mark.redis

NOW = 1_800_000_000.0
POLICY = SessionPolicy(idle_timeout=100.0, forget_after=1_000.0)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A Redis that is no cluster: there both are in reach of one script."""
    with redis_server() as running:
        yield running


@asynccontextmanager
async def opened(server: RedisServer) -> AsyncGenerator[tuple[RedisStore, SessionId, SessionId]]:
    """A store, a connection in it, and its current session."""
    store = RedisStore(server.url)
    await store.open(POLICY)
    try:
        connection = await store.create(Mode.TRANSPORT, ANONYMOUS, peer=None, now=NOW)
        session = await store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=NOW)
        attached = await store.attach(session.session_id, HERE, now=NOW)
        assert attached is not None
        current = CurrentSession(session.session_id, attached.fencing_epoch)
        await store.change(connection.session_id, SetCurrent(current))
        yield store, connection.session_id, session.session_id
    finally:
        await store.close()


async def admit(
    store: RedisStore, connection: SessionId, use: CurrentUse, *, now: float = NOW
) -> Admitted:
    admitted = await store.admit(connection, ANONYMOUS, mode=Mode.TRANSPORT, now=now, current=use)
    assert admitted is not None
    return admitted


async def test_a_call_with_a_key_is_two_scripts(server: RedisServer) -> None:
    """One lets it in, into both, and records its key; the other keeps its answer (KEY4)."""
    async with opened(server) as (store, connection, session):
        use = CurrentUse(session, key=KEY)
        await admit(store, connection, CurrentUse(session))
        before = server.executed("EVALSHA")
        within = (await admit(store, connection, use)).current
        assert within is not None and within.key is Begun.FIRST
        assert await store.finish_request(session, KEY.key, RESULT, now=NOW)
        assert server.executed("EVALSHA") == before + 2
        within = (await admit(store, connection, use)).current
        assert within is not None and within.outcome == RESULT


async def test_a_connection_that_wakes_up_brings_its_session_along(server: RedisServer) -> None:
    """One script lets the request into both. Their places in the list of all are put right, so both
    fall asleep again, and neither is ended in place of what was used earlier.
    """
    idle = POLICY.idle_timeout
    async with opened(server) as (store, connection, session):
        await store.sleep(now=NOW + idle)
        woken = NOW + idle + 50
        within = (await admit(store, connection, CurrentUse(session, key=KEY), now=woken)).current
        assert within is not None and within.key is Begun.FIRST
        appended = await store.append(session, MESSAGE, now=woken)
        assert appended is not None
        # Those of other tests are in this Redis, too.
        gone = await store.evict_heavy(now=woken + idle - 1, most=1, held=(), limit=99)
        assert {connection, session}.isdisjoint(record.session_id for record in gone)
        await store.sleep(now=woken + idle - 1)
        first = Position(appended.event.position.log_epoch, 0).event_id()
        assert (await store.read(session, first, now=woken))[1] is None
        await store.sleep(now=woken + idle)
        assert (await store.read(session, first, now=woken))[1] is Refusal.EVICTED
