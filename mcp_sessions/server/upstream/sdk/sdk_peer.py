"""Present a client to the SDK's kernel: its ``Connection``, and what runs its requests.

``ServerRunner`` gets a ``Connection`` that can be rebuilt from a stored handshake and a
``DispatchContext`` of ours, which takes notifications and server-to-client requests. No server loop
runs, and none of the SDK's own transports stands in between.

A client of the modern era is one request, which carries all data about the client. The data is the
same for each request of one client, so the SDK's objects for it are made once. The clean-up after
each request runs only if a handler has registered something.

The SDK opens a span for each request. If no tracer is configured and the request carries no trace,
the span has no effect. The request then goes past the SDK's tracing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final, cast

from mcp.server._otel import OpenTelemetryMiddleware
from mcp.server.connection import Connection
from mcp.server.lowlevel.server import Server
from mcp.server.runner import ServerRunner, aclose_shielded, modern_error_data
from mcp.shared.jsonrpc_dispatcher import handler_exception_to_error_data
from mcp.shared.message import ServerMessageMetadata
from mcp_types import InitializeRequestParams, methods
from opentelemetry import trace
from pydantic_core import to_jsonable_python

from mcp_sessions import method_names
from mcp_sessions.core.client_description import ENVELOPE
from mcp_sessions.core.messages import REQUEST_KEY_META, SESSION_META
from mcp_sessions.core.recent import Recent
from mcp_sessions.ids import SessionId, name_for_handlers
from mcp_sessions.server.upstream.port import (
    CALL,
    NOTHING_WANTED,
    Outbound,
    StoreFailedHandler,
    UpstreamCall,
    UpstreamError,
    UpstreamPeer,
    Wanted,
    of_handler,
)
from mcp_sessions.server.upstream.sdk.sdk_spans import is_tracing, traced
from mcp_sessions.server.upstream.sdk.store_failures import crashed_with, failed_with
from mcp_sessions.server.upstream.sdk.ways_back import CallContext, ModernOutbound, SdkOutbound
from mcp_sessions.stores.records import Peer

logger = logging.getLogger(__name__)

Runner = ServerRunner[Any]

_KEPT: Final = 256
"""Clients whose envelopes are kept, at most."""

_LARGEST: Final = 4_096
"""Characters of an envelope that is kept, at most."""


class SdkPeers:
    def __init__(self, lowlevel: Server[Any]) -> None:
        self._lowlevel = lowlevel
        self._untraced = untraced(lowlevel)
        self._envelopes = Envelopes()
        self.lifespan_state: Any = None
        self._is_tracing = False

    def start(self, lifespan_state: Any) -> None:
        self.lifespan_state = lifespan_state
        # Only now, since an application may set up its tracing in its lifespan.
        self._is_tracing = is_tracing()

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
        return self.peer_on(connection)

    def peer_on(self, connection: Connection) -> SdkPeer:
        return SdkPeer(self._runner, connection)

    def modern_peer(
        self,
        peer: Peer,
        outbound: Outbound | None,
        session_id: SessionId | None,
        *,
        wanted: Wanted = NOTHING_WANTED,
        was_served: bool = False,
    ) -> SdkPeer:
        connection = self._envelopes.connection(peer)
        way = None
        if outbound is not None or connection.is_askable:
            connection.outbound = way = ModernOutbound(outbound)
        if session_id is not None:
            connection.session_id = name_for_handlers(session_id)
        return SdkPeer(self._runner, connection, modern=True, request_outbound=way)

    def _runner(
        self, connection: Connection, params: Mapping[str, Any] | None, known: Runner | None
    ) -> Runner:
        if self._is_tracing:
            if known is not None:
                return known
            server = traced(self._lowlevel, connection)
        else:
            server = self._untraced if is_in_no_trace(params) else self._lowlevel
            if known is not None and known.server is server:
                return known
        return ServerRunner(server, connection, self.lifespan_state)


@dataclass(slots=True, eq=False, repr=False)
class SdkPeer:
    _runner_of: Callable[[Connection, Mapping[str, Any] | None, Runner | None], Runner]
    _connection: Connection
    modern: bool = False
    request_outbound: ModernOutbound | None = None
    """The way back to the client of the 2026 era. None: another era, or a client without one."""

    _runner: Runner | None = None

    async def request(
        self, call: UpstreamCall, method: str, params: dict[str, Any] | None
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
            handle = runner.on_request
            # The runner keeps it, and so refers to itself: all that is known of the request would
            # wait for the garbage collector.
            runner.__dict__.pop("on_request", None)
            result = await handle(context, method, params)
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
            raise UpstreamError(
                of_handler(error_of(failed, modern=self.modern), modern=self.modern)
            ) from failed

    async def notify(self, call: UpstreamCall, method: str, params: dict[str, Any] | None) -> None:
        CALL.set(call)
        self._runner = runner = self._runner_of(self._connection, params, self._runner)
        metadata = ServerMessageMetadata(request_context=call.context)
        context = CallContext(call, call.request_id, metadata)
        handle = runner.on_notify
        runner.__dict__.pop("on_notify", None)
        await handle(context, method, params)

    def belongs_to(self, session_id: SessionId) -> None:
        self._connection.session_id = name_for_handlers(session_id)

    async def close(self) -> None:
        connection = self._connection
        # A connection of one request is closed only if a handler registered something there.
        if not isinstance(connection, RequestConnection) or connection.is_stack_used:
            await aclose_shielded(connection)


def error_of(failed: Exception, *, modern: bool) -> dict[str, Any]:
    error = modern_error_data(failed) if modern else handler_exception_to_error_data(failed)
    if error is None:
        logger.exception("a request handler raised")
        return {"code": 0, "message": str(failed)}
    return error.model_dump(by_alias=True, mode="json", exclude_none=True)


_NO_TRACE: Final = frozenset({*ENVELOPE, SESSION_META, REQUEST_KEY_META, "progressToken"})
"""Members of ``_meta`` that no propagator reads."""


_GLOBALS = vars(trace)


def is_in_no_trace(params: Mapping[str, Any] | None) -> bool:
    # This runs for each request, so not is_tracing(), which looks through the environment.
    if _GLOBALS.get("_TRACER_PROVIDER", trace) is not None:
        return False
    meta: Mapping[str, Any] | None = params.get("_meta") if params else None
    return not meta or (isinstance(meta, dict) and meta.keys() <= _NO_TRACE)


def untraced(server: Server[Any]) -> Server[Any]:
    return cast("Server[Any]", _Untraced(server))


class _Untraced:
    def __init__(self, server: Server[Any]) -> None:
        self._server = server
        self.get_request_handler = server.get_request_handler
        self.cache_hints = server.cache_hints
        stamp = server.server_info_stamp
        is_flat = all(isinstance(value, str) for value in stamp.values())
        self._stamp = stamp if is_flat else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    @property
    def middleware(self) -> list[Any]:
        return [
            each for each in self._server.middleware if type(each) is not OpenTelemetryMiddleware
        ]

    @property
    def server_info_stamp(self) -> dict[str, Any]:
        """Return a copy of the server's name and version. Plain texts need no deep copy."""
        return {**self._stamp} if self._stamp is not None else self._server.server_info_stamp


