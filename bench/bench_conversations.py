"""Cost of a conversation: a call in it, and its session while it sleeps.

    python -m bench.bench_conversations [CALLS]

The figure is the server CPU of a call in a conversation. The ratio compares it with a call in a
session that the client names. One server gets both kinds of calls, on two connections: 50 of one
kind, then 50 of the other.

The rows with *asleep* show what the store keeps for one conversation that sleeps: bytes in memory,
rows in SQLite, or keys in Redis. The store has 10,000 of them, of 100 users.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from sqlite3 import connect

from bench.bench_calls import ERAS, MODERN, SESSION, Case, Client, Server
from bench.rows import Row, report
from bench.stores import cpu_of, stores
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import SessionId
from mcp_sessions.policy import FORGET_AFTER, SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.security import SessionSecurity
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.memory import MemoryStore
from mcp_sessions.stores.redis.redis_store import RedisStore
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore
from tests.support.redis_server import redis_server

SLEEPING, USERS = 10_000, 100
MOST_BYTES, MOST_SHARE = 512, 1.10
TURN, WARM = 50, 8


def per_call(version: str, store: str, calls: int) -> tuple[float, float]:
    """Microseconds of the server's CPU of a call in a named session, and of one in a bound one."""
    server = Server("conversations", store)
    try:
        starter = Client(Case("", "ours", MODERN), server.port)
        named = starter.send("sessions/create", {})["result"]["session"]
        case = Case("", "ours", version)
        clients = [
            Client(case, server.port, meta)
            for meta in ({SESSION: named}, {"openai/session": "a conversation"})
        ]
        times: tuple[list[float], list[float]] = [], []
        for _ in range(calls // TURN + WARM):
            for client, spent in zip(clients, times, strict=True):
                before = cpu_of(server.process.pid)
                for _ in range(TURN):
                    client.call()
                spent.append((cpu_of(server.process.pid) - before) / TURN * 1_000_000)
    finally:
        server.stop()
    by_name, bound = times[0][WARM:], times[1][WARM:]
    more = statistics.median(b - a for a, b in zip(by_name, bound, strict=True))
    return statistics.median(by_name), statistics.median(by_name) + more


async def fill(store: SessionStore) -> None:
    """Open a store, and make the conversations, each as the first request of one does."""
    await store.open(SessionPolicy(forget_after=FORGET_AFTER))
    security = SessionSecurity(["k" * 32])
    for number in range(SLEEPING):
        # A request's credential is read anew each time.
        subject, scopes = f"user {number % USERS}", frozenset({"read", "write"})
        principal = Principal("client", "https://issuer.example", subject, scopes, 1e9 + number)
        (session_id,) = security.conversation_ids(
            "openai/session", f"{number}", principal=principal
        )
        await make(store, principal, session_id, 1e9 + number)


async def make(
    store: SessionStore, principal: Principal, session_id: SessionId, now: float
) -> None:
    await store.create(Mode.CONVERSATION, principal, peer=None, now=now, session_id=session_id)


async def in_memory() -> float:
    # So that what is imported when it is first used is there before.
    await fill(MemoryStore())
    store = MemoryStore()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    await fill(store)
    # The index that finds them belongs to the process.
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    await store.close()
    return (after - before) / SLEEPING


async def in_sqlite() -> float:
    """Rows of each, in all tables."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "sessions.db"
        store = SQLiteStore(file)
        await fill(store)
        await store.close()
        with closing(connect(file)) as opened:
            tables = opened.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
            names = [name for (name,) in tables if name != "meta"]
            counts = [opened.execute(f"SELECT count(*) FROM {name}").fetchone() for name in names]
    return sum(count for (count,) in counts) / SLEEPING


async def in_redis() -> float:
    """Keys of each, but for the lists of all and of each user."""
    with redis_server() as redis:
        store = RedisStore(redis.url)
        await fill(store)
        keys = int(redis.ask("DBSIZE").strip().lstrip(":"))
        await store.close()
    return (keys - USERS) / SLEEPING


def rows(calls: int) -> Iterator[Row]:
    with stores() as each:
        for store in each.names:
            for version, era in ERAS.items():
                named, bound = per_call(version, each.url(store, "conversations"), calls)
                yield Row(
                    name=f"{store}, {era}: in a conversation",
                    measured=bound,
                    unit="µs",
                    most=MOST_SHARE * named,
                    ratio=bound / named,
                    basis="times one in a session that the client names",
                )
        yield from each.missing()
        yield Row(
            name="asleep, memory", measured=asyncio.run(in_memory()), unit="bytes", most=MOST_BYTES
        )
        yield Row(name="asleep, sqlite", measured=asyncio.run(in_sqlite()), unit="rows", most=1)
        if "redis" in each.names:
            keys = asyncio.run(in_redis())
            yield Row(name="asleep, redis", measured=keys, unit="keys", most=1.01)
        yield from each.missing("asleep")


def main() -> None:
    report(rows(int(sys.argv[1]) if len(sys.argv) > 1 else 2_000))


if __name__ == "__main__":
    main()
