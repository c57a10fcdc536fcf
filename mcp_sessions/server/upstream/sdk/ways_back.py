"""Adapt the ways back to a client for the SDK's kernel: of one request, and of a connection."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import anyio
from mcp.shared.dispatcher import CallOptions
from mcp.shared.exceptions import MCPError, NoBackChannelError
from mcp.shared.message import ServerMessageMetadata
from mcp.shared.transport_context import TransportContext

from mcp_sessions.server.upstream.port import (
    NotAskable,
    Outbound,
    PeerError,
    PeerRequest,
    UpstreamCall,
    noted,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, repr=False)
class CallContext:
    _call: UpstreamCall
    request_id: str | int | None
    """None: a notification."""

    message_metadata: ServerMessageMetadata
    """The data that its transport has about it."""

    _cancel_requested: anyio.Event | None = None

    @property
    def transport(self) -> TransportContext:
        headers = getattr(self._call.context, "headers", None)
        return TransportContext(
            kind=_TRANSPORT_KINDS.get(self._call.transport, self._call.transport),
            can_send_request=self._call.can_send_request,
            headers=headers,
        )

    @property
    def can_send_request(self) -> bool:
        return self._call.can_send_request

    @property
    def cancel_requested(self) -> anyio.Event:
        """Return an event for callers that want one. Cancellation itself interrupts the handler."""
        if self._cancel_requested is None:
            self._cancel_requested = anyio.Event()
        return self._cancel_requested

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        if not self._call.can_send_request:
            raise NoBackChannelError(method)
        return await _ask(self._call, method, params, opts)

    async def notify(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> None:
        await noted(self._call.notify(method, params))

    async def progress(
        self, progress: float, total: float | None = None, message: str | None = None
    ) -> None:
        await noted(self._call.progress(progress, total, message))


@dataclass(slots=True, eq=False, repr=False)
class SdkOutbound:
    _outbound: Outbound

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        return await _ask(self._outbound, method, params, opts)

    async def notify(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> None:
        await noted(self._outbound.notify(method, params))


class ModernOutbound:
    """Implement the SDK's ``Outbound`` for the 2026 era, whose connection is one request.

    A question goes to the client of that request, whichever handler asks: another one may have the
    connection in its hands.
    """

    def __init__(self, outbound: Outbound | None) -> None:
        self._outbound = outbound
        self._call: UpstreamCall | None = None

    def begin(self, call: UpstreamCall) -> None:
        self._call = call

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        call = self._call
        if call is None or not call.can_send_request:
            raise NoBackChannelError(method)
        return await _ask(call, method, params, opts)

    async def notify(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> None:
        if self._outbound is None:
            logger.debug("dropped %s: no standalone channel", method)
            return
        await noted(self._outbound.notify(method, params))


async def _ask(
    outbound: Outbound, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None
) -> dict[str, Any]:
    options = opts or {}
    try:
        asked = PeerRequest(method, params, options.get("timeout"), options.get("on_progress"))
        return await noted(outbound.send_request(asked))
    except NotAskable as failed:
        raise NoBackChannelError(method) from failed
    except PeerError as failed:
        raise MCPError(failed.code, failed.message, failed.data) from failed


_TRANSPORT_KINDS = {"http": "streamable-http"}
