"""Define the port to the wrapped MCP server, as one session sees it.

The implementation is the SDK (``sdk/``), or child processes (``stdio/``). Nothing here knows which.
Messages are JSON-RPC methods and params, as plain dictionaries.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from opentelemetry.trace import Span

from mcp_sessions.core.messages import RequestId, error_body, members_of
from mcp_sessions.errors import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    KEY_BYTES,
    SESSION_DETACHED,
    SESSION_NOT_FOUND,
    STORE_UNAVAILABLE,
    StoreUnavailable,
)
from mcp_sessions.ids import SessionId
from mcp_sessions.principal import Principal
from mcp_sessions.stores.records import Peer, SessionRecord

REQUEST_TIMEOUT = -32001
"""The SDK's code for a client that did not answer in time."""

OnProgress = Callable[[float, float | None, str | None], Awaitable[None]]


class UpstreamError(Exception):
    """The wrapped server answered with an error: a JSON-RPC error object."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error.get("code"))
        self.error = error


HEADER_MISMATCH = -32020
"""The modern era's: a request's headers are not what they have to be. Its clients read the list of
tools, and call again.
"""

_NOT_BEGUN = frozenset({"draining", "invalid_state", "not_started", STORE_UNAVAILABLE})
"""Values of ``data.reason`` by which the layer says that a request did not run."""


def of_handler(error: dict[str, Any], *, modern: bool = True) -> dict[str, Any]:
    """Return the error of a handler as its client gets it: it is not taken for the layer's.

    The layer says by some errors that a request did not begin, or that its session is gone. Its
    client may send such a request again, or leave the session (CLI6, ERR15). The request of a
    handler has begun, and its session is there.

    Args:
        modern: Whether its client may have the modern era, and calls again after a mismatch.
    """
    taken = (SESSION_NOT_FOUND, SESSION_DETACHED, *((HEADER_MISMATCH,) if modern else ()))
    if error.get("code") in taken:
        error = {**error, "code": INTERNAL_ERROR}
    data: object = error.get("data")
    said = members_of(data)
    if (
        said.get("started") is False
        or str(said.get("reason")) in _NOT_BEGUN
        or said.get("limit") == KEY_BYTES
    ):
        error = {**error, "data": {**said, "started": True}}
    return error


class StoreFailedHandler(UpstreamError):
    """The store failed a handler, which ended with that error.

    The handler began, and may have had effects. So the answer is not 503, after which a client
    would send the request again (HTP5).
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


class NotAskable(PeerError):
    """The client does not accept that request, or nobody can ask it now."""

    def __init__(self, method: str) -> None:
        text = "this transport context has no back-channel for server-initiated requests."
        super().__init__(INVALID_REQUEST, f"Cannot send {method!r}: {text}")


LEFT, AWAY, LISTENS = range(3)
"""What is known of the client of a call. It listens, and gets a message at once. It does not listen
now. It was asked in a result, and may never come back.
"""

TOO_FAR: Final = {"reason": "too_far"}
"""The data of a :class:`PeerError`: the client was not asked, see :attr:`PeerRequest.least`."""


@dataclass(slots=True, eq=False)
class PeerRequest:
    """A request to a client.

    Args:
        timeout: Seconds that the client has. None: any time.
        on_progress: Takes the progress that the client reports. None: no progress is asked for.
    """

    method: str
    params: Mapping[str, Any] | None
    timeout: float | None = None
    on_progress: OnProgress | None = None
    about: Sequence[UpstreamCall] = ()
    """Calls that the request may be about. It ends with the last of them. Empty: it ends with the
    call on whose way it is sent.
    """

    id: str | None = None
    """Under which its client was asked, and is asked again. None: it was not asked."""

    may_move: bool = False
    """Some of these calls are in other processes, where its client may be asked next."""

    least: int = LEFT
    """Another process refuses it by `TOO_FAR` if its client is farther than that for each of these
    calls there: the client of another one may be nearer.
    """


