"""Start a server once before a client needs it, which shows whether it works.

Rules, owned by ``tests/server/upstream/external/test_trial.py``:

1. No client notices it: it takes none of the room, and a failure refuses no client.
2. The started child is stopped. If all clients share one child and there is none yet, it stays.
3. It gets no request but its handshake.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mcp_sessions.http_server import HTTPServer
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.server.upstream.external.beginning import NOT_STARTED_TEXT, begin, made
from mcp_sessions.server.upstream.external.children import Children
from mcp_sessions.server.upstream.external.slot import ONE_CLIENT, Slot
from mcp_sessions.server.upstream.port import UpstreamError

logger = logging.getLogger(__name__)


class _TrialSlot(Slot):
    def label(self) -> str:
        return f"{self.services.title}, first start"


def trial_slot(children: Children) -> Slot:
    async def announce(
        method: str, params: Mapping[str, Any] | None, *, is_outside: bool = False
    ) -> None:
        """Do nothing: no client gets its changes."""

    return _TrialSlot(children.services(announce), object(), children.ours, ONE_CLIENT)


async def tried(children: Children, slot: Slot) -> Mapping[str, Any]:
    """Start a child once, and return its answer to ``initialize``.

    Raises:
        UpstreamError: It cannot be started.
    """
    child = await made(children.starter, slot, ANONYMOUS)
    is_kept = False
    try:
        client = children.offered(children.ours)
        await begin(children.server, child, slot, client, children.versions)
        is_kept = slot.clients.is_shared and children.keep(slot, child)
        return child.result
    finally:
        if not is_kept:
            await child.stop()


async def warn_unless_it_starts(children: Children, slot: Slot) -> None:
    try:
        await tried(children, slot)
    except UpstreamError as failed:
        server = children.server
        name = (
            f"{server.title} at {server.name}" if isinstance(server, HTTPServer) else server.title
        )
        logger.warning(
            "%s failed its first start: %s. Its clients get this error until a start succeeds.",
            name,
            why_not(failed),
        )


def why_not(failed: UpstreamError) -> str:
    return str(failed.error.get("message")).removeprefix(NOT_STARTED_TEXT).rstrip(".")
