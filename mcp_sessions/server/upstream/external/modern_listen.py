"""Deliver a child's changes outside of sessions, to the listens of the modern era.

Rules, owned by ``tests/server/upstream/test_port.py`` and ``tests/server/upstream/external``:

1. A listener gets changes after its acknowledgement. Each carries the id of the listen.
2. A resource is subscribed at the child as long as a client listens for it there. If the child
   ended, idle or dead, the next request starts another, which sends changes again.
3. If the child refuses a subscription, its changes are not delivered, as from a server without such
   a resource.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from mcp_sessions import method_names
from mcp_sessions.core.listen_messages import SUBSCRIPTION_ID, Filter
from mcp_sessions.core.messages import with_meta
from mcp_sessions.errors import METHOD_NOT_FOUND
from mcp_sessions.server.upstream.port import PeerError, PeerRequest, UpstreamCall
from mcp_sessions.server.upstream.subscriptions import notifying_by


class Listen:
    def __init__(self, call: UpstreamCall, wanted: Filter) -> None:
        self._call = call
        self._wanted = wanted
        self._is_acknowledged = asyncio.Event()

    @property
    def uris(self) -> frozenset[str]:
        return self._wanted.uris

    @property
    def call(self) -> UpstreamCall:
        return notifying_by(self._call, self._acknowledge)

    async def _acknowledge(self, method: str, params: Mapping[str, Any] | None) -> None:
        await self._call.notify(method, params)
        if method == method_names.ACKNOWLEDGED:
            self._is_acknowledged.set()

    async def notify(self, method: str, params: Mapping[str, Any] | None) -> None:
        if (
            method != method_names.RESOURCE_UPDATED
            and method_names.CHANGED_KIND.get(method) not in self._wanted.lists
        ):
            return
        await self._is_acknowledged.wait()
        about = {SUBSCRIPTION_ID: self._call.request_id}
        await self._call.notify(method, with_meta(params, about))

    async def send_request(self, asked: PeerRequest) -> dict[str, Any]:
        raise PeerError(METHOD_NOT_FOUND, "Method not found", asked.method)
