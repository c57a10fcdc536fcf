"""Sessions in this process's memory: the default store."""

from mcp_sessions.stores.memory.memory_store import MemoryStore

__all__ = ["MemoryStore"]
