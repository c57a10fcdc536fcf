"""A store that is open, and sessions in it."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TypeVar

from mcp_sessions.core.states import Mode
from mcp_sessions.ids import SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.stores.contract import SessionStore

NOW = 1_800_000_000.0
POLICY = SessionPolicy(idle_timeout=100, max_lifetime=1_000)

S = TypeVar("S", bound=SessionStore)


@asynccontextmanager
async def opened(store: S, policy: SessionPolicy = POLICY) -> AsyncGenerator[S]:
    """This store, until the block ends."""
    await store.open(policy)
    try:
        yield store
    finally:
        await store.close()


async def new(
    store: SessionStore, mode: Mode = Mode.PROTOCOL, principal: Principal = ANONYMOUS
) -> SessionId:
    return (await store.create(mode, principal, peer=None, now=NOW)).session_id
