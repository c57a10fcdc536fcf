from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

from mcp_sessions import method_names
from mcp_sessions.core.client_description import ENVELOPE
from mcp_sessions.core.messages import error_body, members_of, meta_of, with_meta
from mcp_sessions.errors import METHOD_NOT_FOUND
from mcp_sessions.server.upstream.port import UpstreamCall, UpstreamError, UpstreamPeer
from mcp_sessions.server.upstream.sdk.kernel import advertise_subscriptions

ServeUpstream = Callable[
    [UpstreamCall, str | None, dict[str, Any] | None, str | None],
    Awaitable[tuple[dict[str, Any], Mapping[str, Any]]],
]

_SERVER_INFO: Final = "io.modelcontextprotocol/serverInfo"
_LOG_LEVEL: Final = "io.modelcontextprotocol/logLevel"
_REMOVED: Final = method_names.SUBSCRIPTIONS | {
    method_names.INITIALIZE,
    method_names.PING,
    method_names.SET_LEVEL,
}
"""Methods of the handshake era that the modern era removed."""

_CACHED: Final = method_names.LISTING | {method_names.READ_RESOURCE}
"""Methods whose modern-era results say how long they are valid."""


@dataclass(eq=False)
class ModernPeer:
    """A client of the modern era, for one request. Its child speaks the handshake era."""

    _served: ServeUpstream
    """Sends a request to its child; returns the result and the child's answer to ``initialize``."""

    _listens: Callable[
        [UpstreamCall, Mapping[str, Any] | None], AbstractAsyncContextManager[UpstreamCall]
    ]
    """Sends the changes of its child that a listen wants."""

    _listen: Callable[[UpstreamCall, Collection[str]], Awaitable[None]]
    """Subscribes the child of its session to these resources, and to no others."""

    _make_shell: Callable[[], UpstreamPeer]
    """Makes the object that serves methods without a child. Most requests need none."""

    _adds_subscriptions: bool
    """Whether the layer sends changes, whatever the server does."""

    _shell: UpstreamPeer | None = None

    async def request(
        self, call: UpstreamCall, method: str, params: dict[str, Any] | None
    ) -> dict[str, Any]:
        if method == method_names.LISTEN:
            async with self._listens(call, params) as acknowledging:
                return await self._stand_in().request(acknowledging, method, params)
        if method == method_names.DISCOVER:
            return await self._discover(call, params)
        if method in _REMOVED:
            raise UpstreamError(error_body(METHOD_NOT_FOUND, "Method not found", method))
        meta = meta_of(params)
        level = meta.get(_LOG_LEVEL)
        left = {name: value for name, value in (params or {}).items() if name != "_meta"}
        others = {name: value for name, value in meta.items() if name not in ENVELOPE}
        if others:
            left["_meta"] = others
        least = level if isinstance(level, str) else None
        result, handshake = await self._served(call, method, left, least)
        result = {"resultType": "complete", **result}
        is_good_for_a_while = method in _CACHED and result["resultType"] == "complete"
        return _stamped(result, handshake, is_good_for_a_while)

    async def _discover(self, call: UpstreamCall, params: dict[str, Any] | None) -> dict[str, Any]:
        result = await self._stand_in().request(call, method_names.DISCOVER, params)
        _, handshake = await self._served(call, None, None, None)
        result["capabilities"] = deepcopy(dict(members_of(handshake.get("capabilities"))))
        if self._adds_subscriptions:
            advertise_subscriptions(result["capabilities"])
        result.pop("instructions", None)
        if "instructions" in handshake:
            result["instructions"] = handshake["instructions"]
        return _stamped(result, handshake, True)

    async def listen(self, call: UpstreamCall, uris: Collection[str]) -> None:
        await self._listen(call, uris)

    async def notify(self, call: UpstreamCall, method: str, params: dict[str, Any] | None) -> None:
        """Do nothing: the modern era has no notifications to a server."""

    async def close(self) -> None:
        if self._shell is not None:
            await self._shell.close()

    def _stand_in(self) -> UpstreamPeer:
        if self._shell is None:
            self._shell = self._make_shell()
        return self._shell


def _stamped(
    result: dict[str, Any], handshake: Mapping[str, Any], is_cached: bool
) -> dict[str, Any]:
    info = handshake.get("serverInfo")
    if info is not None:
        result = with_meta(result, {_SERVER_INFO: info})
    return {"ttlMs": 0, "cacheScope": "private", **result} if is_cached else result
