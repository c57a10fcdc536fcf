"""Sessions in Redis, or Valkey: they are served by any replica."""

from mcp_sessions.stores.redis.store import RedisStore

__all__ = ["RedisStore"]
