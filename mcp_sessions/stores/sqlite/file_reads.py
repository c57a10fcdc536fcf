"""What is asked of a file, by the process that serves from it and by an operator's: its sessions,
and how sessions ended. An end is a row. The newest ones stay, for a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from mcp_sessions.core.ends import MOST_ENDS, REMEMBERED_FOR, SessionEnd, StoreMade
from mcp_sessions.core.log import UNBOUNDED
from mcp_sessions.core.messages import encode
from mcp_sessions.ids import SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.stores.records import SessionPage, SessionRecord
from mcp_sessions.stores.sql.session_rows import loads
from mcp_sessions.stores.sql.sql_store import unreadable
from mcp_sessions.stores.sqlite import rows
from mcp_sessions.stores.sqlite.rows import FileSession, InTransaction, Transaction, Unreadable
from mcp_sessions.stores.whole_sessions import WholeSession

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PAGE = 500
"""Sessions read at once: some milliseconds in which no other call is served."""

_DROPPED_AT_ONCE = 16
"""Old rows that one new end takes out."""


def remember(
    tx: Transaction, ends: Sequence[SessionEnd], *, now: float, outside: bool
) -> list[SessionEnd]:
    new: list[SessionEnd] = []
    for end in ends:
        row = tx.execute(
            "INSERT OR IGNORE INTO ends (at, value, is_beside) VALUES (?, ?, ?)",
            (end.at, encode(end.to_json()), outside),
        )
        if row.rowcount:
            new.append(end)
            # Rows are numbered in their order, and none is taken out of the middle.
            tx.execute("DELETE FROM ends WHERE number <= ?", ((row.lastrowid or 0) - MOST_ENDS,))
            tx.execute(
                "DELETE FROM ends WHERE at <= ? AND number IN"
                " (SELECT number FROM ends ORDER BY number LIMIT ?)",
                (now - REMEMBERED_FOR, _DROPPED_AT_ONCE),
            )
    return new


def made(tx: Transaction, *, now: float | None) -> StoreMade | None:
    meta = dict(
        tx.execute("SELECT name, value FROM meta WHERE name IN ('file', 'made')").fetchall()
    )
    if "made" in meta:
        return StoreMade(str(meta.get("file")), float(meta["made"]))
    if now is None:
        return None
    tx.execute("INSERT INTO meta (name, value) VALUES ('made', ?)", (now,))
    return StoreMade(str(meta.get("file")), now, is_new=True)


_SEALED_BY = "sealed by "


def sealing_keys(tx: Transaction, add: str | None = None) -> frozenset[str]:
    if add is not None:
        tx.execute("INSERT OR IGNORE INTO meta (name, value) VALUES (?, 1)", (_SEALED_BY + add,))
    names = tx.execute("SELECT name FROM meta WHERE name LIKE ?", (_SEALED_BY + "%",)).fetchall()
    return frozenset(str(name).removeprefix(_SEALED_BY) for (name,) in names)


def ends_of(found: Sequence[tuple[bytes]]) -> list[SessionEnd]:
    ends = (SessionEnd.from_json(loads(value)) for (value,) in found)
    return [end for end in ends if end is not None]


class FileReads:
    _policy = SessionPolicy()
    _window = UNBOUNDED

    def _ask(self, work: InTransaction[T], *, writes: bool = False) -> Awaitable[T]:
        """Have work done in a transaction; its result."""
        raise NotImplementedError

    def _newest(self, session: FileSession) -> SessionRecord:
        """The record as it is: the file may be behind."""
        return session.record

    async def _page(
        self, principal: Principal | None, after: int, limit: int
    ) -> tuple[list[rows.Found], int | None]:
        """Sessions, and the start of the next page."""
        found, following = await self._ask(
            lambda tx: rows.page(tx, principal, after=after, limit=limit, window=self._window)
        )
        return found, following if len(found) == limit else None

    async def all_sessions(self, principal: Principal | None = None) -> Sequence[SessionRecord]:
        """Return all sessions, read in pages, so that other calls run in between.

        Each session is as it was when its page was read. A session that exists from beginning to
        end is in the list, once.
        """
        records: list[SessionRecord] = []
        after: int | None = 0
        while after is not None:
            found, after = await self._page(principal, after, _PAGE)
            records += self._readable(found)
        return records

    async def some_sessions(self, after: str | None, limit: int) -> SessionPage:
        found, following = await self._page(None, int(after or 0), limit)
        return SessionPage(self._readable(found), str(following) if following is not None else None)

    def _readable(self, found: Sequence[rows.Found]) -> list[SessionRecord]:
        for each in found:
            if isinstance(each, Unreadable):
                logger.error("a session is left out of a list: %s", unreadable(each.failed))
        return [self._newest(each) for each in found if isinstance(each, FileSession)]

    async def session_ids(self) -> Sequence[SessionId]:
        find = "SELECT session_id FROM sessions ORDER BY sid"
        found = await self._ask(lambda tx: tx.execute(find).fetchall())
        return [SessionId(rows.text_of(session_id)) for (session_id,) in found]

    async def whole(self, session_id: SessionId) -> WholeSession | None:
        def work(tx: Transaction) -> WholeSession | None:
            try:
                return rows.whole(tx, session_id, self._policy)
            except rows.UNREADABLE as failed:
                raise unreadable(failed) from failed

        return await self._ask(work)

    async def ends(self, *, now: float | None = None) -> Sequence[SessionEnd]:
        after = (now if now is not None else time.time()) - REMEMBERED_FOR
        find = "SELECT value FROM ends WHERE at > ? ORDER BY number"
        return ends_of(await self._ask(lambda tx: tx.execute(find, (after,)).fetchall()))

    async def made(self, *, now: float | None = None) -> StoreMade | None:
        return await self._ask(lambda tx: made(tx, now=now), writes=now is not None)
