"""The stores that every test of the contract runs on."""

from collections.abc import Mapping

from mcp_sessions.stores.memory import MemoryStore
from mcp_sessions.testing import MakeStore

STORES: Mapping[str, MakeStore] = {
    "memory": MemoryStore,
}
"""Name → how to make one that is empty and not open yet."""
