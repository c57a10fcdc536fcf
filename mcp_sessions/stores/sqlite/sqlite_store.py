"""Sessions in a file: they survive the process, and the machine if you ask for it.

One process serves from one file; an operating system's lock says which, and is gone when
that process is. Inside it one connection has the file open, one writer at a time
(``writer.py``: a thread, or the event loop itself while the thread has nothing to do),
and everything that is stored is SQL in a transaction: an event is in the file before anybody
learns of it, and a call returns when its transaction is committed. Calls that come at the
same time share one commit.

``durability`` defines ``committed``:

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
  was restored. ``-seen`` next to it tells (``seen.py``), and every log is made anew, as below.
  So move the file with its ``-seen``; and whoever restores a whole directory leaves it out.
* After a power loss in ``normal`` mode events may be missing that clients have seen, and
  their ids would be given out again. So every log is made anew: its positions are refused
  (``log_replaced``), and clients read again what they follow. (Where the operating system
  does not name its runs this cannot be noticed: use ``full``.)
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from mcp_sessions.core.life import (
    Admission,
    admission,
    asleep_by,
    has_come,
    idle_time,
    new_life,
    unused_by,
)
from mcp_sessions.core.request_keys import KeyUse
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import FencingEpoch, SessionId
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.security import mint_session_id
from mcp_sessions.stores.exchange import Exchange
from mcp_sessions.stores.limits import check_peer
from mcp_sessions.stores.records import Admitted, CurrentUse, Peer, SessionClient, SessionRecord
from mcp_sessions.stores.sqlite import session_rows
from mcp_sessions.stores.sqlite.key_rows import keys_of
from mcp_sessions.stores.sqlite.sqlite_belongings import BelongingsInFile
from mcp_sessions.stores.sqlite.sqlite_ends import EndsInFile
from mcp_sessions.stores.sqlite.sqlite_events import AttachmentsInFile, EventsInFile
from mcp_sessions.stores.sqlite.transaction import Transaction

_ENDED_AT_ONCE = 256
"""Sessions that one transaction ends for their bytes. Others write in between."""

_PAGE = 500
"""Records read at once: some milliseconds in which no other call is served."""


class SQLiteStore(EventsInFile, AttachmentsInFile, BelongingsInFile, EndsInFile):
    """A :class:`~mcp_sessions.stores.contract.SessionStore` in one SQLite file."""

    name = "sqlite"
    survives_process = True
    remembers = True
    exchange: Exchange | None = None

    async def create(
        self,
        mode: Mode,
        principal: Principal,
        *,
        peer: Peer | None,
        now: float,
        session_id: SessionId | None = None,
    ) -> SessionRecord:
        check_peer(peer, self._policy)
        record = SessionRecord(
            session_id or mint_session_id(),
            mode,
            principal,
            new_life(mode, now=now, policy=self._policy),
            SessionClient(peer),
        )
        record.is_new = True
        return await self._writer.call(lambda tx: session_rows.create(tx, record, self._policy))

    async def load(self, session_id: SessionId, *, now: float) -> SessionRecord | None:
        record = await self._cache.find(session_id)
        return None if record is None or has_come(record.life.expires_at, now) else record

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
        current: CurrentUse | None = None,
    ) -> Admitted | None:
        record = await self._cache.find(session_id)
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
            self._cache.move_deadline(session_id, record, now)
            return Admitted(record)
        return await self._admit_keyed(record, key, fencing_epoch, now)

    async def _admit_keyed(
        self, record: SessionRecord, use: KeyUse, fencing_epoch: FencingEpoch | None, now: float
    ) -> Admitted | None:
        session_id = record.session_id
        deadline = self._cache.deadline(record.mode, now, record.life.ends_at)

        def work(tx: Transaction) -> Admitted | None:
            # The record in memory may be older than the file by now.
            keys = keys_of(tx, session_id, self._policy)
            if keys is None:
                return None
            if fencing_epoch not in (None, keys.counts.fencing_epoch):
                return Admitted(record, displaced=True)
            return Admitted(record, *keys.begin(use, now=now))

        admitted = await self._writer.call(work, short=True)
        if admitted is not None and not admitted.displaced:
            known = self._cache.known(session_id)
            if known is not None or not has_come(deadline, record.life.expires_at):
                self._cache.move_deadline(session_id, known or record, now)
        return admitted

    async def touch(self, session_ids: Collection[SessionId], *, now: float) -> None:
        for session_id in session_ids:
            record = await self._cache.find(session_id)
            # A touched session was in use until now. So its idle deadline cannot have passed; the
            # absolute one can.
            if record is not None and not has_come(record.life.ends_at, now):
                self._cache.move_deadline(session_id, record, now)

    async def end(self, session_id: SessionId) -> SessionRecord | None:
        return await self._writer.call(lambda tx: session_rows.end(tx, session_id))

    async def expire(
        self, *, now: float, held: Collection[SessionId], limit: int
    ) -> Sequence[SessionRecord]:
        # The file may have passed deadlines that were moved since.
        moved = self._cache.moved(written_by=now)
        gone = await self._writer.call(
            lambda tx: session_rows.expire(
                tx,
                now=now,
                held=frozenset(held),
                deadlines=moved,
                policy=self._policy,
                limit=limit,
            )
        )
        self._cache.were_written(moved)
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
        asleep, idle = asleep_by(now, self._policy), idle_time(Mode.TRANSPORT, self._policy)
        latest = unused_by(Mode.TRANSPORT, now, unused_for, self._policy)
        return await self._evict(
            f"(mode IN ({session_rows.SLEEPERS}) AND {session_rows.DUE}"
            f" OR mode = ? AND {session_rows.DUE} AND owner = ?"
            " AND current_id IS NULL AND (? OR NOT stream_opened)"
            " AND NOT EXISTS (SELECT 1 FROM subscriptions WHERE sid = s.sid)"
            " AND NOT EXISTS (SELECT 1 FROM carried WHERE sid = s.sid))"
            f" ORDER BY NOT {session_rows.DUE}, expires_at - created_at > ?, expires_at",
            (
                *(
                    asleep,
                    Mode.TRANSPORT.value,
                    latest,
                    session_rows.owner_bytes(ANONYMOUS),
                    opened,
                ),
                *(asleep, idle + unused_for),
            ),
            latest=max(asleep, latest),
            held=held,
            limit=limit,
        )

    async def evict_own(
        self,
        principal: Principal,
        *,
        now: float,
        unused_for: float,
        held: Collection[SessionId],
        limit: int,
    ) -> Sequence[SessionRecord]:
        asleep = asleep_by(now, self._policy)
        latest = unused_by(Mode.CONVERSATION, now, unused_for, self._policy)
        return await self._evict(
            f"owner = ? AND (mode IN ('conversation', 'keys') AND {session_rows.DUE}"
            f" OR mode IN ({session_rows.SLEEPERS}) AND {session_rows.DUE}) ORDER BY expires_at",
            (session_rows.owner_bytes(principal), latest, asleep),
            latest=max(asleep, latest),
            held=held,
            limit=limit,
        )

    async def evict_heavy(
        self, *, now: float, most: int, held: Collection[SessionId], limit: int
    ) -> Sequence[SessionRecord]:
        size = 0
        at: tuple[float, int] | None = (asleep_by(now, self._policy), sys.maxsize)
        # Sleeping sessions are a part of the file.
        if await self._writer.call(_in_use) <= most:
            return []
        while at is not None and size <= most:
            size, at = await self._writer.call(
                lambda tx, size=size, at=at: _add_asleep(tx, at, size, most)
            )
        gone: list[SessionRecord] = []
        while at is not None and len(gone) < limit:
            wanted = min(_ENDED_AT_ONCE, limit - len(gone))
            which = "(expires_at, sid) <= (?, ?) ORDER BY expires_at, sid"
            try:
                some = await self._evict(which, at, latest=at[0], held=held, limit=wanted)
            except StoreUnavailable:
                if not gone:
                    raise
                # Those have ended, and nobody is notified of them a second time.
                break
            gone += some
            if len(some) < wanted:
                break
        return gone

    async def _evict(
        self,
        which: str,
        values: Sequence[float | str | bytes],
        *,
        latest: float,
        held: Collection[SessionId],
        limit: int,
    ) -> Sequence[SessionRecord]:
        """End some whose idle deadline is ``latest`` or earlier.

        Args:
            which: The sessions, and their order, as SQL for the table ``s``.
            values: Its values.
        """
        moved = self._cache.moved(written_by=latest)
        spared = frozenset(held)

        def work(tx: Transaction) -> list[SessionRecord]:
            session_rows.move_deadlines(tx, moved)
            rows = tx.execute(
                "SELECT session_id FROM sessions AS s"
                f" WHERE {session_rows.DUE} AND {session_rows.IDLE_ENDS_FIRST} AND {which} LIMIT ?",
                (latest, *values, limit + len(spared)),
            ).fetchall()
            going = [SessionId(session_id) for (session_id,) in rows if session_id not in spared]
            ended = [session_rows.end(tx, session_id) for session_id in going[:limit]]
            return [record for record in ended if record is not None]

        gone = await self._writer.call(work)
        self._cache.were_written(moved)
        return gone

    async def sleep(self, *, now: float) -> None:
        by = asleep_by(now, self._policy)
        moved = self._cache.moved(written_by=by)
        after: tuple[float, int] | None = self._slept
        while after is not None:
            after = await self._writer.call(
                lambda tx, after=after: session_rows.fall_asleep(tx, after, by, moved)
            )
        self._cache.were_written(moved)
        self._slept = (by, sys.maxsize)

    async def all_sessions(self, principal: Principal | None = None) -> Sequence[SessionRecord]:
        """Return all sessions, read in pages, so that other calls run in between.

        Each session is as it was when its page was read. A session that exists from beginning to
        end is in the list, once.
        """
        found: list[SessionRecord] = []
        after = 0
        while True:
            page, after = await self._writer.call(
                lambda tx, after=after: session_rows.records(
                    tx, principal, after=after, limit=_PAGE
                )
            )
            # One in memory has its deadline as it really is.
            found.extend(self._cache.known(record.session_id) or record for record in page)
            if len(page) < _PAGE:
                return found


_AT_ONCE = 256

_SIZE = (
    "length(state) + ifnull(length(peer), 0)"
    " + ifnull((SELECT length(value) FROM data WHERE sid = s.sid), 0)"
    " + (SELECT total(length(uri)) FROM subscriptions WHERE sid = s.sid)"
    " + (SELECT total(bytes) FROM logs WHERE sid = s.sid)"
    " + (SELECT total(length(key) + ifnull(length(outcome), 0)) FROM keys WHERE sid = s.sid)"
)


def _in_use(tx: Transaction) -> int:
    """Return the bytes of the file that are in use. All other sizes here are a part of them."""
    pages = [
        tx.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    ]
    return (pages[0] - pages[1]) * pages[2]


def _add_asleep(
    tx: Transaction, before: tuple[float, int], size: int, most: int
) -> tuple[int, tuple[float, int] | None]:
    """Add the bytes of some sessions to ``size``, the latest idle deadline first, until it is more
    than ``most``.

    Args:
        before: Deadline and row of the session that these come before.

    Returns:
        The sum; and deadline and row of the last session, or None if all have room.
    """
    rows = tx.execute(
        f"SELECT expires_at, sid, {_SIZE} FROM sessions AS s WHERE (expires_at, sid) < (?, ?)"
        f" AND {session_rows.IDLE_ENDS_FIRST} ORDER BY expires_at DESC, sid DESC LIMIT ?",
        (*before, _AT_ONCE),
    ).fetchall()
    for deadline, sid, held in rows:
        size += int(held)
        if size > most:
            return size, (deadline, sid)
    return size, rows[-1][:2] if len(rows) == _AT_ONCE else None
