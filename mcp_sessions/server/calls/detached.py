"""Bound the requests that run on while nobody listens for their answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from mcp_sessions.background import Background
from mcp_sessions.core.fair_bound import FairBound
from mcp_sessions.core.messages import wire_error
from mcp_sessions.errors import OutcomeUnknown
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.seldom import Seldom
from mcp_sessions.server.calls.shares import share_of
from mcp_sessions.server.calls.table import Run, load_of

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

IN_BACKGROUND = "a background task of a request"
"""Names such work in the log."""


class DetachedRequests:
    def __init__(self, policy: SessionPolicy, background: Background) -> None:
        self._policy = policy
        self._timeout = policy.detached_timeout
        self._background = background
        self._bound = FairBound[Run](
            most=policy.max_detached_requests,
            most_of_one=policy.max_detached_requests_per_session,
        )
        self._timers: dict[Run, asyncio.TimerHandle] = {}
        self.runs: Mapping[Run, object] = self._timers
        """Those that nobody listens for."""

    def __len__(self) -> int:
        return len(self._bound)

    def add(self, run: Run) -> None:
        """Start the time of a run without listeners. To add it again changes nothing."""
        if run in self._bound:
            return
        inbound = run.waiters[0].inbound
        principal, share = inbound.principal, share_of(inbound.principal, inbound.scope)
        session = load_of(next(iter(run.sessions), None), principal)
        loop = asyncio.get_running_loop()
        self._timers[run] = loop.call_later(self._timeout, self._give_up, run)
        for given_up in self._bound.add(run, share, session):
            self.remove(given_up)
            self._make_room(given_up)

    def remove(self, run: Run) -> None:
        self._bound.remove(run)
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
