"""Sessions in Redis, or Valkey: they are served by any replica."""

from mcp_sessions.stores.redis.redis_store import RedisStore

__all__ = ["RedisStore"]
