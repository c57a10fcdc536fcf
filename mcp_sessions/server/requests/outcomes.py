"""How a request ended: what is kept of that, and what each of its waiters is answered."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from mcp_sessions.core.messages import error_body, error_outcome, result_outcome
from mcp_sessions.errors import INTERNAL_ERROR, SessionsError
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.server.delivery.owed import Owed
from mcp_sessions.server.requests.running import RunningRequest, Waiter
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import SessionRecord

logger = logging.getLogger(__name__)

_MOST_OWED = 16_777_216
"""Bytes of outcomes that wait for a store that is away; of what ends then only the end is kept."""

_NOT_JSON = (TypeError, ValueError, RecursionError)
"""What JSON writers raise for a value that they cannot write."""

Stamp = Callable[[dict[str, Any], SessionRecord], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A result or, if that is None, an error."""

    result: dict[str, Any] | None
    error: dict[str, Any] | None
    is_away: bool = False
    """The error is that the store is away, and nothing ran."""


class Outcomes:
    """Keeps them, and writes them."""

    def __init__(
        self,
        store: SessionStore,
        policy: SessionPolicy,
        clock: Callable[[], float],
        owed: Owed,
        stamp: Stamp,
    ) -> None:
        """Those of one server.

        Args:
            stamp: Adds the session's ``_meta`` to a result.
        """
        self._store = store
        self._clock = clock
        self._owed = owed
        self._stamp = stamp
        self._rarely = policy.idle_timeout / 100

    async def keep(self, running: RunningRequest, outcome: Outcome) -> None:
        """Store what becomes of the request's key, and move its sessions' deadlines.

        Raises:
            StoreUnavailable: No deadline was moved; the key's outcome is owed to the store.
        """
        now = self._clock()
        session_id = running.session_id
        if session_id is not None and running.key is not None:
            kept = self._encoded(running, outcome)
            size = len(kept) if kept is not None else 0
            if size and self._owed.size + size > _MOST_OWED:
                kept, size = None, 0
            finish = partial(self._store.finish_request, session_id, running.key, kept, now=now)
            await self._owed.settle({("finish", session_id, running.key): finish}, size=size)
        # Idle time counts from the end of the last request (SES14). Admission moved
        # the deadline already; a store is written again only if that was a while ago.
        if now - running.started_at > self._rarely:
            await self._store.touch(running.sessions, now=now)

    def _encoded(self, running: RunningRequest, outcome: Outcome) -> bytes | None:
        try:
            if outcome.result is not None:
                return result_outcome(outcome.result)
            return error_outcome(outcome.error or {})
        except _NOT_JSON:
            logger.exception("the outcome of %s cannot be kept", running.request.method)
            return None

    def answer(
        self, running: RunningRequest, waiter: Waiter, outcome: Outcome
    ) -> tuple[bytes, int | None]:
        """The answer for one waiter, and its error's code."""
        inbound, request_id, record = waiter.inbound, waiter.request.id, running.record
        result, error = outcome.result, outcome.error or {}
        if result is not None:
            try:
                if waiter.named and record is not None:
                    result = self._stamp(result, record)
                if waiter is not running.waiters[0]:
                    result = inbound.of_its_era(result)
                return inbound.result(request_id, result), None
            except (SessionsError, *_NOT_JSON):
                logger.exception("the result of %s cannot be sent", running.request.method)
                error = error_body(INTERNAL_ERROR, "Internal error")
        try:
            return inbound.error(request_id, error), error.get("code")
        except _NOT_JSON:
            logger.exception("the error of %s cannot be sent", running.request.method)
            internal = error_body(INTERNAL_ERROR, "Internal error")
            return inbound.error(request_id, internal), INTERNAL_ERROR
