from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence

from mcp_sessions.argument_types import checked
from mcp_sessions.core.ends import MOST_ENDS, REMEMBERED_FOR, SessionEnd, StoreMade
from mcp_sessions.core.messages import decode, encode
from mcp_sessions.errors import ConfigurationError, StoreRefused
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.security import mint_process
from mcp_sessions.stores.ends_contract import EndedOutside
from mcp_sessions.stores.exchange import Exchange
from mcp_sessions.stores.postgres import schema
from mcp_sessions.stores.postgres.postgres_engine import PostgresEngine
from mcp_sessions.stores.postgres.postgres_exchange import PostgresExchange
from mcp_sessions.stores.postgres.postgres_link import TIMEOUT, PostgresLink, split_url
from mcp_sessions.stores.probe import EngineFacts, StoreSize
from mcp_sessions.stores.shared_clock import SharedClock
from mcp_sessions.stores.sql.sql_store import SqlStore

SCHEMA = "mcp_sessions"

OLDEST_VERSION = 14

_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,62}", re.ASCII)

_LOCK = 0x6D63705F73657373
"""Held by whoever makes the tables."""


class PostgresStore(SqlStore):
    """A :class:`~mcp_sessions.stores.contract.SessionStore` in a schema of a Postgres database."""

    name = "postgres"

    @checked()
    def __init__(
        self,
        url: str,
        *,
        schema: str | None = None,
        timeout: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Nothing is connected yet.

        Args:
            url: ``postgresql://…``; its query may hold ``schema``, ``timeout`` and the options of
                asyncpg.
            schema: The schema of the tables, for stores that share one database: 1 to 63 of
                ``a-z 0-9 _``. None: ``mcp_sessions``.
            timeout: Seconds that an answer may take; None: 3.
            clock: The clock from which callers read ``now``, in seconds since 1970. It is compared
                to the server's.

        Raises:
            ConfigurationError: The URL, the schema or the timeout cannot be used.
        """
        plain, ours = split_url(url)
        named = schema if schema is not None else ours.get("schema", SCHEMA)
        if _SCHEMA.fullmatch(named) is None:
            raise ConfigurationError("a schema has 1 to 63 of a-z 0-9 _, and begins with no digit")
        try:
            seconds = timeout if timeout is not None else float(ours.get("timeout", TIMEOUT))
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < math.inf:
            raise ConfigurationError("a store's timeout is a positive number of seconds")
        self._link = PostgresLink(plain, named, seconds)
        self._clock = SharedClock(self._time, clock)
        super().__init__(PostgresEngine(self._link))
        self.outage = self._link.outage
        self.exchange: Exchange | None = PostgresExchange(self._link, self.claim)

    @property
    def clock_ahead(self) -> float:
        return self._clock.ahead if self._clock is not None else 0.0

    async def open(self, policy: SessionPolicy) -> None:
        """Connect, make the tables if they are not there, and serve within ``policy``.

        Raises:
            ConfigurationError: The server is too old, or a newer release made the tables.
            StoreRefused: It is behind a pooler in transaction mode.
        """
        if not await self.open_if_made(policy):
            await self._link.run(
                f"BEGIN; SELECT pg_advisory_xact_lock({_LOCK});"
                f' CREATE SCHEMA IF NOT EXISTS "{self._link.schema}"; {schema.TABLES} COMMIT'
            )

    async def open_if_made(self, policy: SessionPolicy) -> bool:
        """See :class:`~mcp_sessions.stores.probe.Made`, and :meth:`open` for the errors."""
        await super().open(policy)
        await self._link.check_pooler()
        (row,) = await self._link.fetch(
            "SELECT current_setting('server_version_num')::int, to_regclass('versions') IS NOT NULL"
        )
        if row[0] < OLDEST_VERSION * 10_000:
            raise ConfigurationError(
                f"the server is Postgres {row[0] // 10_000}; sessions need Postgres "
                f"{OLDEST_VERSION} or later"
            )
        if not row[1]:
            await self._check_may_make()
            return False
        ((newest,),) = await self._link.fetch("SELECT max(version) FROM versions")
        if newest > schema.VERSION:
            raise ConfigurationError(
                f"a newer release made the tables of {self._link.name}: use that release"
            )
        return True

    async def _check_may_make(self) -> None:
        ((may_make,),) = await self._link.fetch(
            "SELECT CASE WHEN EXISTS (SELECT 1 FROM pg_namespace WHERE nspname = $1)"
            " THEN has_schema_privilege($1, 'CREATE')"
            " ELSE has_database_privilege(current_database(), 'CREATE') END",
            self._link.schema,
        )
        if not may_make:
            raise StoreRefused(
                f"{self._link.name} does not let this user make the schema {self._link.schema}: "
                "grant CREATE on the database"
            )

    async def close(self) -> None:
        """Let go of the connections. The sessions stay."""
        if isinstance(self.exchange, PostgresExchange):
            await self.exchange.close()
        await self._link.close()

    async def size(self) -> StoreSize:
        ((sessions, size),) = await self._link.fetch(
            "SELECT c.sessions, (SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class"
            " WHERE relnamespace = to_regnamespace($1) AND relkind = 'r') FROM counted c",
            self._link.schema,
        )
        return StoreSize(sessions, size)

    async def probe(self) -> None:
        await self._link.fetch(
            "INSERT INTO versions VALUES ($1) ON CONFLICT (version) DO UPDATE"
            " SET version = excluded.version",
            schema.VERSION,
        )

    async def describe(self) -> EngineFacts:
        names = ("server_version", "synchronous_commit", "fsync", "full_page_writes")
        settings = ", ".join(f"current_setting('{name}')" for name in names)
        ((version, commits, syncs, pages),) = await self._link.fetch(f"SELECT {settings}")
        loses: list[str] = []
        if commits == "off":
            loses.append("the last moments before a crash: set synchronous_commit on")
        if syncs == "off":
            loses.append("any part of the database at a crash of the machine: set fsync on")
        if pages == "off":
            loses.append("pages that a crash of the machine tears: set full_page_writes on")
        durability = f"synchronous_commit {commits}, fsync {syncs}, full_page_writes {pages}"
        return EngineFacts(f"Postgres {version}", durability, tuple(loses))

    async def _time(self) -> float:
        ((there,),) = await self._link.fetch("SELECT extract(epoch FROM clock_timestamp())::float8")
        return there

    # --- ends ------------------------------------------------------------------------------------

    async def remember_ends(
        self, ends: Sequence[SessionEnd], *, now: float, outside: bool = False
    ) -> Sequence[SessionEnd]:
        now = await self._now(now)
        values = [encode(end.to_json()) for end in ends]
        new = await self._link.fetch(
            "INSERT INTO ends (at, value, is_outside) SELECT e.at, e.value, $3"
            " FROM unnest($1::float8[], $2::bytea[]) AS e (at, value)"
            " ON CONFLICT DO NOTHING RETURNING value",
            [end.at for end in ends],
            values,
            outside,
        )
        await self._link.fetch(
            "DELETE FROM ends WHERE at <= $1 OR id <="
            " (SELECT id FROM ends ORDER BY id DESC OFFSET $2 LIMIT 1)",
            now - REMEMBERED_FOR,
            MOST_ENDS,
        )
        stored = {row[0] for row in new}
        return [end for end, value in zip(ends, values, strict=True) if value in stored]

    async def ended_outside(self, *, now: float) -> Sequence[EndedOutside]:
        rows = await self._link.fetch(
            "UPDATE ends SET is_outside = false WHERE is_outside RETURNING id, value"
        )
        rows.sort(key=lambda row: row["id"])
        found = (SessionEnd.from_json(decode(row["value"])) for row in rows)
        return [EndedOutside(end) for end in found if end is not None]

    async def ends(self, *, now: float) -> Sequence[SessionEnd]:
        after = await self._now(now) - REMEMBERED_FOR
        rows = await self._link.fetch("SELECT value FROM ends WHERE at > $1 ORDER BY at, id", after)
        found = (SessionEnd.from_json(decode(value)) for (value,) in rows)
        return [end for end in found if end is not None]

    async def made(self, *, now: float | None) -> StoreMade | None:
        if now is not None:
            own = StoreMade(mint_process(), await self._now(now), is_new=True)
            made = await self._link.fetch(
                "INSERT INTO made (name, at) VALUES ($1, $2) ON CONFLICT DO NOTHING RETURNING 1",
                own.name,
                own.at,
            )
            if made:
                return own
        rows = await self._link.fetch("SELECT name, at FROM made")
        return StoreMade(rows[0][0], rows[0][1]) if rows else None

    async def sealing_keys(self, *, add: str | None = None) -> frozenset[str]:
        if add is not None:
            await self._link.run(
                f"BEGIN; SELECT pg_advisory_xact_lock({_LOCK}); {schema.SEALING_KEYS} COMMIT"
            )
            await self._link.fetch(
                "INSERT INTO sealing_keys VALUES ($1) ON CONFLICT DO NOTHING", add
            )
        ((is_there,),) = await self._link.fetch("SELECT to_regclass('sealing_keys') IS NOT NULL")
        rows = await self._link.fetch("SELECT id FROM sealing_keys") if is_there else ()
        return frozenset(row[0] for row in rows)
