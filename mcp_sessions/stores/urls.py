"""Stores by URL: what an operator writes behind ``--store``."""

from __future__ import annotations

from urllib.parse import urlsplit

from mcp_sessions.errors import ConfigurationError
from mcp_sessions.stores.base import SessionStore
from mcp_sessions.stores.memory import MemoryStore


def open_store(url: str) -> SessionStore:
    """The store that ``url`` names; it is not connected yet.

    Args:
        url: ``memory://``: this process's memory.

    Raises:
        ConfigurationError: No store has such a URL. The text holds the scheme only, since
            the rest of a URL may hold a password.
    """
    scheme = urlsplit(url).scheme
    if scheme == "memory":
        return MemoryStore()
    raise ConfigurationError(f"unknown store {scheme or url.partition(':')[0]!r}: use memory://")
