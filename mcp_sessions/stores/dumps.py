"""Sessions in a file, as lines of JSON: dump them from one store, and load them into another.

The first line names the format. Each other line has one session (``whole_sessions.py``), or how one
ended. The last line counts them: a file without it is not complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from mcp_sessions.core.ends import SessionEnd
from mcp_sessions.core.life import has_come
from mcp_sessions.core.messages import members_of
from mcp_sessions.errors import ConfigurationError, StoreRefused
from mcp_sessions.ids import SessionId, digest
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.encrypted import Sealable
from mcp_sessions.stores.new_file import new_file
from mcp_sessions.stores.operator import open_made
from mcp_sessions.stores.urls import open_store, sqlite_file
from mcp_sessions.stores.whole_sessions import (
    Moving,
    WholeSession,
    faults_of,
    from_json,
    moved,
    moving,
    to_json,
)
from mcp_sessions.unopened import reason_of

VERSION = 1
_FORMAT = "mcp-sessions dump"

_AT_ONCE = 16
"""Sessions that are read or added at once."""

T = TypeVar("T")


@dataclass(slots=True)
class Moved:
    """What became of the sessions of a store or a file."""

    done: int = 0
    there: int = 0
    """They were in the other store already, and stay as they are."""

    faults: list[str] = field(default_factory=list[str])
    """What is wrong: a line each, with the digest of a session."""


@asynccontextmanager
async def reading(url: str) -> AsyncGenerator[SessionStore]:
    """The store that ``url`` names, to read from it. A SQLite file is copied first, since one
    process alone may have it open as a store.

    Raises:
        ConfigurationError: No store has such a URL, or there is nothing at it.
        StoreUnavailable: It cannot be reached.
    """
    store = opened = open_lasting(url)
    with contextlib.ExitStack() as stack:
        if store.name == "sqlite":
            from mcp_sessions.stores.sqlite.backup import copied
            from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore

            opened = SQLiteStore(stack.enter_context(copied(sqlite_file(url)[0])))
        await open_made(opened)
        try:
            yield opened
        finally:
            await opened.close()


@asynccontextmanager
async def writing(url: str) -> AsyncGenerator[SessionStore]:
    """The store that ``url`` names, to add sessions to it.

    Raises:
        ConfigurationError: No store has such a URL, or a process serves from the SQLite file.
        StoreUnavailable: It cannot be reached.
    """
    store = open_lasting(url)
    await store.open(SessionPolicy())
    try:
        yield store
    finally:
        await store.close()


def open_lasting(url: str) -> SessionStore:
    store = open_store(url)
    if not store.survives_process:
        raise ConfigurationError(
            f"{store.name}:// is the memory of the process that serves: nobody else sees it"
        )
    return store


async def check(store: SessionStore) -> Moved:
    """Read every session, and say what is wrong."""
    found = Moved()
    async for session_id, whole in _each(store, found):
        faults = faults_of(session_id, whole)
        found.done += not faults
        found.faults += [f"session {digest(session_id)}: {fault}" for fault in faults]
    return found


async def dump(store: SessionStore, path: Path, now: float) -> Moved:
    """Write the live sessions of a store to a file, which only its owner can read.

    Raises:
        ConfigurationError: The file is there, or cannot be written.
        StoreUnavailable: The store is away. There is no file then.
    """
    found = Moved()
    ends = await store.ends(now=now)
    sealed_by = await store.sealing_keys() if isinstance(store, Sealable) else ()
    with (
        new_file(path) as (file, _),
        os.fdopen(file, "w", encoding="ascii", closefd=False) as opened,
    ):

        def write(line: Any) -> None:
            opened.write(f"{json.dumps(line, separators=(',', ':'))}\n")

        write(
            {
                "format": _FORMAT,
                "version": VERSION,
                "store": store.name,
                "at": now,
                "sealedBy": sorted(sealed_by),
            }
        )
        async for _, whole in _each(store, found):
            if not has_come(whole.record.life.expires_at, now):
                write({"session": to_json(whole)})
                found.done += 1
        for end in ends:
            write({"end": end.to_json()})
        write({"sessions": found.done, "ends": len(ends)})
    return found


@dataclass(slots=True)
class Dump:
    """A file of sessions that was read once from its first line to its last."""

    path: Path
    sessions: dict[SessionId, Moving]
    ends: list[SessionEnd]
    sealed_by: Sequence[str] = ()
    """The ids of the keys that sealed something in it."""


def read(path: Path) -> Dump:
    """Read a whole file, so that nothing of a wrong one is loaded.

    Raises:
        ConfigurationError: It is no dump, not complete, of a newer version, or cannot be read.
    """
    found = Dump(path, {}, [])
    counted: Any = None
    for number, line in _lines(path):
        if counted is not None:
            raise _wrong(path, number)
        if number == 1:
            if line.get("format") != _FORMAT:
                raise _wrong(path, number)
            if line.get("version") != VERSION:
                raise ConfigurationError(
                    f"{path}: another release wrote this dump: use that release, or a newer one"
                )
            found.sealed_by = [str(each) for each in line.get("sealedBy") or ()]
        elif "session" in line:
            whole = _session(path, number, line)
            found.sessions[whole.record.session_id] = moving(whole)
        elif (end := SessionEnd.from_json(line.get("end"))) is not None:
            found.ends.append(end)
        elif "sessions" in line:
            counted = line.get("sessions"), line.get("ends")
        else:
            raise _wrong(path, number)
    if counted != (len(found.sessions), len(found.ends)):
        raise ConfigurationError(f"{path}: the dump is not complete: make another one")
    return found


async def load(store: SessionStore, file: Dump, now: float) -> Moved:
    """Add the sessions of a file to a store. One whose id is there stays as it is.

    Raises:
        ConfigurationError: The sessions are encrypted, and the store with other keys.
        StoreUnavailable: The store is away. What was added stays; load the file again.
    """
    found = Moved()
    await _note_keys(store, file.sealed_by)

    async def add(whole: WholeSession) -> bool:
        return await store.add_whole(moved(whole, file.sessions))

    batch: list[WholeSession] = []
    for number, line in _lines(file.path):
        if "session" in line:
            batch.append(_session(file.path, number, line))
        if batch and (len(batch) == _AT_ONCE or "session" not in line):
            added = await _all_of([add(each) for each in batch])
            found.done += sum(added)
            found.there += len(added) - sum(added)
            batch = []
    await store.remember_ends(file.ends, now=now)
    return found


async def copy(source: SessionStore, target: SessionStore, now: float) -> Moved:
    """Add the live sessions of a store to another one.

    Raises:
        ConfigurationError: There is no room for a temporary file.
        StoreUnavailable: One of the two is away.
    """
    with tempfile.TemporaryDirectory(prefix="mcp-sessions-") as folder:
        path = Path(folder) / "dump"
        dumped = await dump(source, path, now)
        loaded = await load(target, read(path), now)
    loaded.faults = dumped.faults
    return loaded


async def _note_keys(store: SessionStore, sealed_by: Sequence[str]) -> None:
    if not sealed_by:
        return
    if not isinstance(store, Sealable):
        raise ConfigurationError(f"the sessions are encrypted, and a {store.name} store cannot be")
    known = await store.sealing_keys()
    if known and known.isdisjoint(sealed_by):
        raise ConfigurationError(
            f"the {store.name} store is encrypted with other keys than the sessions: load them "
            "into a store of their own"
        )
    for each in sealed_by:
        await store.sealing_keys(add=each)


async def _each(
    store: SessionStore, found: Moved
) -> AsyncGenerator[tuple[SessionId, WholeSession]]:
    """Each session of a store. One that cannot be read is a fault."""
    ids = await store.session_ids()
    for start in range(0, len(ids), _AT_ONCE):
        some = ids[start : start + _AT_ONCE]
        read_ones = await _all_of([_read(store, session_id) for session_id in some])
        for session_id, whole in zip(some, read_ones, strict=True):
            if isinstance(whole, StoreRefused):
                found.faults.append(f"session {digest(session_id)}: {whole}")
            elif whole is not None:
                yield session_id, whole


async def _read(store: SessionStore, session_id: SessionId) -> WholeSession | StoreRefused | None:
    try:
        return await store.whole(session_id)
    except StoreRefused as failed:
        return failed


async def _all_of(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call) for call in calls]
    return [task.result() for task in tasks]


def _session(path: Path, number: int, line: Any) -> WholeSession:
    try:
        return from_json(line["session"])
    except (ValueError, TypeError, LookupError, AttributeError) as failed:
        raise _wrong(path, number) from failed


def _wrong(path: Path, number: int) -> ConfigurationError:
    return ConfigurationError(
        f"{path}, line {number}: this is no line of a dump: name another file"
    )


def _lines(path: Path) -> Generator[tuple[int, Any]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield number, members_of(json.loads(line))
                except (ValueError, RecursionError) as failed:
                    raise _wrong(path, number) from failed
    except OSError as failed:
        raise ConfigurationError(f"{path}: {reason_of(failed, path)}") from failed
