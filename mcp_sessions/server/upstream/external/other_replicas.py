"""Reach the children of sessions in other replicas: the port that ``external/`` uses.

A session's child is in one process. A shared record says which process has it. The record is read
before each request, and again if the request waits longer than a lease lasts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from mcp_sessions.core.named import NAMED
from mcp_sessions.ids import SessionId
from mcp_sessions.server.upstream.accepted_questions import Askable
from mcp_sessions.server.upstream.external.child_requests import RequestSender
from mcp_sessions.server.upstream.port import UpstreamCall, Wanted

ServedResult = tuple[dict[str, Any], Mapping[str, Any]]
"""Result of a request, and the child's answer to ``initialize``."""


class Moved(Exception):
    """The child is in another process by now. The request was not sent."""


@dataclass(frozen=True, slots=True)
class Lease:
    session_id: SessionId
    holder: str
    is_here: bool
    until: float
    """Seconds of the event loop's clock until which no other process can have it."""

    inherited: Wanted | None
    """Subscriptions and log level of the session, if the process that had the child died. None: no
    other process had it.
    """


class RemoteRequest(NamedTuple):
    client: Mapping[str, Any]
    """Params of ``initialize``, if a child is started for it."""

    method: str | None
    """None: a child is started if there is none, and gets no request."""

    params: dict[str, Any] | None
    level: str | None
    """Lowest log level that is sent to the client. None: no log messages."""

    asks: Askable | None = None
    """Requests that a modern-era client accepts in results. None: a client of the handshake era."""

    @property
    def sender(self) -> RequestSender | None:
        if self.asks is None:
            return None
        return RequestSender(self.client, self.level, bool(self.asks) and self.method in NAMED)


class OtherReplicas(Protocol):
    async def lease(self, session_id: SessionId) -> Lease:
        """Find the process that has that session's child, and claim it if no living process has.

        Raises:
            UpstreamError: The session has ended.
            StoreUnavailable: It is unknown.
        """
        ...

    async def check(self, lease: Lease) -> None:
        """Check that this process still has the child.

        Raises:
            Moved: Another process has it.
            StoreUnavailable: It is unknown.
        """
        ...

    async def ask(self, lease: Lease, call: UpstreamCall, asked: RemoteRequest) -> ServedResult:
        """Send a request to a child that another process has.

        Raises:
            Moved: The child is in another process by now.
            UpstreamError: The child's error. -31012: the outcome is unknown.
        """
        ...

    async def notify(
        self, session_id: SessionId, method: str, params: dict[str, Any] | None
    ) -> bool:
        """Notify a child that another process has. False: no other process has it.

        Raises:
            StoreUnavailable: It is unknown whether the child was notified.
        """
        ...

    def release(self, session_id: SessionId) -> None: ...