class Outbound(Protocol):
    async def notify(self, method: str, params: Mapping[str, Any] | None) -> None: ...

    async def send_request(self, asked: PeerRequest) -> dict[str, Any]:
        """Ask the client, and return its result.

        Raises:
            PeerError: It answered with an error, cannot be asked, did not answer within its
                timeout, or the session ended meanwhile.
        """
        ...


class Closable(Protocol):
    @property
    def close_stream(self) -> Callable[[], Awaitable[None]] | None:
        """A function that closes it, so that the client reconnects for the rest. None: the client
        could not.
        """
        ...


class UpstreamCall(Outbound, Protocol):
    """One message that is being handled: its own way back, and its data."""

    request_id: RequestId | None
    """None: a notification."""

    @property
    def context(self) -> Any: ...

    @property
    def transport(self) -> str:
        """Return ``http``, ``websocket`` or ``stdio``."""
        ...

    @property
    def response(self) -> Closable | None:
        """Its response. None: its client is another process's."""
        ...

    @property
    def get_stream(self) -> Closable | None:
        """The GET stream of its connection. None: there is no connection here."""
        ...

    @property
    def can_send_request(self) -> bool: ...

    @property
    def reach(self) -> int:
        """Return `LISTENS`, `AWAY` or `LEFT`. If its client is another process's, only that process
        knows: `LISTENS`.
        """
        ...

    @property
    def session(self) -> str | None:
        """Return the digest of its session. None: a notification, or there is none."""
        ...

    @property
    def conversation(self) -> str | None:
        """Return the host's name for the conversation of its session. None: it belongs to no
        conversation.
        """
        ...

    @property
    def store_failure(self) -> StoreUnavailable | None:
        """Return the last failure of the store that its handler got."""
        ...

    def store_failed(self, failed: StoreUnavailable) -> None: ...

    def is_traced(self, span: Span) -> None: ...

    @property
    def principal(self) -> Principal: ...

    @property
    def conversation_session(self) -> SessionId | None:
        """Return the session of its host's conversation. Its client does not know the session."""
        ...

    @property
    def client(self) -> Hashable:
        """Return a key of the connection on which it came. None: several clients may use that
        connection, or it is another process's.
        """
        ...

    @property
    def share(self) -> Hashable:
        """Return what its client is counted for: its user, or the address of a client that nobody
        authenticated.
        """
        ...

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        """Report progress, if the request carried a progress token."""
        ...

    async def report(self, params: Mapping[str, Any]) -> None:
        """Report progress with these params, which have no token."""
        ...


