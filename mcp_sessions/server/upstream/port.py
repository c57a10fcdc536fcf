"""The port to the wrapped MCP server, as one session sees it.

Behind it is the SDK (``sdk/``), or child processes (``stdio/``). Nothing here knows
which. Messages are JSON-RPC methods and params, as plain dictionaries.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from opentelemetry.trace import Span

from mcp_sessions.core.messages import RequestId, error_body
from mcp_sessions.errors import INTERNAL_ERROR, StoreUnavailable
from mcp_sessions.ids import SessionId
from mcp_sessions.principal import Principal
from mcp_sessions.stores.records import Peer, SessionRecord

OnProgress = Callable[[float, float | None, str | None], Awaitable[None]]


class UpstreamError(Exception):
    """The wrapped server answered with an error: a JSON-RPC error object."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error.get("code"))
        self.error = error


class StoreFailedHandler(UpstreamError):
    """The store failed a handler, which ended with that.

    It began, and may have had effects. So it is not 503, upon which a client sends a request again
    (HTP5).
    """

    def __init__(self, failed: StoreUnavailable) -> None:
        super().__init__(error_body(INTERNAL_ERROR, "the session store failed during the request"))
        self.failed = failed


class PeerError(Exception):
    """A request to the client failed: its error, or the reason why it cannot be asked."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """What a client is asked.

    Args:
        timeout: Seconds that it has; None: any time.
        on_progress: Hears what it reports of its progress; None: it is asked for none.
    """

    method: str
    params: Mapping[str, Any] | None
    timeout: float | None = None
    on_progress: OnProgress | None = None
    about: Sequence[Call] = ()
    """The calls of which any may be what it is about: it is over with the last of them. Of
    none: with the one on whose way it goes.
    """


class Outbound(Protocol):
    """A way to the client."""

    async def notify(self, method: str, params: Mapping[str, Any] | None) -> None:
        """Send a notification."""
        ...

    async def send_request(self, asked: PeerRequest) -> dict[str, Any]:
        """Ask the client; its result.

        Raises:
            PeerError: It answered with an error, cannot be asked, did not answer within
                its timeout, or the session ended meanwhile.
        """
        ...


class Call(Outbound, Protocol):
    """One message being handled: its own way back, and what came with it."""

    request_id: RequestId | None
    """None: a notification."""

    @property
    def context(self) -> Any:
        """What handlers see as ``ctx.request_context.request``."""
        ...

    @property
    def transport(self) -> str:
        """``http``, ``websocket`` or ``stdio``."""
        ...

    @property
    def close_stream(self) -> Callable[[], Awaitable[None]] | None:
        """Closes the response stream; the client comes back for the rest."""
        ...

    @property
    def close_standalone_stream(self) -> Callable[[], Awaitable[None]] | None:
        """Closes the connection's GET stream; the client comes back for the rest."""
        ...

    @property
    def can_send_request(self) -> bool:
        """Whether the client can be asked something on this call's way back."""
        ...

    @property
    def session(self) -> str | None:
        """The digest of its session; None: a notification, or there is none."""
        ...

    @property
    def conversation(self) -> str | None:
        """What its host calls the conversation whose session it belongs to; None: it is none's."""
        ...

    @property
    def store_failure(self) -> StoreUnavailable | None:
        """What its handler was told last by a store that failed."""
        ...

    def store_failed(self, failed: StoreUnavailable) -> None:
        """Its handler is told so."""
        ...

    def is_traced(self, span: Span) -> None:
        """It is handled in that span."""
        ...

    @property
    def principal(self) -> Principal:
        """Whose it is."""
        ...

    @property
    def bound_session(self) -> SessionId | None:
        """The session of its host's conversation, of which its client knows nothing."""
        ...

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        """Report progress, if the request carried a progress token."""
        ...

    async def report(self, params: Mapping[str, Any]) -> None:
        """Report progress in these words, which name no token."""
        ...


