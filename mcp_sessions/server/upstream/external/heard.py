"""What a child is heard to say outside of sessions: by a listen of the modern era.

Rules, owned by ``tests/server/upstream/test_port.py`` and ``tests/server/upstream/external``:

1. A change is told after the acknowledgement, to who listens for it, and carries the listen's id.
2. A resource is subscribed at the child as long as anybody listens for it there; a child that was
   ended, idle or dead, tells again when the next request has started another.
3. What the child refuses to tell of is not heard, as of a server that has no such resource.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final, cast

from mcp_sessions.core.listening import SUBSCRIPTION_ID, Filter
from mcp_sessions.core.messages import meta_of
from mcp_sessions.errors import METHOD_NOT_FOUND
from mcp_sessions.server.upstream.external.place import UPDATED
from mcp_sessions.server.upstream.port import Call, PeerError, PeerRequest

_ACKNOWLEDGED: Final = "notifications/subscriptions/acknowledged"


class Listen:
    """One listen: an :class:`~mcp_sessions.server.upstream.port.Outbound` of its place."""

    def __init__(self, call: Call, wanted: Filter) -> None:
        self._call = call
        self._wanted = wanted
        self._is_acknowledged = asyncio.Event()

    @property
    def uris(self) -> frozenset[str]:
        """The resources of whose changes it wants to hear."""
        return self._wanted.uris

    @property
    def call(self) -> Call:
        """For whom acknowledges it."""
        return cast(Call, _Acknowledging(self._call, self._is_acknowledged))

    async def notify(self, method: str, params: Mapping[str, Any] | None) -> None:
        """See :class:`Outbound`."""
        if method != UPDATED and method.split("/")[1] not in self._wanted.lists:
            return
        await self._is_acknowledged.wait()
        meta = {**(meta_of(params) or {}), SUBSCRIPTION_ID: self._call.request_id}
        await self._call.notify(method, {**(params or {}), "_meta": meta})

    async def send_request(self, asked: PeerRequest) -> dict[str, Any]:
        """See :class:`Outbound`. Nothing is asked there."""
        raise PeerError(METHOD_NOT_FOUND, "Method not found", asked.method)


class _Acknowledging:
    """A call, until its listen is acknowledged and from then on."""

    def __init__(self, call: Call, acknowledged: asyncio.Event) -> None:
        self._call = call
        self._acknowledged = acknowledged

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    async def notify(self, method: str, params: Mapping[str, Any] | None) -> None:
        """See :class:`Call`."""
        await self._call.notify(method, params)
        if method == _ACKNOWLEDGED:
            self._acknowledged.set()
