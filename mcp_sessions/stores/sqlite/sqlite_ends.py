"""How sessions ended, in the file: a row for each, the newest ones, for a time."""

from __future__ import annotations

from collections.abc import Sequence

from mcp_sessions.core.ends import MOST_ENDS, REMEMBERED_FOR, SessionEnd, StoreMade
from mcp_sessions.core.messages import encode
from mcp_sessions.stores.ends_contract import EndedOutside, end_by_operator
from mcp_sessions.stores.sql.session_rows import loads
from mcp_sessions.stores.sqlite.rows import Transaction
from mcp_sessions.stores.sqlite.served_file import ServedFile

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


def remembered(tx: Transaction, *, now: float) -> list[SessionEnd]:
    rows = tx.execute(
        "SELECT value FROM ends WHERE at > ? ORDER BY number", (now - REMEMBERED_FOR,)
    )
    found = (SessionEnd.from_json(loads(value)) for (value,) in rows.fetchall())
    return [end for end in found if end is not None]


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


class EndsInFile(ServedFile):
    _looks_for_rows = True
    """Whether there may be ends that an operator's process wrote. It can while nobody serves."""

    async def remember_ends(
        self, ends: Sequence[SessionEnd], *, now: float, outside: bool = False
    ) -> Sequence[SessionEnd]:
        self._looks_for_rows |= outside
        return await self._writer.call(lambda tx: remember(tx, ends, now=now, outside=outside))

    async def ended_outside(self, *, now: float) -> Sequence[EndedOutside]:
        found: list[EndedOutside] = []
        if self._looks_for_rows:
            rows = await self._writer.call(_take_outside)
            self._looks_for_rows = False
            found = [EndedOutside(end) for end in rows]
        records, self._ended_outside = self._ended_outside, []
        return [*found, *(EndedOutside(end_by_operator(each, now), each) for each in records)]

    async def ends(self, *, now: float) -> Sequence[SessionEnd]:
        return await self._writer.call(lambda tx: remembered(tx, now=now))

    async def made(self, *, now: float | None) -> StoreMade | None:
        return await self._writer.call(lambda tx: made(tx, now=now))

    async def sealing_keys(self, *, add: str | None = None) -> frozenset[str]:
        return await self._writer.call(lambda tx: sealing_keys(tx, add))


def _take_outside(tx: Transaction) -> list[SessionEnd]:
    rows = tx.execute("SELECT value FROM ends WHERE is_beside ORDER BY number").fetchall()
    if rows:
        tx.execute("UPDATE ends SET is_beside = 0 WHERE is_beside")
    found = (SessionEnd.from_json(loads(value)) for (value,) in rows)
    return [end for end in found if end is not None]
