"""Sessions in this process's memory: the default store."""

from mcp_sessions.stores.memory.store import MemoryStore

__all__ = ["MemoryStore"]
