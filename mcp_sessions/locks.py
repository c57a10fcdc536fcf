"""Locks by key: one for each key in use, gone when nobody holds it."""

from __future__ import annotations

import asyncio
import weakref
from typing import TypeVar

Key = TypeVar("Key")


class Locks(weakref.WeakValueDictionary[Key, asyncio.Lock]):
    """Those that somebody holds or waits for."""

    def of(self, key: Key) -> asyncio.Lock:
        lock = self.get(key)
        if lock is None:
            lock = self[key] = asyncio.Lock()
        return lock

    def is_held(self, key: Key) -> bool:
        lock = self.get(key)
        return lock is not None and lock.locked()
