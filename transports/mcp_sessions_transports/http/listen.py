"""A session's ``subscriptions/listen`` stream: the modern era's way to hear its events.

Acknowledged first, then what waits, then live. Each event carries the listen request's id
and its own session event id; a client that was cut resumes the session and listens again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.types import Receive, Send

from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.messages import SESSION_META, RequestId, decode, encode, wire_error
from mcp_sessions.errors import Refusal, SessionNotFound
from mcp_sessions.ids import ConnectionId, FencingEpoch, Position, SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.security import mint_connection_id
from mcp_sessions.server.cluster.bus import ClusterBus
from mcp_sessions.server.delivery.hub import Hub
from mcp_sessions.server.requests.running import RunningRequest
from mcp_sessions.server.upstream.port import UpstreamPeer
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import Attached, Attachment, CurrentSession, Peer
from mcp_sessions_transports.http.modern_channel import MODERN_SSE_HEADERS, PING, modern_event
from mcp_sessions_transports.http.sse import LogFeed, SseStream

LISTEN = "subscriptions/listen"
SUBSCRIPTION_ID = "io.modelcontextprotocol/subscriptionId"
"""``_meta`` key of every message on a listen stream: the listen request's id."""

_FLAGS = {
    "tools": "toolsListChanged",
    "prompts": "promptsListChanged",
    "resources": "resourcesListChanged",
}
_SESSION_KEY = b'"' + SESSION_META.encode() + b'":'


class Filter:
    """What a listen request asked to hear."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        """Take the params of a request that the SDK's rules let through."""
        wanted: Mapping[str, Any] = params.get("notifications") or {}
        self._uri_list: list[str] = list(wanted.get("resourceSubscriptions") or ())
        self.uris = frozenset(self._uri_list)
        self.lists = frozenset(name for name, flag in _FLAGS.items() if wanted.get(flag) is True)

    def honored(self) -> dict[str, Any]:
        """What is heard of it, for the acknowledgement: all of it."""
        honored: dict[str, Any] = {
            flag: True for name, flag in _FLAGS.items() if name in self.lists
        }
        if self._uri_list:
            honored["resourceSubscriptions"] = self._uri_list
        return honored

    def admits(self, event: LoggedEvent) -> bool:
        """Whether an event goes on the stream: a change that was not asked for does not."""
        method: str = decode(event.payload)["method"]
        if method.endswith("/list_changed"):
            return method.split("/")[1] in self.lists
        # An update of a resource was stored because the session subscribed, or because a
        # handler sent it to this very session: it is heard, and so is all else.
        return True


def acknowledgement(wanted: Filter, request_id: RequestId) -> dict[str, Any]:
    """The first message of a listen: what is heard from now on."""
    return {
        "jsonrpc": "2.0",
        "method": "notifications/subscriptions/acknowledged",
        "params": {"notifications": wanted.honored(), "_meta": {SUBSCRIPTION_ID: request_id}},
    }


