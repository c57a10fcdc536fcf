"""Request keys as rows: :class:`~mcp_sessions.core.request_keys.RequestKeys`, rule by rule.

The tests hold the two next to each other (``tests/stores/sqlite/test_log_rows.py``).
"""

from __future__ import annotations

from mcp_sessions.core.messages import encode
from mcp_sessions.core.request_keys import (
    KEY_COST,
    Begun,
    FoundKey,
    KeyedRequest,
    KeyState,
    KeyUse,
    found,
    has_room,
    is_forgotten,
    key_cost,
    sent_again,
)
from mcp_sessions.ids import FencingEpoch, RequestKey, SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.sqlite.session_rows import load_json
from mcp_sessions.stores.sqlite.transaction import KeyCounts, Transaction, text_bytes


def keys_of(tx: Transaction, session_id: SessionId, policy: SessionPolicy) -> Keys | None:
    counts = tx.recall(session_id) or _read(tx, session_id)
    return Keys(tx, session_id, counts, policy=policy) if counts is not None else None


class Keys:
    __slots__ = ("_lifetime", "_max_bytes", "_session_id", "_tx", "counts")

    def __init__(
        self, tx: Transaction, session_id: SessionId, counts: KeyCounts, *, policy: SessionPolicy
    ) -> None:
        self._tx = tx
        self._session_id = session_id
        self.counts = counts
        self._max_bytes = policy.request_key_bytes
        self._lifetime = policy.request_key_lifetime

    def begin(self, use: KeyUse, *, now: float) -> FoundKey:
        self._expire(now)
        first = FoundKey(Begun.FIRST, None, use.runner, use.run)
        if self._is_new(use, now):
            return first
        row = self._tx.execute(
            "SELECT digest, runner, at, finished, outcome, scopes FROM keys"
            " WHERE sid = ? AND key = ?",
            (self.counts.sid, text_bytes(use.key)),
        ).fetchone()
        if row is None:
            return FoundKey(Begun.FULL)
        known = _known(*row)
        begun = sent_again(known, use)
        if begun is not Begun.FIRST:
            return found(begun, known)
        self._tx.execute(
            "UPDATE keys SET runner = ?, scopes = ?, at = ? WHERE sid = ? AND key = ?",
            (_ran_by(use), encode(sorted(use.scopes)), now, self.counts.sid, text_bytes(use.key)),
        )
        return first

    def finish(self, request_key: RequestKey, outcome: bytes | None, *, now: float) -> bool:
        self._expire(now)
        counts = self.counts
        kept = outcome if outcome is not None and self._has_room(len(outcome)) else None
        ran = self._tx.execute(
            "UPDATE keys SET at = ?, outcome = ?, finished = ?"
            " WHERE sid = ? AND key = ? AND finished IS NULL",
            (now, kept, counts.finished + 1, counts.sid, text_bytes(request_key)),
        )
        if not ran.rowcount:
            return False
        counts.finished += 1
        if counts.oldest is None:
            counts.oldest = now
        if kept is not None:
            self._make_room(len(kept))
            counts.bytes += len(kept)
            counts.answers += len(kept)
        self._tx.learn(self._session_id, counts)
        return kept is not None

    def _is_new(self, use: KeyUse, now: float) -> bool:
        cost = key_cost(use.key)
        if not self._has_room(cost):
            return False
        inserted = self._tx.execute(
            "INSERT OR IGNORE INTO keys (sid, key, digest, runner, scopes, at)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (
                self.counts.sid,
                text_bytes(use.key),
                use.digest,
                _ran_by(use),
                encode(sorted(use.scopes)),
                now,
            ),
        )
        if not inserted.rowcount:
            return False
        self._make_room(cost)
        self.counts.bytes += cost
        self._tx.learn(self._session_id, self.counts)
        return True

    def _has_room(self, wanted: int) -> bool:
        counts = self.counts
        return has_room(
            wanted, size=counts.bytes, answers=counts.answers, max_bytes=self._max_bytes
        )

    def _make_room(self, wanted: int) -> None:
        counts = self.counts
        while counts.bytes + wanted > self._max_bytes:
            oldest = self._tx.execute(
                "SELECT key, finished, length(outcome) FROM keys WHERE sid = ? AND finished > ?"
                " AND outcome IS NOT NULL ORDER BY finished LIMIT 1",
                (counts.sid, counts.dropped),
            ).fetchone()
            if oldest is None:
                raise AssertionError("all answers together made room enough")
            key, counts.dropped, size = oldest
            self._tx.take_out()
            self._tx.execute(
                "UPDATE keys SET outcome = NULL WHERE sid = ? AND key = ?", (counts.sid, key)
            )
            counts.bytes -= size
            counts.answers -= size

    def _expire(self, now: float) -> None:
        # A running request is known until it ends, however long that takes.
        counts = self.counts
        if not self._forgets(counts.oldest, now):
            return
        while True:
            oldest = _oldest(self._tx, counts.sid)
            counts.oldest = oldest[0] if oldest is not None else None
            if oldest is None or not self._forgets(counts.oldest, now):
                break
            _, key, size = oldest
            self._tx.take_out()
            self._tx.execute("DELETE FROM keys WHERE sid = ? AND key = ?", (counts.sid, key))
            counts.bytes -= len(key) + KEY_COST + (size or 0)
            counts.answers -= size or 0
        self._tx.learn(self._session_id, counts)

    def _forgets(self, finished_at: float | None, now: float) -> bool:
        return finished_at is not None and is_forgotten(
            finished_at, now=now, lifetime=self._lifetime
        )


def _known(
    digest: bytes,
    ran_by: str,
    at: float,
    finished: int | None,
    outcome: bytes | None,
    scopes: bytes,
) -> KeyedRequest:
    if finished is None:
        state = KeyState.RUNNING
    else:
        state = KeyState.DROPPED if outcome is None else KeyState.ANSWERED
    run, _, runner = ran_by.rpartition("@")
    return KeyedRequest(
        digest, runner, at, state, outcome or b"", frozenset(load_json(scopes)), run
    )


def _ran_by(use: KeyUse) -> str:
    """Return the column ``runner``. An older version wrote the runner alone."""
    return f"{use.run}@{use.runner}"


def _oldest(tx: Transaction, sid: int) -> tuple[float, bytes, int | None] | None:
    """Return the key that finished first: when, its name, and the bytes of its answer."""
    return tx.execute(
        "SELECT at, key, length(outcome) FROM keys"
        " WHERE sid = ? AND finished IS NOT NULL ORDER BY finished LIMIT 1",
        (sid,),
    ).fetchone()


def _read(tx: Transaction, session_id: SessionId) -> KeyCounts | None:
    row = tx.execute(
        "SELECT sid, fencing_epoch FROM sessions WHERE session_id = ?", (session_id,)
    ).fetchone()
    if row is None:
        return None
    sid, epoch = row
    count, key_bytes, answers, finished, first = tx.execute(
        "SELECT count(*), ifnull(sum(length(key)), 0), ifnull(sum(length(outcome)), 0),"
        " ifnull(max(finished), 0), min(iif(outcome IS NULL, NULL, finished))"
        " FROM keys WHERE sid = ?",
        (sid,),
    ).fetchone()
    oldest = _oldest(tx, sid)
    counts = KeyCounts(
        sid,
        FencingEpoch(epoch),
        key_bytes + count * KEY_COST + answers,
        answers,
        finished,
        first - 1 if first is not None else finished,
        oldest[0] if oldest is not None else None,
    )
    tx.learn(session_id, counts)
    return counts
