"""How processes that share a Postgres reach each other: a mailbox each, and ``NOTIFY``.

Whatever is for a process is a row of ``mail``, written by the statement that stores the event. The
notification says only that there is some. So one that is lost loses nothing: the next beat looks.
What is lost with a crash of the database is a gap: whoever watches reads the store again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import asyncpg

from mcp_sessions.core.backoff import Backoff
from mcp_sessions.core.log import LoggedEvent
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import ConnectionId, FencingEpoch, LogEpoch, Position, SessionId, StreamName
from mcp_sessions.locks import Locks
from mcp_sessions.stores.exchange import LIVENESS, ExchangeListener, JoinedProcess
from mcp_sessions.stores.postgres.postgres_engine import CHANNEL
from mcp_sessions.stores.postgres.postgres_link import FAILURES, PostgresLink
from mcp_sessions.stores.records import attachment_of
from mcp_sessions.stores.sql.session_rows import loads, text_bytes, text_of

logger = logging.getLogger(__name__)

_AT_ONCE = 500
"""Letters that one statement takes."""

_LIVES = f"seen > clock_timestamp() - interval '{LIVENESS} seconds'"


@dataclass(eq=False, repr=False)
class PostgresExchange(JoinedProcess):
    _link: PostgresLink
    _claim: Callable[..., Awaitable[str | None]]

    def __post_init__(self) -> None:
        self._connection: asyncpg.Connection[Any] | None = None
        self._watched: set[tuple[SessionId, StreamName]] = set()
        self._turns = Locks[tuple[SessionId, StreamName]]()
        self._has_mail = asyncio.Event()

    async def join(self, process: str, listener: ExchangeListener) -> None:
        self._process, self._listener = process, listener
        await self._connect()
        self._background.loop("reading the mail of other replicas", self._read)
        self._background.loop("heartbeats to other replicas", self._keep_alive)

    async def leave(self) -> None:
        process = self._process
        await self.close()
        if process:
            await self._link.fetch("DELETE FROM processes WHERE process = $1", process)

    async def close(self) -> None:
        """Close the connection. Other processes notice when its sign of life is old."""
        await self._background.close()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()
        self._process, self._listener = "", None
        self._watched.clear()

    async def send(self, message: bytes, *, to: str | None = None) -> bool:
        rows = await self._link.fetch(
            "WITH m AS (INSERT INTO mail (process, message) SELECT p.process, $1 FROM processes p"
            f" WHERE p.process = coalesce($2, p.process) AND p.process <> $3 AND {_LIVES}"
            " RETURNING process)"
            f" SELECT pg_notify({CHANNEL.format('m.process')}, '') FROM m",
            message,
            to,
            self._process,
        )
        return bool(rows) or to == self._process

    async def watch(self, session_id: SessionId, stream: StreamName) -> None:
        watched = (session_id, stream)
        # What an unwatch that is under way undoes is the watch before it.
        async with self._turns.of(watched):
            if watched not in self._watched:
                await self._watch([watched])
                self._watched.add(watched)

    async def unwatch(self, session_id: SessionId, stream: StreamName) -> None:
        watched = (session_id, stream)
        async with self._turns.of(watched):
            if watched in self._watched:
                self._watched.discard(watched)
                await self._link.fetch(
                    "DELETE FROM watchers WHERE sid = $1 AND stream = $2 AND process = $3",
                    session_id, text_bytes(stream), self._process,
                )  # fmt: skip

    async def claim(
        self, session_id: SessionId, holder: str | None, *, instead_of: str | None = None
    ) -> str | None:
        return await self._claim(session_id, holder, instead_of=instead_of)

    async def is_alive(self, process: str) -> bool:
        rows = await self._link.fetch(
            f"SELECT 1 FROM processes WHERE process = $1 AND {_LIVES}", process
        )
        return bool(rows) or self._may_live()

    # --- signs of life -----------------------------------------------------------------------

    async def _sign(self) -> None:
        try:
            await self._beat()
            connection = self._connection
            if connection is not None:
                await connection.fetch("SELECT 1")
        except (StoreUnavailable, *FAILURES):
            self._lose(self._connection)
        # A notification may be missed. Mail is not.
        self._has_mail.set()

    async def _beat(self) -> None:
        """Give a sign of life. Mail for processes that died is dropped."""
        known = await self._link.fetch(
            "UPDATE processes SET seen = clock_timestamp() WHERE process = $1 RETURNING 1",
            self._process,
        )
        if not known:
            # Its row was lost with a crash of the database, and what it watched.
            self._lose(self._connection)
        await self._link.fetch(
            "DELETE FROM processes WHERE seen < clock_timestamp()"
            f" - interval '{LIVENESS * 6} seconds'"
        )

    # --- mail --------------------------------------------------------------------------------

    async def _connect(self) -> None:
        connection = await self._link.connect()
        try:
            ((channel,),) = await connection.fetch(
                f"SELECT {CHANNEL.format('$1::text')}", self._process
            )
            await connection.add_listener(channel, self._notified)
            connection.add_termination_listener(self._lose)
            await self._link.fetch(
                "INSERT INTO processes VALUES ($1, clock_timestamp()) ON CONFLICT (process)"
                " DO UPDATE SET seen = clock_timestamp()",
                self._process,
            )
            await self._watch(list(self._watched))
        except BaseException as failed:
            connection.terminate()
            if isinstance(failed, FAILURES):
                raise self._link.explained(failed) from failed
            raise
        self._connection = connection

    def _notified(self, connection: object, process: int, channel: str, payload: object) -> None:
        self._has_mail.set()

    def _lose(self, connection: object) -> None:
        if connection is None or connection is not self._connection:
            return
        lost, self._connection = self._connection, None
        self._unsettle()
        if lost is not None and not lost.is_closed():
            lost.terminate()
        self._has_mail.set()

    async def _watch(self, watched: list[tuple[SessionId, StreamName]]) -> None:
        await self._link.fetch(
            "INSERT INTO watchers SELECT w.sid, w.stream, $3 FROM unnest($1::text[], $2::bytea[])"
            " AS w (sid, stream) ON CONFLICT DO NOTHING",
            [session_id for session_id, _ in watched],
            [text_bytes(stream) for _, stream in watched],
            self._process,
        )

    async def _read(self) -> None:
        backoff = Backoff(base=0.2, cap=1.0)
        while True:
            try:
                if self._connection is None:
                    await self._connect()
                    self._report_gap()
                while await self._take():
                    pass
                backoff.progressed()
                if self._connection is not None:
                    await self._has_mail.wait()
                self._has_mail.clear()
            except StoreUnavailable:
                # Mail may be taken, and the answer with it be lost.
                self._lose(self._connection)
                self._unsettle()
                await asyncio.sleep(backoff.failed(random.random()))

    async def _take(self) -> bool:
        """Take some mail; whether there may be more."""
        rows = await self._link.fetch(
            "DELETE FROM mail WHERE id = ANY(ARRAY(SELECT id FROM mail WHERE process = $1"
            " ORDER BY id LIMIT $2)) RETURNING *",
            self._process,
            _AT_ONCE,
        )
        for row in sorted(rows, key=lambda row: row["id"]):
            self._deliver(row)
        return len(rows) == _AT_ONCE

    def _deliver(self, row: asyncpg.Record) -> None:
        listener = self._listener
        if listener is None:
            return
        # The others must survive what a listener does wrong with one letter.
        try:
            if row["sid"] is None:
                listener.on_message(row["message"])
                return
            watched = (SessionId(row["sid"]), StreamName(text_of(row["stream"])))
            if watched in self._watched:
                connection, fence = row["connection"], FencingEpoch(row["fence"])
                attached = ConnectionId(text_of(connection)) if connection is not None else None
                listener.on_event(*watched, _event(row), attachment_of(attached, fence))
        except Exception:
            logger.exception("a message of another process could not be handled")


def _event(row: asyncpg.Record) -> LoggedEvent:
    position = Position(LogEpoch(row["log_epoch"]), row["number"])
    key = None
    if row["key"] is not None:
        origin, text = loads(row["key"])
        key = (SessionId(origin) if origin is not None else None, text)
    return LoggedEvent(
        position.event_id(), row["number"], row["payload"], row["at"], key,
        SessionId(text_of(row["origin"])) if row["origin"] is not None else None,
    )  # fmt: skip
