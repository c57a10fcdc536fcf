"""Store the other parts of a session in a SQLite file. Each call is one transaction."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, assert_never

from mcp_sessions.core.messages import encode
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import EVENTS, RequestKey, SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.contract import StateConflict
from mcp_sessions.stores.limits import check_data, check_state, check_subscriptions, text_size
from mcp_sessions.stores.record_changes import (
    RecordChange,
    RenewEvents,
    SetCurrent,
    SetFilter,
    SetLogLevel,
    SetStreamOpened,
    SetWaitsFrom,
)
from mcp_sessions.stores.records import Data, SessionRecord, StoredState
from mcp_sessions.stores.sqlite import log_rows, session_rows
from mcp_sessions.stores.sqlite.key_rows import keys_of
from mcp_sessions.stores.sqlite.served_file import ServedFile, is_small
from mcp_sessions.stores.sqlite.session_rows import Brief
from mcp_sessions.stores.sqlite.transaction import Transaction, text_bytes


class BelongingsInFile(ServedFile):
    async def change(self, session_id: SessionId, change: RecordChange) -> bool:
        match change:
            case SetCurrent(current):
                values = (current.session_id, current.fencing_epoch) if current else (None, None)
                columns = "current_id = ?, current_epoch = ?"
                return await self._set(session_id, columns, values, change.edit)
            case SetStreamOpened():
                known = self._cache.known(session_id)
                if known is not None and known.client.stream_opened:
                    return False
                condition = " AND NOT stream_opened"
                return await self._set(session_id, "stream_opened = 1", (), change.edit, condition)
            case SetWaitsFrom(event_id):
                return await self._set(session_id, "waits_from = ?", (event_id,), change.edit)
            case SetLogLevel(level):
                return await self._set(session_id, "log_level = ?", (level,), change.edit)
            case SetFilter():
                work = partial(_filtered, session_id, change, self._policy)
                return await self._within(session_id, work, False)
            case RenewEvents():
                return await self._within(session_id, _renewed, False)
            case _:
                assert_never(change)

    async def subscribe(self, session_id: SessionId, uri: str) -> bool:

        def apply(record: SessionRecord) -> None:
            record.client.subscriptions |= {uri}

        def work(tx: Transaction, session: Brief) -> bool:
            session_rows.subscribe(tx, session.sid, uri, self._policy)
            tx.changes.append((session_id, apply))
            return True

        return await self._within(session_id, work, False)

    async def unsubscribe(self, session_id: SessionId, uri: str) -> bool:

        def apply(record: SessionRecord) -> None:
            record.client.subscriptions -= {uri}

        def work(tx: Transaction, session: Brief) -> bool:
            session_rows.unsubscribe(tx, session.sid, uri)
            tx.changes.append((session_id, apply))
            return True

        return await self._within(session_id, work, False)

    async def subscribers(self, uri: str) -> Sequence[SessionId]:

        def work(tx: Transaction) -> list[SessionId]:
            rows = tx.execute(
                "SELECT session_id FROM subscriptions JOIN sessions USING (sid) WHERE uri = ?",
                (text_bytes(uri),),
            )
            return [SessionId(session_id) for (session_id,) in rows]

        return await self._writer.call(work)

    async def change_state(
        self,
        session_id: SessionId,
        changed: Mapping[str, Any],
        removed: Collection[str],
        *,
        expected_version: int | None = None,
    ) -> SessionRecord | None:
        """Change the state.

        Raises:
            TypeError: A value cannot be JSON. Nothing was stored.
        """
        values, gone = encode(dict(changed)), frozenset(removed)

        def work(tx: Transaction) -> SessionRecord | None:
            there = session_rows.record_of(tx, session_id)
            if there is None:
                return None
            if expected_version not in (None, there[1].state.version):
                raise StateConflict(there[1])
            before = there[1].state.values
            newest = {name: value for name, value in before.items() if name not in gone}
            newest.update(session_rows.load_json(values))
            sizes = (text_size(name) + len(encode(value)) for name, value in newest.items())
            check_state(sum(sizes), self._policy)
            tx.execute(
                "UPDATE sessions SET state = ?, state_version = state_version + 1"
                " WHERE session_id = ?",
                (encode(newest), session_id),
            )
            found = session_rows.record_of(tx, session_id)
            if found is None:
                raise AssertionError("it was there, in this transaction")
            stored = found[1]

            def apply(record: SessionRecord) -> None:
                record.state = StoredState(newest, stored.state.version)

            tx.changes.append((session_id, apply))
            return stored

        return await self._writer.call(work)

    async def finish_request(
        self, session_id: SessionId, key: RequestKey, outcome: bytes | None, *, now: float
    ) -> bool:

        def work(tx: Transaction) -> bool:
            keys = keys_of(tx, session_id, self._policy)
            return keys is not None and keys.finish(key, outcome, now=now)

        return await self._writer.call(work, short=is_small(outcome))

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
        return Data(session_rows.load_json(value) if value is not None else {}, version)

    async def replace_data(
        self, session_id: SessionId, value: Mapping[str, Any], *, expected_version: int
    ) -> bool:
        """Replace the data.

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


def _filtered(
    session_id: SessionId, change: SetFilter, policy: SessionPolicy, tx: Transaction, session: Brief
) -> bool:
    uris, lists = change.uris, change.lists
    check_subscriptions(uris, policy)
    session_rows.replace_subscriptions(tx, session.sid, uris)
    tx.execute("UPDATE sessions SET lists = ? WHERE sid = ?", (encode(sorted(lists)), session.sid))
    tx.changes.append((session_id, change.edit))
    return True


def _renewed(tx: Transaction, session: Brief) -> bool:
    if session.mode is Mode.PROTOCOL:
        log_rows.drop(tx, session.sid, EVENTS)
        log_rows.opened(tx, session.sid, EVENTS)
    return True
