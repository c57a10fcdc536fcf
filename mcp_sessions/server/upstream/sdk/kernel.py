"""Wrap a server that was made with the SDK: its lifespan, its lists, and the bus of its changes."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any, Protocol, cast

from mcp.server import MCPServer
from mcp.server.connection import Connection
from mcp.server.lowlevel.server import Server
from mcp.server.subscriptions import (
    InMemorySubscriptionBus,
    ListenHandler,
    SubscriptionBus,
)
from mcp.shared.subscriptions import ServerEvent, event_from_wire, event_to_notification
from mcp_types import methods
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, is_version_at_least
from pydantic import ValidationError

from mcp_sessions import method_names
from mcp_sessions.core.client_description import described
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.ids import SessionId
from mcp_sessions.seldom import Seldom
from mcp_sessions.server.upstream.port import (
    Outbound,
    UpstreamCall,
    UpstreamError,
    UpstreamPeer,
)
from mcp_sessions.server.upstream.sdk.sdk_peer import SdkPeer, SdkPeers, error_of
from mcp_sessions.server.upstream.sdk.store_failures import filter_store_failures
from mcp_sessions.server.upstream.sdk.ways_back import SdkOutbound
from mcp_sessions.stores.records import Peer

logger = logging.getLogger(__name__)
# Any client can send a state that no server made. The SDK logs a line for each.
logging.getLogger("mcp.server.request_state").addFilter(Seldom())


class FastMCPServer(Protocol):
    """A ``FastMCP``: it is an extra, and its own type is not needed to wrap it."""

    def http_app(self, *args: Any, **options: Any) -> Any: ...


SdkServer = MCPServer[Any] | Server[Any] | FastMCPServer
"""What can be wrapped and runs in this process."""

HANDSHAKE_VERSIONS = frozenset(HANDSHAKE_PROTOCOL_VERSIONS)


class _Reach(Enum):
    EVERYONE = "everyone"
    OUTSIDE = "outside"
    """Only listens outside of sessions."""

    ECHO = "echo"
    """The listens of this process: another process has announced the change."""


_REACH: ContextVar[_Reach] = ContextVar("mcp_sessions_reach", default=_Reach.EVERYONE)
"""Who gets the change that is being published."""


def is_server(candidate: object) -> bool:
    return isinstance(candidate, (MCPServer, Server)) or _is_fastmcp(candidate)


def primes_streams(protocol_version: str) -> bool:
    return is_version_at_least(protocol_version, "2025-11-25")


def bare_server(name: str) -> object:
    return MCPServer(name)


def advertise_subscriptions(capabilities: dict[str, Any]) -> None:
    for name in method_names.LISTED:
        if isinstance(capabilities.get(name), dict):
            capabilities[name]["listChanged"] = True
    if isinstance(capabilities.get("resources"), dict):
        capabilities["resources"]["subscribe"] = True


def _fastmcp_kind(candidate: object) -> type | None:
    # By name: FastMCP is an extra, and importing it here would demand it.
    kinds = type(candidate).__mro__
    named = (kind for kind in kinds if kind.__name__ == "FastMCP")
    return next((kind for kind in named if kind.__module__.startswith("fastmcp.")), None)


def _is_fastmcp(candidate: object) -> bool:
    return _fastmcp_kind(candidate) is not None


class SdkUpstream:
    def __init__(self, server: object, *, adds_subscriptions: bool = True) -> None:
        """Wrap a server.

        Args:
            server: An ``MCPServer``, a lowlevel ``Server`` or a ``FastMCP``.
            adds_subscriptions: Whether the layer serves subscriptions and list changes in the
                handshake era.

        Raises:
            ConfigurationError: The server is none of these.
        """
        self.server = server
        auth: object = getattr(server, "auth", None)
        if isinstance(server, MCPServer):
            known = cast("MCPServer[Any]", server)
            auth = known.settings.auth
            self.lowlevel: Server[Any] = known._lowlevel_server  # pyright: ignore[reportPrivateUsage]
        elif isinstance(server, Server):
            self.lowlevel = cast("Server[Any]", server)
        elif _is_fastmcp(server):
            self.lowlevel = cast("Server[Any]", getattr(server, "_mcp_server"))  # noqa: B009
        else:
            raise ConfigurationError(
                f"a {type(server).__name__} cannot be wrapped: "
                "an MCPServer, a lowlevel Server or a FastMCP is wanted"
            )
        self.authenticates = auth is not None
        """Whether its own HTTP application asks for a credential."""

        self.kind = "fastmcp" if _is_fastmcp(cast(object, server)) else "mcp"
        """``fastmcp`` or ``mcp``."""

        self._bus = _bus_of(cast(object, server), self.lowlevel)
        self._peers = peers = SdkPeers(self.lowlevel)
        self.peer, self.modern_peer = peers.peer, peers.modern_peer
        filter_store_failures()
        self._adds_subscriptions = adds_subscriptions

    is_outside = False

    @property
    def keeps_state_in_memory(self) -> bool:
        if self.kind != "fastmcp":
            return False
        storage: object = getattr(self.server, "_state_storage", None)
        # FastMCP makes this storage by default. An equal one counts as well.
        return storage is None or type(storage).__module__.startswith("key_value.aio.stores.memory")

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None]:
        async with self.lowlevel.lifespan(self.lowlevel) as state:
            self._peers.start(state)
            yield

    def validate(self, method: str, version: str, params: Mapping[str, Any] | None) -> None:
        try:
            methods.validate_client_request(method, version, params)
        except ValidationError as failed:
            raise UpstreamError(error_of(failed, modern=True)) from failed

    async def initialize(
        self, call: UpstreamCall, params: dict[str, Any] | None, outbound: Outbound
    ) -> tuple[dict[str, Any], Peer, SdkPeer]:
        connection = Connection.for_loop(SdkOutbound(outbound))
        peer = self._peers.peer_on(connection)
        result = await peer.request(call, method_names.INITIALIZE, params)
        agreed = Peer(connection.protocol_version, described(params))
        capabilities: dict[str, Any] = result.setdefault("capabilities", {})
        if self._adds_subscriptions:
            advertise_subscriptions(capabilities)
        return result, agreed, peer

    def serves(self, method: str) -> bool:
        return self.lowlevel.get_request_handler(method) is not None

    def listed(self) -> frozenset[str]:
        return frozenset(
            kind for kind, method in method_names.LIST_METHODS.items() if self.serves(method)
        )

    async def listed_tools(self) -> Sequence[Mapping[str, Any]] | None:
        """Return the tools of an MCPServer or FastMCP. None: a lowlevel server's handler makes its
        list.
        """
        server = self.server
        if isinstance(server, MCPServer):
            known = cast("MCPServer[Any]", server)
            return [tool.model_dump(by_alias=True) for tool in await known.list_tools()]
        if self.kind != "fastmcp":
            return None
        try:
            listed: Any = server
            # This also finds tools that some sessions see later: FastMCP leaves them out after its
            # providers.
            whole = cast("Any", super(cast("Any", _fastmcp_kind(server)), listed))
            tools: list[Any] = [*await listed.list_tools(), *await whole.list_tools()]
            return [tool.to_mcp_tool().model_dump(by_alias=True) for tool in tools]
        except Exception:
            # This is the boundary to the server's code: its list may depend on the client.
            logger.info("the server cannot list its tools without a client")
            return None

    def on_change(
        self, listener: Callable[[str, Mapping[str, Any] | None, bool], None]
    ) -> Callable[[], None]:
        if self._bus is None:
            return lambda: None

        def forward(event: ServerEvent) -> None:
            reach = _REACH.get()
            if reach is _Reach.ECHO:
                return
            notification = event_to_notification(event, {})
            dumped = notification.model_dump(by_alias=True, mode="json", exclude_none=True)
            params: dict[str, Any] = dumped.get("params") or {}
            params.pop("_meta", None)
            listener(dumped["method"], params or None, reach is _Reach.OUTSIDE)

        return self._bus.subscribe(forward)

    async def publish(
        self, method: str, params: Mapping[str, Any] | None, *, is_outside: bool = False
    ) -> bool:
        event = event_from_wire(method, params)
        if self._bus is None or event is None:
            return False
        if is_outside:
            await _publish(self._bus, event, _Reach.OUTSIDE)
        else:
            await self._bus.publish(event)
        return True

    async def echo(self, method: str, params: Mapping[str, Any] | None) -> None:
        """Publish a change on the SDK's own bus. Another bus may reach other processes by itself,
        so it does not get the change again.
        """
        event = event_from_wire(method, params)
        bus = self._bus
        if event is None or not isinstance(bus, InMemorySubscriptionBus):
            return
        await _publish(bus, event, _Reach.ECHO)

    async def leave(self, grace: float) -> None:
        """Do nothing: the server runs already."""

    async def listen(self, peer: UpstreamPeer, call: UpstreamCall, uris: Collection[str]) -> None:
        """Do nothing: the server publishes its changes by itself."""

    async def session_ended(self, session_id: SessionId, *, sleeps: bool = False) -> None:
        """Do nothing: the session's peers keep its data."""

    @property
    def name(self) -> str:
        return self.lowlevel.name

    @property
    def lifespan_state(self) -> Any:
        return self._peers.lifespan_state


async def _publish(bus: SubscriptionBus, event: ServerEvent, reach: _Reach) -> None:
    token = _REACH.set(reach)
    try:
        await bus.publish(event)
    finally:
        _REACH.reset(token)


def _bus_of(server: object, lowlevel: Server[Any]) -> SubscriptionBus | None:
    if isinstance(server, MCPServer):
        known = cast("MCPServer[Any]", server)
        return known._subscriptions  # pyright: ignore[reportPrivateUsage]
    entry = lowlevel.get_request_handler(method_names.LISTEN)
    if entry is not None and isinstance(entry.handler, ListenHandler):
        return entry.handler._bus  # pyright: ignore[reportPrivateUsage]
    return None
