"""The port to a wrapped server outside of this process.

A bare server of the SDK stands in where that one has no part: it checks a client's handshake,
and has the bus on which modern-era clients outside of any session listen for changes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Hashable, Mapping
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, Final, cast

from mcp_sessions.core.client_description import described
from mcp_sessions.core.listening import LISTEN
from mcp_sessions.core.messages import meta_of
from mcp_sessions.external_server import ExternalServer
from mcp_sessions.ids import SessionId
from mcp_sessions.principal import Principal
from mcp_sessions.server.upstream.external.child import Child
from mcp_sessions.server.upstream.external.children import Children, Starter
from mcp_sessions.server.upstream.external.place import LISTS, Place
from mcp_sessions.server.upstream.port import Call, Outbound, UpstreamPeer
from mcp_sessions.server.upstream.sdk.kernel import (
    HANDSHAKE_VERSIONS,
    SdkUpstream,
    advertise_subscriptions,
    bare_server,
)
from mcp_sessions.stores.records import Peer

Json = dict[str, Any]

_NEWEST: Final = max(HANDSHAKE_VERSIONS)
_OURS: Final[Mapping[str, Any]] = {
    "protocolVersion": _NEWEST,
    "capabilities": {},
    "clientInfo": {"name": "mcp-sessions", "version": version("mcp-sessions")},
}
"""What a child is told that serves several clients."""

_ENVELOPE: Final = frozenset(
    f"io.modelcontextprotocol/{name}"
    for name in ("protocolVersion", "clientInfo", "clientCapabilities", "logLevel")
)
"""Of ``params._meta``: the modern era's words to a server of that era."""

_SERVER_INFO: Final = "io.modelcontextprotocol/serverInfo"
_LOG_LEVEL: Final = "io.modelcontextprotocol/logLevel"
_CACHED: Final = frozenset(
    {"tools/list", "prompts/list", "resources/list", "resources/templates/list", "resources/read"}
)
"""Whose modern-era results say for how long they are good."""

_ENDED_HERE: Final = frozenset(
    {"notifications/initialized", "notifications/cancelled", "notifications/progress"}
)
"""What a client says to the layer; each child is told of its own."""


