"""Sessions in a file: they survive the process, and the machine if you ask for it.

One process serves from one file; an operating system's lock says which, and is gone when
that process is. Inside it one connection has the file open, one writer at a time
(``sqlite_writer``: a thread, or the event loop itself while the thread has nothing to do),
and everything that is stored is SQL in a transaction: an event is in the file before anybody
hears of it, and a call returns when its transaction is committed. Calls that come at the
same time share one commit.

What ``committed`` means is ``durability``:

========== ============================================ ==============================
           what is on disk when a call returns          lost
========== ============================================ ==============================
``normal`` handed to the operating system: written to   by ``kill -9`` or a crash of
           the write-ahead log, synced at checkpoints   the process: nothing. By a
                                                        power loss: the last moments,
                                                        and that is noticed (below)
``full``   on the medium: the log is synced (fsync)     nothing
           before each commit returns
========== ============================================ ==============================

In memory is a bounded number of records, those of the sessions used last: never newer than
the file, and never older than an answer that somebody has. From them ``load``, and ``admit``
without a request key, answer at once. Logs and data are read from the file each time; of
request keys the sums are known, and the keys themselves are read.

The one thing that may be in memory only is how far a session's idle deadline was moved: it is
written when it moved by a hundredth of the idle timeout, and when the store closes. So a
crash can make a session expire up to 1 % early, which ``SessionPolicy.idle_timeout`` allows.

After a start:

* Connections of the process before are gone, and their sessions wait, but for those of
  transport-mode sessions: such a connection is in the file, and its client comes back to it.
* What had a request key and was running has no outcome that anybody could know. Its key is
  kept, and answers so.
* A file that is not the one that was served from here last gives event ids out again: a copy
  was restored. ``-seen`` beside it tells (``sqlite_seen``), and every log is made anew, as below.
  So move the file with its ``-seen``; and whoever restores a whole directory leaves it out.
* After a power loss in ``normal`` mode events may be missing that clients have seen, and
  their ids would be given out again. So every log is made anew: its positions are refused
  (``log_replaced``), and clients read again what they follow. (Where the operating system
  does not name its runs this cannot be noticed: use ``full``.)
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from mcp_sessions.core.admission import Admission, admission, is_displaced
from mcp_sessions.core.lifetime import end_of_life
from mcp_sessions.core.log import Draft, LoggedEvent, Window
from mcp_sessions.core.messages import encode
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import (
    ConfigurationError,
    Refusal,
    StoreInUse,
    StoreUnavailable,
)
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    ConnectionId,
    FencingEpoch,
    Position,
    RequestKey,
    SessionEventId,
    SessionId,
    StreamName,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.security import mint_session_id
from mcp_sessions.stores.contract import StateConflict
from mcp_sessions.stores.exchange import Exchange
from mcp_sessions.stores.limits import (
    check_data,
    check_peer,
    check_state,
    check_subscriptions,
    text_size,
)
from mcp_sessions.stores.records import (
    Admitted,
    Appended,
    Attached,
    Audience,
    CurrentSession,
    Data,
    KeyUse,
    Peer,
    Relayed,
    ServerChange,
    SessionRecord,
    Told,
)
from mcp_sessions.stores.sqlite import attachment, changes, logs, sessions
from mcp_sessions.stores.sqlite.cache import HotRecords
from mcp_sessions.stores.sqlite.file_lock import FileLock, Locked
from mcp_sessions.stores.sqlite.keys import keys_of
from mcp_sessions.stores.sqlite.recovery import shut_down, start_up
from mcp_sessions.stores.sqlite.schema import Durability, check_no_directory, open_file
from mcp_sessions.stores.sqlite.seen import Seen
from mcp_sessions.stores.sqlite.transaction import Changes, Transaction, text_bytes
from mcp_sessions.stores.sqlite.writer import Writer

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SMALL = 65_536
"""Bytes of a value that is written in no time."""

_PAGE = 500
"""Records read at once: some milliseconds in which no other call is served."""

_AUDIENCE = 128
"""Sessions asked for at once while a change is told: a fraction of a millisecond."""


class SQLiteStore:
    """A :class:`~mcp_sessions.stores.contract.SessionStore` in one SQLite file."""

    name = "sqlite"
    survives_process = True
    remembers = True
    exchange: Exchange | None = None

    def __init__(self, path: str | Path, durability: Durability = "normal") -> None:
        """Take what it works with.

        Args:
            path: The file, on a local disk; made when the store opens, if it is not there.
                Beside it are ``-wal``, ``-shm`` (SQLite's), ``-lock`` and ``-seen``.
            durability: ``normal`` survives a killed process, ``full`` a power loss too.

        Raises:
            ConfigurationError: ``durability`` is neither.
        """
        if durability not in get_args(Durability):
            raise ConfigurationError(f"durability is 'normal' or 'full', not {durability!r}")
        self.path = Path(path)
        # Two names of one file are one file, and have one lock.
        self._place = Path(os.path.realpath(path))
        self.durability: Durability = durability
        self._policy = SessionPolicy()
        self._window = _window(self._policy)
        self._lock = FileLock(self._place.with_name(self._place.name + "-lock"))
        self._seen = Seen(self._place)
        self._writer = Writer(
            self.path,
            self._place.with_name(self._place.name + "-wal"),
            self._open_file,
            closing=lambda connection: shut_down(connection, self._seen),
            resting=self._seen.count,
            on_commit=self._on_commit,
            chore=sessions.end_requested,
            on_chore=self._on_ended_beside,
            syncs=durability == "full",
        )
        self._ended_beside: list[SessionRecord] = []
        self._hot = HotRecords(self._writer)

    # --- opening and closing ---------------------------------------------------------------

    async def open(self, policy: SessionPolicy) -> None:
        """See :meth:`SessionStore.open`.

        Raises:
            ConfigurationError: The file is no session store, or damaged, or newer than this
                version.
            StoreInUse: Another process serves from it.
            StoreUnavailable: The disk is full, or another program has the file locked.
        """
        self._policy = policy
        self._hot.idle_timeout = policy.idle_timeout
        self._window = _window(policy)
        check_no_directory(self.path)
        try:
            await self._lock.acquire_patiently(self.path)
        except Locked as held:
            raise StoreInUse(
                f"{self.path} is in use by {held}: one process serves from a file at a time"
            ) from None
        except OSError as failed:
            reason = failed.strerror or str(failed)
            raise ConfigurationError(f"{self.path} cannot be opened: {reason}") from failed
        try:
            await self._writer.start()
        except BaseException:
            # Also where nobody waits for it any more: the thread lets go of the file first.
            await self._writer.stop()
            self._lock.release()
            raise

    async def close(self) -> None:
        moved = self._hot.moved()
        try:
            if moved:
                await self._writer.call(lambda tx: sessions.move_deadlines(tx, moved))
        except StoreUnavailable as failed:
            logger.warning("idle deadlines are up to 1%% early: %s", failed)
        finally:
            await self._writer.stop()
            self._hot.clear()
            self._lock.release()

    def _open_file(self) -> sqlite3.Connection:
        connection = open_file(self._place, self.durability)
        try:
            start_up(connection, self.path, self.durability, self._seen)
        except BaseException:
            connection.close()
            raise
        return connection

    def _on_commit(self, changes: Changes) -> None:
        self._hot.on_commit(changes)

    def _on_ended_beside(self, records: Sequence[SessionRecord]) -> None:
        self._ended_beside += records

    # --- a session's life ------------------------------------------------------------------

    async def create(
        self, mode: Mode, principal: Principal, *, peer: Peer | None, now: float
    ) -> SessionRecord:
        check_peer(peer, self._policy)
        ends_at = end_of_life(mode, now=now, max_lifetime=self._policy.max_lifetime)
        record = SessionRecord(
            mint_session_id(),
            mode,
            principal,
            created_at=now,
            expires_at=self._hot.deadline(now, ends_at),
            ends_at=ends_at,
            peer=peer,
        )
        await self._writer.call(lambda tx: sessions.create(tx, record, self._policy))
        return record

    async def load(self, session_id: SessionId, *, now: float) -> SessionRecord | None:
        record = await self._hot.find(session_id)
        return record if record is not None and now < record.expires_at else None

    async def admit(
        self,
        session_id: SessionId,
        principal: Principal,
        *,
        mode: Mode,
        now: float,
        held: bool = False,
        fencing_epoch: FencingEpoch | None = None,
        key: KeyUse | None = None,
    ) -> Admitted | None:
        record = await self._hot.find(session_id)
        # From here to the last line nothing suspends, but to record the key.
        if record is None:
            return None
        verdict = admission(
            record, principal, mode=mode, now=now, held=held, fencing_epoch=fencing_epoch
        )
        if verdict is Admission.REFUSED:
            return None
        if verdict is not Admission.ADMITTED:
            return Admitted(record, displaced=verdict is Admission.DISPLACED)
        if key is None:
            self._hot.move_deadline(session_id, record, now)
            return Admitted(record)
        return await self._admit_keyed(record, key, fencing_epoch, now)

    async def _admit_keyed(
        self, record: SessionRecord, use: KeyUse, fencing_epoch: FencingEpoch | None, now: float
    ) -> Admitted | None:
        session_id, deadline = record.session_id, self._hot.deadline(now, record.ends_at)

        def work(tx: Transaction) -> Admitted | None:
            # What was in memory may be behind the file by now.
            keys = keys_of(tx, session_id, self._policy)
            if keys is None:
                return None
            if is_displaced(fencing_epoch, keys.fencing_epoch):
                return Admitted(record, displaced=True)
            return Admitted(record, *keys.begin(use, now=now))

        admitted = await self._writer.call(work, short=True)
        if admitted is not None and not admitted.displaced:
            known = self._hot.known(session_id)
            if known is not None or record.expires_at < deadline:
                self._hot.move_deadline(session_id, known or record, now)
        return admitted

    async def touch(self, session_ids: Collection[SessionId], *, now: float) -> None:
        for session_id in session_ids:
            record = await self._hot.find(session_id)
            # Whoever touches a session was at work on it until now, so its idle deadline
            # cannot have passed; the absolute one can.
            if record is not None and now < record.ends_at:
                self._hot.move_deadline(session_id, record, now)

    async def end(self, session_id: SessionId) -> SessionRecord | None:
        return await self._writer.call(lambda tx: sessions.end(tx, session_id))

    async def expire(
        self, *, now: float, held: Collection[SessionId], limit: int
    ) -> Sequence[SessionRecord]:
        if self._ended_beside:
            # Whoever looks after what expired ends what is at work for these, too.
            ended, self._ended_beside = self._ended_beside[:limit], self._ended_beside[limit:]
            return ended
        # The file may have passed deadlines that were moved since.
        moved = self._hot.moved(written_by=now)
        gone = await self._writer.call(
            lambda tx: sessions.expire(
                tx,
                now=now,
                held=frozenset(held),
                deadlines=moved,
                idle_timeout=self._policy.idle_timeout,
                limit=limit,
            )
        )
        self._hot.were_written(moved)
        return gone

    async def evict(
        self,
        *,
        now: float,
        unused_for: float,
        held: Collection[SessionId],
        limit: int,
        opened: bool,
    ) -> Sequence[SessionRecord]:
        idle = self._policy.idle_timeout
        moved = self._hot.moved(written_by=now - unused_for + idle)
        gone = await self._writer.call(
            lambda tx: sessions.evict(
                tx,
                now=now,
                unused_for=unused_for,
                held=frozenset(held),
                deadlines=moved,
                idle_timeout=idle,
                limit=limit,
                opened=opened,
            )
        )
        self._hot.were_written(moved)
        return gone

    # --- the log ---------------------------------------------------------------------------

    async def append(
        self, session_id: SessionId, draft: Draft, *, now: float, stream: StreamName = EVENTS
    ) -> Appended | None:

        def work(tx: Transaction) -> Appended | None:
            session = sessions.brief(tx, session_id)
            if session is None or now >= session.ends_at:
                return None
            log = logs.opened(tx, session.sid, stream)
            window = sessions.window_of(session, stream, self._window)
            event, replaced = logs.append(tx, log, draft, window, now=now)
            if event.number == 1 and stream not in (EVENTS, GET_STREAM):
                logs.evict_responses(tx, session.sid, stream, window, now=now)
            return Appended(event, session.attachment, replaced)

        return await self._writer.call(work, short=_is_small(draft.before))

    async def renew(self, session_id: SessionId) -> None:

        def work(tx: Transaction) -> None:
            session = sessions.brief(tx, session_id)
            if session is not None and session.mode is Mode.PROTOCOL:
                logs.drop(tx, session.sid, EVENTS)
                logs.opened(tx, session.sid, EVENTS)

        await self._writer.call(work)

    async def audience(self, change: ServerChange, after: str | None) -> Audience:
        page = int(after) if after is not None else 0
        return await self._writer.call(
            lambda tx: changes.audience(tx, change, after=page, limit=_AUDIENCE)
        )

    async def tell(
        self,
        session_ids: Sequence[SessionId],
        change: ServerChange,
        *,
        now: float,
        again: bool = False,
    ) -> Sequence[Told]:
        """See :meth:`SessionStore.tell`. A call that failed has stored nothing."""
        return await self._writer.call(
            lambda tx: changes.tell(tx, session_ids, change, self._window, now=now),
            short=change.size * len(session_ids) <= _SMALL,
        )

    async def read(
        self,
        session_id: SessionId,
        after: str | None,
        *,
        now: float,
        stream: StreamName = EVENTS,
        limit: int | None = None,
    ) -> tuple[Sequence[LoggedEvent], Refusal | None]:

        def work(tx: Transaction) -> tuple[Sequence[LoggedEvent], Refusal | None]:
            session = sessions.brief(tx, session_id)
            log = logs.find(tx, session.sid, stream) if session is not None else None
            if session is None or log is None:
                return (), Refusal.UNKNOWN_POSITION
            window = sessions.window_of(session, stream, self._window)
            return logs.since_id(tx, log, after, window, now=now, limit=limit)

        return await self._writer.call(work)

    async def head(self, session_id: SessionId, *, stream: StreamName = EVENTS) -> Position | None:

        def work(tx: Transaction) -> Position | None:
            session = sessions.brief(tx, session_id)
            log = logs.find(tx, session.sid, stream) if session is not None else None
            return log.position if log is not None else None

        return await self._writer.call(work, short=True)

    async def open_stream(self, session_id: SessionId, stream: StreamName) -> Position | None:

        def work(tx: Transaction) -> Position | None:
            session = sessions.brief(tx, session_id)
            return logs.opened(tx, session.sid, stream).position if session is not None else None

        return await self._writer.call(work, short=True)

    async def drop_stream(self, session_id: SessionId, stream: StreamName) -> None:

        def work(tx: Transaction) -> None:
            session = sessions.brief(tx, session_id)
            if session is not None:
                logs.drop(tx, session.sid, stream)

        await self._writer.call(work)

    async def drop_origin(
        self,
        session_id: SessionId,
        origin: SessionId,
        *,
        stream: StreamName = GET_STREAM,
        fencing_epoch: FencingEpoch | None = None,
    ) -> None:
        await self._writer.call(
            lambda tx: attachment.drop_origin(
                tx, session_id, origin, stream=stream, fencing_epoch=fencing_epoch
            )
        )

    async def carry(
        self,
        connection: SessionId,
        origin: SessionId,
        fencing_epoch: FencingEpoch,
        after: Position,
    ) -> bool:
        return await self._writer.call(
            lambda tx: attachment.carry(tx, connection, origin, fencing_epoch, after)
        )

    async def relay(
        self,
        connection: SessionId,
        origin: SessionId,
        fencing_epoch: FencingEpoch,
        event: LoggedEvent,
        *,
        now: float,
        skips: bool = False,
    ) -> Relayed:
        return await self._writer.call(
            lambda tx: attachment.relay(
                tx,
                connection,
                origin,
                fencing_epoch,
                event,
                now=now,
                skips=skips,
                window=self._window,
            ),
            short=_is_small(event.payload),
        )

    # --- attachment ------------------------------------------------------------------------

    async def attach(
        self,
        session_id: SessionId,
        connection_id: ConnectionId | None,
        *,
        now: float,
        position: str | None = None,
        only_if_free: bool = False,
    ) -> Attached | None:
        return await self._writer.call(
            lambda tx: attachment.attach(
                tx,
                session_id,
                connection_id,
                now=now,
                position=position,
                only_if_free=only_if_free,
                window=self._window,
            )
        )

    async def detach(self, session_id: SessionId, fencing_epoch: FencingEpoch) -> bool:
        return await self._writer.call(
            lambda tx: attachment.detach(tx, session_id, fencing_epoch), short=True
        )

    async def set_current(self, session_id: SessionId, current: CurrentSession | None) -> None:
        values = (current.session_id, current.fencing_epoch) if current else (None, None)

        def apply(record: SessionRecord) -> None:
            record.current = current

        await self._set(session_id, "current_id = ?, current_epoch = ?", values, apply)

    async def mark_stream_opened(self, session_id: SessionId) -> bool:
        known = self._hot.known(session_id)
        if known is not None and known.stream_opened:
            return False

        def apply(record: SessionRecord) -> None:
            record.stream_opened = True

        def work(tx: Transaction) -> bool:
            cursor = tx.execute(
                "UPDATE sessions SET stream_opened = 1 WHERE session_id = ? AND NOT stream_opened",
                (session_id,),
            )
            tx.changes.append((session_id, apply))
            return bool(cursor.rowcount)

        return await self._writer.call(work, short=True)

    # --- what else a session has -----------------------------------------------------------

    async def subscribe(self, session_id: SessionId, uri: str) -> bool:

        def apply(record: SessionRecord) -> None:
            record.subscriptions |= {uri}

        def work(tx: Transaction) -> bool:
            session = sessions.brief(tx, session_id)
            if session is None:
                return False
            sessions.subscribe(tx, session.sid, uri, self._policy)
            tx.changes.append((session_id, apply))
            return True

        return await self._writer.call(work)

    async def unsubscribe(self, session_id: SessionId, uri: str) -> bool:

        def apply(record: SessionRecord) -> None:
            record.subscriptions -= {uri}

        def work(tx: Transaction) -> bool:
            session = sessions.brief(tx, session_id)
            if session is None:
                return False
            sessions.unsubscribe(tx, session.sid, uri)
            tx.changes.append((session_id, apply))
            return True

        return await self._writer.call(work)

    async def subscribers(self, uri: str) -> Sequence[SessionId]:

        def work(tx: Transaction) -> list[SessionId]:
            rows = tx.execute(
                "SELECT session_id FROM subscriptions JOIN sessions USING (sid) WHERE uri = ?",
                (text_bytes(uri),),
            )
            return [SessionId(session_id) for (session_id,) in rows]

        return await self._writer.call(work)

    async def all_sessions(self, principal: Principal | None = None) -> Sequence[SessionRecord]:
        """See :meth:`SessionStore.all_sessions`.

        It is read in pages, between which others are served: each session as it is when its
        page is read. What is there from beginning to end is in the list, once.
        """
        found: list[SessionRecord] = []
        after = 0
        while True:
            page, after = await self._writer.call(
                lambda tx, after=after: sessions.records(tx, principal, after=after, limit=_PAGE)
            )
            for record in page:
                # One in memory has its deadline as it really is.
                found.append(self._hot.known(record.session_id) or record)
            if len(page) < _PAGE:
                return found

    async def set_filter(
        self, session_id: SessionId, uris: frozenset[str], lists: frozenset[str]
    ) -> bool:

        def apply(record: SessionRecord) -> None:
            record.subscriptions, record.lists = uris, lists

        def work(tx: Transaction) -> bool:
            session = sessions.brief(tx, session_id)
            if session is None:
                return False
            check_subscriptions(uris, self._policy)
            sessions.replace_subscriptions(tx, session.sid, uris)
            tx.execute(
                "UPDATE sessions SET lists = ? WHERE sid = ?", (encode(sorted(lists)), session.sid)
            )
            tx.changes.append((session_id, apply))
            return True

        return await self._writer.call(work)

    async def set_waits_from(self, session_id: SessionId, event_id: SessionEventId | None) -> None:

        def apply(record: SessionRecord) -> None:
            record.waits_from = event_id

        await self._set(session_id, "waits_from = ?", (event_id,), apply)

    async def change_state(
        self,
        session_id: SessionId,
        changed: Mapping[str, Any],
        removed: Collection[str],
        *,
        expected_version: int | None = None,
    ) -> SessionRecord | None:
        """See :meth:`SessionStore.change_state`.

        Raises:
            TypeError: A value cannot be JSON. Nothing was stored.
        """
        values, gone = encode(dict(changed)), frozenset(removed)

        def work(tx: Transaction) -> SessionRecord | None:
            there = sessions.record_of(tx, session_id)
            if there is None:
                return None
            if expected_version not in (None, there[1].state_version):
                raise StateConflict(there[1])
            before = there[1].state
            newest = {name: value for name, value in before.items() if name not in gone}
            newest.update(sessions.load_json(values))
            sizes = (text_size(name) + len(encode(value)) for name, value in newest.items())
            check_state(sum(sizes), self._policy)
            tx.execute(
                "UPDATE sessions SET state = ?, state_version = state_version + 1"
                " WHERE session_id = ?",
                (encode(newest), session_id),
            )
            found = sessions.record_of(tx, session_id)
            if found is None:
                raise AssertionError("it was there, in this transaction")
            record, state, version = found[1], newest, found[1].state_version

            def apply(hot: SessionRecord) -> None:
                hot.state, hot.state_version = state, version

            tx.changes.append((session_id, apply))
            return record

        return await self._writer.call(work)

    async def finish_request(
        self, session_id: SessionId, key: RequestKey, outcome: bytes | None, *, now: float
    ) -> bool:

        def work(tx: Transaction) -> bool:
            keys = keys_of(tx, session_id, self._policy)
            return keys is not None and keys.finish(key, outcome, now=now)

        return await self._writer.call(work, short=_is_small(outcome))

    async def load_data(self, session_id: SessionId) -> Data | None:

        def work(tx: Transaction) -> tuple[bytes | None, int] | None:
            return tx.execute(
                "SELECT value, ifnull(version, 0) FROM sessions LEFT JOIN data USING (sid)"
                " WHERE session_id = ?",
                (session_id,),
            ).fetchone()

        row = await self._writer.call(work)
        if row is None:
            return None
        value, version = row
        return Data(sessions.load_json(value) if value is not None else {}, version)

    async def replace_data(
        self, session_id: SessionId, value: Mapping[str, Any], *, expected_version: int
    ) -> bool:
        """See :meth:`SessionStore.replace_data`.

        Raises:
            TypeError: A value cannot be JSON. Nothing was stored.
        """
        encoded = encode(dict(value))

        def work(tx: Transaction) -> bool:
            row = tx.execute(
                "SELECT sid, ifnull(version, 0) FROM sessions LEFT JOIN data USING (sid)"
                " WHERE session_id = ?",
                (session_id,),
            ).fetchone()
            if row is None or row[1] != expected_version:
                return False
            check_data(len(encoded), self._policy)
            tx.execute(
                "INSERT OR REPLACE INTO data (sid, value, version) VALUES (?, ?, ?)",
                (row[0], encoded, expected_version + 1),
            )
            return True

        return await self._writer.call(work)

    # --- inside ----------------------------------------------------------------------------

    async def _set(
        self,
        session_id: SessionId,
        assignment: str,
        values: tuple[Any, ...],
        apply: Callable[[SessionRecord], None],
    ) -> None:
        def work(tx: Transaction) -> None:
            statement = f"UPDATE sessions SET {assignment} WHERE session_id = ?"
            tx.execute(statement, (*values, session_id))
            tx.changes.append((session_id, apply))

        await self._writer.call(work, short=True)


def _is_small(value: bytes | None) -> bool:
    return value is None or len(value) <= _SMALL


def _window(policy: SessionPolicy) -> Window:
    return Window(policy.max_events, policy.max_bytes, policy.max_age)
