"""Bound the requests that run on while nobody listens for their answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from mcp_sessions.background import Background
from mcp_sessions.core.messages import wire_error
from mcp_sessions.core.without_listener import WithoutListener
from mcp_sessions.errors import OutcomeUnknown
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.server.calls.table import Run

logger = logging.getLogger(__name__)

IN_BACKGROUND = "a background task of a request"
"""Names such work in the log."""


class DetachedRequests:
    def __init__(self, policy: SessionPolicy, background: Background) -> None:
        self._policy = policy
        self._timeout = policy.detached_timeout
        self._background = background
        self._without_listener = WithoutListener[Run](
            most=policy.max_detached_requests,
            most_of_one=policy.max_detached_requests_per_session,
        )
        self._timers: dict[Run, asyncio.TimerHandle] = {}
        self.runs: Mapping[Run, object] = self._timers
        """Those that nobody listens for."""

    def __len__(self) -> int:
        return len(self._without_listener)

    def add(self, run: Run) -> None:
        """Start the time of a run without listeners. To add it again changes nothing."""
        if run in self._without_listener:
            return
        principal = run.waiters[0].inbound.principal
        given_up = self._without_listener.add(run, principal, next(iter(run.sessions), None))
        loop = asyncio.get_running_loop()
        self._timers[run] = loop.call_later(self._timeout, self._give_up, run)
        if given_up is not None:
            self.remove(given_up)
            self._make_room(given_up)

    def remove(self, run: Run) -> None:
        self._without_listener.remove(run)
        timer = self._timers.pop(run, None)
        if timer is not None:
            timer.cancel()

    def _give_up(self, run: Run) -> None:
        logger.warning(
            "%s ran %g seconds without a client (detached_timeout); it is cancelled",
            run.waiters[0].request.method,
            self._timeout,
        )
        self._cancel(run)

    def _make_room(self, run: Run) -> None:
        logger.warning(
            "%s ran without a client, and is cancelled to make room for others. "
            "max_detached_requests is %d, max_detached_requests_per_session is %d",
            run.waiters[0].request.method,
            self._policy.max_detached_requests,
            self._policy.max_detached_requests_per_session,
        )
        self._cancel(run)

    def _cancel(self, run: Run) -> None:
        self._background.run(IN_BACKGROUND, run.abort(wire_error(OutcomeUnknown())))
