"""Request keys as rows: :class:`~mcp_sessions.core.request_keys.RequestKeys`, rule by rule.

The tests hold the two next to each other (``tests/stores/test_sqlite_logs.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from mcp_sessions.core.messages import decode, encode
from mcp_sessions.core.request_keys import KEY_COST, Begun
from mcp_sessions.ids import RequestKey
from mcp_sessions.stores.base import KeyUse
from mcp_sessions.stores.sqlite_logs import text_bytes
from mcp_sessions.stores.sqlite_writer import Transaction


@dataclass(slots=True)
class Keys:
    """The keys of one session."""

    sid: int
    bytes: int
    """Of keys and kept answers."""

    answers: int
    """Of those, the answers'."""

    max_bytes: int
    lifetime: float

    def begin(
        self, tx: Transaction, use: KeyUse, *, now: float
    ) -> tuple[Begun, bytes | None, str | None]:
        """See :meth:`RequestKeys.begin`; the kept answer, if it may be told, and the runner."""
        changed = self._expire(tx, now)
        key = text_bytes(use.key)
        known = tx.execute(
            "SELECT digest, runner, scopes, finished, outcome FROM keys WHERE sid = ? AND key = ?",
            (self.sid, key),
        ).fetchone()
        if known is not None:
            if changed:
                self._write(tx)
            digest, runner, scopes, finished, outcome = known
            if digest != use.digest:
                return Begun.OTHER_CONTENT, None, None
            if not frozenset(decode(scopes)) <= use.scopes:
                return Begun.FEWER_SCOPES, None, None
            if finished is None:
                return Begun.RUNNING, None, runner
            return Begun.DROPPED if outcome is None else Begun.ANSWERED, outcome, runner
        cost = len(use.key) + KEY_COST
        if not self._make_room(tx, cost):
            self._write(tx)
            return Begun.FULL, None, None
        tx.execute(
            "INSERT INTO keys (sid, key, digest, runner, scopes, at) VALUES (?, ?, ?, ?, ?, ?)",
            (self.sid, key, use.digest, use.runner, encode(sorted(use.scopes)), now),
        )
        self.bytes += cost
        self._write(tx)
        return Begun.FIRST, None, use.runner

    def finish(
        self, tx: Transaction, request_key: RequestKey, outcome: bytes | None, *, now: float
    ) -> bool:
        """See :meth:`RequestKeys.finish`."""
        changed = self._expire(tx, now)
        key = text_bytes(request_key)
        runs = tx.execute(
            "SELECT 1 FROM keys WHERE sid = ? AND key = ? AND finished IS NULL", (self.sid, key)
        ).fetchone()
        if runs is None:
            if changed:
                self._write(tx)
            return False
        kept = outcome if outcome is not None and self._make_room(tx, len(outcome)) else None
        tx.execute(
            "UPDATE keys SET at = ?, outcome = ?, finished ="
            " (SELECT ifnull(max(finished), 0) + 1 FROM keys"
            " WHERE sid = ? AND finished IS NOT NULL)"
            " WHERE sid = ? AND key = ?",
            (now, kept, self.sid, self.sid, key),
        )
        if kept is not None:
            self.bytes += len(kept)
            self.answers += len(kept)
        # Also where it was dropped: others may have gone to make room.
        self._write(tx)
        return kept is not None

    def _make_room(self, tx: Transaction, wanted: int) -> bool:
        if self.bytes + wanted <= self.max_bytes:
            return True
        if self.bytes - self.answers + wanted > self.max_bytes:
            # It will not fit, whatever goes: then nothing has to go.
            return False
        answered = tx.execute(
            "SELECT key, length(outcome) FROM keys"
            " WHERE sid = ? AND finished IS NOT NULL AND outcome IS NOT NULL ORDER BY finished",
            (self.sid,),
        ).fetchall()
        for key, size in answered:
            tx.execute("UPDATE keys SET outcome = NULL WHERE sid = ? AND key = ?", (self.sid, key))
            self.bytes -= size
            self.answers -= size
            if self.bytes + wanted <= self.max_bytes:
                return True
        raise AssertionError("all answers together made room enough")

    def _expire(self, tx: Transaction, now: float) -> bool:
        # A running request is known until it ends, however long that takes.
        expired = False
        while True:
            oldest = tx.execute(
                "SELECT key, at, length(outcome) FROM keys"
                " WHERE sid = ? AND finished IS NOT NULL ORDER BY finished LIMIT 1",
                (self.sid,),
            ).fetchone()
            if oldest is None or oldest[1] >= now - self.lifetime:
                return expired
            key, _, size = oldest
            tx.execute("DELETE FROM keys WHERE sid = ? AND key = ?", (self.sid, key))
            characters = len(key.decode("utf-8", "surrogatepass"))
            self.bytes -= characters + KEY_COST + (size or 0)
            self.answers -= size or 0
            expired = True

    def _write(self, tx: Transaction) -> None:
        tx.execute(
            "UPDATE sessions SET key_bytes = ?, key_answers = ? WHERE sid = ?",
            (self.bytes, self.answers, self.sid),
        )
