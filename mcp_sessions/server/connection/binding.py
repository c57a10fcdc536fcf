"""Define the port that every transport implements for the server.

A connection has a :class:`Transport`, and a request has a :class:`RequestChannel`. See also
:mod:`mcp_sessions.server.connection.connection`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.errors import Refusal, StoreUnavailable
from mcp_sessions.ids import Position, SessionId
from mcp_sessions.stores.records import Attached

ReadEvents = Callable[[str], Awaitable[tuple[Sequence[LoggedEvent], Refusal | None]]]


class RequestChannel(Protocol):
    @property
    def kind(self) -> str:
        """The transport of a message without a connection."""
        ...

    @property
    def encode(self) -> Callable[[Any], bytes]:
        """Write a message as this peer's entry does."""
        ...

    @property
    def cancels(self) -> bool:
        """Whether a broken response stream cancels a request without a key: the modern era over
        HTTP.
        """
        ...

    @property
    def is_admitted(self) -> bool:
        """Whether its transport refuses what comes once the process stops: this came before."""
        ...

    @property
    def is_answerable(self) -> bool:
        """Whether a client without a connection can be asked all the same, through another
        process.
        """
        ...

    @property
    def is_open(self) -> bool:
        """Whether somebody still listens there. Over HTTP a cut response stream is closed,
        even if its messages are kept for ``Last-Event-ID``.
        """
        ...

    on_closed: Callable[[], None]
    """Called when the channel closes before it was answered."""

    on_reopened: Callable[[], None]
    """Called when a client came back for a closed channel that was not answered yet."""

    follows: Callable[[], None] | None
    """Called once when the answer was handed to the network, or never can be."""

    close_stream: Callable[[], Awaitable[None]] | None
    """Closes the response stream so that the client comes back with ``Last-Event-ID``;
    None where it could not come back."""

    async def emit(self, message: bytes, key: str | None = None) -> None:
        """Send a notification or a request of ours, or keep it for a client that may come
        back for it. Waits for room, for ``SessionPolicy.slow_timeout`` at the most.

        Args:
            message: Encoded.
            key: It replaces the kept message with this key; None: it replaces nothing.
        """
        ...

    async def answer(
        self,
        message: bytes,
        *,
        code: int | None = None,
        away: StoreUnavailable | None = None,
        retry_after: float | None = None,
    ) -> None:
        """Send the answer. Called once; nothing follows it.

        Args:
            code: The error's code; None: it is a result.
            away: The store's failure, for which the request cannot be served (HTP5). If no response
                has begun, the response says so. None: it was served.
            retry_after: Seconds after which a request that a limit refused may be served.
        """
        ...


class Transport(Protocol):
    """The wire of one connection: the port that every binding implements.

    Only :meth:`drain` waits for the peer. Events that it does not take now wait in their session's
    log.
    """

    is_leaving: bool
    """The process stops, and this connection is served until nothing of it runs."""

    close_stream: Callable[[], Awaitable[None]] | None
    """Closes its GET stream so that the client comes back with ``Last-Event-ID``; None
    where there is none."""

    @property
    def is_taken(self) -> bool:
        """Whether something proves now that the client is there: what was sent to it was taken,
        and it would be noticed if it took nothing. A connection that is merely open proves nothing.
        """
        ...

    def begin(
        self, session_id: SessionId, attached: Attached, after: Position, read: ReadEvents
    ) -> None:
        """Attach a session. Events that wait here for an older attachment are withdrawn.

        Args:
            session_id: The session.
            attached: The store's answer.
            after: The position where the replay starts: the client's, or the head.
            read: The session's events after a position, or nothing and why; nothing either
                once it is attached at another replica.
        """
        ...

    def offer(self, session_id: SessionId, event: LoggedEvent) -> None:
        """Hand over, in order, a stored event of a session that is attached here."""
        ...

    def check_position(self, session_id: SessionId, head: Position | None) -> None:
        """Something may have been missed: read on, unless this is as far as was handed over.

        Args:
            session_id: The session.
            head: None: unknown; or read on anyway.
        """
        ...

    def send(self, draft: Draft) -> None: ...

    def withdraw(self, session_id: SessionId, *, has_ended: bool = False) -> None:
        """Drop unsent messages of a session, and send no more of it.

        Args:
            session_id: The session.
            has_ended: It has ended: who listens to it gets the reason why there is no more.
        """
        ...

    async def drain(self) -> None:
        """Wait until the peer took enough to hand over more, for
        ``SessionPolicy.slow_timeout`` at the most; then the slow stream is closed.
        """
        ...

    def hold(self) -> Callable[[], None]:
        """Send nothing until the returned function is called, once."""
        ...

    def cut(self) -> None:
        """End its event stream as a lost connection does: its client comes back."""
        ...

    def close(self) -> None:
        """End its streams, in order: the session behind it has ended, or the server stops."""
        ...
