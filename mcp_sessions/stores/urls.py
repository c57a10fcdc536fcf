"""Stores by URL: what an operator writes behind ``--store``."""

from __future__ import annotations

from urllib.parse import urlsplit

from mcp_sessions.errors import ConfigurationError
from mcp_sessions.stores.base import SessionStore
from mcp_sessions.stores.memory import MemoryStore

_REDIS = frozenset({"redis", "rediss", "valkey", "valkeys", "unix"})


def open_store(url: str) -> SessionStore:
    """The store that ``url`` names; it is not connected yet.

    Args:
        url: ``memory://``: this process's memory. ``redis://``, ``rediss://``, ``valkey://``,
            ``valkeys://``, ``unix://``: Redis or Valkey; ``?namespace=…`` where several share it.

    Raises:
        ConfigurationError: No store has such a URL, or what it needs is not installed. The
            text holds the scheme only, since the rest of a URL may hold a password.
    """
    scheme = urlsplit(url).scheme
    if scheme == "memory":
        return MemoryStore()
    if scheme in _REDIS:
        try:
            from mcp_sessions.stores.redis import RedisStore
        except ModuleNotFoundError as missing:
            if (missing.name or "").partition(".")[0] != "redis":
                raise
            raise ConfigurationError(
                f"{scheme}:// needs redis-py: pip install 'mcp-sessions[redis]'"
            ) from missing
        return RedisStore(url)
    known = "memory://, redis://, rediss://, valkey://, unix://"
    raise ConfigurationError(
        f"unknown store {scheme or url.partition(':')[0]!r}: use one of {known}"
    )
