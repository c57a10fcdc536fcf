"""Write to a SQLite file: one thread commits for all callers at once.

While that thread has nothing to do, the event loop commits short work itself.

Rules, owned by ``tests/stores/sqlite/test_writer.py``:

1. A caller gets its answer after the transaction with its work is committed, never before:
   every answer that was given is in the file.
2. While the thread commits one transaction, new work waits, and goes into the next one together.
   So a hundred callers at once share few commits, and a single caller waits for no other.
3. A transaction is whole or not at all. Work that fails alone (a value that SQLite cannot hold)
   fails alone. The rest is done again, each piece in its own transaction.
4. A step is done in memory first (:class:`Write`). If its write fails, no later write of that
   session is done: it was decided by what the file does not have. Its callers get the error, and
   the session is read anew.
5. The event loop commits short work, because waking the thread takes longer. It never waits
   there for another program's lock, nor for a disk to sync, and it does not spend long there
   (``commit_budget.py``). The thread commits if a commit syncs (``full``), if it has work
   already, and if the write-ahead log must start again (``checkpointing.py``).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from mcp_sessions.background import report
from mcp_sessions.errors import SessionsError, StoreUnavailable
from mcp_sessions.stores.outage import Outage
from mcp_sessions.stores.sqlite import schema
from mcp_sessions.stores.sqlite.checkpointing import (
    WriteAheadLog,
    committed_length,
    give_back_space,
)
from mcp_sessions.stores.sqlite.commit_budget import CommitBudget
from mcp_sessions.stores.sqlite.rows import FileSession, InTransaction, Statement, Transaction
from mcp_sessions.stores.sqlite.schema import committing, error_code, opening_failed, unavailable
from mcp_sessions.stores.sqlite.watch import Watch

logger = logging.getLogger(__name__)

T = TypeVar("T")

BATCH = 256
"""Calls that share one commit, at the most."""

IDLE = 0.5
"""Seconds between two looks after the file itself."""

_OF_THE_VALUE = (
    None, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_RANGE,
    sqlite3.SQLITE_CONSTRAINT,
)  # fmt: skip
"""Errors that are one value's fault, and not the file's."""


class Write:
    """What a step changed of these sessions (rule 4). No statements: it waits for earlier writes
    of them.
    """

    __slots__ = ("_statements", "sessions")

    def __init__(
        self, sessions: Sequence[FileSession], statements: Sequence[Statement] = ()
    ) -> None:
        self.sessions = sessions
        self._statements = statements

    @property
    def is_empty(self) -> bool:
        return not self._statements

    def __call__(self, tx: Transaction) -> None:
        for session in self.sessions:
            if session.undone is not None:
                raise StoreUnavailable(*session.undone.args)
        for statement, values in self._statements:
            tx.execute(statement, values)

    def undo(self, failed: BaseException) -> None:
        """It failed. Called before anything else is written."""
        if not isinstance(failed, StoreUnavailable):
            failed = StoreUnavailable(f"an earlier change was not stored: {type(failed).__name__}")
        for session in self.sessions if self._statements else ():
            session.undone = failed


class _Call(NamedTuple):
    work: InTransaction[Any]
    future: asyncio.Future[Any]
    reads: bool
    """It only reads. It is done also while another program has the file locked."""

    def undo(self, failed: BaseException) -> None:
        if isinstance(self.work, Write):
            self.work.undo(failed)

    @property
    def writes(self) -> bool:
        return not (self.reads or (isinstance(self.work, Write) and self.work.is_empty))


_Outcome = tuple[_Call, Any, BaseException | None]
_Done = Sequence[_Outcome]


class _Repeated:
    """Work that is tried again twice a second: the log names its failure once.

    On a full disk, a line for each attempt would take the space that somebody makes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._logged: str | None = None

    def failed(self, failed: BaseException) -> None:
        if str(failed) != self._logged:
            logger.warning("%s: %s", self._path, failed)
        self._logged = str(failed)

    def succeeded(self) -> None:
        self._logged = None


