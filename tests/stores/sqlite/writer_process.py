"""Writes to a SQLite store until it is killed, and says what was acknowledged.

Run with the file's path; prints one JSON object per line, after the call that it speaks of
returned. ``tests/stores/sqlite/test_sqlite_store_crash.py`` kills it.
"""

import asyncio
import json
import sys
from typing import Any

from mcp_sessions.core.log import Draft
from mcp_sessions.core.request_keys import KeyUse
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import ConnectionId, RequestKey, SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore

NOW = 1_800_000_000.0


def acknowledged(**what: Any) -> None:
    """Said when it is so: the line is in the pipe before the next call begins."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def write(store: SQLiteStore, writer: int) -> None:
    """One session after the other, each with events, keys, data, and an end for some."""
    number = 0
    while True:
        record = await store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=NOW)
        session_id = record.session_id
        acknowledged(what="created", session=session_id)
        await store.attach(session_id, ConnectionId("here"), now=NOW)
        for _ in range(8):
            number += 1
            text = f"{writer}-{number}-" + "x" * 300
            appended = await store.append(session_id, Draft(text.encode()), now=NOW)
            assert appended is not None
            acknowledged(what="event", session=session_id, id=appended.event.event_id, payload=text)
            key = RequestKey(f"key-{number}")
            use = KeyUse(key, b"digest", "process")
            await store.admit(session_id, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW, key=use)
            acknowledged(what="begun", session=session_id, key=key)
            await store.finish_request(session_id, key, text.encode(), now=NOW)
            acknowledged(what="answered", session=session_id, key=key, outcome=text)
        assert await store.replace_data(session_id, {"n": number}, expected_version=0)
        acknowledged(what="data", session=session_id, value={"n": number})
        if number % 3 == 0:
            acknowledged(what="ending", session=session_id)
            await store.end(SessionId(session_id))
            acknowledged(what="ended", session=session_id)


async def main(path: str) -> None:
    """Four writers at once, so that commits are shared."""
    store = SQLiteStore(path)
    await store.open(SessionPolicy())
    await asyncio.gather(*[write(store, writer) for writer in range(4)])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