def completion(
    request_id: RequestId,
    error: dict[str, Any] | None,
    result: Callable[[dict[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    """The last message of a listen.

    Args:
        error: Why it ended; None: in order.
        result: Adds what its result carries beside the subscription's id.
    """
    if error is not None:
        return {"jsonrpc": "2.0", "id": request_id, "error": error}
    members = {"_meta": {SUBSCRIPTION_ID: request_id}}
    return {"jsonrpc": "2.0", "id": request_id, "result": result(members)}


def stamped(payload: bytes, request_id: RequestId) -> bytes:
    """An event with the subscription's id in its ``_meta``."""
    stamp = b'"' + SUBSCRIPTION_ID.encode() + b'":' + encode(request_id) + b","
    before, key, after = payload.rpartition(_SESSION_KEY)
    if key:
        return before + stamp + key + after
    message = decode(payload)
    params: dict[str, Any] = message.setdefault("params", {})
    params["_meta"] = {**(params.get("_meta") or {}), SUBSCRIPTION_ID: request_id}
    return encode(message)


class ListenStream:
    """A :class:`~mcp_sessions.server.connection.TransportConnection` of one session."""

    kind = "listen"

    is_leaving = False
    """Nothing is asked on it."""

    is_streaming = False
    """It is no GET stream."""

    def __init__(
        self,
        session_id: SessionId,
        request_id: RequestId,
        principal: Principal,
        peer: Peer,
        wanted: Filter,
        *,
        store: SessionStore,
        policy: SessionPolicy,
        clock: Callable[[], float],
        hub: Hub,
        bus: ClusterBus,
        result: Callable[[dict[str, Any]], dict[str, Any]],
        encode_answer: Callable[[Any], bytes],
    ) -> None:
        """Take what it works with.

        Args:
            hub: Where its session is attached.
            result: Adds what the stream's last message carries beside its subscription id.
            encode_answer: Writes that message.
        """
        self.id: ConnectionId = mint_connection_id("listen", bus.process)
        self.principal = principal
        self.peer = peer
        self.transport_session: SessionId | None = None
        self.attached: dict[SessionId, FencingEpoch] = {}
        self.requests: dict[RequestId, RunningRequest] = {}
        self.upstream_peers: dict[SessionId | None, UpstreamPeer] = {}
        self.close_stream: Callable[[], Awaitable[None]] | None = None
        self._session_id = session_id
        self._request_id = request_id
        self._wanted = wanted
        self._store = store
        self._clock = clock
        self._hub = hub
        self._bus = bus
        self._result = result
        self._encode = encode_answer
        self._stream = SseStream(
            limit=policy.send_buffer, slow_timeout=policy.slow_timeout, comment=PING
        )
        self._feed: LogFeed[SseStream] | None = None
        self._stream.push(modern_event(encode_answer(acknowledgement(wanted, request_id))))

    # --- the port --------------------------------------------------------------------------

    async def current(self) -> CurrentSession | None:
        """See :class:`TransportConnection`. In the modern era every request names its own."""
        return None

    async def set_current(self, current: CurrentSession | None) -> None:
        """See :class:`TransportConnection`."""
        raise AssertionError("a listen stream carries one session and no requests")

    async def begin(self, session_id: SessionId, attached: Attached, after: Position) -> bool:
        """See :class:`TransportConnection`: it starts where its session waits for it."""
        self.attached[session_id] = attached.fencing_epoch
        start = attached.waits_from if attached.waits_from is not None else attached.head
        self._feed = LogFeed(
            self._stream,
            self._read,
            start,
            self._frame,
            is_checked=self._bus.is_shared,
        )
        self._stream.wake()
        return True

    async def deliver(
        self, session_id: SessionId, event: LoggedEvent, fencing_epoch: FencingEpoch
    ) -> bool:
        """See :class:`TransportConnection`."""
        if self._feed is not None and self.attached.get(session_id) == fencing_epoch:
            self._feed.offer(event)
        return True

    def appended(
        self, session_id: SessionId, event: LoggedEvent, attachment: Attachment | None
    ) -> None:
        """See :class:`TransportConnection`."""
        if self._feed is None:
            return
        if attachment == Attachment(self.id, self.attached.get(session_id, FencingEpoch(-1))):
            self._feed.offer(event)
        else:
            # Whether it was displaced is asked by who reads the log.
            self._feed.check_position(None)

    def check_position(self, session_id: SessionId, head: Position | None) -> None:
        """See :class:`TransportConnection`."""
        if self._feed is not None:
            self._feed.check_position(head)

    async def send(self, draft: Draft) -> None:
        """See :class:`TransportConnection`."""
        self._stream.push(modern_event(stamped(draft.before, self._request_id)), draft.origin)

    async def withdraw(
        self, session_id: SessionId, fencing_epoch: FencingEpoch | None = None
    ) -> None:
        """See :class:`TransportConnection`: the session went elsewhere, its log with it."""
        self._finish(None)

    async def session_over(self, session_id: SessionId) -> None:
        """See :class:`TransportConnection`."""
        self._finish(wire_error(SessionNotFound(session_id)))

    async def drain(self) -> None:
        """See :class:`TransportConnection`."""
        await self._stream.drain()

    def hold(self) -> Callable[[], None]:
        """See :class:`TransportConnection`."""
        return self._stream.hold()

    def close(self) -> None:
        """See :class:`TransportConnection`: a newer listen, or the server stops."""
        self._finish(None)

    # --- the stream ------------------------------------------------------------------------

    async def serve(self, receive: Receive, send: Send) -> None:
        """Send until the stream ends or its peer is gone."""
        await self._stream.serve(receive, send, MODERN_SSE_HEADERS)

    def cut(self) -> None:
        """End the stream now, without a result: its credential expired."""
        self._stream.cut()

    async def _read(self, position: str) -> tuple[Sequence[LoggedEvent], Refusal | None]:
        events, refusal = await self._store.read(self._session_id, position, now=self._clock())
        if self._bus.is_shared and events:
            # Asked after they were read: what was read then is from before any takeover.
            if not await self._hub.check_attached(self._session_id, self, waits=False):
                return (), None
        return events, refusal

    def _frame(self, event: LoggedEvent) -> bytes | None:
        if not self._wanted.admits(event):
            return None
        return modern_event(stamped(event.payload, self._request_id))

    def _finish(self, error: dict[str, Any] | None) -> None:
        last = completion(self._request_id, error, self._result)
        self._stream.push(modern_event(self._encode(last)))
        self._stream.finish()
