from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mcp_sessions.core.messages import Answer, RequestId, error_body
from mcp_sessions.errors import INTERNAL_ERROR
from mcp_sessions.server.upstream.port import OnProgress, UpstreamCall, UpstreamError

NOT_STARTED = "not_started"
"""Reason in the error of a request that was not sent."""

ANSWERING = 10.0
"""Seconds that a child has to answer a request of the layer that precedes a client's request. After
that the client's request continues without it.
"""


Later = Callable[[], Coroutine[Any, Any, None]]
"""Work that has to be done, and may wait."""


@dataclass(frozen=True, slots=True)
class RequestSender:
    client: Mapping[str, Any]
    """Params that its ``initialize`` would have."""

    level: str | None
    """Lowest log level that it wants meanwhile. None: no log messages."""

    is_asked: bool = False
    """Whether it accepts questions during the request."""


@dataclass(slots=True)
class Waiting:
    request_id: RequestId
    future: asyncio.Future[Answer]
    call: UpstreamCall | None
    """None: the request is the layer's own."""


class Forgotten(UpstreamError):
    """The child has ended, and did not run the request."""

    def __init__(self) -> None:
        data = {"reason": NOT_STARTED, "started": False}
        super().__init__(error_body(INTERNAL_ERROR, "the server ended its session", data))


class NotStarted(UpstreamError):
    """There is no child to send the request to."""


class ChildRefused(UpstreamError):
    """The server itself answered with that error."""


def raised_anew(failed: UpstreamError, error: dict[str, Any] | None = None) -> UpstreamError:
    """Copy an error for one of several callers. A raised exception keeps the frames of its caller
    alive.

    Args:
        error: Replaces its error.
    """
    kind = ChildRefused if isinstance(failed, ChildRefused) else UpstreamError
    return kind(error if error is not None else failed.error)


class Client(Protocol):
    @property
    def is_one_client(self) -> bool:
        """Whether only one client ever asks there."""
        ...

    def label(self) -> str: ...

    async def notified(
        self, method: str, params: dict[str, Any] | None, about: UpstreamCall | None = None
    ) -> None:
        """Take a notification of the child. Raises nothing: a fault of a receiver does not end the
        child.

        Args:
            about: The request that caused it. None: unknown.
        """
        ...

    async def reported(self, call: UpstreamCall, params: dict[str, Any]) -> None:
        """Take progress of a request.

        Args:
            params: Those of the notification, without the token.
        """
        ...

    async def asked(
        self,
        method: str,
        params: dict[str, Any] | None,
        on_progress: OnProgress | None,
        about: UpstreamCall | None = None,
    ) -> dict[str, Any]:
        """Take a question of the child to its client, and return the answer.

        Args:
            about: See :meth:`notified`.

        Raises:
            PeerError: See :meth:`Outbound.send_request`.
        """
        ...
