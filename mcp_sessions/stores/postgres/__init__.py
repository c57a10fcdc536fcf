"""Sessions in Postgres, shared by every process that names the same database."""

from mcp_sessions.stores.postgres.postgres_store import PostgresStore

__all__ = ["PostgresStore"]