@dataclass(eq=False, repr=False)
class Writer:
    """Runs work on a file, in order.

    Args:
        path: The file, as its user names it.
        log: Its write-ahead log.
        watch: Knows whether it is still there.
        open_file: Opens the file.
        rest: Called between two commits, twice a second.
        shut_down: Called last, when the file is closed in order.
        on_done: Called in the event loop after each :class:`Write`, with its failure.
        chore: Due when another program has written to the file; called in the event loop.
        syncs: Whether a commit waits for the medium.
    """

    _path: Path
    _log: WriteAheadLog
    _watch: Watch
    _: KW_ONLY
    open_file: Callable[[], sqlite3.Connection]
    rest: Callable[[sqlite3.Connection], None]
    shut_down: Callable[[sqlite3.Connection], None]
    chore: Callable[[], Coroutine[Any, Any, None]]
    on_done: Callable[[Write, BaseException | None], None]
    syncs: bool

    def __post_init__(self) -> None:
        self.outage = Outage("sqlite")
        self.refused_as_full = 0
        """Writes that were refused for want of space, so far."""

        self._chores, self._rests = _Repeated(self._path), _Repeated(self._path)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        # For the event loop: the number of unanswered calls of the thread, and the time that is
        # left for others.
        self._in_thread = 0
        self._budget: CommitBudget | None = None
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        # Held by whoever uses the connection, and what follows.
        self._writing = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._version = -1
        self._waits = True
        self._chore: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the file.

        Raises:
            ConfigurationError, StoreUnavailable: It cannot be opened.
        """
        self._loop = asyncio.get_running_loop()
        self._budget = CommitBudget(self._loop)
        ready: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(
            target=self._run, args=(ready,), name="mcp-sessions-sqlite", daemon=True
        )
        self._thread.start()
        await ready

    async def stop(self) -> None:
        if self._chore is not None:
            await asyncio.wait([self._chore])
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            await asyncio.get_running_loop().run_in_executor(None, thread.join)

    def call(
        self, work: InTransaction[T], *, short: bool = False, reads: bool = False
    ) -> asyncio.Future[T]:
        """Have ``work`` done; its result when that is committed.

        Args:
            short: It reads and writes a handful of rows, and little in them (rule 5).
            reads: It writes nothing.

        Raises (from the future):
            StoreUnavailable: Nothing of it was stored.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        call = _Call(work, future, reads)
        try:
            self._watch.look(now=monotonic())
            if self._thread is None:
                raise StoreUnavailable(f"{self._path} is not open")
        except StoreUnavailable as refused:
            call.undo(refused)
            self._deliver([(call, None, refused)])
            return future
        if not (short and self._done_here(call)):
            self._in_thread += 1
            self._queue.put(call)
        return future

    # --- in the event loop -----------------------------------------------------------------

    def _done_here(self, call: _Call) -> bool:
        """Do short work in the event loop (rule 5). False: the thread has to do it."""
        if self._budget is None or self.syncs or self._in_thread:
            return False
        if not self._writing.acquire(blocking=False):
            return False
        try:
            if self._connection is None or self._log.is_due or not self._budget.begin():
                return False
            try:
                self._wait_for_others(self._connection, False)
                done = list(self._commit(self._connection, [call], in_loop=True))
            except sqlite3.OperationalError:
                # Another program has the file locked. The thread has the time for it.
                return False
            finally:
                self._budget.end()
            self._log.look()
        finally:
            self._writing.release()
        for each in done:
            self._deliver(each)
        return True

    def _answer(self, outcomes: _Done) -> None:
        self._in_thread -= len(outcomes)
        self._deliver(outcomes)

    def _deliver(self, outcomes: _Done) -> None:
        for call, result, failed in outcomes:
            if isinstance(call.work, Write):
                self.on_done(call.work, failed)
            _settle(call.future, result, failed)

    def _do_chore(self) -> None:
        if self._thread is not None and (self._chore is None or self._chore.done()):
            self._chore = asyncio.ensure_future(self._chore_done())

    async def _chore_done(self) -> None:
        try:
            await self.chore()
        except StoreUnavailable as failed:
            self._chores.failed(failed)
            # The thread's next look finds it changed, and asks for it again.
            self._version = -1
        else:
            self._chores.succeeded()

    # --- in the thread ---------------------------------------------------------------------

    def _run(self, ready: asyncio.Future[None]) -> None:
        try:
            connection = self.open_file()
        except BaseException as failed:
            self._call_loop(_settle, ready, None, failed)
            return
        try:
            self._version = _data_version(connection)
        except sqlite3.Error as failed:
            connection.close()
            self._call_loop(_settle, ready, None, opening_failed(self._path, failed))
            return
        self._connection = connection
        self._call_loop(_settle, ready, None, None)
        try:
            self._serve(connection)
        finally:
            self._log.join()
            with self._writing:
                self._connection = None
                self._close(connection)

    def _close(self, connection: sqlite3.Connection) -> None:
        try:
            self._watch.look()
            self._wait_for_others(connection, True)
            self.shut_down(connection)
        except (StoreUnavailable, sqlite3.Error) as failed:
            # If the file at its path is another process's now, this one writes nothing more.
            logger.error("%s was not closed cleanly: %s", self._path, failed)
        finally:
            connection.close()

    def _serve(self, connection: sqlite3.Connection) -> None:
        rested = monotonic()
        while True:
            # Under load as well: who asks all the time leaves free pages behind too.
            if monotonic() - rested >= IDLE:
                with self._writing:
                    self._rest(connection)
                rested = monotonic()
            if self._log.is_due:
                with self._writing:
                    self._log.begin_anew(connection)
            try:
                call = self._queue.get(timeout=IDLE)
            except queue.Empty:
                continue
            batch: list[_Call] = []
            while call is not None:
                batch.append(call)
                if len(batch) >= BATCH:
                    break
                try:
                    call = self._queue.get_nowait()
                except queue.Empty:
                    break
            if batch:
                with self._writing:
                    outcomes = self._outcomes(connection, batch)
                    self._log.look()
                # The connection is free for the next caller now.
                for done in outcomes:
                    self._call_loop(self._answer, done)
            if call is None:
                return

    def _outcomes(self, connection: sqlite3.Connection, batch: Sequence[_Call]) -> list[_Done]:
        outcomes: list[_Done] = []
        try:
            self._wait_for_others(connection, True)
            for done in self._commit(connection, batch):
                outcomes.append(done)
        except Exception as failed:
            # The boundary between callers and the thread that serves them all: it goes on,
            # and nobody waits for an answer that does not come.
            report("writing to the file", failed)
            settled = {call.future for each in outcomes for call, _, _ in each}
            refused = StoreUnavailable(f"{self._path} could not be written: see the log")
            outcomes.append(
                _refused([call for call in batch if call.future not in settled], refused)
            )
        return outcomes

    def _rest(self, connection: sqlite3.Connection) -> None:
        try:
            version = _data_version(connection)
            if version != self._version:
                # Another program may have vacuumed the file.
                self._watch.note(committed_length(connection))
            self._watch.look()
        except (StoreUnavailable, sqlite3.Error):
            # That is said once. Nothing is written next to a file that is not there.
            return
        try:
            self._wait_for_others(connection, True)
            if version != self._version:
                self._version = version
                self._call_loop(self._do_chore)
            self._watch.note(committed_length(connection))
            give_back_space(connection, self._watch.note)
            self.rest(connection)
        except Exception as failed:
            # The boundary between what is done by the way and what callers wait for: whatever
            # is wrong with the former, the latter goes on, and the next round tries again.
            self._rests.failed(failed)
        else:
            self._rests.succeeded()

    def _call_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        if self._loop is None:
            raise AssertionError("the thread is started in an event loop")
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            # The event loop is closed: nobody is left to notify.
            logger.debug("nobody waits for %s any more", self._path)

    # --- by whoever holds ``_writing`` -----------------------------------------------------

    def _commit(
        self, connection: sqlite3.Connection, batch: Sequence[_Call], *, in_loop: bool = False
    ) -> Generator[_Done]:
        """Do these, in as few transactions as it takes; what came of each transaction.

        Args:
            in_loop: Nobody is to wait for anything.

        Raises:
            sqlite3.OperationalError: Another program has the file locked (``in_loop``).
                Nothing was done.
        """
        try:
            done = self._transaction(connection, batch)
        except sqlite3.Error as failed:
            if error_code(failed) not in _OF_THE_VALUE:
                if error_code(failed) == sqlite3.SQLITE_BUSY and in_loop:
                    raise
                # The file is full, locked or damaged: it will not be better for one alone.
                self.refused_as_full += error_code(failed) == sqlite3.SQLITE_FULL
                refused = unavailable(self._path, failed)
                self.outage.failed(refused, len(batch))
                yield _refused([call for call in batch if call.writes], refused)
                reads = [call for call in batch if not call.writes]
                if len(reads) == len(batch):
                    yield _refused(reads, refused)
                elif reads:
                    yield from self._commit(connection, reads)
                return
            yield from self._one_by_one(connection, batch, failed)
        except Exception as failed:
            # The boundary to what was called with: a value that cannot be stored is reported to
            # who came with it.
            yield from self._one_by_one(connection, batch, failed)
        else:
            yield done

    def _one_by_one(
        self, connection: sqlite3.Connection, batch: Sequence[_Call], failed: Exception
    ) -> Generator[_Done]:
        if len(batch) == 1:
            # A row is in the way that the process knows nothing of.
            is_damaged = isinstance(failed, sqlite3.IntegrityError)
            yield _refused(batch, unavailable(self._path, failed) if is_damaged else failed)
            return
        for call in batch:
            yield from self._commit(connection, [call])

    def _transaction(self, connection: sqlite3.Connection, batch: Sequence[_Call]) -> _Done:
        transaction = Transaction(connection)
        outcomes: list[_Outcome] = []
        writes = batch[0].writes or any(call.writes for call in batch)
        with committing(connection, writes=writes):
            for call in batch:
                try:
                    outcomes.append((call, call.work(transaction), None))
                except SessionsError as refused:
                    outcomes.append((call, None, refused))
        return outcomes

    def _wait_for_others(self, connection: sqlite3.Connection, waits: bool) -> None:
        if waits is not self._waits:
            timeout = round(schema.BUSY_TIMEOUT * 1_000) if waits else 0
            connection.execute(f"PRAGMA busy_timeout = {timeout}")
            self._waits = waits


def _refused(calls: Sequence[_Call], failed: BaseException) -> _Done:
    for call in calls:
        call.undo(failed)
    return [(call, None, failed) for call in calls]


def _data_version(connection: sqlite3.Connection) -> int:
    """Return a number that changes when another connection commits."""
    (version,) = connection.execute("PRAGMA data_version").fetchone()
    return version


def _settle(future: asyncio.Future[Any], result: Any, failed: BaseException | None) -> None:
    # A caller that was cancelled meanwhile does not wait any more.
    if future.done():
        return
    if failed is not None:
        future.set_exception(failed)
    else:
        future.set_result(result)
