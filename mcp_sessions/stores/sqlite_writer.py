"""The one thread that has a SQLite file open, and commits for everyone at once.

Rules, owned by ``tests/stores/test_sqlite.py``:

1. Whoever calls gets an answer when the transaction that holds its work is committed, and
   not before: what anybody was told is in the file.
2. What waits while one transaction is committed goes into the next one together. So a
   hundred callers at once cost one commit, and one caller waits for no other.
3. A transaction is whole or not at all. What fails alone (a value that SQLite cannot hold)
   fails alone: the others are done again, each in a transaction of its own.
4. The event loop hears of the changes in the order of their commits, before any caller goes
   on: what it remembers of a session is never newer than the file, and never older than an
   answer that somebody has.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from mcp_sessions import metrics
from mcp_sessions.errors import SessionsError, StoreUnavailable
from mcp_sessions.ids import SessionId
from mcp_sessions.stores.base import SessionRecord
from mcp_sessions.stores.sqlite_schema import committing, error_code, unavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")

Change = SessionRecord | Callable[[SessionRecord], None] | None
"""What became of a session: how it is now (it was read, or made), what to do to a record
that is as it was before, or None: it is over."""

Changes = Sequence[tuple[SessionId, Change]]
"""In the order in which they happened."""

BATCH = 256
"""Calls that share one commit, at the most."""

IDLE = 0.5
"""Seconds between two looks after the file itself."""

_FREE_PAGES = 64
"""Pages that an idle file keeps for what comes next; all other free ones are given back."""

_VACUUM_STEP = 1_024
"""Pages given back at once, so that nobody waits long."""

_OF_THE_VALUE = (None, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_RANGE)
"""Errors that are one value's fault, and not the file's."""


class Transaction:
    """What a piece of work has in the writer's thread."""

    __slots__ = ("changes", "execute")

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.execute = connection.execute
        self.changes: list[tuple[SessionId, Change]] = []
        """What the event loop is to know of sessions when this is committed."""


Work = Callable[[Transaction], T]
"""Runs in the writer's thread. It may run twice (see rule 3), so it changes nothing but the
file; what it raises of :class:`SessionsError` it raises before its first write."""

_Item = tuple[Work[Any], "asyncio.Future[Any]"]
_Outcome = tuple["asyncio.Future[Any]", Any, BaseException | None]


