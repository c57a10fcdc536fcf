"""Add the layer's own methods around the wrapped server's handlers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from mcp_sessions import method_names
from mcp_sessions.core.listen_messages import level_of
from mcp_sessions.core.messages import error_body, wire_error
from mcp_sessions.core.named import NAMING
from mcp_sessions.errors import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    WireError,
)
from mcp_sessions.server.upstream.port import Upstream, UpstreamCall, UpstreamError, UpstreamPeer


@dataclass(slots=True, eq=False, repr=False)
class Around:
    _peer: UpstreamPeer

    async def notify(self, call: UpstreamCall, method: str, params: dict[str, Any] | None) -> None:
        await self._peer.notify(call, method, params)

    async def close(self) -> None:
        await self._peer.close()


@dataclass(slots=True, eq=False, repr=False)
class Subscriptions(Around):
    """Serve ``resources/subscribe`` and ``unsubscribe`` for every wrapped server.

    A server with handlers of its own is asked first. If it refuses, nothing is subscribed.

    Args:
        remember: Adds (True) or removes a subscription to a URI. False: there is no session, and no
            connection, that it could belong to.
    """

    _upstream: Upstream
    _remember: Callable[[str, bool], Awaitable[bool]]

    async def request(
        self, call: UpstreamCall, method: str, params: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Handle a subscription, and keep it.

        Raises:
            StoreUnavailable: It is unknown whether the change took effect. A repeat is harmless.
        """
        uri = (params or {}).get(NAMING[method])
        if not isinstance(uri, str):
            raise UpstreamError(error_body(INVALID_PARAMS, "Invalid request parameters", ""))
        result: dict[str, Any] = {}
        if self._upstream.serves(method):
            result = await self._peer.request(call, method, params)
        try:
            remembered = await self._remember(uri, method == method_names.SUBSCRIBE)
        except WireError as refused:
            raise UpstreamError(wire_error(refused)) from refused
        if not remembered:
            raise UpstreamError(error_body(INTERNAL_ERROR, "no session that could subscribe"))
        return result


@dataclass(slots=True, eq=False, repr=False)
class LogLevel(Around):
    """Serve ``logging/setLevel``, and keep the level: a server outside of this process gets it
    again when it restarts.

    Args:
        remember: Keeps the level with the session.
    """

    _remember: Callable[[str], Awaitable[None]]

    async def request(
        self, call: UpstreamCall, method: str, params: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Set the level, and keep it.

        Raises:
            StoreUnavailable: It is unknown whether the level was kept. A repeat is harmless.
        """
        result = await self._peer.request(call, method, params)
        level = level_of(params)
        if level is not None:
            await self._remember(level)
        return result


@dataclass(slots=True, eq=False, repr=False)
class Discovery(Around):
    _advertise: Callable[[dict[str, Any]], None]

    async def request(
        self, call: UpstreamCall, method: str, params: dict[str, Any] | None
    ) -> dict[str, Any]:
        result = await self._peer.request(call, method, params)
        self._advertise(result)
        return result
