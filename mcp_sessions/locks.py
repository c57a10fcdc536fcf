from __future__ import annotations

import asyncio
import weakref
from typing import TypeVar

Key = TypeVar("Key")


class Locks(weakref.WeakValueDictionary[Key, asyncio.Lock]):
    """Locks by key. A lock is gone when no task holds it or waits for it."""

    def of(self, key: Key) -> asyncio.Lock:
        lock = self.get(key)
        if lock is None:
            lock = self[key] = asyncio.Lock()
        return lock

    def is_held(self, key: Key) -> bool:
        lock = self.get(key)
        return lock is not None and lock.locked()
