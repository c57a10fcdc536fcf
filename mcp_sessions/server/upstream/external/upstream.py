"""The port to a wrapped server outside of this process.

A bare server of the SDK stands in where that one has no part: it checks a client's handshake,
and has the bus on which modern-era clients outside of any session listen for changes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Hashable, Mapping
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, Final, cast

from mcp_sessions.core.client_description import described
from mcp_sessions.core.messages import encode, members_of
from mcp_sessions.external_server import ExternalServer
from mcp_sessions.ids import SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.server.upstream.external.child import Child
from mcp_sessions.server.upstream.external.children import Children, Starter
from mcp_sessions.server.upstream.external.declared import DeclaredHeaders
from mcp_sessions.server.upstream.external.elsewhere import Asked, Elsewhere, Lease, Moved, Served
from mcp_sessions.server.upstream.external.modern import VERSION
from mcp_sessions.server.upstream.external.modern_peer import ModernPeer
from mcp_sessions.server.upstream.external.place import LISTS, Place
from mcp_sessions.server.upstream.external.rounds import Asks, Rounds, asks_of, waiting_call
from mcp_sessions.server.upstream.external.spans import traced
from mcp_sessions.server.upstream.port import Call, Outbound, UpstreamPeer
from mcp_sessions.server.upstream.sdk.kernel import (
    HANDSHAKE_VERSIONS,
    SdkUpstream,
    advertise_subscriptions,
    bare_server,
)
from mcp_sessions.server.upstream.sdk.spans import is_tracing
from mcp_sessions.stores.records import Peer

Json = dict[str, Any]

_NEWEST: Final = max(HANDSHAKE_VERSIONS)
_OURS: Final[Mapping[str, Any]] = {
    "protocolVersion": _NEWEST,
    "capabilities": {},
    "clientInfo": {"name": "mcp-sessions", "version": version("mcp-sessions")},
}
"""What a child is told that serves several clients."""

_ENDED_HERE: Final = frozenset(
    {"notifications/initialized", "notifications/cancelled", "notifications/progress"}
)
"""What a client says to the layer; each child is told of its own."""


class ExternalUpstream:
    """An :class:`~mcp_sessions.server.upstream.port.Upstream` of children."""

    keeps_state_in_memory = False

    def __init__(
        self,
        server: ExternalServer,
        starter: Starter,
        shell: SdkUpstream,
        elsewhere: Elsewhere | None,
        policy: SessionPolicy,
        declared: DeclaredHeaders,
        *,
        remembers: bool,
    ) -> None:
        """Wrap a server.

        Args:
            shell: Stands in for it; see :func:`shell_of`.
            declared: Learns what its tools want in headers.
            elsewhere: The processes that serve the same sessions; None: there are none.
            remembers: Whether there is a store.
        """
        self.shell = shell
        self.elsewhere = elsewhere if server.per == "session" else None
        self.server = server
        self.remembers = remembers
        self.children = Children(server, starter, HANDSHAKE_VERSIONS)
        self.rounds = Rounds(policy, self.elsewhere.process if self.elsewhere else None)
        self.declared = declared
        self.is_tracing = False
        """Whether the application has set a tracer provider."""

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None]:
        """See :class:`Upstream`. Afterwards there is no child."""
        async with self.shell.lifespan():
            self.is_tracing = is_tracing()
            self.children.run()
            try:
                yield
            finally:
                await self.rounds.close()
                await self.children.close()

    def peer(
        self,
        peer: Peer,
        outbound: Outbound,
        session_id: SessionId | None,
        *,
        ready: bool = True,
        is_alone: bool = False,
        beside: UpstreamPeer | None = None,
        subscriptions: Collection[str] = (),
        was_served: bool = False,
    ) -> UpstreamPeer:
        """See :class:`Upstream`."""
        if not ready:
            return self.shell.peer(peer, outbound, session_id, ready=False)
        client = {**_OURS, **(peer.initialize_params or {})}
        client["protocolVersion"] = peer.protocol_version
        way = None if is_alone and session_id is None else outbound
        outside = beside if isinstance(beside, ExternalPeer) else None
        return ExternalPeer(self, client, way, session_id, subscriptions, was_served, outside)

    async def initialize(
        self, call: Call, params: dict[str, Any] | None, outbound: Outbound
    ) -> tuple[dict[str, Any], Peer, ExternalPeer]:
        """See :class:`Upstream`."""
        # Refuses what is no handshake.
        _, checked, stand_in = await self.shell.initialize(call, params, outbound)
        await stand_in.close()
        peer = ExternalPeer(self, described(params), outbound, None, (), False)
        try:
            child = await peer.child(call)
        except BaseException:
            await peer.close()
            raise
        result = dict(child.result)
        if self.server.per != "session":
            result["protocolVersion"] = min(checked.protocol_version, result["protocolVersion"])
        result["capabilities"] = deepcopy(dict(child.capabilities))
        if self.remembers:
            advertise_subscriptions(result["capabilities"])
        return result, Peer(result["protocolVersion"], described(params)), peer

    def modern_peer(
        self,
        route: Any,
        outbound: Outbound | None,
        session_id: SessionId | None,
        *,
        subscriptions: Collection[str] = (),
        was_served: bool = False,
    ) -> UpstreamPeer:
        """See :class:`Upstream`. What its client can be asked it is asked in results."""
        info: Any = route.client_info
        asks: Asks = asks_of(route.client_capabilities) if self.server.per == "session" else {}
        client: Json = {**_OURS, "capabilities": members_of(route.client_capabilities)}
        if isinstance(info, dict):
            client["clientInfo"] = cast(Json, info)
        peer = ExternalPeer(
            self, client, outbound, session_id, subscriptions, was_served, None, asks
        )
        return ModernPeer(peer.served, self.shell.modern_peer(route, outbound, session_id))

    def validate(self, method: str, version: str, params: Mapping[str, Any] | None) -> None:
        """See :class:`Upstream`."""
        self.shell.validate(method, version, params)

    def serves(self, method: str) -> bool:
        """See :class:`Upstream`. What a child does not serve it says itself."""
        return True

    def listed(self) -> frozenset[str]:
        """See :class:`Upstream`."""
        known = self.children.capabilities
        return frozenset(name for name in LISTS if known is None or name in known)

    async def listed_tools(self) -> None:
        """See :class:`Upstream`. No process runs before somebody asks."""

    def on_change(
        self, listener: Callable[[str, Mapping[str, Any] | None], None]
    ) -> Callable[[], None]:
        """See :class:`Upstream`."""
        return self.shell.on_change(listener)

    async def publish(self, method: str, params: Mapping[str, Any] | None) -> bool:
        """See :class:`Upstream`."""
        return await self.shell.publish(method, params)

    async def echo(self, method: str, params: Mapping[str, Any] | None) -> None:
        """See :class:`Upstream`."""
        await self.shell.echo(method, params)

    async def session_over(self, session_id: SessionId) -> None:
        """See :class:`Upstream`."""
        if self.elsewhere is not None:
            self.elsewhere.over(session_id)
        self.children.over(session_id)

    def hosted(
        self,
        client: Mapping[str, Any],
        outbound: Outbound | None,
        session_id: SessionId | None,
        asks: Asks | None,
        *,
        subscriptions: Collection[str],
    ) -> ExternalPeer:
        """A client that another process serves."""
        return ExternalPeer(self, client, outbound, session_id, subscriptions, False, None, asks)

    async def notify_here(
        self, session_id: SessionId, method: str, params: Mapping[str, Any] | None
    ) -> None:
        """Tell a session's child what its client said elsewhere."""
        place = self.children.known(session_id)
        if place is not None and place.living is not None:
            await place.notify(place.living, method, params)


