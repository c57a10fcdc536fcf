"""Hold a call in rounds: which requests belong to it, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from mcp_sessions.core.messages import encode, wire_error
from mcp_sessions.core.named import name_in
from mcp_sessions.errors import OutcomeUnknown
from mcp_sessions.server.upstream.call_in_rounds import CallInRounds
from mcp_sessions.server.upstream.port import NotAskable, PeerRequest, UpstreamCall, UpstreamError


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
