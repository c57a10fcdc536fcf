"""``kill -9`` in the middle of writes: what was acknowledged is there, and nothing half."""

import asyncio
import json
import logging
import os
import random
import select
import sqlite3
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from mcp_sessions.core.request_keys import KeyUse
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.ids import Position, RequestKey, SessionId, parse_position
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.sqlite import file_lock
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore

ROOT = Path(__file__).parents[3]
NOW = 1_800_000_000.0
ROUNDS = 5


@contextmanager
def writing(path: Path) -> Generator["subprocess.Popen[bytes]"]:
    """A process that writes; it is gone afterwards."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.stores.sqlite.writer_process", str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def killed_after(path: Path, lines: int) -> list[dict[str, Any]]:
    """What a writer acknowledged until it was killed, some time after ``lines`` lines."""
    with writing(path) as process:
        assert process.stdout is not None
        output, until = b"", monotonic() + 30
        while output.count(b"\n") < lines:
            ready, _, _ = select.select([process.stdout], [], [], until - monotonic())
            assert ready, "the writer said nothing for half a minute"
            read = os.read(process.stdout.fileno(), 65_536)
            assert read, "the writer ended by itself"
            output += read
        process.kill()
        output += process.stdout.read()
    # The kill may cut the last line.
    whole = output[: output.rindex(b"\n")]
    return [json.loads(line) for line in whole.splitlines()]


async def test_what_was_acknowledged_survives_kill_9_and_nothing_is_half(tmp_path: Path) -> None:
    """CUP8: "``kill -9`` at random points, reopen, no hole below the acknowledged id"."""
    path, chance = tmp_path / "sessions.db", random.Random(6)
    said: list[dict[str, Any]] = []
    for _ in range(ROUNDS):
        said += killed_after(path, chance.randrange(20, 400))
        await check_acknowledged(path, said)
        check_whole(path)


async def check_acknowledged(path: Path, said: list[dict[str, Any]]) -> None:
    """Every line that a killed process managed to say is true."""
    ended = {each["session"] for each in said if each["what"] == "ended"}
    # Ended or not: it was killed before it knew.
    unknown = {each["session"] for each in said if each["what"] == "ending"}
    store = SQLiteStore(path)
    await store.open(SessionPolicy())
    try:
        for session_id in ended:
            assert await store.load(session_id, now=NOW) is None
        outcomes = {
            (each["session"], each["key"]): each for each in said if each["what"] == "answered"
        }
        for each in said:
            session_id = SessionId(each["session"])
            if session_id in unknown:
                continue
            match each["what"]:
                case "created":
                    record = await store.load(session_id, now=NOW)
                    assert record is not None and record.attachment is None
                case "event":
                    await check_event(store, session_id, each["id"], each["payload"])
                case "begun":
                    use = KeyUse(RequestKey(each["key"]), b"digest", "another")
                    admitted = await store.admit(
                        session_id, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW, key=use
                    )
                    answer = outcomes.get((session_id, each["key"]))
                    assert admitted is not None and admitted.key is not None
                    if answer is not None:
                        assert admitted.outcome == answer["outcome"].encode()
                    else:
                        # It runs nowhere any more, and must not run again.
                        assert admitted.key.value in ("dropped", "answered")
                case "data":
                    data = await store.load_data(session_id)
                    assert data is not None and data.value == each["value"]
                case _:
                    pass
    finally:
        await store.close()


async def check_event(store: SQLiteStore, session_id: SessionId, id: str, payload: str) -> None:
    position = parse_position(id)
    assert position is not None
    before = Position(position.log_epoch, position.number - 1).event_id()
    events, refusal = await store.read(session_id, before, now=NOW, limit=1)
    assert refusal is None
    assert (events[0].event_id, events[0].payload) == (id, payload.encode())


def check_whole(path: Path) -> None:
    """The file by itself: no counter that its rows do not bear out, no row without a owner."""
    connection = sqlite3.connect(path)
    try:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        holes = connection.execute(
            "SELECT log, head, logs.events, logs.bytes, count(number), total(length(payload)),"
            " min(number), max(number) FROM logs LEFT JOIN events USING (log) GROUP BY log"
        ).fetchall()
        for _, head, events, size, found, found_size, first, last in holes:
            assert (events, size) == (found, found_size)
            if events:
                assert (first, last, head) == (1, events, events)
        (counted,) = connection.execute("SELECT value FROM meta WHERE name = 'sessions'").fetchone()
        (there,) = connection.execute("SELECT count(*) FROM sessions").fetchone()
        assert counted == there
        for table in ("logs", "keys", "data"):
            orphans = f"SELECT count(*) FROM {table} WHERE sid NOT IN (SELECT sid FROM sessions)"
            assert connection.execute(orphans).fetchone() == (0,)
        lost = "SELECT count(*) FROM events WHERE log NOT IN (SELECT log FROM logs)"
        assert connection.execute(lost).fetchone() == (0,)
    finally:
        connection.close()


async def test_who_starts_while_the_last_one_ends_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor starts the new one when the old one is about to be gone."""
    waits = asyncio.Event()

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waiting" in record.getMessage():
                waits.set()

    logger = logging.getLogger("mcp_sessions.stores.sqlite.file_lock")
    monkeypatch.setattr(logger, "handlers", [Noting()])
    monkeypatch.setattr(logger, "level", logging.INFO)
    path = tmp_path / "sessions.db"
    with writing(path) as process:
        assert process.stdout is not None and process.stdout.readline()
        store = SQLiteStore(path)
        opening = asyncio.create_task(store.open(SessionPolicy()))
        async with asyncio.timeout(2):
            await waits.wait()
        assert not opening.done()
        process.kill()
        await opening
        await store.close()


async def test_a_second_process_is_refused_by_name_until_the_first_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUP8: "two processes on one file"; the lock dies with its holder, however that dies."""
    monkeypatch.setattr(file_lock, "PATIENCE", 0.0)
    path = tmp_path / "sessions.db"
    with writing(path) as process:
        assert process.stdout is not None and process.stdout.readline()
        with pytest.raises(ConfigurationError, match=rf"in use by process {process.pid}\b"):
            await SQLiteStore(path).open(SessionPolicy())
        # Another name of the same file is the same file.
        other = tmp_path / "other.db"
        other.symlink_to(path)
        with pytest.raises(ConfigurationError, match=f"{process.pid}"):
            await SQLiteStore(other).open(SessionPolicy())
        process.kill()
        process.wait(20)
        store = SQLiteStore(path)
        await store.open(SessionPolicy())
        await store.close()
