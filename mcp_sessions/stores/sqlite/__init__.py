"""Sessions in a SQLite file: they survive a restart, in one process."""

from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore

__all__ = ["SQLiteStore"]