class ExternalUpstream:
    """An :class:`~mcp_sessions.server.upstream.port.Upstream` of children."""

    keeps_state_in_memory = False

    def __init__(self, server: ExternalServer, starter: Starter, *, remembers: bool) -> None:
        """Wrap a server.

        Args:
            remembers: Whether there is a store.
        """
        self.shell = SdkUpstream(bare_server(server.identity), adds_subscriptions=remembers)
        self.server = server
        self.remembers = remembers
        self.children = Children(server, starter, HANDSHAKE_VERSIONS)

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None]:
        """See :class:`Upstream`. Afterwards there is no child."""
        async with self.shell.lifespan():
            self.children.run()
            try:
                yield
            finally:
                await self.children.close()

    def peer(
        self,
        peer: Peer,
        outbound: Outbound,
        session_id: SessionId | None,
        *,
        ready: bool = True,
        is_alone: bool = False,
        subscriptions: Collection[str] = (),
        was_served: bool = False,
    ) -> UpstreamPeer:
        """See :class:`Upstream`."""
        if not ready:
            return self.shell.peer(peer, outbound, session_id, ready=False)
        client = {**_OURS, **(peer.initialize_params or {})}
        client["protocolVersion"] = peer.protocol_version
        way = None if is_alone and session_id is None else outbound
        return ExternalPeer(self, client, way, session_id, subscriptions, was_served)

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
        """See :class:`Upstream`. Its client can be asked nothing, and a child is told so."""
        info: Any = route.client_info
        client: Json = {**_OURS, "clientInfo": cast(Json, info)} if isinstance(info, dict) else {}
        peer = ExternalPeer(self, client or _OURS, outbound, session_id, subscriptions, was_served)
        return ModernPeer(peer, self.shell.modern_peer(route, outbound, session_id))

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
        self.children.over(session_id)


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

    async def request(
        self, call: Call, method: str, params: dict[str, Any] | None, level: str | None = "debug"
    ) -> dict[str, Any]:
        """See :class:`UpstreamPeer`.

        Args:
            level: The least of a log message that this request's client wants; None: none.
        """
        place = self.place(call)
        if method == "ping" and place.living is None:
            return {}
        if method not in ("resources/subscribe", "resources/unsubscribe"):
            return await place.request(call, level, method, params)
        return await self._subscribe(place, call, method, params or {})

    async def _subscribe(
        self, place: Place, call: Call, method: str, params: dict[str, Any]
    ) -> dict[str, Any]:
        """A child is subscribed as long as anybody here is, if it has that."""
        who, uri = self._who(call), params["uri"]
        child = await self.child(call)
        resources: Any = child.capabilities.get("resources")
        result: dict[str, Any] = {}
        is_served = isinstance(resources, dict) and bool(cast(Json, resources).get("subscribe"))
        subscribed = place.subscribers.setdefault(uri, set())
        others = subscribed - {who}
        try:
            if is_served and (method == "resources/subscribe" or not others):
                result = await place.request(call, "debug", method, params)
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
        child = self.place(call).living
        if child is not None and method not in _ENDED_HERE:
            await child.notify(method, params)

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

    def place(self, call: Call) -> Place:
        """Where its child is."""
        per, who = self._upstream.server.per, self._who(call)
        key: Hashable = who
        if per == "shared":
            key = per
        elif per == "principal":
            key = call.principal
        is_one_client = per == "session" and not isinstance(key, Principal)
        place = self._upstream.children.place(key, partial(self._new_place, key, is_one_client))
        if self._outbound is not None and self._upstream.remembers:
            place.outbounds[who] = self._outbound
        return place

    def _who(self, call: Call) -> Hashable:
        if call.bound_session is not None:
            return call.bound_session
        if self._session_id is not None:
            return self._session_id
        return self if self._outbound is not None else call.principal

    def _new_place(self, key: Hashable, is_one_client: bool) -> Place:
        return Place(
            self._upstream.children.start,
            self._upstream.shell.publish,
            key,
            self._client if is_one_client else _OURS,
            is_one_client,
            self._upstream.server.per == "shared",
            self._was_served and is_one_client,
            subscribers={uri: {key} for uri in self._subscriptions} if is_one_client else {},
        )


@dataclass(eq=False)
class ModernPeer:
    """A client of the modern era, for one request: its child speaks the era before."""

    _peer: ExternalPeer
    _shell: UpstreamPeer

    async def request(
        self, call: Call, method: str, params: dict[str, Any] | None
    ) -> dict[str, Any]:
        """See :class:`UpstreamPeer`."""
        if method == LISTEN:
            return await self._shell.request(call, method, params)
        if method == "server/discover":
            return await self._discover(call, params)
        meta = meta_of(params) or {}
        level = meta.get(_LOG_LEVEL)
        left = {name: value for name, value in (params or {}).items() if name != "_meta"}
        others = {name: value for name, value in meta.items() if name not in _ENVELOPE}
        if others:
            left["_meta"] = others
        least = level if isinstance(level, str) else None
        result = await self._peer.request(call, method, left, least)
        return self._stamped({"resultType": "complete", **result}, call, method in _CACHED)

    async def _discover(self, call: Call, params: dict[str, Any] | None) -> dict[str, Any]:
        result = await self._shell.request(call, "server/discover", params)
        child = await self._peer.child(call)
        result["capabilities"] = dict(child.capabilities)
        result.pop("instructions", None)
        if "instructions" in child.result:
            result["instructions"] = child.result["instructions"]
        return self._stamped(result, call, True)

    def _stamped(self, result: dict[str, Any], call: Call, is_cached: bool) -> dict[str, Any]:
        """With what each result of the modern era says."""
        child = self._peer.place(call).living
        info = child.result.get("serverInfo") if child is not None else None
        if info is not None:
            result = {**result, "_meta": {**(meta_of(result) or {}), _SERVER_INFO: info}}
        return {"ttlMs": 0, "cacheScope": "private", **result} if is_cached else result

    async def notify(self, call: Call, method: str, params: dict[str, Any] | None) -> None:
        """See :class:`UpstreamPeer`. The modern era has nothing to tell a server."""

    async def close(self) -> None:
        """See :class:`UpstreamPeer`."""
        await self._shell.close()
