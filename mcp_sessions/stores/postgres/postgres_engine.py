"""The statements of a store in Postgres: a step reads in one, and writes in one."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import asyncpg

from mcp_sessions.core.log import PAGE_BYTES
from mcp_sessions.core.messages import encode
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import EVENTS, GET_STREAM, SESSION_ID, SessionId
from mcp_sessions.stores.postgres.postgres_link import PostgresLink, SomebodyWasFirst
from mcp_sessions.stores.sql.session_rows import (
    Change,
    Counts,
    EventRow,
    Found,
    KeyRow,
    SessionRow,
    Wanted,
    key_bytes,
    tag_of,
    text_bytes,
)

_COLUMNS = (
    "sid, version, mode, owner, created_at, expires_at, ends_at, due_at, facts, body, state, uris"
)
_LINE = (
    "substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) || CASE WHEN"
    " current_setting('synchronous_commit') = 'off' THEN pg_postmaster_start_time()::text ELSE ''"
    " END"
)
"""The timeline: another one begins when a standby takes over, which may lack the last moments. A
server that does not wait for its disk may lose them whenever it starts."""

_OF_S = ", ".join([_LINE, *(f"s.{name}" for name in _COLUMNS.split(", "))])
_SHORT = "e.number, e.at, e.size, e.key, e.origin, e.name, NULL::bytea"
_WHOLE = "e.number, e.at, e.size, e.key, e.origin, e.name, e.payload"
_KEY = "k.key, k.digest, k.runner, k.run, k.scopes, k.at, k.state, octet_length(k.outcome)"

_STREAM = (
    f"CASE WHEN s.mode = '{Mode.TRANSPORT.value}' THEN '{GET_STREAM}'::bytea"
    f" ELSE '{EVENTS}'::bytea END"
)

CHANNEL = "'mcps_' || md5({})"
"""The channel of a process, as SQL. A name of any length fits."""


class _Values(list[str]):
    """The names of the values of a statement, in order."""

    def __call__(self, name: str, kind: str) -> str:
        """That value, as SQL."""
        if name not in self:
            self.append(name)
        return f"${self.index(name) + 1}::{kind}"


@lru_cache(maxsize=64)
def _reading(parts: frozenset[str]) -> tuple[str, Sequence[str]]:
    """The statement for some parts, and the names of its values in order."""
    value = _Values()
    stream = "{stream}" if "stream" in parts else _STREAM
    of_log = f"FROM events e WHERE e.sid = s.sid AND e.stream = {stream}"
    of_keys = "FROM keys k WHERE k.sid = s.sid"
    arrays = {
        "log": (_SHORT, f"{of_log} ORDER BY e.number LIMIT {{oldest}}"),
        "key": (_SHORT, f"{of_log} AND e.tag = {{key_tag}} AND e.key = {{key}}"),
        "name": (_WHOLE, f"{of_log} AND e.name = {{name}}"),
        "after": (_WHOLE, f"{of_log} AND e.number > {{after}} ORDER BY e.number"),
        # A page ends with the event that fills it.
        "page": (
            _WHOLE,
            "FROM (SELECT *, sum(size) OVER (ORDER BY number) - size AS before"
            f" FROM (SELECT * {of_log} AND e.number > {{after}} ORDER BY e.number"
            f" LIMIT {{limit}}) p) e WHERE e.before < {PAGE_BYTES} ORDER BY e.number",
        ),
        "origin": (_SHORT, f"{of_log} AND e.origin = {{origin}}"),
        "asked": (
            f"{_KEY}, k.outcome",
            f"{of_keys} AND k.tag = {{asked_tag}} AND k.key = {{asked}}",
        ),
        "finished": (
            f"{_KEY}, NULL::bytea",
            f"{of_keys} AND k.finished IS NOT NULL ORDER BY k.finished LIMIT {{oldest}}",
        ),
        "answered": (
            f"{_KEY}, NULL::bytea",
            f"{of_keys} AND k.finished IS NOT NULL AND k.state = 'answered'"
            " ORDER BY k.finished LIMIT {oldest}",
        ),
    }
    columns = [_OF_S, "s.data" if "data" in parts else "NULL::bytea AS data"]
    for part, (row, rest) in arrays.items():
        if part in parts:
            used = {
                name: value(name, kind) for name, kind in _READ.items() if f"{{{name}}}" in rest
            }
            columns.append(f"ARRAY(SELECT ROW({row}) {rest.format_map(used)}) AS {part}_rows")
    which = value("sid", "text") if "one" in parts else f"ANY({value('sids', 'text[]')})"
    return f"SELECT {', '.join(columns)} FROM sessions s WHERE s.sid = {which}", value


_READ = {
    "stream": "bytea", "oldest": "bigint", "key_tag": "bigint", "key": "bytea", "name": "bytea",
    "after": "bigint", "limit": "bigint", "origin": "bytea", "asked_tag": "bigint",
    "asked": "bytea",
}  # fmt: skip
"""The values that the parts of a reading use, and their types."""


def _parts_of(wanted: Wanted) -> frozenset[str]:
    parts = {
        "stream": wanted.stream is not None,
        "log": wanted.log,
        "key": wanted.key is not None,
        "name": wanted.name is not None,
        "after": wanted.after is not None and wanted.limit is None,
        "page": wanted.after is not None and wanted.limit is not None,
        "origin": wanted.origin is not None,
        "asked": wanted.request_key is not None,
        "finished": wanted.request_key is not None,
        "answered": wanted.request_key is not None,
        "data": wanted.data,
    }
    return frozenset(name for name, is_wanted in parts.items() if is_wanted)


def _found(row: asyncpg.Record, wanted: Wanted, parts: frozenset[str]) -> Found:
    head = SessionRow(*row[:13])
    found = Found(head, row["data"], oldest=wanted.oldest)
    if "log" in parts:
        oldest = [EventRow(*each) for each in row["log_rows"]]
        last = oldest[-1].number if len(oldest) == wanted.oldest else _LAST
        found.events += oldest
        found.read.append((0, last))
    for name in ("key", "name", "origin"):
        if name in parts:
            found.events += [EventRow(*each) for each in row[f"{name}_rows"]]
    after = wanted.after
    if after is not None:
        name = "after" if wanted.limit is None else "page"
        later = [EventRow(*each) for each in row[f"{name}_rows"]]
        is_whole = wanted.limit is None or (
            len(later) < wanted.limit and sum(each.size for each in later) < PAGE_BYTES
        )
        found.events += later
        found.read.append((after, _LAST if is_whole else later[-1].number if later else after))
    if wanted.request_key is not None:
        (asked,) = row["asked_rows"] or (None,)
        found.asked_key = KeyRow(*asked) if asked is not None else None
        found.finished = [KeyRow(*each) for each in row["finished_rows"]]
        found.answered = [KeyRow(*each) for each in row["answered_rows"]]
    return found


def _whose(owner: bytes | None) -> str:
    """A condition on ``$1``. One plan serves all values, so it must not depend on them."""
    return "s.owner = $1::bytea" if owner is not None else "$1::bytea IS NULL"


def _bytes(text: str | None) -> bytes | None:
    return text_bytes(text) if text is not None else None


_LAST = 2**62
"""A number that no event has."""


@lru_cache(maxsize=256)
def _writing(parts: frozenset[str]) -> tuple[str, Sequence[str]]:
    """The statement for some parts, and the names of its values in order."""
    value = _Values()

    def table(prefix: str, **kinds: str) -> str:
        if f"one {prefix}" in parts:
            # The driver and the server take an array of one for much more than its value.
            columns = ", ".join(
                f"{value(f'{prefix}_{name}', kind)} AS {name}" for name, kind in kinds.items()
            )
            return f"(SELECT {columns}) AS {prefix}"
        columns = ", ".join(value(f"{prefix}_{name}", f"{kind}[]") for name, kind in kinds.items())
        return f"unnest({columns}) AS {prefix} ({', '.join(kinds)})"

    rows = table(
        "w", sid="text", version="bigint", line="text", expires_at="float8", due_at="float8",
        weight="bigint", body="bytea",
    )  # fmt: skip
    sets = ["version = t.version + 1", "body = w.body", "weight = w.weight"]
    sets += ["expires_at = w.expires_at"]
    if "due" in parts:
        sets.append("due_at = w.due_at")
    for name, kind in (("state", "bytea"), ("data", "bytea"), ("uris", "bytea")):
        if name in parts:
            sets.append(f"{name} = {value(name, kind)}")
    if "uris" in parts:
        sets.append(f"tags = {value('tags', 'bigint[]')}")
    steps = [
        f"s AS (UPDATE sessions t SET {', '.join(sets)} FROM {rows} WHERE t.sid = w.sid AND"
        f" t.version = w.version AND w.line = {_LINE} RETURNING t.sid)"
    ]
    if "removed" in parts:
        gone = table("g", sid="text", stream="bytea", number="bigint")
        steps.append(
            f"gone AS (DELETE FROM events e USING {gone} JOIN s ON s.sid = g.sid"
            " WHERE e.sid = g.sid AND e.stream = g.stream AND e.number = g.number)"
        )
    if "wiped" in parts:
        gone = table("x", sid="text", stream="bytea")
        steps.append(
            f"wiped AS (DELETE FROM events e USING {gone} JOIN s ON s.sid = x.sid"
            " WHERE e.sid = x.sid AND e.stream = x.stream)"
        )
    told = "0"
    if "added" in parts:
        new = table(
            "a", sid="text", stream="bytea", number="bigint", at="float8", size="int", tag="bigint",
            key="bytea", origin="bytea", name="bytea", payload="bytea", log_epoch="text",
            connection="bytea", fence="bigint",
        )  # fmt: skip
        columns = "sid, stream, number, at, size, tag, key, origin, name, payload"
        of_a = ", ".join(f"a.{name}" for name in columns.split(", "))
        steps.append(
            f"added AS (INSERT INTO events ({columns}) SELECT {of_a} FROM {new}"
            " JOIN s ON s.sid = a.sid)"
        )
        steps.append(
            "told AS (INSERT INTO mail (process, sid, stream, number, log_epoch, at, key, origin,"
            " payload, connection, fence) SELECT v.process, a.sid, a.stream, a.number, a.log_epoch,"
            f" a.at, a.key, a.origin, a.payload, a.connection, a.fence FROM {new} JOIN s"
            " ON s.sid = a.sid JOIN watchers v ON v.sid = a.sid AND v.stream = a.stream"
            " ORDER BY a.sid, a.stream, a.number RETURNING process)"
        )
        channel = CHANNEL.format("p.process")
        told = (
            f"(SELECT count(pg_notify({channel}, '')) FROM (SELECT DISTINCT process FROM told) p)"
        )
    if "keys" in parts:
        keys = table(
            "k", sid="text", tag="bigint", key="bytea", digest="bytea", runner="text", run="text",
            scopes="bytea", at="float8", state="text", outcome="bytea", finished="bigint",
        )  # fmt: skip
        steps.append(
            "noted AS (INSERT INTO keys SELECT k.sid, k.tag, k.key, k.digest, k.runner, k.run,"
            f" k.scopes, k.at, k.state, k.outcome, k.finished FROM {keys} JOIN s ON s.sid = k.sid"
            " ON CONFLICT (sid, tag, key) DO UPDATE SET digest = excluded.digest,"
            " runner = excluded.runner, run = excluded.run, scopes = excluded.scopes,"
            " at = excluded.at, state = excluded.state, outcome = excluded.outcome,"
            # One that runs was forgotten in the same step, and is a new one.
            " finished = CASE WHEN excluded.finished IS NULL THEN NULL"
            " ELSE coalesce(keys.finished, excluded.finished) END)"
        )
    if "gone_keys" in parts:
        gone = table("y", sid="text", tag="bigint", key="bytea")
        steps.append(
            f"forgotten AS (DELETE FROM keys k USING {gone} JOIN s ON s.sid = y.sid"
            " WHERE k.sid = y.sid AND k.tag = y.tag AND k.key = y.key)"
        )
    answer = f"WITH {', '.join(steps)} SELECT array(SELECT sid FROM s), {told}"
    if "reads" in parts:
        sid = value("w_sid", "text")
        answer += (
            f", r.* FROM (SELECT) one LEFT JOIN (SELECT {_OF_S} FROM sessions s"
            f" WHERE s.sid = {sid} AND NOT EXISTS (SELECT FROM s)) r ON true"
        )
    return answer, value


class PostgresEngine:
    def __init__(self, link: PostgresLink) -> None:
        self._link = link

    async def read(self, session_ids: Collection[SessionId], wanted: Wanted) -> list[Found]:
        parts = _parts_of(wanted)
        key = key_bytes(wanted.key) if wanted.key is not None else None
        asked = _bytes(wanted.request_key)
        # A text of another form is no session's id, and may be none of this database.
        ids = [each for each in session_ids if SESSION_ID.fullmatch(each)]
        values = {
            "sid": ids[0] if ids else None, "sids": ids, "stream": _bytes(wanted.stream),
            "oldest": wanted.oldest, "key_tag": tag_of(key) if key is not None else None,
            "key": key, "name": _bytes(wanted.name), "after": wanted.after,
            "limit": wanted.limit, "origin": _bytes(wanted.origin),
            "asked_tag": tag_of(asked) if asked is not None else None, "asked": asked,
        }  # fmt: skip
        sql, names = _reading(parts | {"one"} if len(ids) == 1 else parts)
        rows = await self._link.fetch(sql, *(values[name] for name in names))
        return [_found(row, wanted, parts) for row in rows]

    async def write(self, changes: Sequence[Change]) -> set[SessionId]:
        answer = await self._write(changes)
        return {SessionId(sid) for sid in answer[0]} if answer is not None else set()

    async def write_one(self, change: Change) -> tuple[bool, SessionRow | None]:
        answer = await self._write([change], "reads")
        if answer is None:
            return False, None
        if answer[0]:
            return True, change.written()
        row = SessionRow(*answer[2:]) if answer["sid"] is not None else None
        if row is not None and (row.line, row.version) == (change.row.line, change.row.version):
            # Somebody wrote it while this statement waited.
            row = None
        return False, row

    async def _write(self, changes: Sequence[Change], *more: str) -> asyncpg.Record | None:
        """None: a row with the number of a new one is there, and nothing was written."""
        values: dict[str, Any] = {}

        def add(prefix: str, **columns: Any) -> None:
            for name, each in columns.items():
                values.setdefault(f"{prefix}_{name}", []).append(each)

        parts = set(more)
        for change in changes:
            row = change.row
            sid = row.sid
            add(
                "w", sid=sid, version=row.version, line=row.line, expires_at=change.expires_at,
                due_at=change.due_at, weight=change.weight, body=change.body,
            )  # fmt: skip
            if change.due_at != row.due_at:
                parts.add("due")
            for name in ("state", "data"):
                if getattr(change, name) is not None:
                    values[name] = getattr(change, name)
                    parts.add(name)
            if change.uris is not None:
                values["uris"], values["tags"] = change.uris
                parts.add("uris")
            for stream, number in change.removed:
                add("g", sid=sid, stream=text_bytes(stream), number=number)
                parts.add("removed")
            for stream in change.wiped:
                add("x", sid=sid, stream=text_bytes(stream))
                parts.add("wiped")
            connection, fence = change.attachment
            for stream, event, name in change.added:
                stored = key_bytes(event.key) if event.key is not None else None
                add(
                    "a", sid=sid, stream=text_bytes(stream), number=event.number, at=event.at,
                    size=len(event.payload), tag=tag_of(stored) if stored is not None else None,
                    key=stored, origin=_bytes(event.origin), name=_bytes(name),
                    payload=event.payload, log_epoch=event.position.log_epoch,
                    connection=_bytes(connection), fence=fence,
                )  # fmt: skip
                parts.add("added")
            for key, entry, finished in change.keys:
                text = text_bytes(key)
                add(
                    "k", sid=sid, tag=tag_of(text), key=text, digest=entry.digest,
                    runner=entry.runner, run=entry.run, scopes=encode(sorted(entry.scopes)),
                    at=entry.at, state=entry.state.value, outcome=bytes(entry.outcome),
                    finished=finished,
                )  # fmt: skip
                parts.add("keys")
            for key in change.gone_keys:
                text = text_bytes(key)
                add("y", sid=sid, tag=tag_of(text), key=text)
                parts.add("gone_keys")
        for name, column in values.items():
            if "_" in name and len(column) == 1:
                (values[name],) = column
                parts.add(f"one {name.partition('_')[0]}")
        sql, names = _writing(frozenset(parts))
        try:
            (answer,) = await self._link.fetch(sql, *(values[name] for name in names))
        except SomebodyWasFirst:
            return None
        return answer

    async def count(self, owner: bytes) -> Counts:
        (row,) = await self._link.fetch(
            "SELECT c.sessions, (SELECT count(*) FROM sessions WHERE owner = $1), c.made,"
            f" {_LINE} FROM counted c",
            owner,
        )
        return Counts(*row)

    async def add(self, row: SessionRow, made: int) -> bool:
        try:
            added = await self._link.fetch(
                "WITH c AS (UPDATE counted SET sessions = sessions + 1, made = made + 1"
                " WHERE made = $1 RETURNING made)"
                f" INSERT INTO sessions ({_COLUMNS}) SELECT $2, $3::bigint, $4, $5, $6::float8,"
                " $7::float8, $8::float8, $9::float8, $10, $11, $12, $13 FROM c RETURNING sid",
                made,
                *row[1:],
            )
        except SomebodyWasFirst:
            return False
        return bool(added)

    async def remove(self, rows: Sequence[tuple[SessionId, int | None]]) -> list[SessionRow]:
        known = [each for each in rows if SESSION_ID.fullmatch(each[0])]
        gone = await self._link.fetch(
            "WITH gone AS (DELETE FROM sessions s USING unnest($1::text[], $2::bigint[]) AS r"
            " (sid, version) WHERE s.sid = r.sid AND (r.version IS NULL OR s.version = r.version)"
            f" RETURNING {_OF_S}), unwatched AS (DELETE FROM watchers v USING gone"
            " WHERE v.sid = gone.sid), c AS (UPDATE counted SET sessions = sessions -"
            " (SELECT count(*) FROM gone) WHERE EXISTS (SELECT FROM gone))"
            " SELECT * FROM gone",
            [session_id for session_id, _ in known],
            [version for _, version in known],
        )
        return [SessionRow(*row) for row in gone]

    async def due(
        self, by: float, limit: int, *, after: tuple[float, str] | None = None
    ) -> list[Found]:
        rows = await self._link.fetch(
            f"SELECT {_OF_S} FROM sessions s WHERE due_at <= $1 AND (due_at, sid) > ($2, $3)"
            " ORDER BY due_at, sid LIMIT $4",
            by, *(after or (-math.inf, "")), limit,
        )  # fmt: skip
        return [Found(SessionRow(*row)) for row in rows]

    async def unused(
        self, owner: bytes | None, latest: Mapping[Mode, float], limit: int
    ) -> list[Found]:
        rows = await self._link.fetch(
            f"SELECT {_OF_S} FROM sessions s JOIN unnest($2::text[], $3::float8[]) AS u (mode, by)"
            " ON s.mode = u.mode AND s.expires_at <= u.by WHERE s.expires_at < s.ends_at"
            f" AND s.due_at <= $4 AND {_whose(owner)} ORDER BY s.due_at LIMIT $5",
            owner, [mode.value for mode in latest], list(latest.values()), max(latest.values()),
            limit,
        )  # fmt: skip
        return [Found(SessionRow(*row)) for row in rows]

    async def heavy(self, by: float, most: int, limit: int) -> list[Found]:
        rows = await self._link.fetch(
            f"SELECT {_OF_S} FROM (SELECT *, sum(weight + octet_length(facts)"
            " + coalesce(octet_length(state), 0) + coalesce(octet_length(uris), 0)"
            " + coalesce(octet_length(data), 0)) OVER (ORDER BY expires_at DESC, sid) AS kept"
            " FROM sessions WHERE expires_at <= $1 AND expires_at < ends_at) s"
            " WHERE s.kept > $2 ORDER BY s.expires_at LIMIT $3",
            by, most, limit,
        )  # fmt: skip
        return [Found(SessionRow(*row)) for row in rows]

    async def every(self, owner: bytes | None, after: str, limit: int) -> list[SessionRow]:
        rows = await self._link.fetch(
            f"SELECT {_OF_S} FROM sessions s WHERE {_whose(owner)} AND sid > $2"
            " ORDER BY sid LIMIT $3",
            owner, after, limit,
        )  # fmt: skip
        return [SessionRow(*row) for row in rows]

    async def keys(self, session_id: SessionId) -> list[KeyRow]:
        if not SESSION_ID.fullmatch(session_id):
            return []
        rows = await self._link.fetch(
            f"SELECT {_KEY}, k.outcome FROM keys k WHERE sid = $1 ORDER BY finished NULLS LAST",
            session_id,
        )
        return [KeyRow(*row) for row in rows]

    async def audience(self, tag: int | None, after: str, limit: int) -> list[SessionId]:
        which = "mode = ANY($1::text[])" if tag is None else "tags @> ARRAY[$1::bigint]"
        rows = await self._link.fetch(
            f"SELECT sid FROM sessions WHERE {which} AND sid > $2 ORDER BY sid LIMIT $3",
            [Mode.PROTOCOL.value, Mode.TRANSPORT.value] if tag is None else tag, after, limit,
        )  # fmt: skip
        return [SessionId(row[0]) for row in rows]