def shell_of(server: ExternalServer, *, remembers: bool) -> SdkUpstream:
    """What stands in for a server where it has no part.

    Args:
        remembers: See :class:`ExternalUpstream`.
    """
    return SdkUpstream(bare_server(server.identity), adds_subscriptions=remembers)


@dataclass(frozen=True, slots=True)
class Sessionless:
    """Whose a child is that serves the modern-era requests of one principal outside of sessions:
    those whose clients can be asked the same, which is what it is told of them. Nothing lasts from
    one of them to the next, so that it is spoken to as its client would.
    """

    principal: Principal
    asks: bytes


@dataclass(eq=False)
class ExternalPeer:
    """One client, as its child sees it."""

    _upstream: ExternalUpstream
    _client: Mapping[str, Any]
    _outbound: Outbound | None
    """None: it came on no connection."""

    _session_id: SessionId | None
    _subscriptions: Collection[str]
    _was_served: bool
    _beside: ExternalPeer | None = None
    """Itself outside of its session."""

    _asks: Asks | None = None
    """See :attr:`Asked.asks`."""

    async def request(
        self, call: Call, method: str, params: dict[str, Any] | None, level: str | None = "debug"
    ) -> dict[str, Any]:
        """See :class:`UpstreamPeer`.

        Args:
            level: The least of a log message that this request's client wants; None: none.
        """
        return (await self.served(call, method, params, level))[0]

    async def served(
        self, call: Call, method: str | None, params: dict[str, Any] | None, level: str | None
    ) -> Served:
        """Ask its child, wherever that is; see :meth:`request`.

        Args:
            method: None: nothing; it is there then.
        """
        work = self._served(call, method, params, level)
        if method is None:
            return await work
        if self._upstream.is_tracing:
            version = VERSION if self._asks is not None else self._client.get("protocolVersion")
            work = traced(call, method, params, version, work)
        served = await work
        if method == "tools/list":
            self._upstream.declared.learn(served[0])
        return served

    async def _served(
        self, call: Call, method: str | None, params: dict[str, Any] | None, level: str | None
    ) -> Served:
        asked = Asked(self._client, method, params, level, self._asks)
        elsewhere = self._upstream.elsewhere
        key = self._key(call)
        if elsewhere is None:
            return await self.here(call, asked, None)
        if not isinstance(key, str):
            waiting = waiting_call(params) if self._asks is not None else None
            served = await elsewhere.go_on(waiting, call, asked) if waiting is not None else None
            return served or await self.here(call, asked, None)
        session_id = SessionId(key)
        while True:
            lease = await elsewhere.lease(session_id)
            try:
                if lease.is_here:
                    return await self.here(call, asked, lease)
                # What this process had of it is another's now.
                self._upstream.children.over(session_id)
                return await elsewhere.ask(lease, call, asked)
            except Moved:
                # It was asked nothing.
                continue

    async def here(self, call: Call, asked: Asked, lease: Lease | None) -> Served:
        """Ask its child in this process.

        Args:
            lease: By which it is here; None: there is no other.

        Raises:
            Moved: It is not here any more.
        """
        check = None
        if lease is None or self._upstream.elsewhere is None:
            place = self.place(call)
        else:
            self._leave_old(lease)
            place = self.place(call, lease.inherited)
            place.held_by(lease.holder)
            check = partial(self._upstream.elsewhere.check, lease)
        method, params = asked.method, asked.params
        if method == "ping" and place.living is None:
            return {}, {}
        if method is None:
            child = place.living or await place.started(call.principal)
            return {}, child.result
        if method in ("resources/subscribe", "resources/unsubscribe"):
            result = await self._subscribe(place, call, method, params or {}, check)
        else:

            def work(call: Call) -> Awaitable[Json]:
                return place.request(call, asked.sender, method, params, check)

            result = await (
                work(call)
                if asked.asks is None
                else self._upstream.rounds.serve(
                    call, self._who(call), asked.asks, method, params, work
                )
            )
        child = place.living
        return result, child.result if child is not None else {}

    def _leave_old(self, lease: Lease) -> None:
        """What this process had of the session is of the time before another one had it."""
        known = self._upstream.children.known(lease.session_id)
        if known is None or known.holder == lease.holder:
            return
        if known.holder is not None or lease.inherited is not None:
            self._upstream.children.over(lease.session_id)

    async def _subscribe(
        self,
        place: Place,
        call: Call,
        method: str,
        params: dict[str, Any],
        check: Callable[[], Awaitable[None]] | None,
    ) -> dict[str, Any]:
        """A child is subscribed as long as anybody here is, if it has that."""
        who, uri = self._who(call), params["uri"]
        child = place.living or await place.started(call.principal)
        resources: Any = child.capabilities.get("resources")
        result: dict[str, Any] = {}
        is_served = isinstance(resources, dict) and bool(cast(Json, resources).get("subscribe"))
        subscribed = place.subscribers.setdefault(uri, set())
        others = subscribed - {who}
        try:
            if is_served and (method == "resources/subscribe" or not others):
                result = await place.request(call, None, method, params, check)
            if method == "resources/subscribe":
                subscribed.add(who)
            else:
                subscribed.discard(who)
        finally:
            if not subscribed:
                place.subscribers.pop(uri, None)
        return result

    async def notify(self, call: Call, method: str, params: dict[str, Any] | None) -> None:
        """See :class:`UpstreamPeer`. A child that is not there yet has nothing to be told."""
        if method in _ENDED_HERE:
            return
        key, elsewhere = self._key(call), self._upstream.elsewhere
        if elsewhere is not None and isinstance(key, str):
            if await elsewhere.notify(SessionId(key), method, params):
                return
        place = self.place(call)
        if place.living is not None:
            await place.notify(place.living, method, params)

    def belongs_to(self, session_id: SessionId) -> None:
        """See :class:`NewPeer`."""
        self._session_id = session_id
        self._upstream.children.rename(self, session_id)

    async def close(self) -> None:
        """See :class:`UpstreamPeer`. What is a session's goes on."""
        if self._session_id is None and self._outbound is not None:
            self._upstream.children.over(self)

    async def child(self, call: Call) -> Child:
        """Its child, which is started if there is none.

        Raises:
            UpstreamError: It cannot be started.
        """
        place = self.place(call)
        return place.living or await place.started(call.principal)

    def place(self, call: Call, inherited: Collection[str] | None = None) -> Place:
        """Where its child is.

        Args:
            inherited: See :attr:`Lease.inherited`.
        """
        key, who = self._key(call), self._who(call)
        is_one_client = self._upstream.server.per == "session" and not isinstance(
            key, (Principal, Sessionless)
        )
        make = partial(self._new_place, key, is_one_client, inherited)
        children = self._upstream.children
        if inherited is None and children.known(key) is None:
            self._take_along(key, call)
        place = children.place(key, make)
        if self._outbound is not None and self._upstream.remembers:
            place.outbounds[who] = self._outbound
        return place

    def _take_along(self, key: Hashable, call: Call) -> None:
        """A session that begins has the child that its client's handshake was made with, if that
        was not used for anything else.
        """
        own = self._own if self._beside is None else self._beside._own
        is_new = not self._was_served and (
            call.bound_session is not None or not self._subscriptions
        )
        if own is not None and own != key and is_new and self._upstream.server.per == "session":
            self._upstream.children.hand_over(own, key)

    @property
    def _own(self) -> Hashable:
        """Of the place that is its connection's, or its session's; None: it has none."""
        if self._session_id is not None:
            return self._session_id
        return self if self._outbound is not None else None

    def _key(self, call: Call) -> Hashable:
        """Of its place."""
        match self._upstream.server.per:
            case "shared":
                return None
            case "principal":
                return call.principal
            case "session":
                who = self._who(call)
                if self._asks is not None and isinstance(who, Principal):
                    return Sessionless(who, encode(self._asks))
                return who

    def _who(self, call: Call) -> Hashable:
        if call.bound_session is not None:
            return call.bound_session
        if self._session_id is not None:
            return self._session_id
        return self if self._outbound is not None else call.principal

    def _new_place(
        self, key: Hashable, is_one_client: bool, inherited: Collection[str] | None
    ) -> Place:
        subscriptions = self._subscriptions if inherited is None else inherited
        was_served = self._was_served or inherited is not None
        client = self._client if is_one_client else _OURS
        if self._asks is not None:
            # In the era before it is told what it can ask.
            client = {**client, "capabilities": self._asks}
        if isinstance(key, Sessionless):
            client = {**client, "protocolVersion": VERSION}
        return Place(
            self._upstream.children.start,
            self._upstream.shell.publish,
            self._upstream.children.telling,
            key,
            client,
            is_one_client,
            isinstance(key, Sessionless),
            self._upstream.server.per == "shared",
            was_served and is_one_client,
            subscribers={uri: {key} for uri in subscriptions} if is_one_client else {},
        )