class RequestConnection(Connection):
    is_stack_used = False
    is_askable = False
    """Its client declared something."""

    @property
    def exit_stack(self) -> AsyncExitStack:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the stack, and note the use: a caller wants to register something."""
        self.is_stack_used = True
        return self._stack

    @exit_stack.setter
    def exit_stack(self, stack: AsyncExitStack) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._stack = stack


class Envelopes:
    def __init__(self) -> None:
        # The most recent one is at the end.
        self._known = Recent[str, tuple[Connection, bool]](_KEPT)

    def connection(self, peer: Peer) -> RequestConnection:
        said, is_askable = self._read(peer)
        connection = RequestConnection(
            said.outbound,
            protocol_version=said.protocol_version,
            client_params=said.client_params,
        )
        connection.client_capabilities = said.client_capabilities
        connection.is_askable = is_askable
        connection.initialized.set()
        return connection

    def _read(self, peer: Peer) -> tuple[Connection, bool]:
        # Two different JSON values never have the same text here. In JSON itself NaN and null may.
        try:
            spelled = repr((peer.protocol_version, peer.initialize_params))
        except RecursionError:
            # JSON has more levels than a text of it may have here.
            return _said(peer)
        known = self._known.get(spelled)
        if known is not None:
            self._known.move_to_end(spelled)
            return known
        said = _said(peer)
        if len(spelled) <= _LARGEST:
            self._known.keep(spelled, said)
        return said


def _said(peer: Peer) -> tuple[Connection, bool]:
    known = peer.initialize_params or {}
    described = known.get("clientInfo"), known.get("capabilities")
    said = Connection.from_envelope(peer.protocol_version, *described)
    return said, bool(peer.capabilities)
