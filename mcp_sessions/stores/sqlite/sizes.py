from __future__ import annotations

from mcp_sessions.stores.sqlite.transaction import Transaction

_AT_ONCE = 256

_SIZE = (
    "length(state) + ifnull(length(peer), 0)"
    " + ifnull((SELECT length(value) FROM data WHERE sid = s.sid), 0)"
    " + (SELECT total(length(uri)) FROM subscriptions WHERE sid = s.sid)"
    " + (SELECT total(bytes) FROM logs WHERE sid = s.sid)"
    " + (SELECT total(length(key) + ifnull(length(outcome), 0)) FROM keys WHERE sid = s.sid)"
)


def in_use(tx: Transaction) -> int:
    """Return the bytes of the file that are in use. All other sizes here are a part of them."""
    pages = [
        tx.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    ]
    return (pages[0] - pages[1]) * pages[2]


def add_asleep(
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
        " AND expires_at < ends_at ORDER BY expires_at DESC, sid DESC LIMIT ?",
        (*before, _AT_ONCE),
    ).fetchall()
    for deadline, sid, held in rows:
        size += int(held)
        if size > most:
            return size, (deadline, sid)
    return size, rows[-1][:2] if len(rows) == _AT_ONCE else None
