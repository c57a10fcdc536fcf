"""Define the wire of a child: a process has pipes, a URL has requests (``command.py``, ``url.py``).

A :class:`~mcp_sessions.server.upstream.external.child.Child` is a wire and an era. The wire writes,
streams and closes. It gives each message that comes to the child.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from mcp_sessions.background import Background
from mcp_sessions.server.upstream.external.child_requests import Waiting
from mcp_sessions.server.upstream.external.receiver import Client
from mcp_sessions.server.upstream.external.server_stream import ReadStream, StreamReceiver
from mcp_sessions.server.upstream.external.unreadable import Unreadable
from mcp_sessions.server.upstream.port import UpstreamCall

Later = Callable[[], Coroutine[Any, Any, None]]
"""Work that has to be done, and may wait."""

SendOnce = Callable[[Mapping[str, Any]], Coroutine[Any, Any, dict[str, Any]]]
"""Sends a request with these params once, under an id of its own, and returns its result."""


class ChildConnection(Protocol):
    background: Background
    """Its tasks. They end with it."""

    @property
    def client(self) -> Client: ...

    @property
    def result(self) -> Mapping[str, Any]:
        """Result of ``initialize``. Empty: there is none yet."""
        ...

    @property
    def capabilities(self) -> Mapping[str, Any]: ...

    @property
    def level(self) -> str | None:
        """Lowest log level that it was set to. None: it decides itself."""
        ...

    @property
    def subscribed(self) -> set[str]: ...

    @property
    def is_modern(self) -> bool: ...

    @property
    def has_ended(self) -> bool: ...

    @property
    def failure(self) -> str:
        """Fault of the child that ended it, if there was one."""
        ...

    # --- for a wire ------------------------------------------------------------------------------

    def take(self, line: bytes, about: Waiting | None = None) -> Later | None:
        """Handle a message of the child.

        Args:
            about: The request on whose response the message comes. None: on none.

        Returns:
            Work that has to be done before the next message is handled.
        """
        ...

    def cannot_read(self, said: Unreadable, size: int) -> None:
        """Handle a text that is no message. If it answers a request, the request fails.

        Args:
            size: Its bytes, if they are noise.
        """
        ...

    def dropped(self, said: Unreadable, longest: int) -> bool:
        """Handle a message that is too large to be read. False: its kind is unknown.

        Args:
            longest: Bytes of a message, at most.
        """
        ...

    def leave_out(self, longest: int) -> None: ...

    def fail(self, waiting: Waiting, why: str) -> None: ...

    def warn(self, kind: str, text: str) -> None:
        """Log the first message of a kind. A server may repeat its fault without a bound."""
        ...

    def breaks(self, failure: str) -> None: ...

    def forget(self) -> None:
        """Accept no more requests: it has ended, or ends."""
        ...

    def give_up(self) -> None:
        """Fail all open requests: it has ended."""
        ...

    # --- for an era ------------------------------------------------------------------------------

    def next_id(self) -> int: ...

    async def exchange(
        self,
        request_id: int,
        call: UpstreamCall | None,
        method: str,
        params: Mapping[str, Any] | None,
    ) -> dict[str, Any]: ...

    def was_answered(self) -> None:
        """Note that it answers requests, so that a broken stream may work again."""
        ...

    def is_set_to(self, level: str | None) -> None: ...

    async def reopen_stream(self) -> None:
        """Open the stream of its own messages again, for all wanted changes."""
        ...

    def end_listen(self, request_id: object) -> None:
        """End a listen of the layer, which the child cancelled."""
        ...


class ChildWire(Protocol):
    def begin(self, child: ChildConnection) -> None:
        """Give the child each message from now on. Called once, before anything is sent."""
        ...

    def given_to(self, client: Client) -> None: ...

    def room(self) -> Coroutine[Any, Any, None] | None:
        """Return a wait for space to send more, which raises nothing. None: there is space."""
        ...

    def submit(self, waiting: Waiting, message: Mapping[str, Any]) -> None: ...

    def write(self, message: bytes) -> None:
        """Send a message that is no request. Never waits."""
        ...

    async def hand_over(self, message: bytes) -> None:
        """Send a message of a client that is no request, after those before it."""
        ...

    async def around(
        self, exchange: SendOnce, method: str, params: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Send a request of the modern era, with what the wire adds to it, and return its
        result.
        """
        ...

    def stream(self) -> ReadStream | None:
        """Return the stream of the child's own messages in the handshake era, not opened yet. None:
        it needs no stream.
        """
        ...

    async def listen(
        self,
        request_id: int,
        params: dict[str, Any],
        receiver: StreamReceiver,
        *,
        is_acknowledged: Callable[[], bool],
    ) -> float | None:
        """Send a listen of the modern era, and read its stream to its end; see :data:`ReadStream`.

        Args:
            is_acknowledged: Returns whether the listen was acknowledged.
        """
        ...

    def noise(self, size: int, why: str) -> None:
        """Handle bytes that are no message and answer nothing."""
        ...

    def memory(self) -> int | None:
        """Return the bytes that it takes on this machine. None: none, or the system does not say
        it.
        """
        ...

    async def stop(self) -> None: ...

    def kill(self) -> None: ...

    async def last_words(self) -> str:
        """Return how the child ended, in words for a client."""
        ...
