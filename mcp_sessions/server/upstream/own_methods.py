"""Add the layer's own methods around the wrapped server's handlers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mcp_sessions import method_names
from mcp_sessions.background import stopped
from mcp_sessions.core.listen_messages import SUBSCRIPTION_ID, level_of
from mcp_sessions.core.messages import error_body, members_of, wire_error, with_meta
from mcp_sessions.core.named import NAMING
from mcp_sessions.errors import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
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


Notify = Callable[[str, Mapping[str, Any] | None], Awaitable[None]]


@dataclass(slots=True, eq=False, repr=False)
class TaskListen(Around):
    """Report tasks on a listen outside of sessions, beside the changes of the server.

    Args:
        task_ids: The tasks, which are named in the acknowledgement.
        report: Reports them by a function that sends one, until it is cancelled.
    """

    _task_ids: Sequence[str]
    _report: Callable[[Callable[[dict[str, Any]], Awaitable[None]]], asyncio.Task[None]]

    async def request(
        self, call: UpstreamCall, method: str, params: dict[str, Any] | None
    ) -> dict[str, Any]:
        about = {SUBSCRIPTION_ID: call.request_id}
        reporting: asyncio.Task[None] | None = None

        async def say(shown: dict[str, Any]) -> None:
            await call.notify(method_names.TASK_CHANGED, with_meta(shown, about))

        async def notify(method: str, params: Mapping[str, Any] | None) -> None:
            nonlocal reporting
            if method != method_names.ACKNOWLEDGED:
                return await call.notify(method, params)
            said = members_of((params or {}).get("notifications"))
            if self._task_ids:
                said = {**said, "taskIds": self._task_ids}
            await call.notify(method, {**(params or {}), "notifications": said})
            reporting = self._report(say)

        try:
            return await self._peer.request(notifying_by(call, notify), method, params)
        except UpstreamError as failed:
            if reporting is not None or failed.error.get("code") != METHOD_NOT_FOUND:
                raise
            # The server itself reports no changes.
            await notify(method_names.ACKNOWLEDGED, {"_meta": about})
            await asyncio.Event().wait()
            raise
        finally:
            if reporting is not None:
                await stopped(reporting)


def notifying_by(call: UpstreamCall, notify: Notify) -> UpstreamCall:
    """Return a call whose notifications go another way."""
    return cast(UpstreamCall, _Notifying(call, notify))


class _Notifying:
    def __init__(self, call: UpstreamCall, notify: Notify) -> None:
        self._call, self.notify = call, notify

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)
