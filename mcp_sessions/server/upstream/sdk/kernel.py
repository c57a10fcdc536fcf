"""Call the SDK's handler kernel directly.

``ServerRunner`` gets a ``Connection`` that can be rebuilt from a stored handshake and a
``DispatchContext`` of ours, which takes notifications and server-to-client requests. No server loop
runs, and none of the SDK's own transports stands in between.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

from mcp.server import MCPServer
from mcp.server.connection import Connection
from mcp.server.lowlevel.server import Server
from mcp.server.runner import ServerRunner, aclose_shielded, modern_error_data
from mcp.server.subscriptions import (
    InMemorySubscriptionBus,
    ListenHandler,
    SubscriptionBus,
)
from mcp.shared.inbound import InboundModernRoute
from mcp.shared.jsonrpc_dispatcher import handler_exception_to_error_data
from mcp.shared.message import ServerMessageMetadata
from mcp.shared.subscriptions import ServerEvent, event_from_wire, event_to_notification
from mcp_types import InitializeRequestParams, methods
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, is_version_at_least
from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from mcp_sessions import method_names
from mcp_sessions.core.client_description import described
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.ids import SessionId, name_for_handlers
from mcp_sessions.server.upstream.port import (
    CALL,
    NOTHING_WANTED,
    Call,
    Outbound,
    StoreFailedHandler,
    UpstreamError,
    UpstreamPeer,
    Wanted,
)
from mcp_sessions.server.upstream.sdk.modern_connection import Envelopes, RequestConnection
from mcp_sessions.server.upstream.sdk.sdk_spans import is_in_no_trace, is_tracing, traced, untraced
from mcp_sessions.server.upstream.sdk.store_failures import (
    crashed_with,
    failed_with,
    filter_store_failures,
)
from mcp_sessions.server.upstream.sdk.ways_back import CallContext, ModernOutbound, SdkOutbound
from mcp_sessions.stores.records import Peer

logger = logging.getLogger(__name__)

HANDSHAKE_VERSIONS = frozenset(HANDSHAKE_PROTOCOL_VERSIONS)

Runner = ServerRunner[Any]


_ECHOES: ContextVar[bool] = ContextVar("mcp_sessions_echoes", default=False)
"""Whether another process has announced the change that is being published."""


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
        self._lifespan_state: Any = None
        self._is_tracing = False
        self._untraced = untraced(self.lowlevel)
        self._envelopes = Envelopes()
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
            self._lifespan_state = state
            # Only now, since an application may set up its tracing in its lifespan.
            self._is_tracing = is_tracing()
            yield

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
    ) -> SdkPeer:
        connection = Connection(
            SdkOutbound(outbound),
            protocol_version=peer.protocol_version,
            session_id=name_for_handlers(session_id) if session_id is not None else None,
        )
        if peer.initialize_params is not None:
            connection.client_params = InitializeRequestParams.model_validate(
                peer.initialize_params, by_name=False
            )
        if ready:
            connection.initialized.set()
        return SdkPeer(self.runner, connection)

    def modern_peer(
        self,
        route: InboundModernRoute,
        outbound: Outbound | None,
        session_id: SessionId | None,
        *,
        wanted: Wanted = NOTHING_WANTED,
        was_served: bool = False,
    ) -> SdkPeer:
        connection = self._envelopes.connection(route)
        way = None
        if outbound is not None or route.client_capabilities:
            connection.outbound = way = ModernOutbound(outbound)
        if session_id is not None:
            connection.session_id = name_for_handlers(session_id)
        return SdkPeer(self.runner, connection, modern=True, request_outbound=way)

    def validate(self, method: str, version: str, params: Mapping[str, Any] | None) -> None:
        try:
            methods.validate_client_request(method, version, params)
        except ValidationError as failed:
            raise UpstreamError(_error_of(failed, modern=True)) from failed

    async def initialize(
        self, call: Call, params: dict[str, Any] | None, outbound: Outbound
    ) -> tuple[dict[str, Any], Peer, SdkPeer]:
        connection = Connection.for_loop(SdkOutbound(outbound))
        peer = SdkPeer(self.runner, connection)
        result = await peer.request(call, method_names.INITIALIZE, params)
        agreed = Peer(connection.protocol_version, described(params))
        capabilities: dict[str, Any] = result.setdefault("capabilities", {})
        if self._adds_subscriptions:
            advertise_subscriptions(capabilities)
        return result, agreed, peer

    def serves(self, method: str) -> bool:
        return self.lowlevel.get_request_handler(method) is not None

    def listed(self) -> frozenset[str]:
        return frozenset(name for name in method_names.LISTED if self.serves(f"{name}/list"))

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
        self, listener: Callable[[str, Mapping[str, Any] | None], None]
    ) -> Callable[[], None]:
        if self._bus is None:
            return lambda: None

        def forward(event: ServerEvent) -> None:
            if _ECHOES.get():
                return
            notification = event_to_notification(event, {})
            dumped = notification.model_dump(by_alias=True, mode="json", exclude_none=True)
            params: dict[str, Any] = dumped.get("params") or {}
            params.pop("_meta", None)
            listener(dumped["method"], params or None)

        return self._bus.subscribe(forward)

    async def publish(self, method: str, params: Mapping[str, Any] | None) -> bool:
        event = event_from_wire(method, params)
        if self._bus is None or event is None:
            return False
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
        token = _ECHOES.set(True)
        try:
            await bus.publish(event)
        finally:
            _ECHOES.reset(token)

    async def leave(self, grace: float) -> None:
        """Do nothing: the server runs already."""

    async def listen(self, peer: UpstreamPeer, call: Call, uris: Collection[str]) -> None:
        """Do nothing: the server publishes its changes by itself."""

    async def session_ended(self, session_id: SessionId, *, sleeps: bool = False) -> None:
        """Do nothing: the session's peers keep its data."""

    @property
    def name(self) -> str:
        return self.lowlevel.name

    @property
    def lifespan_state(self) -> Any:
        return self._lifespan_state

    def runner(
        self, connection: Connection, params: Mapping[str, Any] | None, known: Runner | None
    ) -> Runner:
        if self._is_tracing:
            if known is not None:
                return known
            server = traced(self.lowlevel, connection)
        else:
            server = self._untraced if is_in_no_trace(params) else self.lowlevel
            if known is not None and known.server is server:
                return known
        return ServerRunner(server, connection, self._lifespan_state)


