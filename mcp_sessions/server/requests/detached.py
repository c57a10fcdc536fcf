"""Requests that nobody listens for any more: how long, and how many of them may run on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mcp_sessions.core.unheard import Unheard
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.server.requests.running import RunningRequest


class DetachedRequests:
    """Bounds them in time and in number."""

    def __init__(self, policy: SessionPolicy, give_up: Callable[[RunningRequest], None]) -> None:
        self._timeout = policy.detached_timeout
        self._give_up = give_up
        self._unheard = Unheard[RunningRequest](
            most=policy.max_detached_requests,
            most_of_one=policy.max_detached_requests_per_session,
        )
        self._timers: dict[RunningRequest, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._unheard)

    def add(self, running: RunningRequest) -> None:
        """A waiter of the request is gone; if it was the last, its time begins."""
        if running.done or running.is_heard or running in self._unheard:
            return
        principal = running.waiters[0].inbound.principal
        given_up = self._unheard.add(running, principal, next(iter(running.sessions), None))
        loop = asyncio.get_running_loop()
        self._timers[running] = loop.call_later(self._timeout, self._give_up, running)
        if given_up is not None:
            self.remove(given_up)
            self._give_up(given_up)

    def remove(self, running: RunningRequest) -> None:
        """Somebody listens for the request again, or it is over."""
        self._unheard.remove(running)
        timer = self._timers.pop(running, None)
        if timer is not None:
            timer.cancel()
