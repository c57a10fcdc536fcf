from mcp_sessions.stores.memory.memory_store import MemoryStore

__all__ = ["MemoryStore"]
