"""Start a server once before a client needs it, which shows whether it works.

Rules, owned by ``tests/server/upstream/external/test_trial.py``:

1. No client notices it: it takes none of the room, and a failure refuses no client.
2. A process gets no message, and waits for the client that needs one first. It is clean, and starts
   once.
3. A URL has no process. A process that all clients share, or that names its session or principal,
   is another one. So these begin with a handshake. The child is then stopped. If all clients share
   one child and there is none yet, it stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcp_sessions.http_server import HTTPServer
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.server.upstream.external.beginning import NOT_STARTED_TEXT, Ended, begin, made
from mcp_sessions.server.upstream.external.children import Children
from mcp_sessions.server.upstream.external.slot import ONE_CLIENT, Slot
from mcp_sessions.server.upstream.external.warm import warn_of
from mcp_sessions.server.upstream.port import UpstreamError


class _TrialSlot(Slot):
    def label(self) -> str:
        return f"{self.services.title}, first start"


def trial_slot(children: Children) -> Slot:
    async def announce(
        method: str, params: Mapping[str, Any] | None, *, is_outside: bool = False
    ) -> None:
        """Do nothing: no client gets its changes."""

    return _TrialSlot(children.services(announce), object(), children.ours, ONE_CLIENT)


@dataclass(frozen=True, slots=True)
class Tried:
    result: Mapping[str, Any]
    """Its answer to ``initialize``."""

    memory: int | None
    """See :meth:`ChildWire.memory`."""


async def tried(children: Children, slot: Slot) -> Tried:
    """Start a child once.

    Raises:
        UpstreamError: It cannot be started.
    """
    child = await made(children.starter, slot, ANONYMOUS)
    is_kept = False
    try:
        client = children.offered(children.ours)
        await begin(children.server, child, slot, client, children.versions)
        is_kept = slot.clients.is_shared and children.keep(slot, child)
        return Tried(child.result, child.memory())
    except Ended:
        if not children.starter.retries():
            raise
    finally:
        if not is_kept:
            await child.stop()
    return await tried(children, slot)


async def warn_unless_it_starts(children: Children, slot: Slot) -> None:
    try:
        await tried(children, slot)
    except UpstreamError as failed:
        server = children.server
        name = (
            f"{server.title} at {server.name}" if isinstance(server, HTTPServer) else server.title
        )
        warn_of(name, why_not(failed))


def why_not(failed: UpstreamError) -> str:
    return str(failed.error.get("message")).removeprefix(NOT_STARTED_TEXT).rstrip(".")
