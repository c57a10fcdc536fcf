"""Bound what one principal uses of this process: requests a second, and open calls.

Rules, owned by ``tests/server/calls/test_shares.py``:

1. A user has one share, however many clients act for the user: a client may register itself as
   often as it likes. Without authentication the client's address has the share.
2. Only requests are refused. An answer and a cancellation always arrive.
3. A refused request has no effect, and does not count.
4. The program at standard input has no such limit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from mcp_sessions.core.addresses import address_of
from mcp_sessions.core.buckets import Buckets
from mcp_sessions.errors import LimitReached
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS, Principal

_OPEN = 1.0
"""Seconds after which a client at its limit of open calls may try again."""


class Shares:
    def __init__(self, policy: SessionPolicy, clock: Callable[[], float]) -> None:
        rate = policy.max_requests_per_principal
        self._buckets = Buckets(rate) if rate is not None else None
        self._most = policy.max_calls_per_principal
        self._clock = clock
        self._open: dict[Hashable, int] = {}
        """Principal → its open calls. One without any is not there."""

    def take(self, principal: Principal, scope: Mapping[str, Any] | None) -> Hashable:
        """Count a request that has arrived.

        Returns:
            Its owner; None: it has no limit.

        Raises:
            LimitReached: Its principal sends too many, or has too many open.
        """
        owner = share_of(principal, scope)
        if owner is None:
            return None
        if self._most is not None and self._open.get(owner, 0) >= self._most:
            raise LimitReached("max_calls_per_principal", self._most, _OPEN)
        if self._buckets is not None:
            wait = self._buckets.take(owner, self._clock())
            if wait:
                raise LimitReached("max_requests_per_principal", self._buckets.rate, wait)
        return owner

    def opened(self, principal: Principal, scope: Mapping[str, Any] | None) -> Hashable:
        owner = self.take(principal, scope)
        if owner is not None and self._most is not None:
            self._open[owner] = self._open.get(owner, 0) + 1
        return owner

    def closed(self, owner: Hashable) -> None:
        if self._most is None:
            return
        left = self._open[owner] - 1
        if left:
            self._open[owner] = left
        else:
            del self._open[owner]


def shares_of(policy: SessionPolicy, clock: Callable[[], float]) -> Shares | None:
    limits = (policy.max_requests_per_principal, policy.max_calls_per_principal)
    return None if limits == (None, None) else Shares(policy, clock)


def share_of(principal: Principal, scope: Mapping[str, Any] | None) -> Hashable:
    return principal.user if principal != ANONYMOUS else address_of(scope)
