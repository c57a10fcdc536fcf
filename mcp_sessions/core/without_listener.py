"""Choose the call to stop when too many calls run after their connections broke.

Rules that must hold, and that ``tests/core/test_without_listener.py`` owns:

1. Each session has its own bound: its own oldest call is stopped.
2. The bound over all calls is the last resort, and fair. It takes the principal with the most
   calls, the session of it with the most calls, and the oldest call of that session. Principals
   with few calls lose none to a principal with many.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class WithoutListener(Generic[T]):
    """Lists the calls that run without a connection, oldest first.

    Args:
        most: The most calls in all.
        most_of_one: The most calls of one session.
    """

    def __init__(self, *, most: int, most_of_one: int) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._owners: dict[T, tuple[Hashable, Hashable]] = {}
        self._kept: dict[Hashable, dict[Hashable, dict[T, None]]] = {}
        self._counts: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, one: object) -> bool:
        return one in self._owners

    def add(self, one: T, principal: Hashable, session: Hashable) -> T | None:
        """Hold one more.

        Args:
            one: Not held yet.
            principal: The principal that asked for it.
            session: That principal's session that it belongs to.

        Returns:
            The call that is removed to make room; None: no call.
        """
        self._owners[one] = (principal, session)
        of_session = self._kept.setdefault(principal, {}).setdefault(session, {})
        of_session[one] = None
        self._counts[principal] = self._counts.get(principal, 0) + 1
        if len(of_session) <= self._most_of_one:
            if len(self._owners) <= self._most:
                return None
            # max() answers the first of equals: who came first, as the oldest goes first.
            sessions = self._kept[max(self._counts, key=self._counts.__getitem__)]
            of_session = max(sessions.values(), key=len)
        oldest = next(iter(of_session))
        self.remove(oldest)
        return oldest

    def remove(self, one: T) -> bool:
        owner = self._owners.pop(one, None)
        if owner is None:
            return False
        principal, session = owner
        sessions = self._kept[principal]
        del sessions[session][one]
        if not sessions[session]:
            del sessions[session]
        self._counts[principal] -= 1
        if not sessions:
            del self._kept[principal], self._counts[principal]
        return True
