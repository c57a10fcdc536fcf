from __future__ import annotations

import asyncio
import itertools
import json
import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mcp_sessions import SessionLayer
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import SessionId
from mcp_sessions.principal import Principal
from mcp_sessions.stores.records import Peer

AT_ONCE = 10
"""Sessions that get an event of one change."""

_TOGETHER = 100
"""Sessions that are made at once."""


class Eventful:
    """Detached sessions in the store of a layer, some of which get events all the time."""

    def __init__(self, layer: SessionLayer) -> None:
        self._layer = layer
        self._count = 0
        self._changes: asyncio.Task[None] | None = None

    async def fill(self, request: Request) -> Response:
        """Make sessions, and begin with events: ``{"sessions": N, "events": N a second}``."""
        asked = json.loads(await request.body())
        sessions: list[SessionId] = []
        for first in range(0, asked["sessions"], _TOGETHER):
            numbers = range(first, min(first + _TOGETHER, asked["sessions"]))
            sessions += await asyncio.gather(*map(self._made, numbers))
        resources = max(1, min(100, len(sessions) // AT_ONCE))
        for number, session_id in enumerate(sessions[: resources * AT_ONCE]):
            await self._layer.store.subscribe(session_id, f"note://{number // AT_ONCE}")
        self._changes = asyncio.ensure_future(self._change(resources, asked["events"] / AT_ONCE))
        return JSONResponse(len(sessions))

    async def count(self, request: Request) -> Response:
        """Return the number of events so far."""
        return JSONResponse(self._count)

    async def _made(self, number: int) -> SessionId:
        peer = Peer("2025-11-25", {"clientInfo": {"name": f"client-{number % 7}", "version": "1"}})
        principal = Principal(subject=f"user-{number % 40}")
        record = await self._layer.store.create(
            Mode.PROTOCOL, principal, peer=peer, now=time.time()
        )
        return record.session_id

    async def _change(self, resources: int, rate: float) -> None:
        begun = time.monotonic()
        for number in itertools.count():
            await self._layer.notify_resource_updated(f"note://{number % resources}")
            self._count += AT_ONCE
            await asyncio.sleep(max(0.0, begun + number / rate - time.monotonic()))
