"""Hold a call in rounds: which requests belong to it, and what becomes of it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mcp_sessions import method_names
from mcp_sessions.core.messages import encode, wire_error
from mcp_sessions.core.named import name_in
from mcp_sessions.errors import OutcomeUnknown
from mcp_sessions.seldom import Seldom
from mcp_sessions.server.upstream.call_in_rounds import CallInRounds
from mcp_sessions.server.upstream.port import NotAskable, PeerRequest, UpstreamCall, UpstreamError

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

_MOST = 256
"""Messages of one call that wait for its next round, the newest."""

_MOST_BYTES = 65_536
"""Bytes of them together."""


@dataclass(eq=False)
class HeldCall:
    call: CallInRounds
    owner: Hashable
    """Session or principal of the call."""

    what: Hashable
    """Client and object of the call, which each round has to match."""

    cancel: Callable[[], object]
    """Cancels its handler."""

    outcome: asyncio.Future[dict[str, Any]]
    share: Hashable = None
    """Its client's, by which it is bounded."""

    name: str | None = None
    """Its name while it waits for its client. None: it does not."""

    _largest: int = 0
    size: int = 0
    """Bytes of its largest request and its open questions."""

    _said: deque[tuple[str, Mapping[str, Any] | None, int]] = field(
        init=False, default_factory=deque[tuple[str, "Mapping[str, Any] | None", int]]
    )
    """Progress and log messages that its handler sent while no round was open."""

    def keeps(self, method: str, params: Mapping[str, Any] | None) -> bool:
        """Keep a message for the next round. False: a round is open, and its client gets it now."""
        if self.name is None and not self._said:
            return False
        self._said.append((method, params, len(encode(params))))
        while len(self._said) > _MOST or sum(size for *_, size in self._said) > _MOST_BYTES:
            self._said.popleft()
            logger.warning("a call says much while its client is asked: the oldest is left out")
        return True

    async def tells(self) -> None:
        """Send the newest request what was kept."""
        while self._said:
            # It stays until it is sent: what is said meanwhile comes after it.
            method, params, _ = self._said[0]
            if method == method_names.PROGRESS:
                await self.call.newest.report(params or {})
            else:
                await self.call.newest.notify(method, params)
            self._said.popleft()

    def asked(self, params: Mapping[str, Any] | None, questions: Mapping[str, Any]) -> None:
        self._largest = max(self._largest, len(encode(params or {})))
        self.size = self._largest + len(encode(questions))

    async def ask(self, asked: PeerRequest) -> dict[str, Any]:
        """Ask the client by the answer to its newest request.

        Raises:
            NotAskable: It does not accept the question.
            PeerError: See :meth:`Outbound.send_request`.
        """
        if not self.call.may_ask(asked):
            raise NotAskable(asked.method)
        return await self.call.send_request(asked)

    def ends(self, result: dict[str, Any] | None, error: dict[str, Any] | None) -> None:
        if not self.outcome.done():
            if result is not None:
                self.outcome.set_result(result)
            else:
                self.outcome.set_exception(UpstreamError(error or wire_error(OutcomeUnknown())))
        self.call.end()


def what_of(
    call: UpstreamCall, owner: Hashable, method: str, params: Mapping[str, Any] | None
) -> Hashable:
    return call.principal, owner, method, name_in(method, params)


def new_outcome() -> asyncio.Future[dict[str, Any]]:
    """Return a future whose error nobody has to fetch."""
    outcome: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    outcome.add_done_callback(lambda it: it.cancelled() or it.exception())
    return outcome
