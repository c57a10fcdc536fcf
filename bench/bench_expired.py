"""Size of the SQLite file after 20,000 sessions expired.

    python -m bench.bench_expired [SESSIONS]

Each session had a subscription and an event of 1 KiB. Some expire at a time, as in a process that
serves. The store gives space back to the file system, some at a time. It keeps 64 free pages in an
idle file for later. The figure is the size of the file after the store is closed, with the files
that belong to it.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.rows import Row, report
from mcp_sessions.core.log import Draft
from mcp_sessions.core.states import Mode
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore

WITHIN = 60.0
"""Seconds in which a store gives its space back."""


def size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())


async def fill(directory: Path, count: int) -> tuple[int, float]:
    """Bytes with all of them, and microseconds of CPU for each to expire."""
    store = SQLiteStore(directory / "sessions.db")
    policy = SessionPolicy(max_sessions=count + 1)
    await store.open(policy)
    now = time.time()
    draft = Draft(b'{"x":"' + b"x" * 1_000 + b'"}')

    async def one(number: int) -> None:
        made = await store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=now)
        await store.subscribe(made.session_id, f"note://{number}")
        await store.append(made.session_id, draft, now=now)

    for first in range(0, count, 500):
        await asyncio.gather(*[one(number) for number in range(first, min(first + 500, count))])
    full, later = size(directory), now + policy.max_lifetime + 1
    begun = time.process_time()
    while await store.expire(now=later, held=(), limit=500):
        pass
    spent = time.process_time() - begun
    # Pages are given back some at a time, while the store has nothing else to do.
    until = time.monotonic() + WITHIN
    before = -1
    while (is_now := size(directory)) != before and time.monotonic() < until:
        before = is_now
        await asyncio.sleep(3)
    await store.close()
    return full, spent / max(1, count) * 1e6


def rows(count: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as used:
        asyncio.run(fill(Path(empty), 0))
        full, each = asyncio.run(fill(Path(used), count))
        nothing, after = size(Path(empty)), size(Path(used))
    yield Row(name="file without any", measured=nothing / 2**20, unit="MiB")
    yield Row(
        name=f"file after {count:,}",
        measured=after / 2**20,
        unit="MiB",
        ratio=after / nothing,
        basis="times the file without any",
        most=(nothing + 64 * 4_096) * 1.1 / 2**20,
        includes=f"{full / 2**20:.0f} MiB with them",
    )
    yield Row(
        name="expiry, each", measured=each, unit="µs", includes="CPU, the writer's thread too"
    )


def main() -> None:
    report(rows(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000))


if __name__ == "__main__":
    main()
