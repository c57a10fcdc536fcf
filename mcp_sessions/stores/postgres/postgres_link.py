"""Connections to a Postgres, and its failures in an operator's words.

Rules:

1. A statement is sent once. When its answer does not come, it is unknown whether it was done:
   :class:`StoreUnavailable`.
2. Nothing waits longer than the timeout.
3. After an attempt to connect that failed, all calls fail at once for ``REST`` seconds.
4. A statement that another one's step undid (a deadlock, a row that went) was not done. It is sent
   again.
5. The server gives a statement up when the caller does. Its own limits of time, which may be meant
   for other programs, do not count.
6. A connection plans a statement once, whatever its values are and however large its tables become.
   So no plan may be one for empty tables.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import asyncpg

from mcp_sessions.errors import ConfigurationError, StoreRefused, StoreUnavailable
from mcp_sessions.stores.outage import Outage

_T = TypeVar("_T")

TIMEOUT = 3.0
"""Seconds that an answer, or a connection, may take if nothing else is said."""

REST = 0.5
"""Seconds between two attempts to connect."""

MOST = 10
"""Connections of a process, and one that listens."""

FAILURES = (
    OSError,
    TimeoutError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    # What asyncpg raises if a server says goodbye to a connection that is idle.
    asyncpg.InternalClientError,
)
"""What a statement, or a connection, may fail with."""

_UNDONE = 20
"""How often a statement that was undone is sent again."""

_REFUSALS = {
    "08P01": "is behind a pooler that refuses the connection. Look at its log",
    "53100": "has a full disk: it refuses writes. Make room",
    "53200": "is out of memory",
    "53300": "has too many connections (max_connections). Allow more, or use a pooler",
    "25006": "is read-only: it refuses writes. Let --store name the primary, or all servers",
    "28": "refused the user or the password. Look at both in the URL",
    "3D000": "has no such database. Create it",
    "42501": "does not allow this (privileges). Let the user own the schema",
    "57014": "cancelled a statement, because it took too long or an operator ended it",
    "55000": "is a standby: it refuses writes. Let --store name the primary, or all servers",
    "57P": "is shutting down, or starting",
    "42": "has other tables than this release needs. Another program may have changed them",
    "22": "refused a value",
}
"""The beginning of an error's code, and its meaning. It is read after "Postgres at HOST:PORT"."""

_KINDS_FOR_CLIENTS = {
    "53100": "full", "53200": "full", "25006": "read-only", "55000": "read-only",
    "28": "credentials", "42501": "credentials",
}  # fmt: skip
"""The words for clients."""

_OF_OTHERS = asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError
"""A statement was prepared on another connection than the one that it is used on."""

_COMES_BACK = ("57014", "57P")
"""The next one may be done."""

_OF_A_CONNECTION = "08"
"""The driver's own: the connection broke, and nothing was answered."""


_UNDONE_BY_OTHERS = (
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    # A process that a row is for left just now.
    asyncpg.ForeignKeyViolationError,
)


class SomebodyWasFirst(StoreUnavailable):
    """A row with that key is there. Nothing was done."""


