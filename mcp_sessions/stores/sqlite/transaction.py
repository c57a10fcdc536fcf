from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcp_sessions.ids import FencingEpoch, SessionId
from mcp_sessions.stores.records import SessionRecord

CachedChange = SessionRecord | Callable[[SessionRecord], None] | None
"""The change of a session: its new record (it was read, or made), an edit of the record that is in
memory, or None: the session has ended.
"""


Changes = Sequence[tuple[SessionId, CachedChange]]
"""In the order in which they happened."""


@dataclass(slots=True)
class KeyCounts:
    """The totals of a session's request keys. They are read once.

    A keyed request then costs one statement when it is admitted, and one when it ends.
    """

    sid: int
    fencing_epoch: FencingEpoch

    bytes: int
    """The bytes of keys and kept answers."""

    answers: int
    """The bytes of answers among them."""

    finished: int
    """The number of the one that finished last."""

    dropped: int
    """Up to this number no answer is kept."""

    oldest: float | None
    """When the one finished that is forgotten next."""

    def copy(self) -> KeyCounts:
        """Return a copy to change. ``dataclasses.replace`` takes five times as long."""
        return KeyCounts(
            self.sid,
            self.fencing_epoch,
            self.bytes,
            self.answers,
            self.finished,
            self.dropped,
            self.oldest,
        )


def text_bytes(text: str) -> bytes:
    """Return a text as it is stored: JSON may hold a lone surrogate, which SQLite's TEXT cannot."""
    return text.encode("utf-8", "surrogatepass")


def text_of(stored: str | bytes) -> str:
    return stored if isinstance(stored, str) else stored.decode("utf-8", "surrogatepass")


def _storable(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return text_bytes(value)
    return value


class TakesLong(Exception):
    """A transaction would take too long. It is undone."""


class Transaction:
    """One transaction of the file.

    Args:
        known: The totals that earlier transactions left. It is as the file was before this one.
        rows: How many rows it may take out by the way; None: any number.
    """

    __slots__ = ("_known", "_rows", "_execute", "changes", "connection", "learned")

    def __init__(
        self,
        connection: sqlite3.Connection,
        known: Mapping[SessionId, KeyCounts] | None = None,
        rows: int | None = None,
    ) -> None:
        self._rows = rows
        self.connection = connection
        self._execute = connection.execute
        self.changes: list[tuple[SessionId, CachedChange]] = []
        """Changes of sessions that the event loop gets when this is committed."""

        self.learned: dict[SessionId, KeyCounts | None] = {}
        """Totals that the next transaction gets when this is committed; None: unknown."""

        self._known: Mapping[SessionId, KeyCounts] = {} if known is None else known

    def execute(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Run one statement.

        A peer's text may be none in UTF-8 (half a surrogate pair). Then it goes as bytes: it
        equals no text that is stored, and what is stored so is read by :func:`text_of`.
        """
        try:
            return self._execute(statement, values)
        except UnicodeEncodeError:
            return self._execute(statement, [_storable(each) for each in values])

    def recall(self, session_id: SessionId) -> KeyCounts | None:
        """Return the known totals, to change and give to :meth:`learn`; None: read them."""
        if session_id in self.learned:
            counts = self.learned[session_id]
        else:
            counts = self._known.get(session_id)
        return counts.copy() if counts is not None else None

    def take_out(self) -> None:
        """One row goes because it is too old, or to make room.

        Raises:
            TakesLong: It is one too many.
        """
        if self._rows is not None:
            self._rows -= 1
            if self._rows < 0:
                raise TakesLong

    def learn(self, session_id: SessionId, counts: KeyCounts | None) -> None:
        """Set the totals that hold once this is committed; None: they must be read again."""
        self.learned[session_id] = counts