@dataclass(slots=True, eq=False, repr=False)
class SdkPeer:
    _runner_of: Callable[[Connection, Mapping[str, Any] | None, Runner | None], Runner]
    _connection: Connection
    modern: bool = False
    request_outbound: ModernOutbound | None = None
    """The way back to the client of the 2026 era. None: another era, or a client without one."""

    _runner: Runner | None = None

    async def request(
        self, call: Call, method: str, params: dict[str, Any] | None
    ) -> dict[str, Any]:
        CALL.set(call)
        response, stream = call.response, call.get_stream
        if self.request_outbound is not None:
            self.request_outbound.begin(call)
        try:
            self._runner = runner = self._runner_of(self._connection, params, self._runner)
            metadata = ServerMessageMetadata(
                request_context=call.context,
                close_sse_stream=None if response is None else response.close_stream,
                close_standalone_sse_stream=None if stream is None else stream.close_stream,
            )
            context = CallContext(call, call.request_id, metadata)
            result = await runner.on_request(context, method, params)
            if method in methods.SPEC_CLIENT_METHODS:
                if call.store_failure is None or method != method_names.CALL_TOOL:
                    return result
                lost = crashed_with(call, (params or {}).get("name"), result)
                if lost is None:
                    return result
                raise StoreFailedHandler(lost)
            # Results of the server's own methods are JSON only once the SDK's entries have dumped
            # them. Our code does not use those entries.
            return to_jsonable_python(result, by_alias=True, exclude_none=True, inf_nan_mode="null")
        except StoreFailedHandler:
            raise
        except Exception as failed:
            # This is the boundary to handler code: each of its exceptions is an answer on the wire.
            lost = failed_with(failed)
            if lost is not None:
                raise StoreFailedHandler(lost) from failed
            raise UpstreamError(_error_of(failed, modern=self.modern)) from failed

    async def notify(self, call: Call, method: str, params: dict[str, Any] | None) -> None:
        CALL.set(call)
        self._runner = runner = self._runner_of(self._connection, params, self._runner)
        metadata = ServerMessageMetadata(request_context=call.context)
        await runner.on_notify(CallContext(call, call.request_id, metadata), method, params)

    def belongs_to(self, session_id: SessionId) -> None:
        self._connection.session_id = name_for_handlers(session_id)

    async def close(self) -> None:
        connection = self._connection
        # Of a connection of one request only if a handler registered something there.
        if not isinstance(connection, RequestConnection) or connection.is_stack_used:
            await aclose_shielded(connection)


def _error_of(failed: Exception, *, modern: bool) -> dict[str, Any]:
    error = modern_error_data(failed) if modern else handler_exception_to_error_data(failed)
    if error is None:
        logger.exception("a request handler raised")
        return {"code": 0, "message": str(failed)}
    return error.model_dump(by_alias=True, mode="json", exclude_none=True)


def _bus_of(server: object, lowlevel: Server[Any]) -> SubscriptionBus | None:
    if isinstance(server, MCPServer):
        known = cast("MCPServer[Any]", server)
        return known._subscriptions  # pyright: ignore[reportPrivateUsage]
    entry = lowlevel.get_request_handler(method_names.LISTEN)
    if entry is not None and isinstance(entry.handler, ListenHandler):
        return entry.handler._bus  # pyright: ignore[reportPrivateUsage]
    return None
