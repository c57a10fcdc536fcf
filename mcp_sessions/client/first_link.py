"""The first link: opened for the first request of all, at the first address that takes it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from mcp_sessions import method_names
from mcp_sessions.client import explaining
from mcp_sessions.client.application import Application
from mcp_sessions.client.dialer import CONNECTION_CLOSED, Failed, Failure, Link
from mcp_sessions.client.recovery import Recovery
from mcp_sessions.client.requests import PendingRequest
from mcp_sessions.client.sending import Sender
from mcp_sessions.client.state import ClientState, LinkChange, Phase, Runtime
from mcp_sessions.core.resume import AWAY, FailureCause

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Opening:
    _runtime: Runtime
    _state: ClientState
    _app: Application
    _recovery: Recovery
    _sender: Sender
    _failures: int = 0
    """At how many addresses the first request of all got nowhere."""

    async def open_for(self, pending: PendingRequest) -> bool:
        """Open a link for the first request; False: there is none, and it has its answer."""
        state = self._state
        state.apply(LinkChange.OPEN)
        reason = ""
        for _ in range(len(state.addresses)):
            try:
                state.use(await self._recovery.connector.connect(state.addresses.current))
            except Failed as failed:
                # For who sees no more than the log: one is notified of the last address only.
                logger.warning("%s", failed)
                reason = str(failed)
                state.addresses.move_on()
            else:
                state.apply(LinkChange.OPENED)
                return True
        state.apply(LinkChange.NOT_OPENED)
        text = explaining.not_sent(pending.message, reason)
        await self._app.answer(pending, CONNECTION_CLOSED, text)
        return False

    def failed(self, link: Link, pending: PendingRequest, failure: Failure) -> bool:
        state = self._state
        if state.phase is not Phase.OPEN or pending.method not in method_names.OPENING:
            return False
        is_refused = failure.cause is FailureCause.STATUS and failure.status not in AWAY
        if not is_refused or pending.method == method_names.INITIALIZE:
            logger.warning("%s", failure.explanation)
        if is_refused:
            return False
        self._failures += 1
        if self._failures >= len(state.addresses):
            return False
        state.addresses.move_on()
        state.apply(LinkChange.OPEN)
        # Not here: a task of the link called this, and ends with it.
        self._runtime.tasks.start_soon(self._open_another_link, link, pending)
        return True

    async def _open_another_link(self, link: Link, pending: PendingRequest) -> None:
        await link.close(leave=False)
        if await self.open_for(pending):
            pending.forget_sending()
            await self._sender.request(pending)