class Writer:
    """Runs work on a file, in order, in a thread of its own."""

    def __init__(
        self,
        path: Path,
        opened: Callable[[], sqlite3.Connection],
        closing: Callable[[sqlite3.Connection], None],
        on_commit: Callable[[Changes], None],
        chore: Work[T],
        on_chore: Callable[[T], None],
    ) -> None:
        """Take what it works with.

        Args:
            opened: Opens the file; called in the thread.
            closing: Has the last word, in the thread, when it is closed in order.
            on_commit: Takes what changed; called in the event loop.
            chore: Done when somebody else has written to the file.
            on_chore: Takes what came of it; called in the event loop.
        """
        self._path = path
        self._opened = opened
        self._closing = closing
        self._on_commit = on_commit
        self._chore: Work[Any] = chore
        self._on_chore: Callable[[Any], None] = on_chore
        self._version = -1
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        """Open the file.

        Raises:
            ConfigurationError, StoreUnavailable: It cannot be opened.
        """
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(
            target=self._run, args=(ready,), name="mcp-sessions-sqlite", daemon=True
        )
        self._thread.start()
        await ready

    async def stop(self) -> None:
        """Finish what was asked for, and close the file."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            await asyncio.get_running_loop().run_in_executor(None, thread.join)

    def call(self, work: Work[T]) -> asyncio.Future[T]:
        """Have ``work`` done; its result when that is committed.

        Raises (from the future):
            StoreUnavailable: Nothing of it was stored.
        """
        if self._loop is None or self._thread is None:
            raise StoreUnavailable(f"{self._path} is not open")
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put((work, future))
        return future

    # --- in the thread ---------------------------------------------------------------------

    def _run(self, ready: asyncio.Future[None]) -> None:
        try:
            connection = self._opened()
        except BaseException as failed:
            self._tell(_settle, ready, None, failed)
            return
        self._tell(_settle, ready, None, None)
        try:
            self._serve(connection)
            self._closing(connection)
        except sqlite3.Error as failed:
            logger.error("%s was not closed in order: %s", self._path, failed)
        finally:
            connection.close()

    def _serve(self, connection: sqlite3.Connection) -> None:
        # At once: what was asked for while nobody served is done before anybody is served.
        self._rest(connection)
        rested = monotonic()
        while True:
            # Under load as well: who asks all the time leaves free pages behind too.
            if monotonic() - rested >= IDLE:
                self._rest(connection)
                rested = monotonic()
            try:
                first = self._queue.get(timeout=IDLE)
            except queue.Empty:
                continue
            batch: list[_Item] = []
            item: _Item | None = first
            while item is not None:
                batch.append(item)
                if len(batch) >= BATCH:
                    break
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
            if batch:
                self._commit(connection, batch)
            if item is None:
                return

    def _commit(self, connection: sqlite3.Connection, batch: Sequence[_Item]) -> None:
        try:
            changes, outcomes = self._transaction(connection, batch)
        except sqlite3.Error as failed:
            if error_code(failed) not in _OF_THE_VALUE:
                # The file is full, locked or damaged: it will not be better for one alone.
                logger.error("%s: %s", self._path, failed)
                metrics.store_failed("sqlite", len(batch))
                refused = unavailable(self._path, failed)
                self._tell(self._deliver, (), [(future, None, refused) for _, future in batch])
                return
            self._one_by_one(connection, batch, failed)
        except Exception as failed:
            # The boundary to what was called with: a value that cannot be stored is told to
            # who came with it.
            self._one_by_one(connection, batch, failed)
        else:
            self._tell(self._deliver, changes, outcomes)

    def _one_by_one(
        self, connection: sqlite3.Connection, batch: Sequence[_Item], failed: Exception
    ) -> None:
        if len(batch) == 1:
            self._tell(self._deliver, (), [(batch[0][1], None, failed)])
            return
        for item in batch:
            self._commit(connection, [item])

    def _transaction(
        self, connection: sqlite3.Connection, batch: Sequence[_Item]
    ) -> tuple[Changes, list[_Outcome]]:
        transaction = Transaction(connection)
        outcomes: list[_Outcome] = []
        with committing(connection):
            for work, future in batch:
                try:
                    outcomes.append((future, work(transaction), None))
                except SessionsError as refused:
                    outcomes.append((future, None, refused))
        return transaction.changes, outcomes

    def _rest(self, connection: sqlite3.Connection) -> None:
        try:
            # Another one, if another connection committed since.
            (version,) = connection.execute("PRAGMA data_version").fetchone()
            if version != self._version:
                transaction = Transaction(connection)
                with committing(connection):
                    done = self._chore(transaction)
                self._version = version
                self._tell(self._deliver, transaction.changes, ())
                self._tell(self._on_chore, done)
            give_back_space(connection)
        except Exception as failed:
            # The boundary between what is done by the way and what callers wait for: whatever
            # is wrong with the former, the latter goes on, and the next round tries again.
            logger.warning("%s: %s", self._path, failed)

    def _tell(self, call: Callable[..., None], *arguments: Any) -> None:
        if self._loop is None:
            raise AssertionError("the thread is started in an event loop")
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            # The event loop is closed: nobody is left to be told.
            logger.debug("nobody waits for %s any more", self._path)

    # --- in the event loop -----------------------------------------------------------------

    def _deliver(self, changes: Changes, outcomes: Sequence[_Outcome]) -> None:
        if changes:
            self._on_commit(changes)
        for future, result, failed in outcomes:
            _settle(future, result, failed)


def give_back_space(connection: sqlite3.Connection, *, keep: int = _FREE_PAGES) -> None:
    """Return free pages to the file system, some at a time."""
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    if free > keep:
        step = min(free - keep, _VACUUM_STEP)
        # ``execute`` would take one step of it, and this statement gives back a page a step.
        connection.executescript(f"PRAGMA incremental_vacuum({step})")
        # The file itself becomes shorter when the write-ahead log is copied into it.
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()


def _settle(future: asyncio.Future[Any], result: Any, failed: BaseException | None) -> None:
    # Whoever was cancelled meanwhile does not wait any more.
    if future.done():
        return
    if failed is not None:
        future.set_exception(failed)
    else:
        future.set_result(result)
