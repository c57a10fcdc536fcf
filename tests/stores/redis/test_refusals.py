"""A Redis that is there and refuses is named as what it is, at the start and later (HTP5)."""

import re
from collections.abc import Sequence

import pytest

from mcp_sessions.core.log import Draft
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import StoreRefused, StoreUnavailable
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.redis.redis_store import RedisStore
from tests.support.redis_server import redis_server

pytestmark = pytest.mark.redis

NOW = 1_800_000_000.0

LATER = {
    "a full one": (["CONFIG SET maxmemory 1"], r"is full \(maxmemory\).*Raise maxmemory", "full"),
    "a replica": (["REPLICAOF 127.0.0.1 1"], "read-only replica.*primary", "read-only"),
    "too few replicas": (["CONFIG SET min-replicas-to-write 1"], "too few replicas", None),
    "a user who may write nothing": (["ACL SETUSER default -@write"], "ACL", "credentials"),
}


@pytest.mark.parametrize("what", list(LATER))
async def test_writes_that_are_refused_are_named(what: str) -> None:
    """And the probe sees it, also if reading works. Nothing is sent again, and it heals."""
    commands, named, why = LATER[what]
    with redis_server() as server:
        store = RedisStore(server.url)
        await store.open(SessionPolicy())
        record = await store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=NOW)
        await store.probe()
        for command in commands:
            server.ask(command)
        for call in (
            lambda: store.append(record.session_id, Draft(b"{}"), now=NOW),
            store.probe,
        ):
            with pytest.raises(StoreRefused) as refused:
                await call()
            assert re.search(named, str(refused.value))
            assert refused.value.why == why
            assert f"redis://127.0.0.1:{server.port}/0" in str(refused.value)
        for command in (
            *("CONFIG SET maxmemory 0", "CONFIG SET min-replicas-to-write 0"),
            *("REPLICAOF NO ONE", "ACL SETUSER default +@all"),
        ):
            server.ask(command)
        await store.close()
        again = RedisStore(server.url)
        await again.open(SessionPolicy())
        await again.probe()
        await again.close()


START: dict[str, tuple[Sequence[str], str, str]] = {
    "a wrong password": (
        ("CONFIG SET requirepass right",),
        "redis://:SECRET@{address}/0",
        "refused the user name or the password",
    ),
    "a wrong user": (
        ("CONFIG SET requirepass right",),
        "redis://ada:SECRET@{address}/0",
        "refused the user name or the password",
    ),
    "no password": (("CONFIG SET requirepass right",), "redis://{address}/0", "wants a password"),
    "a wrong database": ((), "redis://{address}/99", "Look at the database"),
}


@pytest.mark.parametrize("what", list(START))
async def test_a_start_that_is_refused_names_the_url_without_its_secret(what: str) -> None:
    """SEC2. It does not say "away"."""
    commands, url, named = START[what]
    with redis_server() as server:
        for command in commands:
            server.ask(command)
        store = RedisStore(url.format(address=f"127.0.0.1:{server.port}"), timeout=10)
        for _ in range(2):
            # Also while it rests after a failure.
            with pytest.raises(StoreRefused) as refused:
                await store.open(SessionPolicy())
            said = str(refused.value)
            assert re.search(named, said)
            assert "away" not in said and "SECRET" not in said
            assert f"127.0.0.1:{server.port}/" in said
            assert "SECRET" not in url or ":***@" in said
        await store.close()


async def test_tls_on_one_side_is_hinted_at() -> None:
    """A server without TLS says nothing to a client with it."""
    with redis_server() as server:
        store = RedisStore(f"rediss://127.0.0.1:{server.port}/0", timeout=1)
        with pytest.raises(StoreUnavailable, match="speak no TLS"):
            await store.open(SessionPolicy())
        await store.close()
