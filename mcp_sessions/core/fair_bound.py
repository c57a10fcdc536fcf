"""Bound what one process holds for many clients, and choose what goes if it is too much.

Rules that must hold, and that ``tests/core/test_fair_bound.py`` owns:

1. Each client has a share: its user or, without authentication, its address (``calls/shares.py``).
2. If there is too much in all, the share with the most loses its oldest, in its session with the
   most.
3. Of equal ones the newcomer's loses. So a client loses nothing for another one that has as much.
   If it has nothing else, the newcomer is refused.
4. Each session of a share has a bound of its own, and loses its own oldest. What belongs to no
   session has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
Group = TypeVar("Group")

_Session = dict[T, int]
"""What is held of one session, oldest first, and its bytes."""


class FairBound(Generic[T]):
    """Holds things of many clients.

    Args:
        most: The most things in all.
        most_bytes: The most bytes in all.
        most_of_one: The most things of one session.
        most_bytes_of_one: The most bytes of one session.
    """

    def __init__(
        self,
        *,
        most: float,
        most_bytes: float = math.inf,
        most_of_one: float = math.inf,
        most_bytes_of_one: float = math.inf,
    ) -> None:
        self._most, self._most_of_one = most, most_of_one
        self._most_bytes, self._most_bytes_of_one = most_bytes, most_bytes_of_one
        self._owners: dict[T, tuple[Hashable, Hashable]] = {}
        self._held: dict[Hashable, dict[Hashable, _Session[T]]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, one: object) -> bool:
        return one in self._owners

    def count(self, share: Hashable) -> int:
        return _count(self._held.get(share, {}))

    def is_full(self, share: Hashable, session: Hashable) -> bool:
        """Whether a session has as many as one may have."""
        return len(self._held.get(share, {}).get(session, ())) >= self._most_of_one

    def add(self, one: T, share: Hashable, session: Hashable, size: int = 0) -> list[T]:
        """Hold one more.

        Args:
            one: Not held yet.
            share: Its client's.
            session: The session of that client that it belongs to. None: none.
            size: Its bytes.

        Returns:
            Those that go, which are held no more. If it is refused, it is the last of them.
        """
        self._owners[one] = share, session
        self._held.setdefault(share, {}).setdefault(session, {})[one] = size
        self._bytes += size
        gone: list[T] = []
        while one in self._owners and (loser := self._loser(share, session)) is not None:
            self.remove(loser)
            gone.append(loser)
        return gone

    def remove(self, one: T) -> bool:
        owner = self._owners.pop(one, None)
        if owner is None:
            return False
        share, session = owner
        sessions = self._held[share]
        self._bytes -= sessions[session].pop(one)
        if not sessions[session]:
            del sessions[session]
        if not sessions:
            del self._held[share]
        return True

    def _loser(self, share: Hashable, session: Hashable) -> T | None:
        own = self._held[share][session]
        is_large = _size_of_session(own) > self._most_bytes_of_one
        if session is not None and (len(own) > self._most_of_one or is_large):
            return next(iter(own))
        if len(self._owners) > self._most:
            sessions = _heaviest(self._held, share, _count)
            return next(iter(_heaviest(sessions, session, len)))
        if self._bytes > self._most_bytes:
            sessions = _heaviest(self._held, share, _size)
            return next(iter(_heaviest(sessions, session, _size_of_session)))
        return None


def _heaviest(
    groups: Mapping[Hashable, Group], newcomers: Hashable, weigh: Callable[[Group], int]
) -> Group:
    heaviest, own = max(groups.values(), key=weigh), groups.get(newcomers)
    return own if own is not None and weigh(own) >= weigh(heaviest) else heaviest


def _count(sessions: Mapping[Hashable, _Session[T]]) -> int:
    return sum(map(len, sessions.values()))


def _size(sessions: Mapping[Hashable, _Session[T]]) -> int:
    return sum(map(_size_of_session, sessions.values()))


def _size_of_session(session: _Session[T]) -> int:
    return sum(session.values())
