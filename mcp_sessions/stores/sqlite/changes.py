"""Server-wide changes in a SQLite file: whom they may be for, and how some are told at once."""

from __future__ import annotations

from collections.abc import Sequence

from mcp_sessions.core.entitlement import is_entitled
from mcp_sessions.core.log import Window
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import SessionId
from mcp_sessions.stores.records import Audience, ServerChange, Told
from mcp_sessions.stores.sqlite import logs, sessions
from mcp_sessions.stores.sqlite.transaction import Transaction, text_bytes


def audience(tx: Transaction, change: ServerChange, *, after: int, limit: int) -> Audience:
    """See :meth:`SessionStore.audience`; pages begin after a session's number."""
    if change.uri is not None:
        rows = tx.execute(
            "SELECT sid, session_id FROM subscriptions JOIN sessions USING (sid)"
            " WHERE uri = ? AND sid > ? ORDER BY sid LIMIT ?",
            (text_bytes(change.uri), after, limit),
        ).fetchall()
    else:
        rows = tx.execute(
            "SELECT sid, session_id FROM sessions WHERE sid > ? ORDER BY sid LIMIT ?",
            (after, limit),
        ).fetchall()
    following = str(rows[-1][0]) if len(rows) == limit else None
    return Audience([SessionId(session_id) for _, session_id in rows], following)


def tell(
    tx: Transaction,
    session_ids: Sequence[SessionId],
    change: ServerChange,
    window: Window,
    *,
    now: float,
) -> list[Told]:
    """See :meth:`SessionStore.tell`."""
    uri = text_bytes(change.uri) if change.uri is not None else None
    places = ",".join("?" * len(session_ids))
    rows = tx.execute(
        "SELECT session_id, sid, mode, connection_id, fencing_epoch, lists,"
        " EXISTS (SELECT 1 FROM subscriptions AS s WHERE s.sid = sessions.sid AND s.uri = ?),"
        " EXISTS (SELECT 1 FROM carried AS c WHERE c.sid = sessions.sid)"
        f" FROM sessions WHERE session_id IN ({places}) AND ends_at > ?",
        (uri, *session_ids, now),
    ).fetchall()
    found = {row[0]: row for row in rows}
    told: list[Told] = []
    for session_id in session_ids:
        row = found.get(session_id)
        if row is None:
            continue
        _, sid, stored_mode, connection_id, fencing_epoch, lists, subscribes, carries = row
        mode = Mode(stored_mode)
        if not is_entitled(
            mode,
            uri=change.uri,
            listed=change.listed,
            is_subscribed=bool(subscribes),
            lists=sessions.load_json(lists) if lists is not None else None,
            carries=bool(carries),
        ):
            continue
        stream, draft = change.told_to(mode, session_id)
        log = logs.opened(tx, sid, stream)
        event, replaced = logs.append(tx, log, draft, window, now=now)
        attachment = sessions.stored_attachment(connection_id, fencing_epoch)
        told.append(Told(session_id, stream, event, attachment, replaced))
    return told