class UpstreamPeer(Protocol):
    """One client as the wrapped server sees it; rebuilt from a stored handshake."""

    async def request(
        self, call: Call, method: str, params: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Handle a request; its result.

        Raises:
            UpstreamError: The server answered with an error.
        """
        ...

    async def notify(self, call: Call, method: str, params: dict[str, Any] | None) -> None:
        """Handle a notification. Never raises for what the handler does."""
        ...

    async def close(self) -> None:
        """The client is gone for good: run what the server wants cleaned up."""
        ...


class NewPeer(UpstreamPeer, Protocol):
    """A client that shakes hands just now."""

    def belongs_to(self, session_id: SessionId) -> None:
        """It was accepted, and this is its transport-mode session."""
        ...


class Wanted(NamedTuple):
    """What a session's clients want to hear of a server: one that begins anew is told it again."""

    subscriptions: Collection[str] = ()
    log_level: str | None = None


NOTHING_WANTED = Wanted()


def wanted_by(record: SessionRecord) -> Wanted:
    """What a session wants."""
    return Wanted(record.subscriptions, record.log_level)


class Upstream(Protocol):
    """A wrapped MCP server."""

    @property
    def keeps_state_in_memory(self) -> bool:
        """Whether what handlers keep with FastMCP's ``ctx.set_state`` is in this process only."""
        ...

    @property
    def is_outside(self) -> bool:
        """Whether the server is outside of this process: it is told what sessions want to hear,
        and told again when it begins anew. One in this process says by itself what changes.
        """
        ...

    def lifespan(self) -> AbstractAsyncContextManager[None]:
        """Everything runs inside; entered once."""
        ...

    def peer(
        self,
        peer: Peer,
        outbound: Outbound,
        session_id: SessionId | None,
        *,
        ready: bool = True,
        is_alone: bool = False,
        beside: UpstreamPeer | None = None,
        wanted: Wanted = NOTHING_WANTED,
        was_served: bool = False,
    ) -> UpstreamPeer:
        """A client that did its handshake, here or in another process.

        Args:
            ready: False: it did none yet, and has to.
            is_alone: It came on no connection.
            beside: The same client outside of its session, on the connection that started it.
            wanted: By the session, as it is stored.
            was_served: Another process may have served the session.
        """
        ...

    async def initialize(
        self, call: Call, params: dict[str, Any] | None, outbound: Outbound
    ) -> tuple[dict[str, Any], Peer, NewPeer]:
        """Shake hands: the result (with what this layer serves for every server), what was
        agreed, and the client.

        Raises:
            UpstreamError: The params are malformed, or the server refuses.
        """
        ...

    def modern_peer(
        self,
        route: Any,
        outbound: Outbound | None,
        session_id: SessionId | None,
        *,
        wanted: Wanted = NOTHING_WANTED,
        was_served: bool = False,
    ) -> UpstreamPeer:
        """A modern-era client, for one request.

        Args:
            route: What the upstream's rules made of the request's envelope.
            outbound: To the session the request belongs to; None: to none.
            session_id: That session.
            wanted: See :meth:`peer`.
            was_served: See :meth:`peer`.
        """
        ...

    async def listen(self, peer: UpstreamPeer, call: Call, uris: Collection[str]) -> None:
        """Have it tell a session of these resources' changes, and of no others. What it refuses to
        tell of is not heard.

        Args:
            peer: The session's client, of the modern era.

        Raises:
            StoreUnavailable: Unknown who serves the session.
        """
        ...

    def validate(self, method: str, version: str, params: Mapping[str, Any] | None) -> None:
        """Check the params of a method that is served here, as the server would.

        Raises:
            UpstreamError: They are malformed.
        """
        ...

    def serves(self, method: str) -> bool:
        """Whether the server has a handler for ``method``."""
        ...

    def listed(self) -> frozenset[str]:
        """Of ``tools``, ``prompts`` and ``resources``: the lists that it has."""
        ...

    async def listed_tools(self) -> Sequence[Mapping[str, Any]] | None:
        """The tools that it has before anybody asks; None: its list is made for each request."""
        ...

    def on_change(
        self, listener: Callable[[str, Mapping[str, Any] | None], None]
    ) -> Callable[[], None]:
        """Hear the server's own change notifications (method, params), until the returned
        function is called.
        """
        ...

    async def publish(self, method: str, params: Mapping[str, Any] | None) -> bool:
        """Publish a change on the server's own bus; False if it has none."""
        ...

    async def leave(self, grace: float) -> None:
        """The layer drains: what begins now has so many seconds to begin, and nothing does after
        that.
        """
        ...

    async def session_over(self, session_id: SessionId, *, sleeps: bool = False) -> None:
        """A session of any mode is over: what runs for it ends.

        Args:
            sleeps: It goes on with its next request, and has then what it kept in files.
        """
        ...

    async def echo(self, method: str, params: Mapping[str, Any] | None) -> None:
        """Put a change that another process announced on the server's own bus, for those who
        listen there; :meth:`on_change` does not hear it.
        """
        ...


CALL: ContextVar[Call | None] = ContextVar("mcp_sessions_call", default=None)
"""What is handled."""


def told_handler(failed: StoreUnavailable) -> None:
    """A call of the layer's, which a handler may have made, raises ``failed``."""
    call = CALL.get()
    if call is not None:
        call.store_failed(failed)
