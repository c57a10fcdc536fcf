"""Define the port that each transport's client side implements.

A *link* is a way to one server that was opened once: a WebSocket, a child's pipes, or every request
to one URL, with its transport session if there is one. It carries raw JSON-RPC messages and knows
nothing of sessions, keys or back-off across links.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from anyio.abc import TaskStatus

from mcp_sessions.core.messages import Json, RequestId
from mcp_sessions.core.resume import FailureCause

CONNECTION_CLOSED = -32000
"""The SDK's code for a request that a lost connection leaves without an answer."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a request has no answer, or why a link ended. The text holds no secret."""

    cause: FailureCause
    explanation: str
    status: int | None = None
    """The HTTP status, or that which says the same; None: neither."""

    retry_after: float | None = None
    """Seconds that the server asked to wait."""

    error: Json | None = None
    """The JSON-RPC error that a stock transport would give its application."""

    is_answer: bool = False
    """``error`` came from the server, as the answer to this very request."""

    never_ran: bool = False
    """The transport proves that the request did not run. No text is such a proof."""

    may_return: bool = True
    """False: the server said that coming back is of no use."""


class Failed(Exception):
    """The message was not sent, or the link was not opened."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.explanation)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Received:
    message: Json


@dataclass(frozen=True, slots=True)
class Unanswered:
    request_id: RequestId
    failure: Failure


@dataclass(frozen=True, slots=True)
class AnswerTooLarge:
    """The server does not take so large an answer to its question."""

    question_id: RequestId


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request's response began as a stream: the server did not refuse it outright."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class StreamReopened:
    """The notification stream was cut and is open again (HTTP)."""

    continued: bool
    """With ``Last-Event-ID``: the server continues after the last event. False only if no session
    can be resumed."""

    was_lost: bool = True
    """It broke, or could not be opened; False: the server ended it in order."""


@dataclass(frozen=True, slots=True)
class StreamUnsure:
    """The notification stream was cut and cannot continue: it would skip events (HTTP). It is
    closed.
    """


@dataclass(frozen=True, slots=True)
class StreamBroke:
    """The notification stream was open and is lost (HTTP); the link opens it again."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class StreamFailed:
    """The notification stream was lost and cannot be opened again, or the server no longer knows
    the link's transport session (HTTP).
    """

    failure: Failure


@dataclass(frozen=True, slots=True)
class Missed:
    """A message was too large and was dropped. It answered no request: it may be an event."""


@dataclass(frozen=True, slots=True)
class Down:
    failure: Failure


Event = (
    Received
    | Unanswered
    | AnswerTooLarge
    | Accepted
    | StreamReopened
    | StreamUnsure
    | StreamBroke
    | StreamFailed
    | Missed
    | Down
)


@dataclass(frozen=True, slots=True)
class LinkSettings:
    has_sessions: bool = False
    """Notice silence on streams, and keep reopening the notification stream."""

    may_resume: bool = True
    """A session can be resumed on another link."""

    has_keys: bool = False
    """A cut response is reported at once: the request is sent again with its key, and no
    ``Last-Event-ID`` is needed for it."""

    protocol_version: str | None = None
    """The agreed version; over HTTP a header repeats it."""

    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """The headers of each HTTP request, and of a WebSocket's handshake."""


class Link(Protocol):
    kind: str
    """``http``, ``websocket`` or ``stdio``."""

    name: str
    """Its server's URL or command, without credentials: for logs and outcomes."""

    async def run(self, sink: Sink, *, task_status: TaskStatus[None]) -> None:
        """Open the link, say that it started, and hand over what comes until it is closed.

        Events of one stream are handed over one by one, in order.

        Raises:
            Failed: It could not be opened.
        """
        ...

    async def send(self, message: Json, headers: Mapping[str, str]) -> None:
        """Send one message. Returns when a request is on its way and when the server took
        anything else.

        Args:
            headers: For HTTP only.

        Raises:
            Failed: It was not sent, or nobody knows.
        """
        ...

    def configure(self, settings: LinkSettings) -> None:
        """Take the settings: before it runs, and again when more is known of the server."""
        ...

    def listen(self) -> None:
        """Open the notification stream, where that is a stream of its own. Called when the
        settings are known, and again, to no effect, whenever they are.
        """
        ...

    def abandon(self, request_id: RequestId) -> None:
        """Note that the answer to a request is no longer wanted."""
        ...

    async def close(self, *, leave: bool) -> None:
        """Close it; ``run`` returns, without a `Down`.

        Args:
            leave: Tell the server that the transport session has ended.
        """
        ...


Sink = Callable[[Link, Event], Awaitable[None]]
"""Takes what comes on a link."""


class Dialer(Protocol):
    target: str
    """Names the server for the jar: never with credentials in it."""

    def link(self) -> Link: ...
