"""The stores that every test of the contract runs on."""

import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path

from mcp_sessions.stores.memory import MemoryStore
from mcp_sessions.stores.sqlite import SQLiteStore
from mcp_sessions.testing import MakeStore


def sqlite_store() -> SQLiteStore:
    """In a file of its own, which is gone with the store."""
    place = tempfile.TemporaryDirectory(prefix="mcp-sessions-")
    store = SQLiteStore(Path(place.name) / "sessions.db")
    weakref.finalize(store, place.cleanup)
    return store


STORES: Mapping[str, MakeStore] = {
    "memory": MemoryStore,
    "sqlite": sqlite_store,
}
"""Name → how to make one that is empty and not open yet."""
