"""What a conversation's session costs: a call in one, and one that sleeps.

    python -m tests.bench.bench_conversations [CALLS]

A call in process is compared with one in a session that the client names, 50 and 50 in turn; both
times are those of client and server. What sleeps is 10,000 conversations of 100 users, each made by
a request of its own: bytes in memory, rows in SQLite, keys in Redis. It fails where one of them is
more than promised.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
import tracemalloc
from contextlib import closing
from pathlib import Path
from sqlite3 import connect

from mcp_sessions import Conversations
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import SessionId
from mcp_sessions.policy import FORGET_AFTER, SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.security import SessionSecurity
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.memory import MemoryStore
from mcp_sessions.stores.redis.store import RedisStore
from mcp_sessions.stores.sqlite.store import SQLiteStore
from tests.support.modern import ModernClient
from tests.support.raw import Json, RawClient
from tests.support.redis_server import redis_server
from tests.support.world import world

SLEEPING, USERS = 10_000, 100
MOST_BYTES, MOST_SHARE = 512, 1.10
TURN = 50


async def per_call(era: str, calls: int) -> tuple[float, float]:
    """Microseconds of CPU of a call in a named session, and of one in a bound session."""
    async with world(conversations=Conversations()) as it:
        modern, old = ModernClient(it.carrier), RawClient(it.carrier)
        await old.initialize()

        async def call(meta: Json) -> None:
            arguments = {"text": "hello"}
            if era == "2026":
                await modern.call("echo", arguments, meta=meta).result()
            else:
                params = {"name": "echo", "arguments": arguments, "_meta": meta}
                await old.send("tools/call", params).result()

        started = await modern.send("sessions/create", {}).result()
        metas = {"io.modelcontextprotocol/session": started["session"]}, {"openai/session": "c"}
        times: tuple[list[float], list[float]] = [], []
        for _ in range(calls // TURN + 4):
            for meta, spent in zip(metas, times, strict=True):
                before = time.process_time()
                for _ in range(TURN):
                    await call(meta)
                spent.append((time.process_time() - before) / TURN * 1_000_000)
    # The first ones warm up.
    named, bound = times[0][4:], times[1][4:]
    more = statistics.median(b - a for a, b in zip(named, bound, strict=True))
    return statistics.median(named), statistics.median(named) + more


async def fill(store: SessionStore) -> None:
    """Open a store, and make the conversations, each as the first request of one does."""
    await store.open(SessionPolicy(forget_after=FORGET_AFTER))
    security = SessionSecurity(["k" * 32])
    for number in range(SLEEPING):
        # A request's credential is read anew each time.
        subject, scopes = f"user {number % USERS}", frozenset({"read", "write"})
        principal = Principal("client", "https://issuer.example", subject, scopes, 1e9 + number)
        (session_id,) = security.bound_ids("openai/session", f"{number}", principal=principal)
        await make(store, principal, session_id, 1e9 + number)


async def make(
    store: SessionStore, principal: Principal, session_id: SessionId, now: float
) -> None:
    """The session of one."""
    await store.create(Mode.BOUND, principal, peer=None, now=now, session_id=session_id)


async def in_memory() -> float:
    """Bytes of each."""
    # So that what is imported when it is first used is there before.
    await fill(MemoryStore())
    store = MemoryStore()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    await fill(store)
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


def main() -> None:
    """Measure, and print."""
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000
    failed = False
    for era in ("2025", "2026"):
        named, bound = asyncio.run(per_call(era, calls))
        failed = failed or bound > MOST_SHARE * named
        print(
            f"  {era} era: named {named:4.0f} us, bound {bound:4.0f} us, {bound / named:.2f} times"
        )
    size, rows, keys = (asyncio.run(count()) for count in (in_memory, in_sqlite, in_redis))
    print(
        f"  asleep: {size:.0f} bytes in memory, {rows:.2f} rows in SQLite, {keys:.2f} keys in Redis"
    )
    failed = failed or size > MOST_BYTES or rows > 1 or keys > 1.01
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