class PostgresLink:
    """Connections to one server, made when they are needed.

    Args:
        url: ``postgresql://…``, as asyncpg takes it.
        schema: The schema of the tables.
        timeout: Seconds that an answer, or a connection, may take.
    """

    def __init__(self, url: str, schema: str, timeout: float) -> None:
        self.timeout = timeout
        self.schema = schema
        self._url = url
        self.name = f"Postgres at {', '.join(_servers_of(url))}"
        self._free: list[asyncpg.Connection[Any]] = []
        self._room = asyncio.Semaphore(MOST)
        self.outage = Outage("postgres")
        self._failed: StoreUnavailable | None = None
        self._rests_until = 0.0
        self._is_closed = False

    async def connect(self) -> asyncpg.Connection[Any]:
        """A new connection of the caller's own.

        Raises:
            StoreUnavailable: It could not be made.
        """
        loop = asyncio.get_running_loop()
        if self._failed is not None and loop.time() < self._rests_until:
            self.outage.failed(self._failed)
            raise type(self._failed)(*self._failed.args)
        try:
            async with asyncio.timeout(self.timeout):
                connection = await asyncpg.connect(
                    self._url, timeout=self.timeout, command_timeout=self.timeout
                )
                try:
                    await self._begin(connection)
                except BaseException:
                    connection.terminate()
                    raise
                return connection
        except FAILURES as failed:
            self._failed, self._rests_until = self.explained(failed), loop.time() + REST
            raise self._failed from failed

    async def _begin(self, connection: asyncpg.Connection[Any]) -> None:
        # Not as the connection is made: a pooler refuses settings that it does not know.
        settings = {
            "search_path": f'"{self.schema}"',
            "application_name": '"mcp-sessions"',
            "statement_timeout": math.ceil(self.timeout * 1_000),
            "lock_timeout": 0,
            "idle_session_timeout": 0,
            "jit": "off",
            "plan_cache_mode": "force_generic_plan",
            "enable_seqscan": "off",
        }
        await connection.execute("; ".join(f"SET {name} TO {v}" for name, v in settings.items()))

    async def check_pooler(self) -> None:
        """Refuse a pooler that hands a connection on between two statements.

        Raises:
            StoreRefused: It does. What is set, and what is listened to, would be another client's.
        """
        connection = await self.connect()
        try:
            if await connection.fetchval("SELECT pg_backend_pid()") == connection.get_server_pid():
                return
            heard = asyncio.Event()
            channel = f"mcps_{random.getrandbits(64):x}"

            def hear(*_: object) -> None:
                heard.set()

            await connection.add_listener(channel, hear)
            await self.fetch("SELECT pg_notify($1, '')", channel)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.timeout):
                    await heard.wait()
            is_ours = heard.is_set()
        except _OF_OTHERS:
            is_ours = False
        except FAILURES as failed:
            raise self.explained(failed) from failed
        finally:
            connection.terminate()
        if not is_ours:
            raise StoreRefused(
                f"{self.name} is behind a pooler in transaction mode. Name the server, or pool "
                "sessions"
            )

    async def _asked(self, send: Callable[[asyncpg.Connection[Any]], Awaitable[_T]]) -> _T:
        """Use a connection that is free, the last one used first.

        The pool of asyncpg asked for a task and five turns of the event loop for each statement.
        """
        if self._room.locked():
            async with asyncio.timeout(self.timeout):
                await self._room.acquire()
        else:
            await self._room.acquire()
        try:
            if self._is_closed:
                raise StoreUnavailable(f"the connection to {self.name} failed: it is closed")
            connection = None
            while connection is None and self._free:
                connection = self._free.pop()
                if connection.is_closed():
                    connection = None
            if connection is None:
                connection = await self.connect()
            try:
                return await send(connection)
            except (TimeoutError, asyncio.CancelledError):
                # Its answer may still come.
                connection.terminate()
                raise
            finally:
                if self._is_closed:
                    connection.terminate()
                if not connection.is_closed():
                    self._free.append(connection)
        finally:
            self._room.release()

    async def fetch(self, sql: str, *values: Any) -> list[asyncpg.Record]:
        """Send one statement; its rows.

        Raises:
            SomebodyWasFirst: A row with that key is there.
            StoreUnavailable: Unknown whether it was done.
            StoreRefused: It was not done.
        """
        for left in range(_UNDONE, -1, -1):
            try:
                return await self._asked(lambda connection: connection.fetch(sql, *values))
            except _UNDONE_BY_OTHERS as undone:
                if not left:
                    raise self.explained(undone) from undone
                await asyncio.sleep(random.random() * 0.01)
            except FAILURES as failed:
                raise self.explained(failed) from failed
        raise AssertionError("the last time raises")

    async def run(self, script: str) -> None:
        """Send a script without values: one transaction."""
        try:
            await self._asked(lambda connection: connection.execute(script))
        except FAILURES as failed:
            raise self.explained(failed) from failed

    async def close(self) -> None:
        self._is_closed = True
        free, self._free = self._free, []
        for connection in free:
            with suppress(*FAILURES):
                await connection.close(timeout=self.timeout)

    def explained(self, failed: BaseException) -> StoreUnavailable:
        """Count a failure; the error for the caller. A server's text may quote a value, so it is
        left out.
        """
        if isinstance(failed, asyncpg.UniqueViolationError):
            return SomebodyWasFirst(f"{self.name} has a row of another process")
        explained = self._explained(failed)
        self.outage.failed(explained)
        return explained

    def _explained(self, failed: BaseException) -> StoreUnavailable:
        if isinstance(failed, TimeoutError):
            return StoreUnavailable(f"{self.name} did not answer within {self.timeout:g} s")
        code = getattr(failed, "sqlstate", None)
        if isinstance(failed, asyncpg.PostgresError) and isinstance(code, str):
            for beginning, meaning in _REFUSALS.items():
                if code.startswith(beginning):
                    text = f"{self.name} {meaning} ({code})"
                    if beginning in _COMES_BACK:
                        return StoreUnavailable(text)
                    return StoreRefused(text, _KINDS_FOR_CLIENTS.get(beginning))
            if not code.startswith(_OF_A_CONNECTION):
                return StoreUnavailable(f"{self.name} answered with the error {code}")
        if isinstance(failed, asyncpg.TargetServerAttributeNotMatched):
            return StoreUnavailable(f"none of {self.name} is a primary")
        if isinstance(failed, ConnectionRefusedError):
            return StoreUnavailable(f"{self.name} takes no connections: is it running?")
        return StoreUnavailable(f"the connection to {self.name} failed: {type(failed).__name__}")


def split_url(url: str) -> tuple[str, dict[str, str]]:
    """The URL for asyncpg, and the options of ours: ``schema``, ``timeout``.

    Raises:
        ConfigurationError: It names no server.
    """
    parts = urlsplit(url)
    servers = _servers_of(url)
    if not all(each.rpartition(":")[2].isdecimal() for each in servers):
        raise ConfigurationError("the port in a postgresql:// URL is a number")
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    ours = {name: value for name, value in pairs if name in ("schema", "timeout")}
    others = [(name, value) for name, value in pairs if name not in ours]
    if len(servers) > 1 and not any(name == "target_session_attrs" for name, _ in others):
        others.append(("target_session_attrs", "primary"))
    return urlunsplit(parts._replace(query=urlencode(others))), ours


def _servers_of(url: str) -> list[str]:
    """Each as ``host:port``. After a failover another one of them is the primary."""
    named = urlsplit(url).netloc.rpartition("@")[2].split(",")
    return [
        each if each.rpartition("]")[2].count(":") else f"{each or 'localhost'}:5432"
        for each in named
    ]
