from __future__ import annotations

import os
from pathlib import Path
from typing import cast
from urllib.parse import parse_qsl, unquote, urlsplit

from mcp_sessions.argument_types import did_you_mean
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.memory import MemoryStore

_SERVERS = ("redis", "rediss", "valkey", "valkeys")
_REDIS = frozenset({*_SERVERS, "unix", *(f"{each}+sentinel" for each in _SERVERS)})
_POSTGRES = frozenset({"postgresql", "postgres"})
SQLITE_SHAPE = "sqlite:///relative.db or sqlite:////absolute.db"


def open_store(url: str | os.PathLike[str]) -> SessionStore:
    """The store that ``url`` names; it is not connected yet.

    Args:
        url: Or the path of a SQLite file. ``memory://``: this process's memory.
            ``sqlite:///relative.db`` or
            ``sqlite:////absolute.db``: a file; ``?durability=full`` for one that survives a
            power loss too. ``redis://``, ``rediss://``, ``valkey://``, ``valkeys://``,
            ``unix://``: Redis or Valkey; ``?namespace=…`` where several share it. Behind Sentinel:
            ``redis+sentinel://host1,host2/service``.
            ``postgresql://``: Postgres; ``?schema=…`` where several share it.

    Raises:
        ConfigurationError: No store has such a URL, or what it needs is not installed. The
            text holds the scheme only, since the rest of a URL may hold a password.
    """
    if isinstance(url, os.PathLike):
        from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore

        return SQLiteStore(Path(url))
    scheme = urlsplit(url).scheme
    if scheme == "memory":
        if url != "memory://":
            raise ConfigurationError("a memory URL names nothing: memory://")
        return MemoryStore()
    if scheme in _REDIS:
        try:
            from mcp_sessions.stores.redis.redis_store import RedisStore
        except ModuleNotFoundError as missing:
            if (missing.name or "").partition(".")[0] != "redis":
                raise
            raise ConfigurationError(
                f"{scheme}:// needs redis-py: pip install 'mcp-sessions[redis]'"
            ) from missing
        return RedisStore(url)
    if scheme in _POSTGRES:
        try:
            from mcp_sessions.stores.postgres.postgres_store import PostgresStore
        except ModuleNotFoundError as missing:
            if (missing.name or "").partition(".")[0] != "asyncpg":
                raise
            raise ConfigurationError(
                f"{scheme}:// needs asyncpg: pip install 'mcp-sessions[postgres]'"
            ) from missing
        return PostgresStore(url)
    if scheme == "sqlite":
        # A user of another store need not wait for the import.
        from mcp_sessions.stores.sqlite.schema import Durability
        from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore

        path, durability = sqlite_file(url)
        return SQLiteStore(path, cast("Durability", durability))
    known = f"memory://, {SQLITE_SHAPE}, redis://, rediss://, valkey://, valkeys://, unix://, "
    known += "redis+sentinel://, rediss+sentinel://, postgresql://"
    given = scheme or url.partition(":")[0]
    schemes = ("memory", "sqlite", *_REDIS, *_POSTGRES)
    hint = did_you_mean(given, [f"{each}://" for each in schemes])
    if not hint and scheme == "" and ":" not in url and url:
        hint = f"; did you mean sqlite:///{url}?"
    raise ConfigurationError(f"unknown store {given!r}: use one of {known}{hint}")


def sqlite_file(url: str) -> tuple[Path, str]:
    parts = urlsplit(url)
    has_slashes = url.partition(":")[2].startswith("///")
    if not has_slashes or parts.fragment or len(parts.path) < 2 or parts.path.endswith("/"):
        raise ConfigurationError(f"a sqlite URL names a file: {SQLITE_SHAPE}")
    durability = "normal"
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name != "durability" or value not in ("normal", "full"):
            raise ConfigurationError(
                f"a sqlite URL takes ?durability=normal or ?durability=full, not {name}={value}"
            )
        durability = value
    return Path(unquote(parts.path[1:])), durability
