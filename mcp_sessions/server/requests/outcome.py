from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable
from functools import partial
from typing import Any

from mcp_sessions.core.messages import error_body, error_outcome, result_outcome, wire_error
from mcp_sessions.errors import (
    INTERNAL_ERROR,
    STORE_UNAVAILABLE,
    NotBegun,
    OutcomeUnknown,
    StoreUnavailable,
)
from mcp_sessions.ids import RequestKey, SessionId
from mcp_sessions.server.calls.table import NOT_JSON, Outcome
from mcp_sessions.server.cluster.replica import Replica
from mcp_sessions.server.delivery.pending_writes import PendingWrites
from mcp_sessions.stores.records import SessionRecord

logger = logging.getLogger(__name__)

Stamp = Callable[[dict[str, Any], SessionRecord], dict[str, Any]]
"""Adds a session's ``_meta`` to a result."""


class Outcomes:
    def __init__(self, replica: Replica, pending_writes: PendingWrites, *, stamp: Stamp) -> None:
        self._store, self.policy, self.clock = (
            replica.store,
            replica.policy,
            replica.clock,
        )
        self._pending_writes, self.stamp = pending_writes, stamp

    async def keep(
        self, session_id: SessionId, key: RequestKey, outcome: Outcome, method: str
    ) -> None:
        """Store the outcome of a request's key, now or when the store is back."""
        kept = _encoded(outcome, method)
        finish = partial(self._store.finish_request, session_id, key, now=self.clock())
        await self._pending_writes.settle(
            {_finish(session_id, key): partial(finish, kept)},
            owner=session_id,
            size=len(kept) if kept is not None else 0,
            lost=lambda: partial(finish, None),
        )

    async def flush(self, session_id: SessionId, key: RequestKey) -> bool:
        """Store an outcome that waits for the store; False: none waits.

        Raises:
            StoreUnavailable: It still waits.
        """
        return await self._pending_writes.flush(_finish(session_id, key))

    async def touch(self, sessions: Collection[SessionId]) -> None:
        """Move the deadlines of sessions in which a long request ended.

        Raises:
            StoreUnavailable: None was moved.
        """
        await self._store.touch(sessions, now=self.clock())

    async def newest(self, record: SessionRecord | None) -> SessionRecord | None:
        """Return a session as it is now (ASC14): a handler may have changed it in another process.
        If the store is away, or keeps nothing, the record is returned.
        """
        if record is None:
            return None
        try:
            return await self._store.load(record.session_id, now=0) or record
        except StoreUnavailable:
            return record


def _finish(session_id: SessionId, key: RequestKey) -> Hashable:
    return "finish", session_id, key


def _encoded(outcome: Outcome, method: str) -> bytes | None:
    """Encode an outcome for the store; None: JSON cannot represent it.

    Args:
        method: The method of its request, for the log.
    """
    try:
        if outcome.result is not None:
            return result_outcome(outcome.result)
        return error_outcome(outcome.error or {})
    except NOT_JSON:
        logger.exception("the outcome of %s cannot be kept", method)
        return None


def store_error(failed: StoreUnavailable) -> dict[str, Any]:
    """Return the error of a request that the store failed: whether it began (ERR17)."""
    if not isinstance(failed, NotBegun):
        return {**wire_error(OutcomeUnknown()), "data": {"reason": STORE_UNAVAILABLE}}
    data = {"reason": STORE_UNAVAILABLE, "started": False}
    return error_body(INTERNAL_ERROR, failed.client_text, data)