class UpstreamPeer(Protocol):
    """One client as the wrapped server sees it; rebuilt from a stored handshake."""

    async def request(
        self, call: UpstreamCall, method: str, params: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Handle a request, and return its result.

        Raises:
            UpstreamError: The server answered with an error.
        """
        ...

    async def notify(self, call: UpstreamCall, method: str, params: dict[str, Any] | None) -> None:
        """Handle a notification. Never raises for an error of the handler."""
        ...

    async def close(self) -> None:
        """Run the server's clean-up: the client has left for good."""
        ...


class NewPeer(UpstreamPeer, Protocol):
    def belongs_to(self, session_id: SessionId) -> None:
        """Note the transport-mode session of the client, which was accepted."""
        ...


class Wanted(NamedTuple):
    """Subscriptions and log level of a session. A server outside of this process gets them again
    when it restarts.
    """

    subscriptions: Collection[str] = ()
    log_level: str | None = None


NOTHING_WANTED = Wanted()


def wanted_by(record: SessionRecord) -> Wanted:
    return Wanted(record.client.subscriptions, record.client.log_level)


class Upstream(Protocol):
    @property
    def keeps_state_in_memory(self) -> bool:
        """Whether FastMCP's ``ctx.set_state`` keeps state in this process only."""
        ...

    @property
    def is_outside(self) -> bool:
        """Whether the server is outside of this process. Such a server gets the subscriptions and
        log levels of sessions, and again when it restarts. A server in this process publishes its
        changes itself.
        """
        ...

    def lifespan(self) -> AbstractAsyncContextManager[None]: ...

    def peer(
        self,
        peer: Peer,
        outbound: Outbound,
        session_id: SessionId | None,
        *,
        ready: bool = True,
        is_alone: bool = False,
        connection_peer: UpstreamPeer | None = None,
        wanted: Wanted = NOTHING_WANTED,
        was_served: bool = False,
    ) -> UpstreamPeer:
        """Make a client whose handshake ran here or in another process.

        Args:
            ready: False: the client has not done its handshake yet, and has to.
            is_alone: It came on no connection.
            connection_peer: The same client outside of its session, on the connection of its start.
            wanted: The session's subscriptions and log level, as stored.
            was_served: Another process may have served the session.
        """
        ...

    async def initialize(
        self, call: UpstreamCall, params: dict[str, Any] | None, outbound: Outbound
    ) -> tuple[dict[str, Any], Peer, NewPeer]:
        """Do the handshake. Return the result (with what this layer serves for every server), the
        agreed values, and the client.

        Raises:
            UpstreamError: The params are malformed, or the server refuses.
        """
        ...

    def modern_peer(
        self,
        peer: Peer,
        outbound: Outbound | None,
        session_id: SessionId | None,
        *,
        wanted: Wanted = NOTHING_WANTED,
        was_served: bool = False,
    ) -> UpstreamPeer:
        """Make a modern-era client, for one request.

        Args:
            peer: Its client, as the envelope of the request describes it.
            outbound: The way to the session of the request. None: it has no session.
            session_id: That session.
            wanted: See :meth:`peer`.
            was_served: See :meth:`peer`.
        """
        ...

    async def listen(self, peer: UpstreamPeer, call: UpstreamCall, uris: Collection[str]) -> None:
        """Subscribe a session's server to these resources, and to no others. If the server refuses
        one, its changes do not arrive.

        Args:
            peer: The session's client, of the modern era.

        Raises:
            StoreUnavailable: It is unknown which process serves the session.
        """
        ...

    def validate(self, method: str, version: str, params: Mapping[str, Any] | None) -> None:
        """Check the params of a method that is served here, as the server would.

        Raises:
            UpstreamError: The params are malformed.
        """
        ...

    def serves(self, method: str) -> bool: ...

    def listed(self) -> frozenset[str]: ...

    async def listed_tools(self) -> Sequence[Mapping[str, Any]] | None:
        """Return the tools that it has before any request. None: its list is made for each
        request.
        """
        ...

    def on_change(
        self, listener: Callable[[str, Mapping[str, Any] | None, bool], None]
    ) -> Callable[[], None]:
        """Call ``listener`` with the server's own change notifications (method, params, and whether
        only listens outside of sessions get it), until the returned function is called.
        """
        ...

    async def publish(self, method: str, params: Mapping[str, Any] | None) -> bool:
        """Publish a change on the server's own bus. False: it has none."""
        ...

    async def leave(self, grace: float) -> None:
        """Drain: a start that begins now has so many seconds, and later none begins."""
        ...

    async def session_ended(self, session_id: SessionId, *, sleeps: bool = False) -> None:
        """End what runs for a session of any mode that has ended.

        Args:
            sleeps: Whether the session continues with its next request, with its files.
        """
        ...

    async def echo(self, method: str, params: Mapping[str, Any] | None) -> None:
        """Publish a change of another process on the server's own bus, for the listeners there.
        :meth:`on_change` does not report it.
        """
        ...


_Done = TypeVar("_Done")

CALL: ContextVar[UpstreamCall | None] = ContextVar("mcp_sessions_call", default=None)
"""The call that is being handled."""


def note_store_failure(failed: StoreUnavailable) -> None:
    """Note that a call of the layer, which a handler may have made, raises ``failed``."""
    call = CALL.get()
    if call is not None:
        call.store_failed(failed)


async def noted(work: Awaitable[_Done]) -> _Done:
    """Do work that a handler may have asked for, and note that the store failed it."""
    try:
        return await work
    except StoreUnavailable as failed:
        note_store_failure(failed)
        raise
