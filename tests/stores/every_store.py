"""The stores that every test of the contract runs on."""

import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from mcp_sessions.security import SessionSecurity
from mcp_sessions.serve.sealing_key_file import encrypted_store
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.memory import MemoryStore
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore
from mcp_sessions.testing import MakeStore, MakeTwoStores
from tests.support.postgres_server import postgres_store, two_postgres_stores
from tests.support.redis_server import redis_store, two_redis_stores


def sqlite_store() -> SQLiteStore:
    """In a file of its own, which is gone with the store."""
    position = tempfile.TemporaryDirectory(prefix="mcp-sessions-")
    store = SQLiteStore(Path(position.name) / "sessions.db")
    weakref.finalize(store, position.cleanup)
    return store


def two_shared_stores() -> tuple[SessionStore, SessionStore]:
    """Two in this process: what the tests of the replicas stand on keeps the contract, too."""
    # Here: that module makes worlds, which know the stores of this one.
    from tests.support import replicas

    return replicas.two_shared_stores()


STORES: Mapping[str, MakeStore] = {
    "memory": MemoryStore,
    "postgres": postgres_store,
    "redis": redis_store,
    "sqlite": sqlite_store,
}
"""Name → how to make one that is empty and not open yet."""

KEYS = ("k" * 32,)


def encrypted_store_over(store: SessionStore, keys: Sequence[str] = KEYS) -> SessionStore:
    return encrypted_store(store, SessionSecurity(keys))


def _encrypted(make: MakeStore) -> MakeStore:
    return lambda: encrypted_store_over(make())


def _two_encrypted(make_two: MakeTwoStores) -> MakeTwoStores:
    def make() -> tuple[SessionStore, SessionStore]:
        first, second = make_two()
        return encrypted_store_over(first), encrypted_store_over(second)

    return make


ENCRYPTED: Mapping[str, MakeStore] = {
    f"encrypted-{name}": _encrypted(STORES[name]) for name in ("postgres", "redis", "sqlite")
}
"""The same for the stores that can be encrypted."""

EXCHANGES: Mapping[str, MakeTwoStores] = {
    "in-one-process": two_shared_stores,
    "postgres": two_postgres_stores,
    "redis": two_redis_stores,
}
"""Name → how to make two that share everything."""

ENCRYPTED_EXCHANGES: Mapping[str, MakeTwoStores] = {
    f"encrypted-{name}": _two_encrypted(EXCHANGES[name]) for name in ("postgres", "redis")
}

MARKS: Mapping[str, pytest.MarkDecorator] = {
    "postgres": pytest.mark.postgres,
    "redis": pytest.mark.redis,
}
"""Name → what leaves its tests out, where something must be there for them."""


def every_store(*others: object, name: str = "") -> list[object]:
    """A parameter set for each store: how to make it, then ``others``."""
    return _sets(STORES, others, name)


def every_encrypted_store(*others: object, name: str = "") -> list[object]:
    return _sets(ENCRYPTED, others, name)


def every_exchange(*others: object, name: str = "") -> list[object]:
    return _sets(EXCHANGES, others, name)


def every_encrypted_exchange(*others: object, name: str = "") -> list[object]:
    return _sets(ENCRYPTED_EXCHANGES, others, name)


def _sets(makers: Mapping[str, object], others: Sequence[object], name: str) -> list[object]:
    sets: list[object] = []
    for store, make in makers.items():
        engine = store.removeprefix("encrypted-")
        marks = [MARKS[engine]] if engine in MARKS else []
        # What is sealed before it comes to an engine is the same before each of them.
        if store != engine and engine != "sqlite":
            marks.append(pytest.mark.full)
        case = f"{store}-{name}" if name else store
        sets.append(pytest.param(make, *others, id=case, marks=marks))
    return sets
